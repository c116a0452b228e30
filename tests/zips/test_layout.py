"""lay_out() and directory(): a zip as torch lays it out, to the byte; and relays made of them."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

import ckptmove
from ckptmove.sources.file import File
from ckptmove.zips.archive import Archive
from ckptmove.zips.layout import Member, PlacedRecord, directory, lay_out
from tests.conftest import examples
from tests.making.building import Part, build_zip
from tests.making.checkpoints import (
    MAKERS,
    rezip,
    save,
    save_by_cpp,
    save_tagged,
    sparse_zip64,
    squeeze,
)
from tests.making.strategies import Checkpoint, checkpoint_trees
from tests.oracles.readers import (
    assert_same_checkpoint,
    loads_with_computed_offsets,
    pid_locations,
)


def relaid(archive: Archive, alignment: int) -> list[PlacedRecord]:
    """The records of a file in their order, laid out anew."""
    records = archive.records.values()
    members = [Member(r.name, r.method, r.crc32, r.stored_nbytes, r.nbytes) for r in records]
    return lay_out(members, alignment)


def assert_laid_out_as(path: Path, alignment: int = 64) -> None:
    """Every byte of the file but the contents is where, and as, we would have written it."""
    with File.open(path) as source, path.open("rb") as file:
        archive = Archive(source)
        placed = relaid(archive, alignment)
        end = 0
        for place, record in zip(placed, archive.records.values(), strict=True):
            assert (place.at, record.header_at) == (end, end), record.name
            assert source.read(end, len(place.header)) == place.header, record.name
            assert place.data_at == archive.data_at(record) == end + len(place.header)
            assert place.data_at % alignment == 0
            tail = place.data_at + record.stored_nbytes
            assert source.read(tail, len(place.descriptor)) == place.descriptor, record.name
            end = place.end
        file.seek(end)
        assert file.read() == directory(placed, end)


def by_cpp(path: Path) -> None:
    """Storages first, and no .format_version."""
    save_by_cpp([torch.ones(3), torch.ones(0), torch.ones(70_000)], path)


def without_checksums(path: Path, **options: Any) -> None:
    """Where torch was told to leave them out."""
    torch.serialization.set_crc32_options(False)
    try:
        save(path, MAKERS["linear_state_dict"](), **options)
    finally:
        torch.serialization.set_crc32_options(True)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a name of many bytes": lambda path: renamed(path, "a" * 200 + ".pt"),
    "a name without extension": lambda path: renamed(path, "plain"),
    "one byte more than a step": lambda path: save(path, torch.ones(65, dtype=torch.uint8)),
    "only empty storages": lambda path: save(path, [torch.ones(0), torch.ones(0, 3)]),
    "empty storages between": lambda path: save(path, [torch.ones(n % 3) for n in range(9)]),
    "no tensors": lambda path: save(path, {"epoch": 1}),
    "a thousand storages": lambda path: save(path, [torch.ones(n % 7) for n in range(1_000)]),
    "a storage of some MiB": lambda path: save(path, torch.ones(1 << 20)),
    "libtorch": by_cpp,
    "no checksums": without_checksums,
    "a buffer": lambda path: path.write_bytes(buffered([torch.ones(3), torch.ones(0)])),
}


def renamed(path: Path, name: str) -> None:
    """A file that was saved under another name, which its records start with."""
    save(path.with_name(name), torch.ones(3)).rename(path)


def buffered(saved: object) -> bytes:
    """torch.save to memory."""
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_torch_is_laid_out_to_the_byte(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tmp_path / "made.pt")
    assert_laid_out_as(tmp_path / "made.pt")


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_checkpoint_is_laid_out_to_the_byte(name: str, tmp_path: Path) -> None:
    assert_laid_out_as(save(tmp_path / "made.pt", MAKERS[name]()))


@pytest.mark.parametrize("alignment", [1, 2, 8, 64, 100, 256, 4096])
def test_any_alignment_that_torch_is_told(alignment: int, tmp_path: Path) -> None:
    aligned = config.patch({"save.storage_alignment": alignment})  # type: ignore[attr-defined]
    with aligned:
        path = save(tmp_path / "made.pt", MAKERS["adam_mixed_capturable"]())
    assert_laid_out_as(path, alignment)
    out = tmp_path / "out.pt"
    relay(path, out, to="mps")
    assert_laid_out_as(out, alignment)


def test_above_4_gib_headers_and_directory_are_wide_where_they_must_be(tmp_path: Path) -> None:
    path = sparse_zip64(tmp_path / "big.pt")
    assert path.stat().st_size > 5 << 30
    assert_laid_out_as(path)


def test_many_offsets_above_4_gib(tmp_path: Path) -> None:
    """Wide by the offset though not by the size, with each length of padding there is."""
    big = Member("a/data/0", 0, 0, 0xFFFFFFFF, 0xFFFFFFFF)
    members = [big, *(Member("a/" + "x" * n, 0, n, n, n) for n in range(200))]
    placed = lay_out(members)
    assert all(place.data_at % 64 == 0 for place in placed)
    assert [len(place.descriptor) for place in placed] == [24, 0, *[24] * 199]
    assert len(directory(placed, placed[-1].end)) > 200 * 46


@given(
    st.lists(st.tuples(st.text(max_size=9), st.integers(0, 300)), max_size=20), st.integers(1, 99)
)
def test_zipfile_finds_every_record_where_it_was_put(
    records: list[tuple[str, int]], alignment: int
) -> None:
    names = dict(records)
    numbered = enumerate(names.items())
    contents = {f"a/{n}{name}".replace("\0", ""): b"x" * size for n, (name, size) in numbered}
    members = [Member(n, 0, zlib.crc32(c), len(c), len(c)) for n, c in contents.items()]
    placed = lay_out(members, alignment)
    out = b""
    for place, content in zip(placed, contents.values(), strict=True):
        assert place.at == len(out)
        out += place.header + content + place.descriptor
    out += directory(placed, len(out))
    with zipfile.ZipFile(io.BytesIO(out)) as archive:
        assert archive.testzip() is None
        assert {info.filename: archive.read(info) for info in archive.infolist()} == contents


# The patch: a pickle of the same length, and its checksum wherever it is repeated


@pytest.mark.parametrize(
    "form",
    [
        {"flags": 0x0800},
        {"flags": 0x0000},
        {"flags": 0x0808},
        {"flags": 0x0808, "unsigned": True},
        {"flags": 0x0800, "wide": True},
        {"flags": 0x0808, "wide": True},
        {"flags": 0x0808, "wide": True, "unsigned": True},
    ],
)
def test_a_patch_mends_the_checksum_wherever_it_is(form: dict[str, Any], tmp_path: Path) -> None:
    made = save(tmp_path / "made.pt", [torch.ones(3), torch.ones(0), "cpu"], "cpu")
    source, out = tmp_path / "source.pt", tmp_path / "out.pt"
    with zipfile.ZipFile(made) as archive:
        parts = [Part(info.filename, archive.read(info), **form) for info in archive.infolist()]
    source.write_bytes(build_zip(parts, wide=True))
    assert ckptmove.relocate(source, out, to="cuda:0").method == "patch"
    with zipfile.ZipFile(out) as archive:
        pickle = archive.read("made/data.pkl")
    parts[0].content = pickle
    assert out.read_bytes() == build_zip(parts, wide=True)
    assert dict(pid_locations(out)) == {"0": "cuda:0", "1": "cuda:0"}


# The relay: the zip laid out anew around a pickle of another length


def relay(source: Path, out: Path, **rules: Any) -> Path:
    """Relocate a copy whose pickle is compressed, by a new layout therefore; gives the copy."""
    packed = rezip(source, source.with_name("packed.pt"))
    report = ckptmove.relocate(packed, out, all=True, **rules)
    assert report.method == "relay"
    return packed


# Their parts can't leave for a device that they themselves don't name.
WHOLE = {"wrapper_subclass", "wrapper_subclass_on_cuda", "dtensor_state_dict"}


@pytest.mark.sample(68)
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - WHOLE))
def test_a_relay_is_the_same_checkpoint_in_torchs_layout(name: str, tmp_path: Path) -> None:
    source, out = save(tmp_path / "made.pt", MAKERS[name](), "cuda:5"), tmp_path / "out.pt"
    if not pid_locations(source):
        return  # nothing moves
    packed = relay(source, out, map={"cuda:5": "cuda:6"})
    assert_same_checkpoint(packed, out, {"cuda:5": "cuda:6"}, trust=True)
    assert_laid_out_as(out)


@settings(max_examples=examples(15))
@given(checkpoint=checkpoint_trees())
def test_any_checkpoint_can_be_relaid(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("relaid")
    save_tagged(checkpoint.tree, folder / "made.pt", checkpoint.tag)
    if pid_locations(folder / "made.pt"):
        packed = relay(folder / "made.pt", folder / "out.pt", to="xpu:9")
        assert_same_checkpoint(packed, folder / "out.pt", lambda _key, _old: "xpu:9", trust=True)
        assert_laid_out_as(folder / "out.pt")


def squeezed_out(path: Path) -> Path:
    """The same checkpoint with so little to spare that a longer tag changes the length."""
    source = save(path.with_name("loose.pt"), [torch.ones(n % 5) for n in range(40)], "cpu")
    return squeeze(source, path)


def test_a_pickle_with_nothing_to_spare_is_relaid(tmp_path: Path) -> None:
    source, out = squeezed_out(tmp_path / "made.pt"), tmp_path / "out.pt"
    report = ckptmove.relocate(source, out, to="privateuseone:15")
    assert report.method == "relay"
    assert out.stat().st_size > source.stat().st_size
    assert_same_checkpoint(source, out, {"cpu": "privateuseone:15"})
    assert_laid_out_as(out)


def test_a_relay_of_a_relay_is_a_patch_of_it_or_laid_out_alike(tmp_path: Path) -> None:
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    source = squeezed_out(tmp_path / "made.pt")
    ckptmove.relocate(source, first, to="privateuseone:15")
    ckptmove.relocate(first, second, to="cpu")
    assert_same_checkpoint(source, second, {"cpu": "cpu"})
    assert_laid_out_as(second)


@pytest.mark.parametrize("compress", ["all", "storages", "pickle"])
def test_compressed_records_are_carried_over_as_they_are(compress: str, tmp_path: Path) -> None:
    chosen: dict[str, Callable[[str], bool]] = {
        "all": lambda _: True,
        "storages": lambda name: "/data/" in name or name.endswith("data.pkl"),
        "pickle": lambda name: name.endswith("data.pkl"),
    }
    saved = [torch.arange(200.0), torch.ones(0), torch.ones(3)]
    source = rezip(save(tmp_path / "a.pt", saved, "cpu"), tmp_path / "b.pt", chosen[compress])
    report = ckptmove.relocate(source, tmp_path / "out.pt", to="cuda:0")
    assert report.method == "relay"
    assert_same_checkpoint(source, tmp_path / "out.pt", {"cpu": "cuda:0"})


def test_no_checksum_stays_no_checksum_but_for_the_pickle(tmp_path: Path) -> None:
    source, out = tmp_path / "made.pt", tmp_path / "out.pt"
    without_checksums(source, pickle_protocol=4)
    report = ckptmove.relocate(source, out, to="privateuseone:15")  # protocol 4 can't shrink
    assert report.method == "relay"
    assert_laid_out_as(out)
    with zipfile.ZipFile(out) as archive:
        computed = [info.filename for info in archive.infolist() if info.CRC]
    assert computed == ["made/data.pkl"]


@pytest.mark.slow
def test_a_giant_is_relaid(tmp_path: Path) -> None:
    """Above 4 GiB too, everything lies where torch predicts it; the holes stay holes."""
    source, out = sparse_zip64(tmp_path / "made.pt", 4.1, pickle_protocol=4), tmp_path / "out.pt"
    report = ckptmove.relocate(source, out, to="privateuseone:15")  # protocol 4 can't shrink
    assert report.method == "relay"
    assert set(dict(pid_locations(out)).values()) == {"privateuseone:15"}
    assert_laid_out_as(out)
    ours: Any = loads_with_computed_offsets(out, weights_only=False)
    for key, name in enumerate(("before", "big", "after")):
        raw, mark = ours[name].untyped_storage(), f"data/{key}".encode().ljust(16, b"~")
        assert bytes(raw[:16]) == bytes(raw[-16:]) == mark
    assert out.stat().st_blocks * 512 < 1 << 20
