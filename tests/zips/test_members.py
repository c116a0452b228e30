"""The members of a zip file are told as they were noted, and take little memory."""

from __future__ import annotations

import random
import tracemalloc

from ckptmove.zips.members import Record, Records


def made(number: int) -> list[Record]:
    """Records whose headers are in another order than they."""
    at = random.Random(number)
    sizes = [at.choice([0, 1, 1 << 40]) for _ in range(number)]
    places = at.sample(range(1 << 50), number)
    return [
        Record(f"archive/data/{n}", 8 * (n % 2), 8, at.getrandbits(32), size, size, place, 46 * n)
        for n, (size, place) in enumerate(zip(sizes, places, strict=True))
    ]


def test_each_record_is_as_it_was_noted() -> None:
    given, records = made(50), Records()
    for each in given:
        records.append(each)
    assert list(records.values()) == given
    assert list(records) == [each.name for each in given]
    assert {each.name: records[each.name] for each in given} == dict(records)
    ordered = [Record(name, *fields) for _, name, fields in records.by_header()]
    assert ordered == sorted(given, key=lambda each: each.header_at)
    assert list(records.column("crc32")) == [each.crc32 for each in given]
    assert records.get("another") is None
    assert "another" not in records
    assert given[7].name in records
    assert records.data_at(given[7].name) == 0
    records.note_data_at(given[7].name, 1 << 63)
    assert records.data_at(given[7].name) == 1 << 63
    assert list(records.values()) == given


def test_a_record_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        before, records = tracemalloc.get_traced_memory()[0], Records()
        for each in made(20_000):
            records.append(each)
        del each
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 250 * len(records)
