"""Explain what a script left out: models never called, optimizers without state, lost gradients."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..display.phrases import join_names
from ..live.tracing.program.source_lines import is_a, is_library, locals_of
from ..live.tracing.program.syntax import tree_of
from ..reports.doctor import Verdict

_MOST = 8  # models that are reported


def models_never_called(
    variables: Mapping[str, Any], called: Sequence[nn.Module], call: Callable[[str], str]
) -> Iterator[str]:
    """A line for each model among a script's variables that was not called.

    `call` gives the displayed name of a device. Parts of other models are left out.
    """
    parts = {id(part) for each in called for part in each.modules()}
    models: dict[str, nn.Module] = {}
    for name, value in variables.items():
        known = id(value) in parts or any(value is each for each in models.values())
        if is_a(value, nn.Module) and not known and not name.startswith("_"):
            models[name] = value
    inner = {id(part) for each in models.values() for part in each.modules() if part is not each}
    found = [(name, each) for name, each in models.items() if id(each) not in inner]
    for name, model in found[:_MOST]:
        tensors = chain(model.parameters(), model.buffers())
        where = list(dict.fromkeys(call(str(each.device)) for each in tensors))
        if where:
            kind = type(model).__name__
            yield f"{name} ({kind}) is on {join_names(where)}; it was never called"


def optimizers_without_state(variables: Mapping[str, Any]) -> Iterator[str]:
    """A line for each optimizer among a script's variables that has no state yet."""
    for name, value in variables.items():
        if is_a(value, torch.optim.Optimizer) and not any(value.state.values()):
            kind = type(value).__name__
            yield (
                f"{name} ({kind}) has no state: torch makes it at the first step, on the device of "
                f"each parameter; before that, there is nothing to move or to save"
            )


def gradient_of_copy(
    error: BaseException, device: str, line_of_node: Callable[[int], str]
) -> Verdict | None:
    """The verdict if an exception is due to a `.grad` that is None because its tensor is a copy.

    `line_of_node` maps the number of an autograd node to its source line.
    """
    if "NoneType" not in str(error):
        return None
    for name, tensor in _asked_for_gradients(error.__traceback__):
        node = tensor.grad_fn
        if node is None or "Copy" not in node.name():
            continue
        line = line_of_node(node._sequence_nr())
        return Verdict(
            "parameter-moved",
            f"{name} is a copy of what is trained, made at {line or 'an unknown line'}: "
            f"{name}.grad stays None",
            f"make it on the device at once, with device={device!r} and requires_grad=True; or "
            f"{name} = {name}.detach().requires_grad_()",
        )
    return None


def _asked_for_gradients(traceback: TracebackType | None) -> list[tuple[str, torch.Tensor]]:
    """The non-leaf tensors, with names, whose `.grad` the innermost line of user code reads."""
    found: list[tuple[str, torch.Tensor]] = []
    while traceback is not None:
        frame, number = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
        tree = None if is_library(frame.f_code.co_filename) else tree_of(frame.f_code.co_filename)
        if tree is None:
            continue
        values = {**frame.f_globals, **locals_of(frame)}
        asked = {
            ast.unparse(each.value)
            for each in ast.walk(tree)
            if isinstance(each, ast.Attribute) and each.attr == "grad" and each.lineno == number
        }
        tensors = ((name, values.get(name)) for name in sorted(asked))
        found = [(name, each) for name, each in tensors if is_a(each, torch.Tensor)]
    return [each for each in found if each[1].requires_grad and not each[1].is_leaf]
