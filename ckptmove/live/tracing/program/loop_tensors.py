"""Find the tensors that the user's loop takes from its batches, in the source around a frame."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

import torch

from .source_lines import is_a, is_library, items_of, line_in, locals_of
from .syntax import loops_around

#: The operation of an event about such tensors.
LOOP = "for"
_MOST_CALLERS = 8


def loop_tensors(frame: FrameType | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The tensors of the innermost `for` around a frame or its callers: line, name and tensor."""
    for _ in range(_MOST_CALLERS):
        if frame is None:
            return
        file, line = frame.f_code.co_filename, frame.f_lineno
        loops = [] if is_library(file) else loops_around(file, line)
        for loop in loops:
            values = locals_of(frame)
            named = [each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)]
            named = [each for each in named if each not in _moved_in(loop)]
            found = list(_tensors(named, values))
            if found:
                yield from ((line_in(file, loop.lineno), *each) for each in found)
                return
        frame = frame.f_back


def _moved_in(loop: ast.For) -> set[str]:
    """The code of objects that the loop itself moves: `x` in `model(x.to(device))`."""
    return {
        ast.unparse(each.value)
        for each in ast.walk(loop)
        if isinstance(each, ast.Attribute) and each.attr in ("to", "cuda")
    }


def _tensors(names: list[str], values: dict[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        value = values.get(name)
        if is_a(value, torch.Tensor):
            yield name, value
        for key, each in items_of(value):
            if is_a(each, torch.Tensor):
                yield f"{name}{key}", each
