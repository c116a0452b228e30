"""What a relocation wrote is read back: any byte that is not as planned is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptmove import formats
from ckptmove.errors import CkptmoveError, WriteError
from ckptmove.formats.checkpoint import Checkpoint
from ckptmove.placement.place import Moves, place
from ckptmove.placement.rules import rules_of
from ckptmove.plans.plan import apply_plan
from ckptmove.sources import open_source
from ckptmove.sources.source import Memory
from ckptmove.zips.archive import Archive
from ckptmove.zips.rewrite import patch
from tests.making.saving import save_tagged


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = {f"t{n}": torch.ones(n) for n in range(9)} | {"device": "cuda:1", "note": ["cpu"]}
    save_tagged(tree, tmp_path / "a.pt", "cuda:1")
    return tmp_path / "a.pt"


def is_accepted(before: Checkpoint, moves: Moves, content: bytes, path: Path) -> bool:
    path.write_bytes(content)
    with open_source(path) as written:
        try:
            return before.check_patched(written, moves)
        except CkptmoveError:
            return False


def test_each_byte_of_a_pickle_counts(source: Path, tmp_path: Path) -> None:
    with open_source(source) as opened:
        before = formats.read(opened)
        moves = place(before.manifest, rules_of(to="cpu"))
        made = apply_plan(before.plan_relocate(moves), source.read_bytes())
        other = tmp_path / "b.pt"
        assert is_accepted(before, moves, made, other)
        archive = Archive(Memory(made, "b.pt"))
        (record,) = (each for each in archive.records.values() if each.name.endswith("data.pkl"))
        pickle = archive.read(record, at_most=1 << 20)
        (stream,) = before.whole.streams
        assert stream.is_respelled(Memory(pickle, "b.pt"), before.spelling(moves))
        for at in range(0, len(pickle), 3):
            damaged = bytearray(pickle)
            damaged[at] ^= 1
            assert not stream.is_respelled(Memory(bytes(damaged), "b.pt"), before.spelling(moves))
            # its checksums are right: only what the pickle says is wrong
            wrong = apply_plan(patch(archive, {record.name: bytes(damaged)}), made)
            accepted = is_accepted(before, moves, wrong, other)
            assert accepted == says_the_same(before, other, moves), at


def says_the_same(before: Checkpoint, path: Path, moves: Moves) -> bool:
    """What a walk of the whole written file finds."""
    with open_source(path) as written:
        try:
            before.check_relocated(formats.read(written), moves)
        except CkptmoveError:
            return False
        return True


def test_other_moves_than_were_planned_are_an_error(source: Path) -> None:
    with open_source(source) as opened:
        before = formats.read(opened)
        moves, others = (place(before.manifest, rules_of(to=to)) for to in ("cpu", "mps"))
        made = apply_plan(before.plan_relocate(moves), source.read_bytes())
        other = source.with_name("b.pt")
        other.write_bytes(made)
        with open_source(other) as written:
            assert before.check_patched(written, moves)
            with pytest.raises(WriteError):
                before.check_patched(written, others)
