"""Expressions in programs whose values would fill the memory, or take hours, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.trial.sandbox.exported_graphs import unknown
from tests.conftest import RunHere
from tests.making.hostile_programs import edited, exported, expression_at

#: In sizes, which sympy reads, and in guards, which Python evaluates.
HUGE = [
    "9**9**9",
    "9^9^9",
    "2**s0",
    "pow(9, 387420489)",
    "Pow(9, Pow(9, 9))",
    "PowByNatural(9, 387420489)",
    "PowByNatural(Integer(9), Integer('387420489'))",
    "FloatPow(9.5, 1e300)",
    "((10**60)**60)**60",
    "1 << 10**11",
    "1 << s0",
    "LShift(1, 100000000000)",
    "RShift(1, 100000000000)",
    "Float('1e999999999')",
    "Float('0.1', 999999999)",
    "Float('0.1', precision=999999999)",
    "1e999999999",
    "1e-999999999",
    "1e9_9_9_9_9",
    "round(5, -1000000000)",
    "RoundDecimal(5, -1000000000)",
    "(s0+s1+s2+s3)**60",
    "*".join(["(s0+1)"] * 40),
    "Mul(" + ", ".join(["s0+1"] * 40) + ")",
    "Max(" + ", ".join(f"s{n}" for n in range(500)) + ")",
    "9" * 1000,
]
#: In guards alone.
LONG = [
    "'a' * 10000000000 == 'a'",
    "len(x) == 1 and [1] * 10000000000 == x",
    "x.size() * 10000000000 == 1",
    "(1, 2) * 10000000000 == x",
    "[1, 9**9**9][0] == 1",
    "sum([2] * 10000000000) == 1",
    "pow(9, 387420489, 7) == 1",
]
RIGHT = [
    "2*s0",
    "s0**2",
    "(s0 - 3)**2 + 1",
    "s0**-1",
    "s0**0.5",
    "FloatPow(ToFloat(s0), 0.5)",
    "Pow(Symbol('s0', integer=True), Rational(1, 2))",
    "PowByNatural(s0, Integer(2))",
    "LShift(s0, 3)",
    "9223372036854775807",
    "1e-05*s0",
    "Float('1e-05', precision=53)",
    "RoundDecimal(s0/3, 2)",
    "Max(1, Min(s0, 9223372036854775806))",
    "Mod(s0*s1*s2*s3, 16)",
    "(((s0 - 1)//2 + 1)*((s1 - 1)//2 + 1) - 1)**2*((s2 - 1)//2 + 1)*((s3 - 1)//2 + 1)",
]
RIGHT_GUARDS = [
    *RIGHT,
    "x.size()[0] == 2*y.size()[1]",
    "x.size(0)*y.size(1) < 2**31",
    "L['x'].storage_offset() == 0",
    "kind == 'mean'",
    "x == math.inf",
    "sum([s0, s1, 3]) >= 2",
]


def size(said: str) -> object:
    return {"as_expr": {"expr_str": said}}


@pytest.mark.parametrize("said", HUGE, ids=range(len(HUGE)))
def test_a_size_that_would_be_huge_is_refused(said: str) -> None:
    assert "too large" in (unknown(size(said)) or "")
    assert "too large" in (unknown({"guards_code": [said]}) or "")


@pytest.mark.parametrize("said", LONG)
def test_text_and_lists_are_not_multiplied(said: str) -> None:
    assert "too large" in (unknown({"guards_code": [said]}) or "")


@pytest.mark.parametrize("said", RIGHT)
def test_a_size_that_torch_writes_is_taken(said: str) -> None:
    assert unknown(size(said)) is None


@pytest.mark.parametrize("said", RIGHT_GUARDS)
def test_a_guard_that_torch_writes_is_taken(said: str) -> None:
    assert unknown({"guards_code": [said]}) is None


@pytest.mark.slow
def test_a_program_with_one_ends_the_command_in_one_line(tmp_path: Path, run_here: RunHere) -> None:
    program = exported(tmp_path / "program.pt2")
    path = edited(program, tmp_path / "huge.pt2", expression_at("size", "9**9**9 > 1"), tmp_path)
    done = run_here("validate", path, "--step", "forward", exit=3)
    assert "a size that is code, or is too large: '9**9**9 > 1'" in done.stderr
    assert done.stderr.count("\n") <= 2
