"""Folders of torch.distributed.checkpoint: read without torch, equal to what was in memory."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, InputError, UnsupportedError
from ckptmove.formats.distributed.dcp.metadata import SavedState
from ckptmove.formats.distributed.dcp.metadata_walk import ItemRange
from tests.conftest import RunCli, examples
from tests.making.distributed import boxes_of, save_dcp
from tests.making.tensors import DTYPES
from tests.oracles.sameness import assert_same_tree

#: Those that DCP can save, which asks for the sizes of their elements, and torch copies in silence.
SAVED = [each for each in DTYPES if "bits" not in str(each) and each != torch.complex32]
COLUMNS = [((0, 0), (4, 3)), ((0, 3), (4, 2)), ((0, 5), (4, 1))]
ROWS = [((0, 0), (1, 6)), ((1, 0), (2, 6)), ((3, 0), (1, 6))]


def state() -> dict[str, Any]:
    """Tensors divided in every way, and values of every kind."""
    return {
        "model": {
            "rows": torch.randn(4, 6),
            "columns": torch.randn(4, 6).bfloat16(),
            "whole": torch.arange(5),
            "scalar": torch.tensor(-0.0),
            "empty": torch.empty(0, 3),
            "transposed": torch.randn(6, 4).t(),
            "dotted.key": torch.tensor([float("nan"), 1.0], dtype=torch.float64),
        },
        "list": [1, torch.tensor([5, 6]), {"deep": torch.zeros(2), "n": 4}],
        "tuple": (torch.arange(3), "text"),
        "epoch": 3,
        "none": None,
    }


BOXES = {"model.rows": ROWS, "model.columns": COLUMNS, "model.transposed": COLUMNS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_dcp(tmp_path / "step-10", state(), BOXES, files=3)


def by_torch(folder: Path) -> Any:
    """What torch's own converter makes of it."""
    path = folder.parent / "by_torch.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=True)


def in_rows(node: Any) -> Any:
    """The same with all tensors contiguous, as the format stores no strides."""
    if isinstance(node, torch.Tensor):
        return node.contiguous()
    if isinstance(node, dict):
        return {key: in_rows(value) for key, value in node.items()}
    return type(node)(map(in_rows, node)) if isinstance(node, (list, tuple)) else node


def test_it_is_what_was_saved(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = in_rows(state())
    assert_same_tree(ckptmove.load(folder), saved)
    assert sorted(by_torch(folder)) == sorted(saved)
    for name in ("out.pt", "out.safetensors"):
        report = ckptmove.convert(folder, tmp_path / name)
        assert report.source_format == "dcp"
        assert_same_tree(ckptmove.load(tmp_path / name), saved)
    assert_same_tree(torch.load(tmp_path / "out.pt", weights_only=True), saved)
    assert load_file(tmp_path / "out.safetensors")["model.rows"].equal(saved["model"]["rows"])
    assert ckptmove.diff(folder, tmp_path / "out.pt").equal


def test_inspect_tells_how_each_is_divided(folder: Path, run_cli: RunCli) -> None:
    found = ckptmove.inspect(folder)
    assert (found.path, found.format, found.verdict) == (str(folder), "dcp", "stores no devices")
    assert found.nbytes == sum(each.stat().st_size for each in folder.iterdir())
    told = {name.removeprefix("model."): how for name, how in found.divisions.items()}
    assert told["rows"] == "rows/3"
    assert told["columns"] == told["transposed"] == "columns/3"
    assert told["whole"] == "one copy, rank 0"
    assert not found.unknown_callables
    assert "rows/3" in run_cli("inspect", folder, "--tensors", exit=0).stdout
    assert "chunks: " in run_cli("inspect", folder, exit=0).stdout


def test_inspect_lists_the_chunks(folder: Path, tmp_path: Path, run_cli: RunCli) -> None:
    found = ckptmove.inspect(folder, chunks=True, select="model.[rc]*")
    told = [(each.name, each.offsets, each.sizes) for each in found.chunks]
    assert told == [
        (name, *box) for name in ("model.rows", "model.columns") for box in sorted(BOXES[name])
    ]
    assert {each.rank for each in found.chunks} == {0}
    for each in found.chunks:
        assert (folder / each.file).stat().st_size > each.nbytes > 0
    assert found.to_json()["chunks"][0]["offsets"] == [0, 0]
    assert not ckptmove.inspect(folder).chunks
    lines = run_cli("inspect", folder, "--chunks", exit=0).stdout.splitlines()
    assert next(each for each in lines if "model.rows" in each).split()[1] == "rows/3"
    assert sum(".distcp" in each for each in lines) == 14  # nothing of an empty one
    run_cli("inspect", folder, "--chunks", "--tree", exit=2)
    torch.save({"t": torch.ones(2)}, tmp_path / "a.pt")
    assert "in chunks" in run_cli("inspect", tmp_path / "a.pt", "--chunks", exit=0).stdout


def test_weights_for_hugging_face(folder: Path, tmp_path: Path) -> None:
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(state()["model"])


def test_everything_is_proved_by_the_checksums_of_the_items(folder: Path, tmp_path: Path) -> None:
    assert ckptmove.validate(folder).ok
    torch.manual_seed(0)
    for tensor in (state()["model"]["rows"][1:3], state()["model"]["columns"][:, 3:5].contiguous()):
        damaged = tensor.view(torch.uint8).numpy().tobytes()
        for file in folder.glob("*.distcp"):
            content = file.read_bytes()
            if damaged in content:
                file.write_bytes(content.replace(damaged, b"\1" + damaged[1:]))
                for dtype in (None, "float16"):  # copied, and gathered
                    with pytest.raises(CorruptError, match=r"model\.\w+ in __0_\d\.distcp"):
                        ckptmove.convert(folder, tmp_path / "out.safetensors", dtype=dtype)
                assert not ckptmove.validate(folder).ok
                with pytest.raises(CorruptError, match=r"model\.\w+ in __0_\d\.distcp"):
                    ckptmove.load(folder)
                file.write_bytes(content)
    assert not (tmp_path / "out.safetensors").exists()
    ckptmove.load(folder)


def test_a_chunk_that_is_put_in_order_is_proved(tmp_path: Path) -> None:
    saved = torch.arange(35.0).view(5, 7).t()
    folder = save_dcp(tmp_path / "in", {"a": saved})
    (path,) = folder.glob("*.distcp")
    content = path.read_bytes()
    damaged = content.replace(saved.t().numpy().tobytes()[-4:], b"\1\2\3\4")
    assert damaged != content
    path.write_bytes(damaged)
    for look in (ckptmove.load, lambda each: ckptmove.convert(each, tmp_path / "out.pt")):
        with pytest.raises(CorruptError, match="checksum of a chunk is wrong"):
            look(folder)
    assert not (tmp_path / "out.pt").exists()


@hypothesis_settings(max_examples=examples(60))
@given(
    dtype=st.sampled_from(SAVED),
    shape=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0),
)
def test_any_shape_divided_in_any_way(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    numel = torch.Size(shape).numel()
    content = torch.arange(numel * dtype.itemsize) % (2 if dtype == torch.bool else 251)
    tensor = content.to(torch.uint8).view(dtype).reshape(shape)
    boxes = boxes_of(shape, Random(seed)) if numel else []
    random = Random(seed + 1)
    if len(shape) > 1 and random.random() < 0.5:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)  # so are its chunks
    save_dcp(folder / "in", {"t": tensor}, {"t": boxes} if boxes else {}, files=2)
    ckptmove.convert(folder / "in", folder / "out.pt")
    expected = {"t": tensor.contiguous()}
    assert_same_tree(torch.load(folder / "out.pt", weights_only=True), expected)
    assert_same_tree(ckptmove.load(folder / "in"), expected)


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_takes_its_state(kind: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_dcp(tmp_path / "in", saved)
    report = ckptmove.convert(tmp_path / "in", tmp_path / "out.pt")
    assert any("optimizer" in each for each in report.warnings)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree(loaded["optimizer"], saved["optimizer"])
    kind(torch.nn.Linear(3, 2).parameters(), lr=0.1).load_state_dict(loaded["optimizer"])


# -- damage ----------------------------------------------------------------------------------------


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Change what `.metadata` says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def chunks(metadata: Metadata, name: str) -> list[ChunkStorageMetadata]:
    found: Any = metadata.state_dict_metadata[name]
    return found.chunks  # type: ignore[no-any-return]


def move(metadata: Metadata, **said: Any) -> None:
    """Say that the first chunk of the rows lies elsewhere."""
    key = MetadataIndex("model.rows", torch.Size((0, 0)))
    metadata.storage_data[key] = replace(metadata.storage_data[key], **said)


def shift(metadata: Metadata) -> None:
    """Say that the first chunk of the rows begins one byte later."""
    info = metadata.storage_data[MetadataIndex("model.rows", torch.Size((0, 0)))]
    move(metadata, offset=info.offset + 1, length=info.length - 1)


def share(metadata: Metadata, first: MetadataIndex, second: MetadataIndex, **said: Any) -> None:
    """Say that an item lies where another one does."""
    info = metadata.storage_data[first]
    metadata.storage_data[second] = replace(info, **said)


ROW = MetadataIndex("model.rows", torch.Size((0, 0)))
OTHER_ROW = MetadataIndex("model.rows", torch.Size((1, 0)))
WHOLE = MetadataIndex("model.whole", torch.Size((0,)))


def swap(metadata: Metadata) -> None:
    keys = [MetadataIndex("model.rows", torch.Size((n, 0))) for n in (0, 1)]
    first, second = (metadata.storage_data[key] for key in keys)
    metadata.storage_data |= {keys[0]: second, keys[1]: first}


DAMAGES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "missing": (lambda told: chunks(told, "model.rows").pop(), "are missing"),
    "all missing": (lambda told: chunks(told, "model.scalar").clear(), "are missing"),
    "larger": (
        lambda told: setattr(told.state_dict_metadata["model.rows"], "size", torch.Size((5, 6))),
        "are missing",
    ),
    "twice": (
        lambda told: chunks(told, "model.rows").append(chunks(told, "model.rows")[0]),
        "twice",
    ),
    "overlapping": (
        lambda told: chunks(told, "model.rows").append(
            ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 6)))
        ),
        "overlap",
    ),
    "outside": (
        lambda told: setattr(told.state_dict_metadata["model.rows"], "size", torch.Size((3, 6))),
        "reaches outside",
    ),
    "nowhere": (lambda told: told.storage_data.clear(), "does not say where"),
    "elsewhere": (lambda told: move(told, relative_path="../x"), "not a file in the same folder"),
    "at the top": (lambda told: move(told, relative_path="/etc/passwd"), "not a file in the same"),
    "gone": (lambda told: move(told, relative_path="__7_0.distcp"), "is missing"),
    "too far": (lambda told: move(told, offset=1 << 40), "truncated"),
    "negative": (lambda told: move(told, offset=-1), "no valid range"),
    "one item of two chunks": (
        lambda told: share(told, ROW, OTHER_ROW),
        r"items of 'model\.rows' and 'model\.rows' overlap in '__0_\d\.distcp'",
    ),
    "one item of two tensors": (
        lambda told: share(told, ROW, WHOLE),
        r"items of 'model\.rows' and 'model\.whole' overlap in '__0_\d\.distcp'",
    ),
    "one item of a tensor and a value": (
        lambda told: share(told, ROW, MetadataIndex("epoch")),
        r"items of 'epoch' and 'model\.rows' overlap",
    ),
    "an item within an item": (
        lambda told: share(told, ROW, WHOLE, offset=told.storage_data[ROW].offset + 9, length=1),
        r"items of 'model\.rows' and 'model\.whole' overlap",
    ),
    "transformed": (
        lambda told: move(told, transform_descriptors=["stream.other/1"]),
        "transformed",
    ),
    "no size": (
        lambda told: setattr(told.state_dict_metadata["model.rows"], "size", "4, 6"),
        "a size or offset is not made of numbers",
    ),
    "no dict": (lambda told: setattr(told, "storage_data", []), "not a dict"),
    "another path": (
        lambda told: told.planner_data.update({"model.rows": ("model", "rowz")}),
        r"'model\.rows' is at another place",
    ),
    "a file name of no text": (
        lambda told: move(told, relative_path="\ud800.distcp"),
        "not a file in the same folder",
    ),
    "a path that is too deep": (
        lambda told: told.planner_data.update({"model.rows": ("k",) * 1_001}),
        "a path of 1,001 keys",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_add_up_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    how, message = DAMAGES[name]
    change(folder, how)
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(InputError, match=message):
            verb(folder)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (swap, "its shape is not the one"),
        (lambda told: shift(told), "the item of 'model.rows'"),
        (lambda told: move(told, length=100), "the item of 'model.rows'"),
    ],
    ids=["swapped", "shifted", "cut"],
)
def test_items_of_another_save_are_refused(
    how: Callable[[Metadata], object], message: str, folder: Path, tmp_path: Path
) -> None:
    change(folder, how)
    for verb in (ckptmove.load, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(InputError, match=message):
            verb(folder)
    report = ckptmove.validate(folder)
    assert not report.ok


def test_files_that_are_not_as_saved(folder: Path) -> None:
    file = max(folder.glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match="truncated") as raised:
        ckptmove.inspect(folder)
    assert raised.value.path == str(file)
    file.unlink()
    with pytest.raises(InputError, match="is missing") as missing:
        ckptmove.inspect(folder)
    assert (missing.value.hint or "").startswith("copy the files of all ranks into one folder")
    file.write_bytes(content)
    (folder / "__9_0.distcp").write_bytes(b"of an earlier save")
    assert any("__9_0.distcp" in each for each in ckptmove.inspect(folder).warnings)
    (folder / ".metadata.tmp").touch()
    with pytest.raises(CorruptError, match="a later save into it did not finish"):
        ckptmove.inspect(folder)


def test_damaged_items_are_named_once(folder: Path) -> None:
    """One in its pickle, one in its zip directory, and one in its elements."""
    saved: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    names, expected = iter(("rows", "transposed", "whole")), set[str]()
    for damaged in (b"data.pkl", b"PK\5\6", None):
        name = f"model.{next(names)}"
        at, span = next((n, each) for n, each in saved.storage_data.items() if n.fqn == name)
        file = folder / span.relative_path
        content = bytearray(file.read_bytes())
        item = content[span.offset : span.offset + span.length]
        data = torch.load(BytesIO(item), weights_only=True).numpy().tobytes()
        place = item.index(data) if damaged is None else item.index(damaged) + 17
        content[span.offset + place] ^= 1
        file.write_bytes(content)
        expected.add(f"{span.relative_path}: the item of {at.fqn!r} at offset {span.offset:,}: ")
    faults = ckptmove.validate(folder).of("container").data["faults"]
    assert len(faults) == 3
    assert {start for start in expected for fault in faults if start in fault} == expected


@pytest.mark.slow
def test_very_many_items_with_short_names(tmp_path: Path) -> None:
    """Their metadata consist of small objects: nine for each tensor, in some eighty bytes."""
    folder = save_dcp(tmp_path / "in", {"n": torch.tensor(1.0)})

    def repeat(told: Metadata) -> None:
        ((_, info),) = told.storage_data.items()
        (about,) = told.state_dict_metadata.values()
        for n in range(16_000):
            name, size = f"n{n}", torch.Size([])
            chunk = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
            again: Any = replace(about, **{"size": size, "chunks": [chunk]})
            told.state_dict_metadata[name] = again
            lies = replace(info, offset=(n + 1) * info.length)
            told.storage_data[MetadataIndex(name, size, 0)] = lies
            told.planner_data[name] = (name,)
        os.truncate(folder / info.relative_path, 16_001 * info.length)  # none is looked at

    change(folder, repeat)
    assert len(ckptmove.inspect(folder).tensors) == 16_001


def test_what_may_be_of_two_saves_is_told(folder: Path, tmp_path: Path) -> None:
    file = next(folder.glob("*.distcp"))
    with file.open("ab") as opened:
        opened.write(b"of a longer save")
    assert any(f"16 bytes of {file.name} are in no" in e for e in ckptmove.inspect(folder).warnings)
    os.truncate(file, file.stat().st_size - 16)
    assert not ckptmove.inspect(folder).warnings
    newest = max(each.stat().st_mtime for each in folder.glob("*.distcp"))
    os.utime(folder / ".metadata", (newest - 3600, newest - 3600))
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(CorruptError, match=r"^\.metadata is older than __0_.* by more than"):
            verb(folder)
    assert not (tmp_path / "out.pt").exists()
    os.utime(folder / ".metadata", (newest - 61, newest - 61))
    (warning,) = ckptmove.inspect(folder).warnings
    assert warning.startswith(".metadata is older than __0_")
    with file.open("ab") as opened:
        opened.write(b"of a longer save")
    with pytest.raises(CorruptError, match=r"of two saves: __0_\d.distcp is newer than .metadata"):
        ckptmove.inspect(folder)


def trained(folder: Path, step: int) -> Path:
    """What a rank saves of four parameters in a step, in two files."""
    tensors = {f"{n}.{key}": torch.full((), step) for n in range(4) for key in ("step", *"xy")}
    return save_dcp(folder, {"state": tensors}, files=2)


def test_steps_tell_the_files_of_two_saves(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / f"{step}", step) for step in (1000, 2000))
    assert not ckptmove.inspect(first).warnings
    file = sorted(second.glob("*.distcp"))[-1]
    shutil.copy2(file, first)
    [note] = ckptmove.inspect(first).warnings
    said = f"steps of the optimizer are 1000 in __0_0.distcp, and 2000 in {file.name}"
    assert note == f"{said}: of two saves?"
    os.utime(first / file.name, (1e9, 1e9))
    with pytest.raises(CorruptError, match=f"written far apart: {said}"):
        ckptmove.convert(first, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    mixed = {f"{n}.step": torch.tensor(n) for n in range(8)}  # some were frozen once
    assert not ckptmove.inspect(save_dcp(tmp_path / "own", mixed, files=2)).warnings


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_is_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    change(folder, lambda told: setattr(told, "planner_data", Payload(marker)))
    with pytest.raises(InputError):
        ckptmove.inspect(folder)
    path = save_dcp(tmp_path / "other", {"t": torch.ones(2), "bad": Payload(marker)})
    assert set(ckptmove.inspect(path).unknown_callables) & {"posix.system", "nt.system"}
    change(path, lambda told: setattr(told, "storage_meta", Payload(marker)))
    assert "posix.system" in ckptmove.inspect(path, select="t").unknown_callables
    with pytest.raises(CkptmoveError):
        ckptmove.load(path, strict=True)
    ckptmove.load(path)
    assert not marker.exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_any_damaged_byte_is_told_or_harmless(seed: int, folder: Path, tmp_path: Path) -> None:
    random = Random(seed)
    torch.manual_seed(0)
    saved, refused = in_rows(state()), list[str]()
    for file in (folder / ".metadata", *folder.glob("*.distcp")):
        content = file.read_bytes()
        for n in range(8):
            at = random.randrange(len(content))
            damaged = bytearray(content)
            damaged[at] ^= 1 << random.randrange(8)
            file.write_bytes(damaged)
            out = tmp_path / f"{zlib.crc32(file.name.encode())}-{n}.pt"
            try:
                ckptmove.convert(folder, out)
            except CkptmoveError as error:
                refused.append(f"{error}")
                continue
            if file.suffix == ".distcp":  # every byte of a tensor is proved; a value has no proof
                loaded = torch.load(out, weights_only=False)
                assert_same_tree(loaded["model"], saved["model"])
            out.unlink()
        file.write_bytes(content)
    assert not any("\n" in each for each in refused)
    assert not list(tmp_path.glob("*.pt"))


def test_lists_with_very_many_holes_are_refused(tmp_path: Path) -> None:
    """An empty dict is not saved, so that its place in a list is empty."""
    some = [*({} for _ in range(3)), torch.ones(2)]
    save_dcp(tmp_path / "few", {"a": some})
    assert ckptmove.load(tmp_path / "few")["a"][:3] == [None] * 3
    long = [*({} for _ in range(40_000)), torch.ones(2)]
    save_dcp(tmp_path / "many", {"a": long, "b": long})
    for verb in (ckptmove.inspect, ckptmove.load):
        with pytest.raises(CorruptError, match="lists have 80,000 places that nothing was saved"):
            verb(tmp_path / "many")


def test_strides_of_empty_tensors_can_be_counted(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "in", {"t": torch.empty(0, 4, 4)})

    def widen(told: Metadata) -> None:
        about: Any = told.state_dict_metadata["t"]
        about.size = about.chunks[0].sizes = torch.Size((0, 1 << 40, 1 << 40))

    change(folder, widen)
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(CorruptError, match="more elements than are possible"):
            verb(folder)


# -- saved by ranks --------------------------------------------------------------------------------


def split_metadata(folder: Path) -> None:
    """Have two ranks tell what they saved, each for itself, and both what all have."""
    path = folder / ".metadata"
    for rank in range(2):
        metadata = pickle.loads(path.read_bytes())
        for name, about in metadata.state_dict_metadata.items():
            if len(getattr(about, "chunks", ())) > 1:
                gone = about.chunks[1 - rank :: 2]
                about.chunks = about.chunks[rank::2]
                for chunk in gone:
                    del metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
    path.unlink()


def test_ranks_that_saved_for_themselves(folder: Path) -> None:
    split_metadata(folder)
    torch.manual_seed(0)
    assert_same_tree(ckptmove.load(folder), in_rows(state()))
    other = shutil.copytree(folder, folder.parent / "other")
    (folder / "__1.metadata").unlink()
    with pytest.raises(CorruptError, match=r"chunks of 'model\.rows' are missing"):
        ckptmove.load(folder)
    (other / "__0.metadata").unlink()
    with pytest.raises(CorruptError, match=r"metadata of ranks are missing: __0\.metadata"):
        ckptmove.load(other)


def test_items_of_two_ranks_overlap(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "in", {"a": torch.ones(4)})
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").rename(folder / "__0.metadata")
    told = pickle.loads(content)
    (info,) = told.storage_data.values()
    told.state_dict_metadata = {"b": told.state_dict_metadata["a"]}
    told.storage_data, told.planner_data = {MetadataIndex("b", torch.Size((0,))): info}, {}
    (folder / "__1.metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CorruptError, match=r"items of 'a' and 'b' overlap in '__0_0\.distcp'"):
        ckptmove.load(folder)


def test_items_without_bytes_may_touch_others() -> None:
    lies = {
        "a": ItemRange("f", 0, 9),
        "b": ItemRange("f", 9, 0),
        "c": ItemRange("f", 9, 3),
        "d": ItemRange("f", 5, 0),
    }
    SavedState(blobs=lies).check_apart()
    SavedState(blobs=lies | {"e": ItemRange("g", 0, 9)}).check_apart()
    with pytest.raises(CorruptError, match="'a' and 'e' overlap in 'f'"):
        SavedState(blobs=lies | {"e": ItemRange("f", 8, 1)}).check_apart()


@pytest.mark.slow
def test_a_transposed_chunk_of_many_dimensions(tmp_path: Path) -> None:
    flat = torch.arange(1 << 25).to(torch.uint8)
    halves = flat.reshape([2] * 25).permute(*range(12, 25), *range(12))
    save_dcp(tmp_path / "two", {"t": halves})
    assert ckptmove.load(tmp_path / "two")["t"].equal(halves)
    save_dcp(tmp_path / "all", {"t": flat.reshape([2] * 25).permute(*reversed(range(25)))})
    with pytest.raises(UnsupportedError, match="chunk of 25 dimensions, which are too many"):
        ckptmove.load(tmp_path / "all")


def test_a_state_dict_that_was_not_flattened(tmp_path: Path) -> None:
    flat = {"w": torch.ones(2, 2), "n": 4}
    save_dcp(tmp_path / "in", dict(flat), flatten_state_dict=False)
    assert_same_tree(ckptmove.load(tmp_path / "in"), flat)


def test_it_is_not_relocated(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="stores no devices"):
        ckptmove.relocate(folder, tmp_path / "out", to="cuda:0")


def test_what_stores_no_devices_fails_no_requirement(tmp_path: Path, run_cli: RunCli) -> None:
    save_dcp(tmp_path / "run", {"w": torch.ones(2)})
    run_cli("inspect", tmp_path / "run", "--require", "cuda:3", exit=0)
    assert ckptmove.inspect(tmp_path / "run", require="cuda:3").verdict == "stores no devices"


def test_what_is_named_and_was_not_saved_is_told(folder: Path) -> None:
    change(folder, lambda told: told.planner_data.update({"ema": ("ema",), "lost": ("lost",)}))
    (said,) = (each for each in ckptmove.inspect(folder).warnings if "not saved" in each)
    assert said.endswith("not saved, though .metadata names it: ema and 1 more")
