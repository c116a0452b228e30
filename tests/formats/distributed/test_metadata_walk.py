"""`.metadata` of very many items takes little memory; whatever byte is damaged, one line tells."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import CorruptError, InputError
from ckptmove.formats.distributed.dcp.item_machine import walk_metadata
from ckptmove.formats.distributed.dcp.metadata import read_metadata
from ckptmove.sources.budget import Budget
from ckptmove.sources.source import Memory
from tests.making.distributed import save_dcp

MOST = 20  # bytes of memory for one of .metadata; as nodes it would take 27


@pytest.mark.slow
def test_very_many_items_take_little_memory(tmp_path: Path) -> None:
    whole = torch.arange(4000.0).reshape(4, 1000)
    boxes = [((n, at), (1, 1)) for n in range(4) for at in range(1000)]
    folder = save_dcp(tmp_path / "in", {"t": whole}, {"t": boxes})
    nbytes = (folder / ".metadata").stat().st_size
    ckptmove.inspect(folder)  # imports
    tracemalloc.start()
    assert ckptmove.inspect(folder).divisions == {"t": "4×1,000"}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST * nbytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_damaged_byte_is_told(flip: int, tmp_path: Path) -> None:
    state = {"a": torch.ones(4, 2), "b": {"c": torch.zeros(3), "d": "text"}}
    boxes = {"a": [((0, 0), (2, 2)), ((2, 0), (2, 2))]}
    content = (save_dcp(tmp_path / "in", state, boxes) / ".metadata").read_bytes()
    right = read_metadata(Memory(content, "m"), Budget()).saved
    assert set(right.names) == {"a", "b.c", "b.d"}
    refused = list[str]()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= flip
        try:
            read_metadata(Memory(bytes(damaged), "m"), Budget())
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > len(content) // 2
    assert not any("\n" in each for each in refused)


def test_a_long_row_that_many_objects_share_is_no_bomb() -> None:
    """Each object copies what it says: a few kB would take a hundred MB."""
    chunk = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\nq\x01"
    names = b"X\7\0\0\0offsetsq\x02X\5\0\0\0sizesq\x03"
    row = b"(" + b"K\x01" * 5000 + b"tq\x04"
    each = b"h\x01)\x81}(h\x02h\x04h\x03h\x04ub"
    data = b"\x80\x02(" + chunk + names + row + each * 1000 + b"t."
    with pytest.raises(CorruptError, match="far denser"):
        walk_metadata(data, Budget())
