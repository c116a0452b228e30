"""Keep what a hook of autograd raises on the simulated device until the backward pass has ended.

There torch runs Python on the way out of a hook, which loses the exception or ends the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_raised: list[BaseException] = []


def guarded_hooks() -> list[tuple[Any, str, Any]]:
    """What registers hooks, and what runs a backward pass: of what, by which name, and instead."""
    registering = (
        *((Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")),
        *((nn.Module, f"register_full_backward_{name}") for name in ("hook", "pre_hook")),
    )
    running = ((each, "_engine_run_backward") for each in (torch.autograd, torch.autograd.graph))
    return [
        *((of, name, _registering(getattr(of, name))) for of, name in registering),
        *((of, name, _running(getattr(of, name))) for of, name in running if hasattr(of, name)),
    ]


def _registering(real: Any) -> Callable[..., Any]:
    @functools.wraps(real)
    def register(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(hook, "is_guarded"):  # under a torch function mode, torch registers it again
            return real(self, hook, *args, **kwargs)

        @functools.wraps(hook)
        def guarded(*given: Any) -> Any:
            if _raised:
                return None  # the pass would have ended
            try:
                return hook(*given)
            except BaseException as error:
                _raised.append(error)
                return None

        guarded.is_guarded = True  # type: ignore[attr-defined]
        return real(self, guarded, *args, **kwargs)

    return register


def _running(real: Any) -> Callable[..., Any]:
    @functools.wraps(real)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if _raised:
            return real(*args, **kwargs)  # within a pass that would have ended, and that raises it
        try:
            return real(*args, **kwargs)
        finally:
            if _raised:
                raise _raised.pop()

    return run_backward
