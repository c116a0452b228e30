"""Any changed byte of a record fails `validate`, in every kind of zip that torch writes."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import InputError
from tests.conftest import examples

FLIPS = examples(1000)  # of one file


def _torch_zip(path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"model": torch.nn.Linear(40, 30).state_dict(), "epoch": 3}, path)


def _script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(20, 10)).save(str(path))


@pytest.mark.parametrize("make", [_torch_zip, _script], ids=["torch-zip", "torchscript"])
def test_each_changed_byte_of_a_record_is_found(
    make: Callable[[Path], None], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path, dice = tmp_path / "x.pt", random.Random(make.__name__)
    make(path)
    sound = path.read_bytes()
    assert ckptmove.validate(path, device="cpu").ok
    for at in dice.choices(_bytes_of_records(path), k=FLIPS):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        with suppress(InputError):
            assert not ckptmove.validate(path, device="cpu").ok, at
    record_property("bytes changed", FLIPS)


def _bytes_of_records(path: Path) -> list[int]:
    found: list[int] = []
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for each in archive.infolist():
            head = data[each.header_offset : each.header_offset + 30]
            start = (
                each.header_offset
                + 30
                + sum(int.from_bytes(head[n : n + 2], "little") for n in (26, 28))
            )
            found += range(start, start + each.compress_size)
    return found
