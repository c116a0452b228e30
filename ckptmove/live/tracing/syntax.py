"""Read the source of the user's program: its tree, the loops around a line, the calls at a line."""

from __future__ import annotations

import ast
import linecache
from types import FrameType

from .source_lines import file_of

_MOST_LINES = 1 << 16  # of a source
_MOST_TREES = 64  # that are kept
_LONGEST = 100  # characters of code that is shown


_trees: dict[str, tuple[list[str], ast.Module | None]] = {}  # by file, with what was parsed


def tree_of(file: str) -> ast.Module | None:
    """The source of a file, as `linecache` has it now; None if there is none to be parsed."""
    lines = linecache.getlines(file)  # the same list until the file is read again
    known = _trees.get(file)
    if known is None or known[0] is not lines:
        if file not in _trees and len(_trees) >= _MOST_TREES:
            _trees.pop(next(iter(_trees)), None)
        known = _trees[file] = (lines, _parsed(lines))
    return known[1]


def _parsed(lines: list[str]) -> ast.Module | None:
    if not lines or len(lines) > _MOST_LINES:
        return None
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def loops_around(file: str, line: int) -> list[ast.For]:
    """The `for` loops around a line, the innermost first."""
    tree = tree_of(file)
    loops = [] if tree is None else [each for each in ast.walk(tree) if isinstance(each, ast.For)]
    around = [each for each in loops if each.lineno <= line <= (each.end_lineno or 0)]
    return sorted(around, key=lambda each: -each.lineno)


def calls_of(file: str, callee: str) -> list[int]:
    """The lines of a file that call `callee`."""
    tree = tree_of(file)
    calls = [] if tree is None else [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return [each.lineno for each in calls if ast.unparse(each.func) == callee]


def calls_at(file: str, line: int) -> list[ast.Call]:
    """The calls whose code is, in part, on a line; outer ones first."""
    tree = tree_of(file)
    calls = [] if tree is None else [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return [each for each in calls if each.lineno <= line <= (each.end_lineno or 0)]


def function_around(file: str, line: int) -> ast.FunctionDef | None:
    """The innermost function of a file that a line is in; None if it is in none."""
    tree = tree_of(file) if file else None
    around = [
        each
        for each in (() if tree is None else ast.walk(tree))
        if isinstance(each, ast.FunctionDef) and each.lineno <= line <= (each.end_lineno or 0)
    ]
    return max(around, key=lambda each: each.lineno, default=None)


def function_at(line: str) -> str:
    """The function that the line `train.py:12` is in; "" if it is in none, or not known."""
    found = function_around(*file_of(line))
    return "" if found is None else found.name


def code_at(line: str) -> str:
    """What stands in the line `train.py:12`, shortened; "" if that is not known."""
    file, number = file_of(line)
    code = " ".join(linecache.getline(file, number).split()) if file else ""
    return code if len(code) <= _LONGEST else f"{code[:_LONGEST]}…"


def arguments_of_call(frame: FrameType, callee: str) -> tuple[list[str], dict[str, str]]:
    """The code of the arguments with which a frame's line calls `callee`, by place and by name."""
    for call in calls_at(frame.f_code.co_filename, frame.f_lineno):
        if ast.unparse(call.func) == callee:
            named = {key.arg: ast.unparse(key.value) for key in call.keywords if key.arg}
            return [ast.unparse(each) for each in call.args], named
    return [], {}


def assigned_at(frame: FrameType, name: str) -> tuple[str, int] | None:
    """The code that gives a variable its value by a call, the last in a frame's file; its line."""
    tree = tree_of(frame.f_code.co_filename)
    found = [
        (ast.unparse(each), each.lineno)
        for each in (() if tree is None else ast.walk(tree))
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Call)
        and any(ast.unparse(target) == name for target in each.targets)
    ]
    return found[-1] if found else None
