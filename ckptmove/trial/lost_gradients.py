"""Tell why a script finds no gradient: it asks a copy, and torch keeps those of leaves alone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import TracebackType

import torch

from ..live.tracing.program.source_lines import is_library, locals_of
from ..live.tracing.program.syntax import tree_of
from ..reports.doctor import Verdict


def gradient_of_copy(
    error: BaseException, device: str, line_of_node: Callable[[int], str]
) -> Verdict | None:
    """What is wrong if an exception comes of a `.grad` that is None since its tensor is a copy.

    `line_of_node` gives the line of a node of autograd, by its number.
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
    """The tensors without a gradient that the user's innermost line asks for one."""
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
        found = [(name, each) for name, each in tensors if isinstance(each, torch.Tensor)]
    return [each for each in found if each[1].requires_grad and not each[1].is_leaf]
