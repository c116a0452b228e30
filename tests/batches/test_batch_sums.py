"""The CRC-32s that the ledger has of outputs come with their verification, and are right."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.batches.options import VerbName
from ckptmove.batches.trees import LEDGER
from ckptmove.batches.trees.ledger import FileLedger

IO = Path("/proc/self/io")
LARGE = 4 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tensor that is verified piece by piece, some that are read together, and a stride."""
    root = tmp_path / "tree"
    root.mkdir()
    large = torch.arange(LARGE // 4, dtype=torch.float32)
    weights = {"large": large, "strided": large[:300_000].view(2, -1).T, "last": torch.ones(3)}
    for n in range(40):
        weights[f"small {n}"] = torch.full((n,), 1.5)
    torch.save(weights, root / "one.pt")
    torch.save({"w": torch.zeros(40_000)}, root / "zeros.pt")
    (root / "other.bin").write_bytes(bytes(range(256)) * 2000)
    return root


def here(verb: VerbName, source: Path, out: Path, **options: Any) -> None:
    """Run a batch in this process."""
    with ThreadPoolExecutor(1) as executor:
        for result in ckptmove.batch(verb, source, out, executor=executor, **options):
            assert result.ok, result


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("relocate", {"to": "cuda:0"}),
        ("relocate", {"to": "privateuseone:127"}),
        ("convert", {"format": "safetensors"}),
        ("convert", {"format": "safetensors", "dtype": "bf16"}),
        ("convert", {"format": "torch-zip", "dtype": "bf16"}),
    ],
)
def test_the_ledger_has_the_sum_of_every_output(
    verb: VerbName, options: dict[str, str], tree: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    here(verb, tree, out, copy_rest=True, **options)
    sums = {each.name: each.crc32 for each in FileLedger(str(out / LEDGER)).every()}
    made = {path.stem: zlib.crc32(path.read_bytes()) for path in out.glob("[!.]*")}
    assert {name.partition(".")[0]: crc32 for name, crc32 in sums.items()} == made


def test_the_ledger_has_the_sum_of_every_folder(tree: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    here("convert", tree, out, format="safetensors", max_shard_size="2MB", include=["one.pt"])
    (out / LEDGER).rename(tmp_path / LEDGER)
    out.rename(moved)  # of which the stamps change as it is copied
    for path in [*moved.rglob("*.safetensors")]:
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").replace(path)
    (tmp_path / LEDGER).rename(moved / LEDGER)
    again = ckptmove.batch(
        "convert", tree, moved, format="safetensors", max_shard_size="2MB", include=["one.pt"]
    )
    assert [result.reason for result in again] == ["done before"]


@pytest.mark.skipif(not IO.exists(), reason="this system does not count what is read")
def test_an_output_is_read_once(tree: Path, tmp_path: Path) -> None:
    """It is copied, which counts as reading the source, and read back; that gives the sum too."""
    here("relocate", tree, tmp_path / "before", to="cuda:0")  # loads what it takes
    nbytes = sum(path.stat().st_size for path in tree.glob("*.pt"))
    start = _read_nbytes()
    here("relocate", tree, tmp_path / "out", to="cuda:0")
    assert _read_nbytes() - start < 2.5 * nbytes


def _read_nbytes() -> int:
    return int(IO.read_text().split()[1])
