"""What a survey of a pickle tells is what a scan of all its opcodes finds."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable

import pytest
import torch

from ckptmove.pickles.opcodes import table
from ckptmove.pickles.scan import Scan, Survey
from ckptmove.pickles.walk import walk


def of_torch(saved: object) -> bytes:
    """The pickle that torch writes of an object."""
    file = io.BytesIO()
    torch.save(saved, file)
    with zipfile.ZipFile(file) as records:
        return records.read(next(name for name in records.namelist() if name.endswith("data.pkl")))


def shared() -> object:
    """Things that are recalled from slots of either width."""
    parts = [[n, f"t{n}", "x" * n] for n in range(400)]
    return [parts, parts[::-1], {each[1]: each for each in parts}]


PICKLES: dict[str, Callable[[], bytes]] = {
    "tensors": lambda: of_torch({f"t{n}": torch.zeros(n % 3, 2) for n in range(700)}),
    "shared": lambda: pickle.dumps(shared(), 2),
    "one short opcode after the other": lambda: pickle.dumps([[n % 200] for n in range(9000)], 2),
    "in lines": lambda: pickle.dumps(shared(), 0),
    "counted": lambda: pickle.dumps(shared(), 4),
    "framed": lambda: pickle.dumps([shared(), "y" * 70_000, 1], 4),
    "long bytes": lambda: pickle.dumps([b"h\1q\1" * 90, "h\1" * 900, shared()], 3),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_survey_finds_what_a_scan_does(name: str) -> None:
    data = PICKLES[name]() + b"h\1 what follows"
    scan = Scan(data)
    assert_found(Survey(data), scan)
    assert_found(Survey(data, walk(data).recalled), scan)


def assert_found(survey: Survey, scan: Scan) -> None:
    assert survey.recalled_slots == set(scan.get_slots)
    assert list(survey.frames) == list(scan.frames)
    for slots in (set(scan.get_slots), {0, 1, 5, 255, 256, 300}):
        gets = zip(scan.gets, scan.get_slots, strict=True)
        puts = zip(scan.puts, scan.put_slots, strict=True)
        assert list(survey.gets_of(slots)) == [each for each in gets if each[1] in slots]
        assert list(survey.puts_of(slots)) == [each for each in puts if each[1] in slots]


@pytest.mark.parametrize("name", PICKLES)
def test_parts_are_the_beginning_of_a_scan(name: str) -> None:
    data = PICKLES[name]()
    whole, parts = Scan(data), list(Survey(data).parts(500))
    assert [part.is_whole for part in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        for mine, all_of_it in (
            (part.gets, whole.gets),
            (part.puts, whole.puts),
            (part.ints, whole.ints),
        ):
            assert mine == all_of_it[: len(mine)]


def test_the_table_has_the_opcodes_of_python() -> None:
    counts = {
        pickletools.TAKEN_FROM_ARGUMENT1: -1,
        pickletools.TAKEN_FROM_ARGUMENT4: -4,
        pickletools.TAKEN_FROM_ARGUMENT4U: -4,
        pickletools.TAKEN_FROM_ARGUMENT8U: -8,
        pickletools.UP_TO_NEWLINE: table.LINES,
    }
    widths = dict[int, int]()
    for each in pickletools.opcodes:
        n = 0 if each.arg is None else each.arg.n
        widths[ord(each.code)] = 1 + n if n >= 0 else counts[n]
    assert {ord(each.code): each.name for each in pickletools.opcodes} == table.NAMES
    assert [widths.get(code, table.UNKNOWN) for code in range(256)] == table.WIDTHS
