"""What in a program's file torch would run while it merely loads it.

A TorchScript archive is run as far as its classes say how they are made, by `__setstate__`, which
may read and write files. What torch.export saved has sizes spelled as expressions, which sympy
gives to Python's `eval`, and may hold compiled libraries, which are loaded.

Sources: torch/csrc/jit/serialization/import.cpp; torch/_export/serde/serialize.py
(`_parse_sym_expr`); torch/export/pt2_archive/_package.py (`load_pt2`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from ..errors import InputError, StrPath
from ..source import File
from ..zips.archive import Archive, Record

_MADE_BY = b"__setstate__"
_COMPILED = "data/aotinductor/"
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Load),
    *(ast.Call, ast.keyword, ast.Constant, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
#: What may be called besides sympy's classes and torch's, whose names begin with a capital.
_FUNCTIONS = frozenset(("ceiling", "floor", "sqrt"))
_LONGEST = 1 << 14  # characters of an expression


def makes_itself(path: StrPath) -> bool:
    """Whether a TorchScript file has code of its own that makes what it holds.

    Raises:
        InputError: it can't be read.
    """
    with File.open(path) as source:
        archive = Archive(source)
        # torch looks records up without regard to case.
        code = [each for each in archive.records.values() if each.name.lower().endswith(".py")]
        return any(_MADE_BY in archive.read_parsed(each) for each in code)


def danger(path: StrPath) -> str | None:
    """What else than a graph of torch's operators a file of torch.export holds; None if nothing.

    Raises:
        InputError: it can't be read.
    """
    with File.open(path) as source:
        archive = Archive(source)
        for name, record in archive.records.items():
            if _COMPILED in name.lower():
                return f"it holds compiled code, {name!r}"
            if _is_graph(name):
                for said in _expressions(archive, record):
                    if not _is_plain(said):
                        return f"{name!r} has a size that is code: {said[:60]!r}"
    return None


def _is_graph(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(".json") or "/models/" in f"/{lower}"


def _expressions(archive: Archive, record: Record) -> Iterator[str]:
    """Every expression in a record of JSON."""
    try:
        todo = [json.loads(archive.read_parsed(record))]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the record {record.name!r} is no JSON", path=archive.source.path
        ) from error
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if "expr_str" in value:
                yield str(value["expr_str"])
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _is_plain(said: str) -> bool:
    """Whether an expression is of numbers, symbols, and functions of them alone."""
    if len(said) > _LONGEST:
        return False
    try:
        nodes = list(ast.walk(ast.parse(said.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _PLAIN) and _is_harmless(node) for node in nodes)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return node.value.isidentifier() and "__" not in node.value
        return isinstance(node.value, (bool, int, float))
    if isinstance(node, ast.Call):
        made = node.func
        return isinstance(made, ast.Name) and (made.id[:1].isupper() or made.id in _FUNCTIONS)
    return True
