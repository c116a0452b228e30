"""Find the user's code of an operation's operands, such as `grid(h, w)` in `a + grid(h, w)`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from itertools import islice
from types import FrameType

import torch

from ..program.source_lines import (
    fields_of,
    is_a,
    is_asked,
    is_library,
    items_of,
    line_of,
    locals_of,
    own_frame,
)
from ..program.syntax import shortened, tree_of
from .remembered import key_of

_MOST_CALLERS = 8
_CHAINS = (ast.Name, ast.Attribute, ast.Subscript)
#: The usual names of methods that return a moved object.
_MOVES = frozenset(("to", "cuda", "cpu", "xpu", "to_device", "move_to"))


def codes_of(frame: FrameType | None, tensors: Sequence[torch.Tensor]) -> list[str]:
    """The code of each tensor that a frame's line gives to an operation; "" if unknown."""
    found = [""] * len(tensors)
    node = None if frame is None or is_library(frame.f_code.co_filename) else _node_at(frame)
    parts = [] if node is None else _parts_of(node)
    if frame is None or not parts:
        return found
    values = {**frame.f_globals, **locals_of(frame)}
    known = [_value_of(each, values) for each in parts]
    both = [  # leave out modules of functions, and numbers
        each
        for each in zip(parts, known, strict=True)
        if each[1] is None or is_a(each[1], torch.Tensor)
    ]
    parts, known = [part for part, _ in both], [value for _, value in both]
    keys = [key_of(each) for each in tensors]
    left = [n for n, each in enumerate(known) if not is_a(each, torch.Tensor)]
    for part, value in zip(parts, known, strict=True):
        if is_a(value, torch.Tensor) and key_of(value) in keys:
            found[keys.index(key_of(value))] = shortened(ast.unparse(part))
    rest = [n for n, each in enumerate(found) if not each]
    if len(parts) == len(tensors):
        for n in rest:
            found[n] = shortened(ast.unparse(parts[n])) if n in left else ""
    elif len(left) == len(rest) == 1:
        found[rest[0]] = shortened(ast.unparse(parts[left[0]]))
    return found


def given_at(frame: FrameType | None, tensor: torch.Tensor) -> str:
    """The line where the user's code gave a tensor to the function that a frame runs.

    If several functions pass it on, it is the outermost line; "" if the tensor is no argument.
    """
    line = ""
    frame = own_frame(frame)
    for _ in range(_MOST_CALLERS):
        if frame is None or not _is_given(frame, tensor):
            break
        frame = own_frame(frame.f_back)
        line = line_of(frame) or line
    return line


def discarded(frame: FrameType | None) -> tuple[str, str]:
    """The line of a statement that drops the result of a move, and the moved code.

    For `x.to(device)` the code is `x`. The frame runs the move, perhaps inside a `to` method of the
    user that returns a new object. The line is "" if no result is dropped; the code is "" if it is
    not known.
    """
    called = ""
    for _ in range(_MOST_CALLERS):
        if frame is None or not is_asked(frame):
            return "", ""
        frame = own_frame(frame)
        if frame is None:
            return "", ""
        tree = tree_of(frame.f_code.co_filename)
        found = {} if tree is None else _dropped(tree, frame.f_lineno)
        for name, code in found.items():
            if name == called or (not called and name in _MOVES):
                return line_of(frame), "" if called else code
        called = frame.f_code.co_name
        if called not in _MOVES:
            return "", ""
        frame = frame.f_back
    return "", ""


@functools.lru_cache(maxsize=1024)  # asked for each copy
def _dropped(tree: ast.Module, line: int) -> dict[str, str]:
    """The methods whose results a line drops, each with the code of its object, or ""."""
    found = {}
    for each in ast.walk(tree):
        if not isinstance(each, ast.Expr) or not each.lineno <= line <= (each.end_lineno or 0):
            continue
        todo: list[ast.expr] = [each.value]
        while todo:
            part = todo.pop()
            if isinstance(part, (ast.Tuple, ast.List)):
                todo += part.elts
            elif isinstance(part, (ast.ListComp, ast.SetComp)):
                todo.append(part.elt)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                alone = part is each.value and isinstance(part.func.value, _CHAINS)
                found[part.func.attr] = ast.unparse(part.func.value) if alone else ""
    return found


def _is_given(frame: FrameType, tensor: torch.Tensor) -> bool:
    """Whether an argument of the function that a frame runs is a tensor, or holds it."""
    code, values, key = frame.f_code, locals_of(frame), key_of(tensor)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in names:
        value = values.get(name)
        for _, each in (("", value), *items_of(value)):
            same = is_a(each, torch.Tensor) and key is not None and key_of(each) == key
            if each is tensor or same:
                return True
    return False


def _node_at(frame: FrameType) -> ast.AST | None:
    """The expression that a frame evaluates; None if that is not known."""
    tree = tree_of(frame.f_code.co_filename)
    positions = getattr(frame.f_code, "co_positions", None)  # there is none before Python 3.11
    if tree is None or positions is None:
        return None
    at = next(islice(positions(), frame.f_lasti // 2, None), (None,) * 4)
    for each in ast.walk(tree) if None not in at else ():
        if isinstance(each, (ast.expr, ast.AugAssign)):
            first, last, begin, end = at
            place = each.lineno, each.end_lineno, each.col_offset, each.end_col_offset
            if place == (first, last, begin, end) and not isinstance(each, ast.Name):
                return each
    return None


def _parts_of(node: ast.AST) -> list[ast.expr]:
    """The operands of an expression."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.Call):
        given = [*node.args, *(each.value for each in node.keywords)]
        given = [each for part in given for each in _items(part)]
        of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*of, *(each for each in given if not isinstance(each, ast.Constant))]
    return []


def _items(part: ast.expr) -> list[ast.expr]:
    return part.elts if isinstance(part, (ast.List, ast.Tuple)) else [part]


def _value_of(part: ast.expr, values: dict[str, object]) -> object:
    """The value of a variable, attribute or item, without running code; None if unknown."""
    if isinstance(part, ast.Name):
        return values.get(part.id)
    if isinstance(part, ast.Attribute):
        return fields_of(_value_of(part.value, values)).get(part.attr)
    if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
        of, key = _value_of(part.value, values), part.slice.value
        if is_a(of, dict):
            return dict.get(of, key)
        if (is_a(of, list) or is_a(of, tuple)) and isinstance(key, int):
            return of[key] if -len(of) <= key < len(of) else None
    return None
