"""Folders that torch.distributed.checkpoint wrote for Hugging Face: boxes of tensors, by rank."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, InputError, UnsupportedError
from ckptmove.formats.safetensors.header import read_header
from ckptmove.sources.source import Memory
from tests.conftest import RunCli, examples
from tests.making.distributed import Box, boxes_of, save_dcp, save_hf_rank
from tests.oracles.sameness import assert_same_tree

ROWS = [((0, 0), (1, 6)), ((1, 0), (2, 6)), ((3, 0), (1, 6))]
COLUMNS = [((0, 0), (4, 3)), ((0, 3), (4, 2)), ((0, 5), (4, 1))]


def save_shards(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Sequence[Box]],
    ranks: int,
    *,
    chunks: bool = False,
) -> Path:
    """Write each box to the file of a rank, as the writer of torch does for a DTensor.

    With `chunks`, as transformers does for FSDP with tensor parallelism: several of one a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = {"transformers_dcp_chunk_version": "1"} if chunks else {"DCP_VERSION": "1.0"}
    for rank in range(ranks):
        held: dict[str, torch.Tensor] = {}
        told: dict[str, Any] = {}
        for name, tensor in state.items():
            own = boxes.get(name, [((0,) * tensor.dim(), tuple(tensor.shape))])
            for start, size in own[rank::ranks]:
                part = tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))
                key = f"chunk_{len(held)}" if chunks else name
                held[key] = tensor[part].clone(memory_format=torch.contiguous_format)
                whole = {"fqn": name, "shape": list(tensor.shape)} if chunks else {}
                told[key] = {**whole, "saved_offsets": list(start)}
        metadata = {"format": "pt", **version, "DCP_SHARDING_INFO": json.dumps(told)}
        save_file(held, folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", metadata)
    return folder


def state() -> dict[str, torch.Tensor]:
    """Tensors that are divided in every way."""
    return {
        "rows": torch.randn(4, 6),
        "columns": torch.randn(4, 6).bfloat16(),
        "whole": torch.arange(5),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
    }


BOXES = {"rows": ROWS, "columns": COLUMNS}


def by_torch(folder: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch's own reader makes of it."""
    found = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_shards(tmp_path / "step", state(), BOXES, 3)


def saved() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return state()


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert_same_tree({name: found[name].clone() for name in wanted}, dict(wanted))
    assert found.keys() == wanted.keys()


def test_it_is_what_was_saved(folder: Path, tmp_path: Path, run_cli: RunCli) -> None:
    wanted = saved()
    same(by_torch(folder, wanted), wanted)
    same(ckptmove.load(folder), wanted)
    for name in ("out.safetensors", "out.pt"):
        assert ckptmove.convert(folder, tmp_path / name).source_format == "dcp-safetensors"
        same(ckptmove.load(tmp_path / name), wanted)
        assert ckptmove.diff(folder, tmp_path / name).equal
    same(load_file(tmp_path / "out.safetensors"), wanted)
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    same(load_file(tmp_path / "hf" / "model.safetensors"), wanted)
    found = ckptmove.inspect(folder)
    assert found.divisions["rows"] == "rows/3"
    assert found.divisions["columns"] == "columns/3"
    assert found.verdict == "stores no devices"
    assert ckptmove.validate(folder).ok
    assert "how many ranks saved: if the last" in run_cli("inspect", folder, exit=0).stderr


def test_the_file_that_torch_writes(tmp_path: Path) -> None:
    wanted = {name: each for name, each in saved().items() if each.numel()}
    folder = save_hf_rank(tmp_path / "hf", wanted)
    same(ckptmove.load(folder), wanted)


@hypothesis_settings(max_examples=examples(40))
@given(shape=st.lists(st.integers(1, 5), max_size=3), seed=st.integers(0), half=st.booleans())
def test_any_shape_divided_in_any_way(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], seed: int, half: bool
) -> None:
    torch.manual_seed(seed % 1000)
    tensor = torch.randn(shape).to(torch.float16 if half else torch.float64)
    boxes = boxes_of(shape, Random(seed))
    folder = save_shards(tmp_path_factory.mktemp("hf"), {"w": tensor}, {"w": boxes}, len(boxes))
    same(ckptmove.load(folder), {"w": tensor})
    ckptmove.convert(folder, folder.parent / f"{folder.name}.safetensors")
    same(load_file(folder.parent / f"{folder.name}.safetensors"), {"w": tensor})


@hypothesis_settings(max_examples=examples(40))
@given(shape=st.lists(st.integers(1, 5), max_size=3), seed=st.integers(0), ranks=st.integers(1, 3))
def test_several_parts_of_a_tensor_in_one_file(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], seed: int, ranks: int
) -> None:
    torch.manual_seed(seed % 1000)
    wanted = {"w": torch.randn(shape), "b": torch.arange(3)}
    boxes = {"w": boxes_of(shape, Random(seed))}
    folder = save_shards(tmp_path_factory.mktemp("hf"), wanted, boxes, ranks, chunks=True)
    same(ckptmove.load(folder), wanted)
    ckptmove.convert(folder, folder.parent / f"{folder.name}.safetensors")
    same(load_file(folder.parent / f"{folder.name}.safetensors"), wanted)


CHANGES: dict[str, tuple[Any, str]] = {
    "no name": (lambda told: told["chunk_0"].pop("fqn"), "which tensor 'chunk_0' is of"),
    "no shape": (lambda told: told["chunk_0"].pop("shape"), "no valid shape"),
    "a longer shape": (lambda told: told["chunk_0"].update(shape=[4, 6, 1]), "another shape"),
    "another shape": (lambda told: told["chunk_0"].update(shape=[5, 6]), "another shape"),
    "not in it": (lambda told: told.update({"x": told["chunk_0"]}), "lists 'x', which is not"),
    "not listed": (lambda told: told.pop("chunk_0"), "which tensor 'chunk_0' is of"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_said_of_parts_and_lies_is_refused(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    folder = save_shards(tmp_path / "step", saved(), BOXES, 2, chunks=True)
    first = folder / "shard-00001-model-00001-of-00001.safetensors"
    metadata = read_header(Memory(first.read_bytes(), "")).metadata
    told = json.loads(metadata["DCP_SHARDING_INFO"])
    change(told)
    save_file(load_file(first), first, {**metadata} | {"DCP_SHARDING_INFO": json.dumps(told)})
    with pytest.raises(CorruptError, match=message):
        ckptmove.convert(folder, tmp_path / "out.pt")
    save_file(load_file(first), first, {**metadata} | {"transformers_dcp_chunk_version": "2"})
    with pytest.raises(UnsupportedError, match="'2', which is not known"):
        ckptmove.inspect(folder)


def test_rows_that_only_the_last_rank_had_are_missed_where_the_shape_is_told(
    tmp_path: Path,
) -> None:
    folder = save_shards(
        tmp_path / "step", {"rows": torch.randn(4, 6)}, {"rows": ROWS}, 3, chunks=True
    )
    (folder / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptError, match="chunks of 'rows' are missing"):
        ckptmove.inspect(folder)


def rows(tensor: torch.Tensor, ranks: int) -> list[Box]:
    """The rows of each rank that has some, as FSDP2 divides them."""
    step = -(-len(tensor) // ranks)
    starts = range(0, len(tensor), step)
    whole = tuple(tensor.shape[1:])
    return [((n, *(0 for _ in whole)), (min(step, len(tensor) - n), *whole)) for n in starts]


@pytest.mark.parametrize("width", [16, 22])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_that_only_the_last_ranks_had_are_missed_by_their_columns(
    ranks: int, width: int, tmp_path: Path
) -> None:
    layers = [torch.nn.TransformerEncoderLayer(width, 2, 40) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(61, width), *layers)
    state = model.state_dict()
    boxes = {name: rows(tensor, ranks) for name, tensor in state.items()}
    folder = save_shards(tmp_path / "step", state, boxes, ranks)
    same(ckptmove.load(folder), dict(state))
    for rank in range(ranks, 1, -1):
        (folder / f"shard-{rank:05}-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(InputError, match=f"its files from 'shard-{rank:05}-model-…' on are"):
            ckptmove.convert(folder, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_the_chunks_of_each_tensor_are_listed(folder: Path, run_cli: RunCli) -> None:
    found = ckptmove.inspect(folder, chunks=True).chunks
    held = [(each.name, each.offsets, each.sizes) for each in found if each.name == "rows"]
    assert held == [("rows", *box) for box in ROWS]
    assert {each.rank for each in found} == {0, 1, 2}
    assert "shard-00003-model" in run_cli("inspect", folder, "--chunks", exit=0).stdout


def test_a_tensor_that_is_listed_and_not_there_is_refused(folder: Path) -> None:
    first = folder / "shard-00001-model-00001-of-00001.safetensors"
    held, metadata = load_file(first), {**read_header(Memory(first.read_bytes(), "")).metadata}
    del held["whole"]
    save_file(held, first, metadata)
    with pytest.raises(CorruptError, match="lists 'whole', which is not in it"):
        ckptmove.inspect(folder)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"shard-00002-model.* is missing"):
        ckptmove.inspect(folder)


def test_missing_files_of_several_of_a_rank_are_named(tmp_path: Path) -> None:
    for rank, number in itertools.product((1, 2), (1, 2)):
        offsets = json.dumps({f"{number}": {"saved_offsets": [rank - 1, 0]}})
        path = tmp_path / f"shard-{rank:05}-model-{number:05}-of-00002.safetensors"
        save_file({f"{number}": torch.ones(1, 6)}, path, {"DCP_SHARDING_INFO": offsets})
    assert not any("rank 2" in each for each in ckptmove.inspect(tmp_path).warnings)
    (tmp_path / "shard-00002-model-00001-of-00002.safetensors").unlink()
    warnings = ckptmove.inspect(tmp_path).warnings
    assert any("rank 2 has no file 00001-of-00002" in each for each in warnings)
    (tmp_path / "shard-00001-model-00001-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00001-of-… *\.safetensors' is missing"):
        ckptmove.inspect(tmp_path)


@pytest.mark.parametrize(
    "told",
    [
        '{"rows": {"saved_offsets": [-1, 0]}}',
        '{"rows": {"saved_offsets": [0]}}',
        '{"rows": {"saved_offsets": [0, 1e3]}}',
        '{"rows": {"saved_offsets": [1, 0]}}',
        '{"rows": {"saved_offsets": [4611686018427387904, 4611686018427387904]}}',
        '{"rows": [0, 0]}',
        "[1]",
        "{",
        "{}",
    ],
)
def test_offsets_that_lie_are_refused(told: str, folder: Path, tmp_path: Path) -> None:
    metadata = {"DCP_SHARDING_INFO": told}
    save_file(
        {"rows": torch.ones(1, 6)},
        folder / "shard-00001-model-00001-of-00001.safetensors",
        metadata,
    )
    with pytest.raises(InputError) as raised:
        ckptmove.convert(folder, tmp_path / "out.pt")
    assert len(str(raised.value)) <= 300
    assert not (tmp_path / "out.pt").exists()


def test_other_damage_gives_one_line(folder: Path, tmp_path: Path) -> None:
    first = folder / "shard-00001-model-00001-of-00001.safetensors"
    content = first.read_bytes()
    for damaged in (b"", content[:7], content[:40], content[:-1], b"\0" * len(content)):
        first.write_bytes(damaged)
        with pytest.raises(CkptmoveError) as raised:
            ckptmove.convert(folder, tmp_path / "out.pt")
        assert "\n" not in str(raised.value)
    first.write_bytes(content)
    save_file({"rows": torch.ones(1, 6, dtype=torch.int32)}, first)
    with pytest.raises(CorruptError, match="another dtype"):
        ckptmove.inspect(folder)
    with pytest.raises(UnsupportedError):
        ckptmove.relocate(folder, tmp_path / "moved", to="cuda:0")
    assert {each.name for each in tmp_path.iterdir()} == {"step"}


# -- beside what was consolidated ------------------------------------------------------------------


def consolidated(folder: Path) -> Path:
    """What the writer of torch leaves: the weights, and in `sharded/` what they were made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(
            str(folder), save_distributed=True, enable_consolidation=True
        )
        dcp_save({"a": torch.randn(5, 7), "b": torch.randn(3)}, storage_writer=writer, no_dist=True)
    assert {each.name for each in folder.iterdir()} > {"sharded", "model.safetensors.index.json"}
    return folder


def test_what_was_consolidated_is_there_twice(tmp_path: Path, run_cli: RunCli) -> None:
    folder = consolidated(tmp_path / "run")
    wanted = load_file(folder / "model-00001-of-00001.safetensors")
    assert "incomplete" not in run_cli("inspect", folder, exit=0).stderr
    checked = ckptmove.validate(folder)
    assert checked.ok
    assert "sharded and model.safetensors.index.json hold the same" in str(checked)
    done = run_cli("convert", folder, tmp_path / "out.safetensors", exit=0)
    assert "left out: sharded\n" in done.stdout
    same(load_file(tmp_path / "out.safetensors"), wanted)


@pytest.mark.slow
def test_what_was_consolidated_must_be_what_ranks_wrote(tmp_path: Path, run_cli: RunCli) -> None:
    folder = consolidated(tmp_path / "run")
    save_hf_rank(folder / "sharded", {"a": torch.randn(5, 7), "b": torch.randn(3)})
    refused = run_cli("convert", folder, tmp_path / "out.safetensors", exit=4)
    assert "sharded, which holds other tensors than model.safetensors.index.json" in refused.stderr
    assert not ckptmove.validate(folder).ok


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("more", [True, False], ids=["of a Trainer", "weights"])
def test_a_folder_called_like_what_was_consolidated_is_looked_at(
    weights: str, more: bool, tmp_path: Path, run_cli: RunCli
) -> None:
    """That of an optimizer is no copy of the model."""
    state = {"w": torch.randn(4, 3)}
    (folder := tmp_path / "run").mkdir()
    if weights.endswith(".bin"):
        torch.save(state, folder / weights)
    else:
        save_file(state, folder / weights)
    if more:
        torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    save_dcp(folder / "sharded", {"state": {"w": {"exp_avg": torch.randn(4, 3)}}})
    assert not any("should hold the same" in each for each in ckptmove.inspect(folder).warnings)
    for options in (["--dry-run"], []):
        out = tmp_path / "out.safetensors"
        done = run_cli("convert", folder, out, *options, exit=0 if more else 4)
        assert "left out: sharded" not in done.stdout
        assert more or "would lose sharded," in done.stderr
    checked = ckptmove.validate(folder).of("container")
    assert more or "sharded (dcp, 1 tensor) is no part of it" in str(checked.details)
    if more:
        assert "sharded.state.w.exp_avg" in load_file(out)


def test_other_names_are_no_copy(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_hf_rank(folder / "sharded", {"other": torch.randn(4, 3)})
    save_file({"w": torch.randn(4, 3)}, folder / "model.safetensors")
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    assert not any("should hold the same" in each for each in ckptmove.inspect(folder).warnings)
