"""`.metadata` says the same, whether usual objects are taken at once or opcode by opcode."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import ckptmove
from ckptmove.errors import InputError
from ckptmove.formats.distributed.dcp.item_machine import ItemMachine
from ckptmove.formats.distributed.dcp.metadata import read_saved
from ckptmove.formats.distributed.dcp.metadata_walk import FrequentObject, MetadataMachine
from ckptmove.pickles.opcodes.machine import Machine
from ckptmove.pickles.walk import walk
from ckptmove.sources.budget import Budget
from tests.conftest import ALL
from tests.making.distributed import save_dcp

WRITERS = ("torch", "ckptmove")
MUTATIONS = 5_000 if ALL else 250


@cache
def metadata_by(writer: str) -> bytes:
    """A `.metadata` with tensors of one, two and four chunks, of two dtypes, and two values."""
    layers = {
        f"layer.{n}.{name}": torch.full(shape, float(n))
        for n in range(5)
        for name, shape in {"weight": (4, 300), "bias": (4,), "scale": (), "none": (0, 3)}.items()
    }
    state = {**layers, "k": torch.ones(2, 3, 4, 5, dtype=torch.int64), "a": "text", "cpu": [1, 2]}
    boxes = {name: [((0, 0), (2, 300)), ((2, 0), (2, 300))] for name in layers if "weight" in name}
    boxes["layer.0.weight"] = [((row, 0), (1, 300)) for row in range(4)]
    with TemporaryDirectory() as folder:
        source = save_dcp(Path(folder) / "in", state, boxes)
        if writer == "ckptmove":
            source, made = Path(folder) / "out", source
            ckptmove.convert(made, source, format="dcp", ranks=3)
        return (source / ".metadata").read_bytes()


class Counting(ItemMachine):
    """A machine that counts what it takes at once."""

    taken = 0

    def _take(self, kind: str, start: int) -> FrequentObject | None:
        record = super()._take(kind, start)
        Counting.taken += record is not None
        return record


def told(data: bytes, machine: type[Machine]) -> object:
    """What it says; or the error."""
    budget = Budget()
    try:
        saved = read_saved(walk(data, budget=budget, machine_type=machine).root)
    except InputError as error:
        return type(error), str(error)
    return saved.tensors, saved.blobs, saved.paths


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The same with a byte that is another, a piece that is elsewhere, or less of it."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at, kind = chance.randrange(len(content)), chance.randrange(6)
        if kind < 3:
            content[at] = chance.choice((chance.randrange(256), *b"hjqKMJ().}\x85\x94Rube\x95"))
        elif kind == 3:
            del content[at : at + chance.choice((1, 2, 5, 40))]
        else:
            start = chance.randrange(len(content))
            piece = content[start : start + chance.choice((1, 2, 5, 60, 300))]
            content[at : at + (kind == 4) * len(piece)] = piece
    return bytes(content)


@pytest.mark.parametrize("writer", WRITERS)
def test_usual_objects_are_taken_at_once(writer: str) -> None:
    data, before = metadata_by(writer), Counting.taken
    assert told(data, Counting) == told(data, MetadataMachine)
    items = 5 * 5 + 1 + 2 * (5 * 3 + 1) + 4 + 4 * 2
    assert Counting.taken - before > items


@pytest.mark.sample(1)
@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_is_damaged_is_told_alike(writer: str) -> None:
    data, chance = metadata_by(writer), random.Random(writer)
    refused = 0
    for _ in range(MUTATIONS):
        damaged = mutated(data, chance)
        slow = told(damaged, MetadataMachine)
        assert told(damaged, ItemMachine) == slow, damaged
        refused += isinstance(slow, tuple) and isinstance(slow[0], type)
    assert MUTATIONS // 10 < refused < MUTATIONS


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_taken_at_once_costs_less(writer: str) -> None:
    """And it is taken only where it fits: else its opcodes are counted one by one."""
    data, rooms = metadata_by(writer), []
    for machine in (MetadataMachine, ItemMachine):
        budget = Budget()
        walk(data, budget=budget, machine_type=machine)
        rooms.append(budget.room)
    assert rooms[0] < rooms[1] < Budget().room + len(data)
    for machine in (MetadataMachine, ItemMachine):
        budget = Budget()
        budget._room = (rooms[1] - Budget().room) // -2
        with pytest.raises(InputError, match="far denser"):
            walk(data, budget=budget, machine_type=machine)
