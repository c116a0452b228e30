"""Find a program's variables, parameters and settings in its source, with their values.

The source is parsed, never run.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ....manifest.device import kind_of
from .source_lines import line_in

_LONGEST = 100  # the most characters of code that are shown
KINDS = ("cpu", "cuda", "mps", "xpu")


class Settings:
    """The values that the source of a program gives to variables, parameters and settings."""

    def __init__(self, tree: ast.Module, file: str, wanted: str) -> None:
        self._nodes = list(ast.walk(tree))
        self._text = "".join(linecache.getlines(file))
        self._file = file
        self._wanted = wanted

    def at(self, node: Any) -> str:
        """The line of a node."""
        return line_in(self._file, node.lineno)

    def code(self, node: ast.AST) -> str:
        """The user's code of a node, in one line."""
        line = " ".join((ast.get_source_segment(self._text, node) or ast.unparse(node)).split())
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"

    def _assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for each in self._nodes:
            if isinstance(each, ast.Assign):
                yield from ((target, each.value) for target in each.targets)
            elif isinstance(each, (ast.AnnAssign, ast.NamedExpr)) and each.value is not None:
                yield each.target, each.value
            elif isinstance(each, ast.arguments):
                named = [*each.posonlyargs, *each.args]
                for arg, default in zip(reversed(named), reversed(each.defaults), strict=False):
                    if isinstance(default, ast.Constant) and isinstance(default.value, str):
                        name = ast.Name(arg.arg, ast.Load())
                        yield ast.copy_location(name, arg), default

    def _setting(self, key: str, kind: str) -> tuple[str, str] | None:
        """Where a setting gets a device (a dict, keyword, assignment or text), and the fix."""
        for each in self._nodes:
            found: list[tuple[str, ast.expr | None]] = []
            if isinstance(each, ast.Dict):
                found = [
                    (string_of(k), v) for k, v in zip(each.keys, each.values, strict=True) if k
                ]
            elif isinstance(each, ast.keyword):
                found = [(each.arg or "", each.value)]
            elif isinstance(each, (ast.AnnAssign, ast.Assign)):
                targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
                found = [(ast.unparse(target), each.value) for target in targets]
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                line = self._line_in_text(each, key, kind)
                if line:
                    return (
                        f"the text has {key!r}: {kind!r} at {line}",
                        f'write "{self._wanted}" there',
                    )
            for name, value in found:
                if name == key and value is not None and device_named_by(value) == kind:
                    told = f"{name} is {self.code(value)} at {self.at(value)}"
                    merged = self._merged(each, key) if isinstance(each, ast.Dict) else None
                    if merged is not None:
                        return f"{told}, and {merged[0]}", merged[1]
                    return told, f'write "{self._wanted}" there'
        return None

    def _merged(self, settings: ast.Dict, key: str) -> tuple[str, str] | None:
        """Where a dict of settings replaces another one's value of a key, and the fix; or None."""
        names = {ast.unparse(target) for target, value in self._assignments() if value is settings}
        others = (each for each in self._nodes if isinstance(each, ast.Dict))
        if not any(
            key in map(string_of, filter(None, d.keys)) for d in others if d is not settings
        ):
            return None
        for each in self._nodes:
            merged = _merged_in_order(each)
            for first, last in pairwise(merged):
                if ast.unparse(last) in names:
                    first_code, last_code = self.code(first), self.code(last)
                    told = f"{last_code} replaces what {first_code} says in `{self.code(each)}`"
                    fix = f"merge {first_code} after {last_code}: the last value counts"
                    return f"{told} at {self.at(each)}", f"at {self.at(each)}, {fix}"
        return None

    def _line_in_text(self, node: ast.expr, key: str, kind: str) -> str:
        """The line of a text, such as JSON or YAML, that gives a setting a device; or ""."""
        wanted = re.compile(rf"[\"']?\b{re.escape(key)}\b[\"']?\s*[:=]\s*[\"']?{kind}\b")
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            if wanted.search(linecache.getline(self._file, number)) and wanted.search(
                string_of(node)
            ):
                return line_in(self._file, number)
        return ""

    def _settings(self, value: ast.expr, kind: str) -> list[tuple[str, str]]:
        """The settings that an expression reads from a dict, if the program sets a device."""
        found = []
        for each in ast.walk(value):
            key = string_of(each.slice) if isinstance(each, ast.Subscript) else ""
            if isinstance(each, ast.Call) and ast.unparse(each.func).endswith(".get") and each.args:
                key = string_of(each.args[0])
            if isinstance(each, ast.Attribute):
                key = each.attr
            setting = self._setting(key, kind) if key else None
            if setting is not None:
                found.append(setting)
        return found

    def _given(self, parameter: str, kind: str) -> ast.Call | None:
        """The call that gives a function's or class's parameter a device by position; or None."""
        makers = {
            id(each): of.name
            for of in self._nodes
            if isinstance(of, ast.ClassDef)
            for each in of.body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        }
        at = {}  # by the name that is called
        for each in self._nodes:
            if isinstance(each, ast.FunctionDef):
                names = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args)]
                if parameter in names:
                    bound = names[0] in ("self", "cls")
                    at[makers.get(id(each), each.name)] = names.index(parameter) - bound
        for each in self._nodes:
            if isinstance(each, ast.Call):
                n = at.get(ast.unparse(each.func).rpartition(".")[2], len(each.args))
                if n < len(each.args) and device_named_by(each.args[n]) == kind:
                    return each
        return None


def _merged_in_order(node: ast.AST) -> list[ast.expr]:
    """The dicts that an expression merges: `{**a, **b}`, `a | b` or `a.update(b)`; or none."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [value for key, value in pairs if key is None]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        return [node.func.value, node.args[0]] if node.func.attr == "update" else []
    return []


def device_named_by(value: ast.expr) -> str:
    """The kind of device that a constant names, also inside `torch.device(...)`; or ""."""
    if isinstance(value, ast.Call) and len(value.args) in (1, 2):
        value = value.args[0]
    kind = kind_of(string_of(value))
    return kind if kind in KINDS else ""


def string_of(value: ast.expr) -> str:
    """The value of a string constant; "" for other expressions."""
    text = value.value if isinstance(value, ast.Constant) else None
    return text if isinstance(text, str) else ""
