"""Bound the values that an expression can take, without evaluating it.

A short expression can produce a number that fills the memory (`9**9**9`), or a sum that takes hours
to expand (`(a+b+c+d)**500`). So each node of its tree gets a bound: the bits of its value, and the
number of terms after expansion. An expression is refused if the bound of a node is above the limit
or unknown.

Sources: sympy/parsing/sympy_parser.py (it reads `^` as a power, and `1e999999999` as a Float with
all its digits); torch/utils/_sympy/functions.py (`PowByNatural`, `LShift`, `RoundDecimal`).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_MOST_BITS = 1 << 12  # bits of a value
_MOST_TERMS = 1 << 12  # terms of an expanded product
_MOST_LITERAL = 128  # bits of a literal number
_MOST_EXPONENT = 64  # also the most digits for rounding
_MOST_SHIFT = 1 << 10
_MOST_ARGUMENTS = 64  # sympy compares the arguments of Max, Min, And and Or pairwise
_SYMBOL = 64  # bits of the size of a tensor

_LITERAL = re.compile(r"[+-]?[0-9]{0,40}\.?[0-9]{0,400}(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_POWERS = frozenset(("pow", "Pow", "PowByNatural", "FloatPow"))
_SHIFTS = frozenset(("LShift", "RShift"))
#: Their second argument is a number of digits.
_ROUNDING = frozenset(("round", "RoundDecimal", "Float"))
_WITHOUT_ARGUMENTS = frozenset(("size", "stride"))  # without arguments, these return tuples


class _Bound(NamedTuple):
    """The upper bounds of a value.

    Attributes:
        bits: the bits of the number.
        terms: the terms of the sum after expansion.
        number: whether it is a number; text, lists and tuples are not, and must not be multiplied.
    """

    bits: int = 1
    terms: int = 1
    number: bool = True


class _NoBound(Exception):
    """No bound is known, or it is too large."""


def is_bounded(tree: ast.AST, text: str) -> bool:
    """Whether all values of an expression are of moderate size, whatever its symbols are.

    Args:
        tree: the expression.
        text: its source, a line of ASCII.
    """
    bounds: dict[ast.AST, _Bound] = {}
    try:
        for node in reversed(list(ast.walk(tree))):  # children come before parents
            bound = _bound(node, bounds, text)
            if bound.bits > _MOST_BITS or bound.terms > _MOST_TERMS:
                return False
            bounds[node] = bound
    except _NoBound:
        return False
    return True


def is_literal(text: str) -> bool:
    """Whether this is a decimal number of moderate length."""
    return _LITERAL.fullmatch(text) is not None


def _bound(node: ast.AST, bounds: Mapping[ast.AST, _Bound], text: str) -> _Bound:
    if isinstance(node, ast.Constant):
        return _of_constant(node, text)
    if isinstance(node, ast.BinOp):
        return _of_operation(node, bounds)
    if isinstance(node, ast.Call):
        return _of_call(node, bounds)
    if isinstance(node, (ast.List, ast.Tuple)):
        return _largest([bounds[each] for each in node.elts])._replace(number=False)
    if isinstance(node, ast.Subscript):
        return bounds[node.value]._replace(number=True)
    if isinstance(node, ast.UnaryOp):
        return bounds[node.operand]
    if isinstance(node, ast.IfExp):
        return _largest([bounds[node.body], bounds[node.orelse]])
    if isinstance(node, ast.BoolOp):
        return _largest([bounds[each] for each in node.values])
    if isinstance(node, (ast.keyword, ast.Expression)):
        return bounds[node.value if isinstance(node, ast.keyword) else node.body]
    return _Bound(_SYMBOL) if isinstance(node, (ast.Name, ast.Attribute)) else _Bound()


def _largest(found: list[_Bound]) -> _Bound:
    return _Bound(
        max((each.bits for each in found), default=1),
        max((each.terms for each in found), default=1),
        all(each.number for each in found),
    )


def _of_constant(node: ast.Constant, text: str) -> _Bound:
    if isinstance(node.value, str):
        return _Bound(number=False)
    if isinstance(node.value, bool):
        return _Bound()
    # sympy reads the text, not the value.
    said = text[node.col_offset : node.end_col_offset]
    if not isinstance(node.value, (int, float)) or not is_literal(said):
        raise _NoBound
    bits = node.value.bit_length() if isinstance(node.value, int) else _SYMBOL
    if bits > _MOST_LITERAL:
        raise _NoBound
    return _Bound(max(bits, 1))


def _of_operation(node: ast.BinOp, bounds: Mapping[ast.AST, _Bound]) -> _Bound:
    left, right = bounds[node.left], bounds[node.right]
    if not (left.number and right.number):
        raise _NoBound
    if isinstance(node.op, (ast.Add, ast.Sub)):
        return _sum([left, right])
    if isinstance(node.op, ast.Mult):
        return _product([left, right])
    if isinstance(node.op, ast.Div):
        return _Bound(left.bits + right.bits, left.terms)
    if isinstance(node.op, (ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr)):
        return _Bound(max(left.bits, right.bits))
    if isinstance(node.op, ast.Pow):
        return _power(left, node.right)
    if isinstance(node.op, (ast.LShift, ast.RShift)):
        return _shift(left, node.right)
    raise _NoBound  # for example, `^`


def _of_call(node: ast.Call, bounds: Mapping[ast.AST, _Bound]) -> _Bound:
    given = [bounds[each] for each in (*node.args, *node.keywords)]
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    if len(given) > _MOST_ARGUMENTS:
        raise _NoBound
    if name in _POWERS or name in _SHIFTS:
        if len(node.args) != 2 or node.keywords or not given[0].number:
            raise _NoBound
        return (_power if name in _POWERS else _shift)(given[0], node.args[1])
    if name in _ROUNDING:
        for each in (*node.args[1:], *(each.value for each in node.keywords)):
            if _value(each) > _MOST_EXPONENT:
                raise _NoBound
    if name == "Mul":
        return _product(given)
    if name == "sum":
        # Assume that each element is as large as the largest.
        count = sum(len(getattr(each, "elts", ())) or 1 for each in node.args)
        return _sum([_largest(given)._replace(number=True)] * min(count, _MOST_TERMS))
    if name == "Add":
        return _sum(given)
    if name in _WITHOUT_ARGUMENTS:
        return _Bound(_SYMBOL, number=bool(given))
    number = name != "Tuple"
    return _Bound(max((_SYMBOL, *(each.bits for each in given))), number=number)


def _sum(given: list[_Bound]) -> _Bound:
    terms = sum(each.terms for each in given)
    return _Bound(max((1, *(each.bits for each in given))) + len(given).bit_length(), terms)


def _product(given: list[_Bound]) -> _Bound:
    return _Bound(sum(each.bits for each in given), math.prod(each.terms for each in given))


def _power(base: _Bound, exponent: ast.AST) -> _Bound:
    times = _value(exponent)
    if times > _MOST_EXPONENT:
        raise _NoBound
    times = max(1, math.ceil(times))
    return _Bound(base.bits * times, base.terms**times)


def _shift(value: _Bound, by: ast.AST) -> _Bound:
    places = _value(by)
    if places > _MOST_SHIFT:
        raise _NoBound
    return _Bound(value.bits + math.ceil(places), value.terms)


def _value(node: ast.AST) -> float:
    """The absolute value of a literal number; raises _Unbounded for any other node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        node = node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return abs(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):  # 1/2
        return _value(node.left) if _value(node.right) >= 1 else math.inf
    if isinstance(node, ast.Call) and node.args:  # Integer(2), Rational(1, 2), Float('0.5')
        return _written(node)
    raise _NoBound


def _written(node: ast.Call) -> float:
    """The absolute value of a number that is written as a call."""
    first = node.args[0]
    name = getattr(node.func, "id", "")
    if name not in ("Integer", "Rational", "Float") or not isinstance(first, ast.Constant):
        raise _NoBound
    try:
        return abs(float(str(first.value)))
    except ValueError as error:
        raise _NoBound from error
