"""Plain entries and headers that are taken in rows are those that are read one by one."""

from __future__ import annotations

import io
import random
import zipfile
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError
from ckptmove.sources.source import Memory
from ckptmove.zips.archive import Archive
from tests.conftest import examples
from tests.making.building import Part, build_zip


class OneByOne(Archive):
    """Takes no entry and no header for a plain one."""

    def _take_usual(self, directory: bytes, at: int) -> int:
        return 0

    def _usual_data_at(self, *_: object) -> int:
        return 0


def outcome(data: bytes, kind: type[Archive]) -> object:
    """What a reader tells of a zip, or raises."""
    try:
        archive = kind(Memory(data, "a.pt"))
        archive.check_layout()
        return [(each, archive.data_at(each)) for each in archive.records.values()]
    except CkptmoveError as error:
        return type(error), str(error)


@cache
def zips() -> tuple[bytes, ...]:
    """Zips of torch, of Python, and built by hand, with records enough to be read in rows."""
    by_torch = io.BytesIO()
    torch.save({f"t{n}": torch.zeros(n % 5) for n in range(30)}, by_torch)
    by_python = io.BytesIO()
    with zipfile.ZipFile(by_python, "w") as file:
        for n in range(20):
            how = zipfile.ZIP_DEFLATED if n % 7 == 3 else zipfile.ZIP_STORED
            file.writestr(zipfile.ZipInfo(f"a/data/{n}"), bytes(n), how)
        file.writestr("a/ü", b"u")
    by_hand = build_zip([Part(f"a/{n}", bytes(range(n))) for n in range(20)])
    return by_torch.getvalue(), by_python.getvalue(), by_hand


def test_whole_zips() -> None:
    for data in zips():
        assert isinstance(outcome(data, Archive), list)
        assert outcome(data, Archive) == outcome(data, OneByOne)


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(400), deadline=None)
def test_mutated_zips(dice: random.Random) -> None:
    data = bytearray(dice.choice(zips()))
    headers = [at for at in range(len(data)) if data[at : at + 2] == b"PK"]
    for _ in range(dice.choice([1, 1, 2, 4])):
        at = dice.choice(headers) + dice.randrange(60) if dice.random() < 0.8 else None
        at = dice.randrange(len(data)) if at is None or at >= len(data) else at
        data[at] = dice.choice([0, 1, 8, 0x2F, 0x41, 0xFF, data[at] ^ 1, dice.randrange(256)])
    assert outcome(bytes(data), Archive) == outcome(bytes(data), OneByOne)
