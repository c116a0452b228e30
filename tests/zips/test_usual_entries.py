"""Plain entries and headers that are taken in rows are those that are read one by one."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError, CorruptError
from ckptmove.sources.source import Memory
from ckptmove.zips import local_headers
from ckptmove.zips.archive import Archive
from ckptmove.zips.local_headers import check_layout
from ckptmove.zips.members import Records
from tests.conftest import examples
from tests.making.building import Part, build_zip


class OneByOne(Archive):
    """Takes no entry for a plain one, nor any row of them."""

    def _take_row(self, *_: object) -> int:
        return 0

    def _take_usual(self, directory: bytes, at: int) -> int:
        return 0


def check_one_by_one(archive: Archive) -> None:
    """As `check_layout`, with a read for each header."""
    end, before = 0, ""
    for each in sorted(archive.records.values(), key=lambda record: record.header_at):
        if each.header_at < end:
            raise CorruptError(f"the records {before!r} and {each.name!r} overlap")
        end, before = archive.data_at(each) + each.stored_nbytes, each.name


def outcome(data: bytes, kind: type[Archive]) -> object:
    """What a reader tells of a zip, or raises."""
    try:
        archive = kind(Memory(data, "a.pt"))
        if kind is OneByOne:
            check_one_by_one(archive)
        else:
            check_layout(archive)
        return [(each, archive.data_at(each)) for each in archive.records.values()]
    except CkptmoveError as error:
        return type(error), str(error)


@cache
def zips() -> tuple[bytes, ...]:
    """Zips of torch, of Python, and built by hand, with records enough to be read in rows."""
    by_torch = io.BytesIO()
    sizes = [n % 5 if n < 20 else 1 + n % 5 for n in range(90)]  # of empty ones all flags differ
    torch.save({f"t{n}": torch.zeros(size) for n, size in enumerate(sizes)}, by_torch)
    by_python = io.BytesIO()
    with zipfile.ZipFile(by_python, "w") as file:
        for n in range(20):
            how = zipfile.ZIP_DEFLATED if n % 7 == 3 else zipfile.ZIP_STORED
            file.writestr(zipfile.ZipInfo(f"a/data/{n}"), bytes(n), how)
        file.writestr("a/ü", b"u")
    by_hand = build_zip([Part(f"a/{n}", bytes(range(n))) for n in range(20)])
    return by_torch.getvalue(), by_python.getvalue(), by_hand, *zips_of_one_size()


def zips_of_one_size() -> tuple[bytes, bytes]:
    """Zips of torch and of Python, whose headers lie equally far apart."""
    by_torch, by_python = io.BytesIO(), io.BytesIO()
    torch.save({f"t{n}": torch.full((3,), n % 7) for n in range(170)}, by_torch)
    with zipfile.ZipFile(by_python, "w") as file:
        for n in range(90):
            file.writestr(zipfile.ZipInfo(f"a/{n:02}"), b"%02d" % n)
    return by_torch.getvalue(), by_python.getvalue()


def test_rows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]
    take = Records.add_all

    def add_all(self: Records, names: Sequence[str], numbers: Iterable[tuple[int, ...]]) -> bool:
        taken[0] += len(names)
        return take(self, names, numbers)

    monkeypatch.setattr(Records, "add_all", add_all)
    Archive(Memory(zips()[0], "a.pt"))
    assert taken[0] > 30


@pytest.mark.parametrize("data", zips_of_one_size(), ids=["torch", "Python"])
def test_headers_are_taken_in_rows(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, start_of = list[str](), local_headers._usual_start

    def usual_start(name: str, *others: Any) -> int:
        alone.append(name)
        return start_of(name, *others)

    monkeypatch.setattr(local_headers, "_usual_start", usual_start)
    archive = Archive(Memory(data, "a.pt"))
    check_layout(archive)
    assert len(alone) < len(archive.records) - 40


@pytest.mark.parametrize("data", zips_of_one_size(), ids=["torch", "Python"])
def test_each_byte_of_a_record_in_a_row(data: bytes) -> None:
    heads = sorted(each.header_at for each in Archive(Memory(data, "a.pt")).records.values())
    changed = bytearray(data)
    for at in range(heads[60], heads[61]):
        changed[at] ^= 1
        assert outcome(bytes(changed), Archive) == outcome(bytes(changed), OneByOne)
        changed[at] ^= 1


def test_whole_zips() -> None:
    for data in zips():
        assert isinstance(outcome(data, Archive), list)
        assert outcome(data, Archive) == outcome(data, OneByOne)


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(400), deadline=None)
def test_mutated_zips(dice: random.Random) -> None:
    data = bytearray(dice.choice(zips()))
    headers = [at for at in range(len(data)) if data[at : at + 2] == b"PK"]
    if dice.random() < 0.3:  # the same in many entries that follow each other
        entries = [at for at in headers if data[at + 2 : at + 4] == b"\1\2"]
        first = dice.choice([0, 16, 32, dice.randrange(len(entries))])
        entries = entries[first : first + dice.choice([16, 48, len(entries)])]
        where, value = dice.randrange(60), dice.choice([0, 1, 8, 0x2F, 0xFF])
        for entry in entries:
            if entry + where < len(data):
                data[entry + where] = value
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        at = dice.choice(headers) + dice.randrange(60) if dice.random() < 0.8 else None
        at = dice.randrange(len(data)) if at is None or at >= len(data) else at
        data[at] = dice.choice([0, 1, 8, 0x2F, 0x41, 0xFF, data[at] ^ 1, dice.randrange(256)])
    assert outcome(bytes(data), Archive) == outcome(bytes(data), OneByOne)
