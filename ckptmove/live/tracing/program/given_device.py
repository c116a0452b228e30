"""Follow the device that a call makes a tensor on, or moves it to, to the code that chose it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ....manifest.device import kind_of
from .program_source import Choice, source_of
from .settings import device_named_by
from .source_lines import CALLED, file_of, line_in
from .syntax import calls_at, function_around, tree_of


def choice_of_argument(line: str, is_on: str, wanted: str) -> Choice | None:
    """The code that chose the device of what the line `train.py:12` makes, or moves to `is_on`.

    The lines that called its function may follow. None if it is not known, or if the line gives no
    device or a constant.
    """
    first, *callers = line.split(CALLED)
    file, number = file_of(first)
    source = source_of(file, wanted, {})
    if source is None:
        return None
    given = next(filter(None, map(_device_of, calls_at(file, number))), None)
    if isinstance(given, ast.Attribute):
        if ast.unparse(given.value) not in ("self", "cls"):  # the device of another tensor, perhaps
            return None
    elif not isinstance(given, ast.Name):
        return None
    name = ast.unparse(given)
    left_out = _left_out(file, name, number, wanted, callers)
    return left_out or source.assigned({name: is_on}, is_on, {name})


def _device_of(call: ast.Call) -> ast.expr | None:
    """The device argument of a call: `d` in `zeros(2, device=d)` and `x.to(d)`; or None."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and call.args:
        return call.args[0]
    return next((key.value for key in call.keywords if key.arg == "device"), None)


def _left_out(
    file: str, name: str, line: int, wanted: str, callers: Sequence[str]
) -> Choice | None:
    """A parameter of the function around a line that a call leaves out, so that its default counts.

    The default is None or another device than `wanted`.
    """
    tree, function = tree_of(file), function_around(file, line)
    if tree is None or function is None:
        return None
    nodes = list(ast.walk(tree))
    named = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    defaults = dict(zip(named[::-1], function.args.defaults[::-1], strict=False))
    default = defaults.get(name)
    if not isinstance(default, ast.Constant):
        return None
    if default.value is not None and device_named_by(default) in ("", kind_of(wanted)):
        return None
    classes = (each for each in nodes if isinstance(each, ast.ClassDef) and function in each.body)
    of = next(classes, None)
    called = of.name if of is not None and function.name == "__init__" else function.name
    at = named.index(name) - (named[0] in ("self", "cls"))
    calls = [(line_in(file, each.lineno), each) for each in nodes if isinstance(each, ast.Call)]
    calls += [(each, call) for each in callers for call in calls_at(*file_of(each))]
    for where, each in calls:
        if len(each.args) > at or any(isinstance(arg, ast.Starred) for arg in each.args):
            continue
        by = ast.unparse(each.func).rpartition(".")[2]
        if by == called and not any(key.arg in (name, None) for key in each.keywords):
            call = f"`{ast.unparse(each)}` at {where}"
            told = f"{name} is {ast.unparse(default)} by default at {line_in(file, default.lineno)}"
            return Choice(f"{call} gives no {name}", f'give {name}="{wanted}" in {call}', (told,))
    return None
