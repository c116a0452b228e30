"""Distributed checkpoints in stores: read by ranges, each byte once, and written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmove
from tests.making.distributed import save_dcp
from tests.oracles.sameness import assert_same_tree
from tests.servers.object_store import Store

ROWS = [((at, 0), (256, 1024)) for at in range(0, 1024, 256)]
COLUMNS = [((0, at), (1024, 256)) for at in range(0, 1024, 256)]


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1024, 1024) for name in ("a", "b")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("boxes", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_nothing_is_fetched_twice(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
    state: dict[str, torch.Tensor],
    store: Store,
    tmp_path: Path,
) -> None:
    folder = save_dcp(tmp_path / "in", state, dict.fromkeys(state, boxes), files=3)
    nbytes = sum(each.stat().st_size for each in folder.iterdir())
    store.put_folder("in", folder)
    url = store.url("in")
    store.front.reset()
    assert set(ckptmove.inspect(url).divisions.values()) == {
        "rows/4" if boxes is ROWS else "columns/4"
    }
    assert store.front.nbytes() < nbytes // 10
    store.front.reset()
    ckptmove.convert(url, tmp_path / "out.safetensors")
    once = store.front.nbytes()
    assert_same_tree(ckptmove.load(tmp_path / "out.safetensors"), state)
    assert once < 1.2 * nbytes, once / nbytes
    store.front.reset()
    ckptmove.convert(url, tmp_path / "out", format="dcp", ranks=3)
    assert_same_tree(ckptmove.load(tmp_path / "out"), state)
    assert store.front.nbytes() < 1.2 * nbytes, store.front.nbytes() / nbytes


@pytest.mark.slow
def test_written_to_a_store(state: dict[str, torch.Tensor], store: Store, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "in.pt")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="dcp", ranks=3)
    ckptmove.convert(tmp_path / "in.pt", store.url("out"), format="dcp", ranks=3)
    ckptmove.convert(store.url("out"), tmp_path / "again", format="dcp", ranks=3)
    for each in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / each.name).read_bytes() == each.read_bytes()
