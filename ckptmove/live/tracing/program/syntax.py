"""Read the source of the user's program: its tree, the loops around a line, the calls at a line."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from types import FrameType

from .source_lines import file_of, is_library, line_in

_MOST_LINES = 1 << 16  # the longest source that is parsed
_MOST_TREES = 64  # the most trees that are kept
_LONGEST = 100  # the most characters of code that are shown


#: Attributes of arrays that are views, and functions that keep an array as it is.
_VIEWS = ("T", "reshape", "view", "ravel", "squeeze", "transpose")
_KEEPS = ("append", "extend", "add", "insert", "put", "from_numpy", "asarray", "as_tensor")
_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]*\])*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_trees: dict[str, tuple[list[str], ast.Module | None]] = {}  # by file, with the parsed lines


def tree_of(file: str) -> ast.Module | None:
    """The tree of a file's source in `linecache`; None if there is no source, or it has errors."""
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


def runs_once(line: str) -> bool:
    """Whether the code of a line runs before a loop: at module level, or in the loop's function."""
    file, number = file_of(line)
    tree = tree_of(file) if file else None
    if tree is None:
        return False
    loops = [each for each in ast.walk(tree) if isinstance(each, (ast.For, ast.While))]
    if any(each.lineno <= number <= (each.end_lineno or 0) for each in loops):
        return False
    within = function_around(file, number)
    end = 0 if within is None else within.end_lineno or 0
    return within is None or any(number < each.lineno <= end for each in loops)


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
    """The innermost function around a line of a file; None if there is none."""
    tree = tree_of(file) if file else None
    around = [
        each
        for each in (() if tree is None else ast.walk(tree))
        if isinstance(each, ast.FunctionDef) and each.lineno <= line <= (each.end_lineno or 0)
    ]
    return max(around, key=lambda each: each.lineno, default=None)


def function_at(line: str) -> str:
    """The name of the function around the line `train.py:12`; "" if there is none, or unknown."""
    found = function_around(*file_of(line))
    return "" if found is None else found.name


def last_line_of_function(line: str) -> str:
    """The last statement's line of the function around a line; else the line itself."""
    file, number = file_of(line)
    found = function_around(file, number)
    return line if found is None else line_in(file, found.body[-1].lineno)


def line_in_function(line: str, code: str) -> str:
    """The first line of an expression, such as `self.x`, in the function around a line; or ""."""
    file, number = file_of(line)
    found = function_around(file, number)
    nodes = (
        [] if found is None else [each for each in ast.walk(found) if isinstance(each, ast.expr)]
    )
    lines = [each.lineno for each in nodes if ast.unparse(each) == code]
    return line_in(file, min(lines)) if lines else ""


def line_of_argument(line: str) -> str:
    """The line that set the variable that is the first argument of a call at a line; or ""."""
    file, number = file_of(line)
    around: ast.AST | None = function_around(file, number) or (tree_of(file) if file else None)
    given = [each.args[0] for each in calls_at(file, number) if each.args] if file else []
    names = {each.id for each in given if isinstance(each, ast.Name)}
    lines = [
        each.lineno
        for each in (() if around is None else ast.walk(around))
        if isinstance(each, ast.Assign) and each.lineno <= number
        for target in each.targets
        if isinstance(target, ast.Name) and target.id in names
    ]
    return line_in(file, max(lines)) if lines else ""


def names_given(line: str) -> list[str]:
    """The variables that the calls at a line are given, each once."""
    file, number = file_of(line)
    calls = calls_at(file, number) if file else []
    given = [value for each in calls for value in (*each.args, *(k.value for k in each.keywords))]
    return list(dict.fromkeys(each.id for each in given if isinstance(each, ast.Name)))


def line_that_sets(line: str, name: str) -> str:
    """The line that set the variable that a line uses; "" for an argument, or if there is none.

    For a local variable, it is the last such line before.
    """
    file, number = file_of(line)
    tree = tree_of(file) if file else None
    functions = [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS)]
    around = [each for each in functions if each.lineno <= number <= (each.end_lineno or 0)]
    around.sort(key=lambda each: -each.lineno)
    scopes = [*around, *([] if tree is None else [tree])]
    for scope in scopes:
        own = _own_nodes(scope)
        lines = [n.lineno for n in own if isinstance(n, ast.Name) and _is_set(n, name)]
        before = [each for each in lines if each < number] if scope is scopes[0] else []
        if lines:
            return line_in(file, max(before or lines))
        if isinstance(scope, _FUNCTIONS) and name in _parameters(scope):
            return ""
    return ""


def _is_set(node: ast.Name, name: str) -> bool:
    return node.id == name and isinstance(node.ctx, ast.Store)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, without the bodies of functions and classes in it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        each = todo.pop()
        yield each
        if not isinstance(each, (*_FUNCTIONS, ast.ClassDef, ast.Lambda, ast.comprehension)):
            todo += ast.iter_child_nodes(each)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def is_place(code: str) -> bool:
    """Whether code names a variable, or what one holds: `x`, `batch.x`, `batch['views']`."""
    return _PLACE.fullmatch(code) is not None


def line_of_attribute(kind: type, attribute: str) -> str:
    """The first line where a class of the user sets an attribute of `self`; "" if there is none."""
    for each in kind.__mro__:
        codes = (getattr(method, "__code__", None) for method in vars(each).values())
        own = next((c for c in codes if c is not None and not is_library(c.co_filename)), None)
        tree = None if own is None else tree_of(own.co_filename)
        if own is None or tree is None:
            continue
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        around = [c for c in classes if c.lineno <= own.co_firstlineno <= (c.end_lineno or 0)]
        named = [c for c in around if c.name == each.__name__]
        of = max(named, key=lambda c: c.lineno, default=None)
        inner = () if of is None else ast.walk(of)
        lines = [n.lineno for n in inner if isinstance(n, ast.Attribute) and _sets(n, attribute)]
        if lines:
            return line_in(own.co_filename, min(lines))
    return ""


def keeps_argument(line: str) -> bool:
    """Whether a line only keeps an argument of its function: `self.prop = prop`."""
    file, number = file_of(line)
    function = function_around(file, number)
    return function is not None and any(
        isinstance(each, ast.Assign)
        and each.lineno == number
        and isinstance(each.value, ast.Name)
        and each.value.id in _parameters(function)
        for each in ast.walk(function)
    )


def line_of_data(kind: type, name: str) -> str:
    """The line in a class's file that sets the `.data` of a tensor such as `head.weight`; or ""."""
    codes = (getattr(method, "__code__", None) for method in vars(kind).values())
    own = next((c for c in codes if c is not None and not is_library(c.co_filename)), None)
    tree = None if own is None else tree_of(own.co_filename)
    for each in () if tree is None else ast.walk(tree):
        targets = each.targets if isinstance(each, ast.Assign) else ()
        if own is not None and any(f".{ast.unparse(t)}".endswith(f".{name}.data") for t in targets):
            return line_in(own.co_filename, each.lineno)  # type: ignore[attr-defined]
    return ""


def _sets(node: ast.Attribute, attribute: str) -> bool:
    """Whether a node assigns to this attribute of a variable."""
    of_variable = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    return node.attr == attribute and of_variable


def is_method(line: str) -> bool:
    """Whether the function around a line is a method, with `self`."""
    found = function_around(*file_of(line))
    return found is not None and [each.arg for each in found.args.args][:1] == ["self"]


def code_at(line: str) -> str:
    """The code of the line `train.py:12`, shortened; "" if it is not known."""
    file, number = file_of(line)
    return shortened(linecache.getline(file, number)) if file else ""


def reads_at_once(line: str, method: str) -> bool:
    """Whether the code of a line reads what `x.numpy()` gives, and does not only keep it."""
    if method != "numpy":
        return True  # `tolist` copies
    file, number = file_of(line)
    calls = {id(each) for each in calls_at(file, number)} if file else set()
    tree = tree_of(file) if calls else None
    for each in () if tree is None else ast.walk(tree):
        for part in ast.iter_child_nodes(each):
            if id(part) not in calls or not ast.unparse(part).endswith(f".{method}()"):
                continue
            if isinstance(each, ast.Attribute):
                return each.attr not in _VIEWS
            keeps = isinstance(each, ast.Call) and ast.unparse(each.func).endswith(_KEEPS)
            return isinstance(each, (ast.BinOp, ast.Compare, ast.Call)) and not keeps
    return False


def shortened(code: str) -> str:
    """Code in one line; the rest of long code is left out."""
    line = " ".join(code.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def arguments_of_call(frame: FrameType, callee: str) -> tuple[list[str], dict[str, str]]:
    """The code of the arguments if a frame's line calls `callee`: positional ones, and keywords."""
    for call in calls_at(frame.f_code.co_filename, frame.f_lineno):
        if ast.unparse(call.func) == callee:
            named = {key.arg: ast.unparse(key.value) for key in call.keywords if key.arg}
            return [ast.unparse(each) for each in call.args], named
    return [], {}


def assigned_at(frame: FrameType, name: str) -> tuple[str, int] | None:
    """The last call in a frame's file whose result is assigned to a variable, with its line."""
    tree = tree_of(frame.f_code.co_filename)
    found = [
        (ast.unparse(each), each.lineno)
        for each in (() if tree is None else ast.walk(tree))
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Call)
        and any(ast.unparse(target) == name for target in each.targets)
    ]
    return found[-1] if found else None
