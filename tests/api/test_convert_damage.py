"""A damaged source is told, whatever becomes of its bytes: copied, gathered, cut or cast."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptmove import CorruptError, convert

SAVED: dict[str, Callable[[], object]] = {
    "whole": lambda: {"w": torch.ones(64, 64)},
    "gathered": lambda: {"w": torch.ones(64, 64).t()},
    "cut": lambda: {"w": torch.ones(4096)[:16]},
    "sliced": lambda: dict(zip("ab", torch.ones(2, 64, 64).transpose(1, 2), strict=True)),
}


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_flipped_bit_is_told(name: str, suffix: str, dtype: str | None, tmp_path: Path) -> None:
    path, out = tmp_path / "made.pt", tmp_path / f"out{suffix}"
    torch.save(SAVED[name](), path)
    convert(path, out, dtype=dtype)
    out.unlink()
    with zipfile.ZipFile(path) as archive:
        record = archive.getinfo("made/data/0")
        start = record.header_offset + 30
    content = bytearray(path.read_bytes())
    start = bytes(content).index(torch.ones(1).numpy().tobytes(), start)
    content[start + record.file_size - 8] ^= 1  # seen by no tensor where the storage is cut
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"damaged: its checksum is wrong"):
        convert(path, out, dtype=dtype)
    assert not out.exists()
