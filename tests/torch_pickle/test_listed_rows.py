"""Plain tensors that are listed in rows are listed as if each were visited."""

from __future__ import annotations

import random
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptmove
from ckptmove.errors import CkptmoveError
from ckptmove.torch_pickle.listed_tensors import TensorListing
from tests.conftest import examples
from tests.pickles.test_plain_tensors import slots, tensors, trained, views

BOTH = [{"a.b": torch.zeros(2), "a": {"b": torch.ones(3)}}, {"rng": torch.get_rng_state()}]
SAVED: dict[str, object] = {
    "tensors": tensors(600),
    "a model": trained(),
    "views": views(),
    "slots": slots(),
    "names that several have": BOTH,
    "bytes": {f"b{n}": torch.zeros(3 + 5053 * (n == 33), dtype=torch.uint8) for n in range(40)},
    "numbers as keys": {n: torch.zeros(2) for n in range(80)},
    "one tensor twice": tensors(40) | dict.fromkeys(("x", "y", "z"), torch.zeros(2)),
    "deep": {"x": {"y": tensors(100)}, "ema": tensors(9), "rng_state": tensors(3)},
}


def outcome(path: Path, monkeypatch: pytest.MonkeyPatch, *, rows: bool) -> object:
    """What is listed, in rows or one by one."""
    with monkeypatch.context() as patch:
        if not rows:
            patch.setattr(TensorListing, "list_row", lambda *_: False)
        try:
            found = ckptmove.inspect(path)
        except CkptmoveError as error:
            return type(error), str(error)
        return found.tensors, dict(found.storages), found.aliases, found.devices, found.sections


def assert_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_rows = outcome(path, monkeypatch, rows=True)
    assert in_rows == outcome(path, monkeypatch, rows=False)


@pytest.mark.parametrize("name", SAVED)
def test_rows_are_listed_as_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(SAVED[name], tmp_path / "a.pt")
    assert_same(tmp_path / "a.pt", monkeypatch)


def test_rows_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(SAVED["deep"], tmp_path / "a.pt")
    taken = list[bool]()
    take = TensorListing.list_row

    def list_row(self: TensorListing, *arguments: object) -> bool:
        taken.append(take(self, *arguments))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(TensorListing, "list_row", list_row)
    ckptmove.inspect(tmp_path / "a.pt")
    assert sum(taken) > 4


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(120), deadline=None)
def test_mutated_checkpoints(tmp_path_factory: pytest.TempPathFactory, dice: random.Random) -> None:
    saved, path = BytesIO(), tmp_path_factory.getbasetemp() / "mutated.pt"
    torch.save(SAVED[dice.choice(sorted(SAVED))], saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = bytearray(old.read(info))
            for _ in range(3 * info.filename.endswith("data.pkl")):
                at = dice.randrange(len(data))
                data[at] = dice.choice([data[at] ^ 1, data[at] + 1 & 255, dice.randrange(256)])
            new.writestr(info.filename, bytes(data))
    with pytest.MonkeyPatch.context() as patch:
        assert_same(path, patch)
