"""No two names of tensors are shown alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmove
from ckptmove.display.phrases import join_names, show_name
from tests.conftest import RunCli

KEYS = [
    *("w", "w ", " w", "w\u00a0", "w\u200b", "w\x00", "w\\x00", "w\\u0000", "w\n", "w\\n", ""),
    *(" ", "\u2003", "w\u202e", '"w"', '"w "', '"w\\u200b"', '"""', "w\ud800", "w  w", "w w"),
    *(
        "\u00e9",
        "e\u0301",
        "\uff57",
        "(root)",
        "a.b",
        '"a.b"',
        "{0..1}",
        "w\ufe0f",
        "w\u115f",
        "w\u2800",
    ),
]
_ODD = st.text(alphabet='w"\\ u0x\u200b\u00a0\x00n\ud800\u00e9\u0301', max_size=8)


def test_all_odd_names_are_apart() -> None:
    assert len({show_name(each) for each in KEYS}) == len(KEYS)
    for each in KEYS:
        shown = show_name(each)
        assert shown.strip() == shown != "", each
        assert shown.isprintable()
        assert shown in (each, json.dumps(each))


@given(_ODD, _ODD)
def test_two_names_are_shown_apart(one: str, other: str) -> None:
    assert (show_name(one) == show_name(other)) is (one == other)


def test_plain_names_stay_as_they_are() -> None:
    for each in ("model.layers.0.weight", "Gewicht.ö", "权重", "'w'", "w w", '"a.b".0'):
        assert show_name(each) == each


@pytest.mark.parametrize("options", [[], ["--tensors"], ["--tree"]])
def test_inspect_shows_all_apart(options: list[str], tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "x.pt"
    torch.save({key: torch.ones(2) for key in KEYS}, path)
    shown = run_cli("inspect", path, *options, exit=0).stdout.splitlines()
    for key in KEYS:
        name = show_name(key)
        assert sum(line.startswith((f"{name}  ", f"{name}: ")) for line in shown) == 1, name
    names = [each.name for each in ckptmove.inspect(path).tensors]
    assert names == KEYS  # as they are


def test_diff_and_validate_quote_names(tmp_path: Path, run_cli: RunCli) -> None:
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": torch.ones(2), "w\u200b": torch.ones(2), "": torch.ones(2)}, a)
    torch.save({"w": torch.ones(2), "w\u200b": torch.zeros(2), "": torch.zeros(2)}, b)
    shown = run_cli("diff", a, b, exit=1).stdout
    assert '"w\\u200b"' in shown
    assert ' "" ' in shown
    assert join_names(["w ", "w"]) == '"w ", w'
