"""Explain a missing gradient: the script reads it from a copy, but only leaf tensors keep one."""

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
        found = [(name, each) for name, each in tensors if isinstance(each, torch.Tensor)]
    return [each for each in found if each[1].requires_grad and not each[1].is_leaf]
