"""A new format is one class and one row of the table: every verb knows it then."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import formats
from ckptmove.formats.base import Format, PickledFormat, WritableFormat
from ckptmove.formats.checkpoint import Carries, Checkpoint
from ckptmove.formats.folders.parts import PartsContainer, number_files
from ckptmove.formats.probe import Probe
from ckptmove.formats.safetensors.file import TensorInFile, TensorsContainer
from ckptmove.formats.safetensors.header import HeaderEntry
from ckptmove.formats.session import ReadSession
from ckptmove.formats.table import FormatRow, in_file, in_folder
from ckptmove.sources.source import Memory, Readable, Source
from tests.oracles.sameness import assert_same_tree

_DTYPES = {0: ("float32", 4), 1: ("float16", 2)}
_ALIGNMENT = 32


class Gguf(PickledFormat):
    """What llama.cpp reads (ggml/docs/gguf.md), as far as it has no metadata and no blocks."""

    name = "gguf"
    suffixes = (".gguf",)
    summary = "llama.cpp"
    refused = "nothing"
    carries = Carries(False, False, False, False, dtypes="float32 and float16")

    def sniff(self, probe: Probe) -> bool:
        return probe.head.startswith(b"GGUF")

    def open(self, probe: Probe) -> TensorsContainer:
        probe.session.folder()
        source = probe.source
        count, at = struct.unpack("<Q", source.read(8, 8))[0], 24
        said = list[tuple[str, tuple[int, ...], int, int]]()
        for _ in range(count):
            length = struct.unpack("<Q", source.read(at, 8))[0]
            name = source.read(at + 8, length).decode()
            at += 8 + length
            rank = struct.unpack("<I", source.read(at, 4))[0]
            *sizes, kind, start = struct.unpack(f"<{rank}QIQ", source.read(at + 4, 8 * rank + 12))
            said.append((name, tuple(reversed(sizes)), kind, start))
            at += 4 + 8 * rank + 12
        base = -(-at // _ALIGNMENT) * _ALIGNMENT
        placed = {each[0]: _placed(source, base, *each) for each in said}
        return TensorsContainer(source, placed, None, base, {})


def _placed(
    source: Readable, base: int, name: str, shape: tuple[int, ...], kind: int, start: int
) -> TensorInFile:
    dtype, itemsize = _DTYPES[kind]
    nbytes = itemsize * torch.Size(shape).numel()
    return TensorInFile(HeaderEntry(name, dtype, shape, base + start, nbytes), source)


class TrainingFolder(Format):
    """A folder of one run: its weights, its optimizer and more, each in a file."""

    name = "training-folder"
    summary = "a trainer"
    refused = "nothing"
    carries = Carries(True, True, True, True, dtypes="those of its files")

    def sniff(self, probe: Probe) -> bool:
        return "trainer_state.json" in probe.entries

    def read(self, probe: Probe) -> Checkpoint:
        parts = {
            Path(name).stem: probe.read(name)
            for name in probe.entries
            if name.endswith((".pt", ".bin", ".safetensors", ".index.json")) and "-of-" not in name
        }
        container = PartsContainer(
            Memory(b"", probe.path), {name: each.container for name, each in parts.items()}
        )
        files = list[Source]()
        for name, each in parts.items():
            number_files(each.container, len(files))
            files += each.files
            container.roots += [((name, *path), root) for path, root in each.container.roots]
        return Checkpoint(self.name, container, self.carries, files)


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        FormatRow("training-folder", in_folder, f"{__name__}.TrainingFolder"),
        FormatRow("gguf", in_file, f"{__name__}.Gguf"),
    )
    monkeypatch.setattr(formats, "FORMATS", (*rows, *formats.FORMATS))


def gguf(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A file as llama.cpp lays it out."""
    head, data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0), b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % _ALIGNMENT)
        kind = 0 if tensor.dtype == torch.float32 else 1
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", tensor.dim())
        head += struct.pack(f"<{tensor.dim()}QIQ", *reversed(tensor.shape), kind, len(data))
        data += tensor.numpy().tobytes()
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)
    return path


TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.c": torch.tensor([1.5, -0.0, torch.nan], dtype=torch.float16),
    "scalar": torch.tensor(2.0),
    "none": torch.empty(0, 3),
}


def training_folder(folder: Path) -> Path:
    """Sharded weights, an optimizer and a scheduler, each in files of their own."""
    ckptmove.convert(gguf(folder.parent / "w.gguf", TENSORS), folder, max_shard_size="20")
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}}
    torch.save(
        {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "optimizer.pt"
    )
    torch.save({"last_epoch": 4}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def expected(folder: Path) -> dict[str, object]:
    parts = ("optimizer", "scheduler")
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in parts}


def test_a_file(tmp_path: Path) -> None:
    path = gguf(tmp_path / "model.gguf", TENSORS)
    manifest = ckptmove.inspect(path)
    assert manifest.format == "gguf"
    assert [(each.name, each.dtype, each.shape) for each in manifest.tensors] == [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in TENSORS.items()
    ]
    assert_same_tree(ckptmove.load(path), TENSORS)
    ckptmove.convert(path, tmp_path / "model.pt")
    assert_same_tree(torch.load(tmp_path / "model.pt", weights_only=True), TENSORS)
    assert ckptmove.diff(path, tmp_path / "model.pt").equal
    assert ckptmove.validate(path).ok


def test_a_folder_of_several_checkpoints(tmp_path: Path) -> None:
    folder = training_folder(tmp_path / "run")
    manifest = ckptmove.inspect(folder)
    assert manifest.format == "training-folder"
    assert {each.path[0] for each in manifest.tensors} == {"model.safetensors.index", "optimizer"}
    loaded = ckptmove.load(folder)
    assert_same_tree(loaded.pop("model.safetensors.index"), TENSORS)
    assert_same_tree(loaded, expected(folder))
    ckptmove.convert(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same_tree(whole.pop("model.safetensors.index"), TENSORS)
    assert_same_tree(whole, expected(folder))
    assert ckptmove.diff(folder, tmp_path / "whole.pt").equal


def test_its_files_are_opened_as_any_others(tmp_path: Path) -> None:
    folder = training_folder(tmp_path / "run")
    (tmp_path / "elsewhere.pt").write_bytes((folder / "scheduler.pt").read_bytes())
    (folder / "scheduler.pt").unlink()
    (folder / "scheduler.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(ckptmove.UnsupportedError, match="leads outside its folder"):
        ckptmove.inspect(folder)
    assert ckptmove.inspect(folder, follow_links=True).tensors
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:-100])
    with pytest.raises(ckptmove.CorruptError) as raised:
        ckptmove.inspect(folder, follow_links=True)
    assert raised.value.path == str(folder / "optimizer.pt")


def test_a_batch_takes_such_a_folder_as_one_item(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    training_folder(tmp_path / "tree" / "run")
    batch = ckptmove.batch("convert", tmp_path / "tree", tmp_path / "out", dry_run=True)
    assert sorted(task.item.name for task in batch.plan.tasks) == ["run", "w.gguf"]


@pytest.mark.parametrize("row", formats.FORMATS, ids=lambda each: each.name)
def test_no_format_takes_a_folder_or_no_bytes_for_a_file(row: FormatRow) -> None:
    session = ReadSession(lambda source, session: None)
    assert not row.format.sniff(Probe(Memory(b"", "x"), session, None, []))
    assert not row.format.sniff(Probe(Memory(b"", "x"), session))


@pytest.mark.parametrize("row", formats.FORMATS, ids=lambda each: each.name)
def test_a_row_names_its_format(row: FormatRow) -> None:
    assert row.format.name == row.name
    assert isinstance(row.format, WritableFormat) == (row.name in formats.WRITABLE)
    assert isinstance(row.format, PickledFormat) or not row.nestable
