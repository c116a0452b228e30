"""What type checkers know of `batch`: the verbs by their names, and the options of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from ckptmove.api.options import options_of
from ckptmove.batches import keywords
from ckptmove.batches.batch import batch
from ckptmove.batches.options import VERBS, item_options
from tests.conftest import ROOT

SNIPPET = """\
import ckptmove
from concurrent.futures import ThreadPoolExecutor

ckptmove.batch("convert", "runs", "out", dtype="bf16", jobs=2, progress=print)
ckptmove.batch("relocate", "runs", "out", to="cpu", executor=ThreadPoolExecutor(1))
ckptmove.batch("inspect", "runs", require="cuda:0")
ckptmove.batch("validate", "runs", against="other", timeout=3.5)
ckptmove.batch("convrt", "runs", "out")
ckptmove.batch("convert", "runs", "out", place={"*": "cpu"})
ckptmove.batch("relocate", "runs", "out", dtype="bf16")
ckptmove.batch("inspect", "runs", force=True)
ckptmove.batch("convert", "runs", "out", jobs="two")
ckptmove.batch("convert", "runs", "out", jbos=2)
for result in ckptmove.batch("convert", "runs", "out"):
    result.digests["a"].upper(), result.name.upper()
    result.nmae
"""
WRONG = [8, 9, 10, 11, 12, 13, 16]  # lines of it


def _kinds(types: Any) -> set[object]:
    return {each for each in types if each is not NoneType}


@pytest.mark.parametrize("verb", VERBS)
def test_type_checkers_know_each_option_as_it_is_declared(verb: str) -> None:
    known = get_type_hints(getattr(keywords, f"Of{verb.title()}"))
    declared = {**item_options(verb), **options_of(batch)}  # a batch's own goes first
    assert known.keys() == {*declared, "executor", "progress", "contents"}
    for name, each in declared.items():
        hint = known[name]  # one type, or a union
        assert _kinds(each.types) in ({hint}, _kinds(get_args(hint)))


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_no_option_of_all_batches(verb: str) -> None:
    """`batch` would take it for its own, and give it to no item."""
    limit = {"timeout"}  # of an item as of `validate`: whichever ends first
    assert item_options(verb).keys() & options_of(batch).keys() <= limit


@pytest.mark.slow
def test_mypy_finds_a_wrong_verb_and_options_of_another(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    done = subprocess.run(  # where it finds what `scripts/lint` has found out
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", snippet],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert all(f"{snippet.name}:" in line for line in errors), errors
    assert sorted({int(line.split(":")[1]) for line in errors}) == WRONG
