"""Follow the `device=` of a call that makes a tensor to the code that chose that device."""

from __future__ import annotations

import ast

from ..program.program_source import Choice, source_of
from ..program.source_lines import file_of, line_in
from ..program.syntax import calls_at, function_around, tree_of


def choice_of_argument(line: str, is_on: str, wanted: str) -> Choice | None:
    """The code that chose the device of a tensor that the line `train.py:12` makes on `is_on`.

    None if it is not known, or if the line gives no device or a constant.
    """
    file, number = file_of(line)
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
    return _left_out(file, name, number, wanted) or source.assigned({name: is_on}, is_on, {name})


def _device_of(call: ast.Call) -> ast.expr | None:
    """The device argument of a call: `d` in `zeros(2, device=d)` and `x.to(d)`; or None."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and call.args:
        return call.args[0]
    return next((key.value for key in call.keywords if key.arg == "device"), None)


def _left_out(file: str, name: str, line: int, wanted: str) -> Choice | None:
    """A parameter of the function around a line that is None because a call leaves it out."""
    tree, function = tree_of(file), function_around(file, line)
    if tree is None or function is None:
        return None
    nodes = list(ast.walk(tree))
    named = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    defaults = dict(zip(named[::-1], function.args.defaults[::-1], strict=False))
    default = defaults.get(name)
    if not isinstance(default, ast.Constant) or default.value is not None:
        return None
    classes = (each for each in nodes if isinstance(each, ast.ClassDef) and function in each.body)
    of = next(classes, None)
    called = of.name if of is not None and function.name == "__init__" else function.name
    at = named.index(name) - (named[0] in ("self", "cls"))
    for each in nodes:
        if not isinstance(each, ast.Call) or len(each.args) > at:
            continue
        by = ast.unparse(each.func).rpartition(".")[2]
        if by == called and not any(key.arg in (name, None) for key in each.keywords):
            call = f"`{ast.unparse(each)}` at {line_in(file, each.lineno)}"
            told = f"{name} is None by default at {line_in(file, default.lineno)}"
            return Choice(f"{call} gives no {name}", f'give {name}="{wanted}" in {call}', (told,))
    return None
