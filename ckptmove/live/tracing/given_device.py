"""Follow the `device=` that the code gives to what makes a tensor, to what chose that device."""

from __future__ import annotations

import ast
import linecache

from .program_source import Choice, Source
from .source_lines import file_of, line_in
from .syntax import calls_at, tree_of


def choice_of_argument(line: str, is_on: str, wanted: str) -> Choice | None:
    """What chose the device of a tensor that the line `train.py:12` makes on `is_on`, or None.

    None, too, if the line gives none, or names it itself.
    """
    file, number = file_of(line)
    tree = tree_of(file) if file else None
    if tree is None:
        return None
    given = next(filter(None, map(_device_of, calls_at(file, number))), None)
    if isinstance(given, ast.Attribute):
        if ast.unparse(given.value) not in ("self", "cls"):  # the device of another tensor, perhaps
            return None
    elif not isinstance(given, ast.Name):
        return None
    name = ast.unparse(given)
    source = Source(tree, "".join(linecache.getlines(file)), file, wanted, {})
    return _left_out(tree, file, name, number, wanted) or source.assigned(
        {name: is_on}, is_on, {name}
    )


def _device_of(call: ast.Call) -> ast.expr | None:
    """What a call gives as the device: `zeros(2, device=d)`, `x.to(d)`; or None."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and call.args:
        return call.args[0]
    return next((key.value for key in call.keywords if key.arg == "device"), None)


def _left_out(tree: ast.Module, file: str, name: str, line: int, wanted: str) -> Choice | None:
    """A parameter of the function around a line that is None, since a call does not give it."""
    nodes = list(ast.walk(tree))
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef)]
    around = [each for each in functions if each.lineno <= line <= (each.end_lineno or 0)]
    function = max(around, key=lambda each: each.lineno, default=None)
    if function is None:
        return None
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
