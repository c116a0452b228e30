"""Tars of torch 0.1: read as torch reads them, moved, and refused in a line where they are bad."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmove import CorruptError, InputError, UnsupportedError, inspect, relocate, validate
from tests.conftest import RunCli, corpus_files
from tests.making.expected import having_every_device, storage_bytes
from tests.making.tar import TAR_MAKERS, save_tar
from tests.making.walking import named_tensors
from tests.oracles.sameness import assert_same_tree

TAGS = ("cpu", "cuda:0", "privateuseone:15")
Members = dict[str, bytes]


def load(path: Path) -> tuple[object, dict[str, str]]:
    """What torch makes of a tar, and where it would have put the tensors."""
    with having_every_device() as restored:
        loaded = torch.load(path, weights_only=False)
        return loaded, restored.devices(loaded)


def members(path: Path) -> Members:
    """Name and content of each member, by the standard library."""
    with tarfile.open(path, "r:") as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def write(path: Path, contents: Members, **options: Any) -> Path:
    """A tar of these members."""
    with tarfile.open(path, "w:", **{"format": tarfile.PAX_FORMAT, **options}) as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1486620520.9  # so that there is a pax header, as torch made it
            tar.addfile(info, io.BytesIO(data))
    return path


def test_it_is_not_loaded_by_torch(tmp_path: Path) -> None:
    """Before 2.6, torch unpacks tars wherever they say, also for `weights_only=True`."""
    TAR_MAKERS[next(iter(TAR_MAKERS))](path := tmp_path / "made.pt", "cpu")
    found = validate(path).of("reload")
    assert (found.outcome, found.title) == (
        "skipped",
        "torch can load torch-tar only by running its code",
    )


# What it holds, and where it goes


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", TAR_MAKERS)
def test_it_is_read_as_torch_reads_it(name: str, tag: str, tmp_path: Path) -> None:
    expected = TAR_MAKERS[name](path := tmp_path / "made.pt", tag)
    manifest = inspect(path)
    assert manifest.format == "torch-tar"
    tensors = {entry.name: entry for entry in manifest.tensors if entry.kind != "storage"}
    assert {name: entry.device for name, entry in tensors.items()} == expected.devices
    loaded, data = dict(named_tensors(load(path)[0])), path.read_bytes()
    for key, tensor in loaded.items():
        entry = tensors[key]
        told = (entry.shape, entry.stride, f"torch.{entry.dtype}")
        assert told == (tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
        extent = manifest.storages[entry.storage or ""].extent
        assert extent is not None
        whole = torch.frombuffer(
            bytearray(data[extent.start : extent.end] or b"\0" * 8), dtype=tensor.dtype
        )
        again = whole.as_strided(entry.shape, entry.stride, entry.offset)
        assert torch.equal(again, tensor.detach())


def test_kinds_and_sections_are_told(tmp_path: Path) -> None:
    TAR_MAKERS["state_dict"](path := tmp_path / "made.pt", "cpu")
    entries = {entry.name: entry for entry in inspect(path).tensors}
    assert entries["parameters.one"].kind == "parameter"
    assert entries["parameters.one"].requires_grad
    assert (entries["model.weight"].section, entries["model.weight"].state_key) == (
        "model",
        "weight",
    )
    assert "tied.weight" in entries["model.weight"].shared_with
    assert entries["tied.tail"].offset == 7


def test_the_newer_form_of_a_parameter_is_known(tmp_path: Path) -> None:
    made = b"ctorch.nn.parameter\nParameter\nX\1\0\0\0007Q\x85\x81"
    state = b"\x88\x89ccollections\nOrderedDict\n)R\x87b"
    path = write(tmp_path / "made.pt", {**WHOLE, "pickle": b"\x80\x02" + made + state + b"."})
    loaded = load(path)[0]
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    (entry,) = inspect(path).tensors
    assert (entry.kind, entry.shape, entry.requires_grad) == ("parameter", (1,), True)


@pytest.mark.sample(6)
@pytest.mark.parametrize("to", ["cpu", "cuda:1", "cuda:0", "privateuseone:15", "xpu:3"])
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", TAR_MAKERS)
def test_it_goes_anywhere_and_back(name: str, tag: str, to: str, tmp_path: Path) -> None:
    TAR_MAKERS[name](path := tmp_path / "made.pt", tag)
    moved, back = tmp_path / "moved.pt", tmp_path / "back.pt"
    relocate(path, moved, to=to, all=True)
    assert set(inspect(moved).devices) == {to}
    ours, before = load(path)
    theirs, after = load(moved)
    assert after == dict.fromkeys(before, to)
    assert_same_tree(ours, theirs)
    assert storage_bytes(ours) == storage_bytes(theirs)
    assert list(members(moved)) == list(members(path))
    if name != "mixed_devices":
        relocate(moved, back, to=tag, all=True)
        assert load(back)[1] == before
        assert_same_tree(ours, load(back)[0])


def test_places_are_chosen_by_storage(tmp_path: Path) -> None:
    TAR_MAKERS["mixed_devices"](path := tmp_path / "made.pt", "cuda:0")
    relocate(path, moved := tmp_path / "moved.pt", map={"cuda:1": "cpu"}, place={"b": "xpu:1"})
    assert load(moved)[1] == {"a": "cpu", "b": "xpu:1", "c": "cpu"}


def test_devices_the_object_names_move_too(tmp_path: Path) -> None:
    TAR_MAKERS["state_dict"](path := tmp_path / "made.pt", "cuda:0")
    relocate(path, moved := tmp_path / "moved.pt", to="privateuseone:15", values=True)
    loaded: Any = load(moved)[0]
    assert loaded["parameters"]["device"] == "privateuseone:15"


def test_tags_of_one_length_are_patched(tmp_path: Path) -> None:
    TAR_MAKERS["state_dict"](path := tmp_path / "made.pt", "cuda:0")
    assert relocate(path, moved := tmp_path / "moved.pt", to="cuda:1").method == "patch"
    assert path.stat().st_size == moved.stat().st_size


def test_many_storages_outgrow_a_block(tmp_path: Path) -> None:
    saved = {str(n): torch.full((n % 5,), float(n)) for n in range(400)}
    save_tar(saved, path := tmp_path / "made.pt", lambda _: "cpu")
    write(path, members(path))
    relocate(path, moved := tmp_path / "moved.pt", to="privateuseone:15")
    assert moved.stat().st_size > path.stat().st_size
    assert moved.stat().st_size % 512 == 0
    loaded, devices = load(moved)
    assert_same_tree(saved, loaded)
    assert set(devices.values()) == {"privateuseone:15"}


@pytest.mark.parametrize("digits", ["0000", ""])
def test_a_size_in_a_pax_header_is_kept_true(digits: str, tmp_path: Path) -> None:
    save_tar({"a": torch.ones(300)}, path := tmp_path / "made.pt", lambda _: "cpu")
    contents = members(path)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = {"size": digits + str(len(data))}
            tar.addfile(info, io.BytesIO(data))
    relocate(path, moved := tmp_path / "moved.pt", to="cuda:1")
    assert load(moved)[1] == {"a": "cuda:1"}


@pytest.mark.parametrize("path", corpus_files("tar-legacy"))
def test_what_torch_wrote_then_goes_there_and_back(path: Path, tmp_path: Path) -> None:
    manifest = inspect(path)
    assert manifest.writer == "torch 0.1"
    assert [entry.shape for entry in manifest.tensors] == [(5, 5)] * 4 + [(25,), (3,)]
    relocate(path, moved := tmp_path / "moved.pt", to="privateuseone:15")
    relocate(moved, back := tmp_path / "back.pt", to="cpu")
    assert back.read_bytes() == path.read_bytes()
    (imitation,) = (param.values[0] for param in corpus_files("tar-imitation"))
    with pytest.raises(UnsupportedError, match="a tar archive without the member 'tensors'"):
        inspect(imitation)  # type: ignore[arg-type]


# What is bad


def good(folder: Path) -> Members:
    """A tar with two storages, a part of one, three tensors."""
    root = torch.arange(10.0)
    tree = {"root": root, "part": root[2:6].clone(), "other": torch.arange(6).view(2, 3)}
    path = folder / "good.pt"
    save_tar(tree, path, lambda _: "cuda:0", ((tree["part"], root, 2),))
    return members(path)


def dumps(*values: object) -> bytes:
    """Pickles, one after the other."""
    return b"".join(pickle.dumps(value, 2) for value in values)


def storage(
    number: object = 1, location: object = "cpu", cls: object = torch.FloatStorage
) -> bytes:
    """The pickle of a storage."""
    return dumps((number, location, cls))


def table(*records: bytes, views: object = ()) -> bytes:
    """The storages."""
    return dumps(len(records)) + b"".join(records) + dumps(list(views))  # type: ignore[call-overload]


ONE = storage() + struct.pack("<qf", 1, 2.0)


def tensor(
    *numbers: int, dimensions: int = 1, number: object = 7, on: object = 1, kind: str = "Float"
) -> bytes:
    """A table of one tensor."""
    head = dumps(1, (number, on, getattr(torch, f"{kind}Tensor")))
    return head + struct.pack(f"<iI{len(numbers)}q", dimensions, 0xDEAD, *numbers)


BAD: dict[str, tuple[Members, str]] = {
    "more storages than there are": ({"storages": dumps(9) + ONE}, "truncated"),
    "a number of storages that is none": (
        {"storages": dumps("9") + ONE + dumps([])},
        "is not an integer",
    ),
    "a number below zero": ({"storages": dumps(-1, [])}, "is not an integer"),
    "a storage that is no tuple": ({"storages": table(dumps([1, "cpu", 3]))}, "malformed"),
    "a location that is no text": ({"storages": table(storage(location=3))}, "not a string"),
    "a type that is none": ({"storages": table(storage(cls=None))}, "a type in a table"),
    "a type of somebody else": ({"storages": table(storage(cls=OrderedDict))}, "a type in a table"),
    "a type that is not known": ({"storages": table(storage(cls=torch.Size))}, "is not known"),
    "more elements than bytes": (
        {"storages": table(storage() + struct.pack("<qf", 1 << 40, 2.0))},
        "the storage 1 is truncated",
    ),
    "elements below zero": (
        {"storages": table(storage() + struct.pack("<qf", -1, 2.0))},
        "the storage 1 is truncated",
    ),
    "no elements": ({"storages": dumps(1) + storage()}, "truncated"),
    "a number taken twice": ({"storages": table(ONE, ONE)}, "two objects in the tar have"),
    "views that are no list": ({"storages": dumps(1) + ONE + dumps(5)}, "list of parts"),
    "a view of nothing": ({"storages": table(ONE, views=[(5, 9, 0, 1)])}, "is missing"),
    "a view of itself": ({"storages": table(ONE, views=[(5, 5, 0, 1)])}, "is missing"),
    "views of each other": (
        {"storages": table(ONE, views=[(5, 6, 0, 1), (6, 5, 0, 1)])},
        "is missing",
    ),
    "a view beyond the storage": (
        {"storages": table(ONE, views=[(5, 1, 1, 1)])},
        "larger than the storage",
    ),
    "a view of a negative part": (
        {"storages": table(ONE, views=[(5, 1, -1, 1)])},
        "is not an integer",
    ),
    "a view of two numbers": ({"storages": table(ONE, views=[(5, 1)])}, "malformed"),
    "dimensions below zero": ({"tensors": tensor(1, 1, 0, dimensions=-1)}, "has -1 dimensions"),
    "absurd dimensions": ({"tensors": tensor(1, 1, 0, dimensions=1 << 30)}, "dimensions"),
    "more dimensions than numbers": ({"tensors": tensor(1, 1, 0, dimensions=5)}, "truncated"),
    "a size below zero": ({"tensors": tensor(-1, 1, 0)}, "negative"),
    "a stride below zero": ({"tensors": tensor(1, -1, 0)}, "negative"),
    "an offset below zero": ({"tensors": tensor(1, 1, -8)}, "negative"),
    "a tensor outside its storage": ({"tensors": tensor(1, 1, 1)}, "outside its storage"),
    "a tensor that is too large": ({"tensors": tensor(2, 1, 0)}, "outside its storage"),
    "more elements than there can be": (
        {"tensors": tensor(1 << 40, 1 << 40, 0, 0, 0, dimensions=2)},
        "more elements",
    ),
    "a tensor on nothing": ({"tensors": tensor(1, 1, 0, on=2)}, "of a tensor is missing"),
    "a tensor another type": ({"tensors": tensor(1, 1, 0, kind="Int")}, "another type"),
    "a tensor with a storage's number": ({"tensors": tensor(1, 1, 0, number=1)}, "two objects"),
    "an object of nothing": ({"pickle": b"\x80\x02X\1\0\0\0008Q."}, "does not hold"),
    "an object of a tuple": ({"pickle": b"\x80\x02K\1K\2\x86Q."}, "does not hold"),
    "an object of no number": ({"pickle": b"\x80\x02X\1\0\0\0-Q."}, "does not hold"),
    "an object that does not end": ({"pickle": b"\x80\x02X\1\0\0\0007Q"}, "truncated"),
}
WHOLE: Members = {
    "sys_info": dumps({}),
    "pickle": b"\x80\x02X\1\0\0\0007Q.",
    "tensors": tensor(1, 1, 0),
    "storages": table(ONE),
}


def test_the_bad_ones_would_be_good_but_for_one_thing(tmp_path: Path) -> None:
    path = write(tmp_path / "good.pt", WHOLE)
    assert torch.load(path, weights_only=False).tolist() == [2.0]
    assert [entry.shape for entry in inspect(path).tensors] == [(1,)]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    changed, said = BAD[name]
    path = write(tmp_path / "bad.pt", {**WHOLE, **changed})
    with pytest.raises(InputError, match=said) as raised:
        inspect(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("missing", ["storages", "tensors", "pickle"])
def test_a_tar_that_lacks_a_member_is_refused(missing: str, tmp_path: Path) -> None:
    rest = {name: data for name, data in WHOLE.items() if name != missing}
    with pytest.raises(UnsupportedError, match=f"without the member '{missing}'"):
        inspect(write(tmp_path / "bad.pt", rest))


def test_other_tars_are_refused_with_a_hint(tmp_path: Path, run_cli: RunCli) -> None:
    path = write(tmp_path / "some.tar", {"run.pt": b"..."})
    with pytest.raises(UnsupportedError, match="is a tar archive") as raised:
        inspect(path)
    assert raised.value.hint is not None
    run_cli("inspect", path, exit=3)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "good.pt", WHOLE).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # where the zeros of the end start
    bad = tmp_path / "bad.pt"
    for length in [*range(100, end, 97), *range(512, end + 1, 512)]:
        bad.write_bytes(whole[:length])
        with pytest.raises(InputError):
            inspect(bad)
    bad.write_bytes(whole[: end + 512])
    assert inspect(bad).tensors


@pytest.mark.slow
def test_no_flipped_byte_ends_in_another_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "good.pt", good(tmp_path)).read_bytes()
    bad = tmp_path / "bad.pt"
    for at in range(0, len(whole.rstrip(b"\0")), 3):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(InputError):
            inspect(bad)


def respelled(header: bytes, at: int, new: bytes) -> bytes:
    """A tar header with another field, and the checksum that goes with it."""
    made = bytearray(header)
    made[at : at + len(new)] = new
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a wrong checksum": (lambda head: b"X" + head[1:], "header at offset 0 is damaged"),
    "no checksum": (lambda head: head[:148] + bytes(8) + head[156:], "is damaged"),
    "a checksum that is no number": (lambda head: head[:148] + b"9" * 8 + head[156:], "is damaged"),
    "a size beyond the file": (lambda head: respelled(head, 124, b"77777777777"), "truncated"),
    "a size that is no number": (lambda head: respelled(head, 124, b"x" * 11), "truncated"),
    "a size below zero": (lambda head: respelled(head, 124, b"\xff" * 12), "truncated"),
    "a link": (lambda head: respelled(head, 156, b"2"), "not a regular file"),
    "a folder": (lambda head: respelled(head, 156, b"5"), "not a regular file"),
    "a sparse file": (lambda head: respelled(head, 156, b"S"), "not a regular file"),
    "a global header": (lambda head: respelled(head, 156, b"g"), "not a regular file"),
    "a folder by its name": (
        lambda head: respelled(head, 0, b"x/" + bytes(8)),
        "not a regular file",
    ),
    "the start of a name": (lambda head: respelled(head, 345, b"x"), "not a regular file"),
    "a name that is there": (lambda head: respelled(head, 0, b"pickle\0\0\0"), "two members"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_header_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    make, said = HEADERS[name]
    with tarfile.open(path := tmp_path / "bad.pt", "w:", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in WHOLE.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    whole = path.read_bytes()
    assert inspect(path).tensors
    path.write_bytes(make(whole[:512]) + whole[512:])
    with pytest.raises(InputError, match=said):
        inspect(path)


@pytest.mark.parametrize("record", [b"99 size=1\n", b"11 path=xy\n", b"size=1\n", b"9 size=1 \n"])
def test_a_bad_pax_header_is_refused(record: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.pt", WHOLE)
    whole = bytearray(path.read_bytes())
    start = whole.index(b"mtime=") - 3
    nbytes = whole.index(b"\n", start) + 1 - start
    whole[start : start + nbytes] = record.ljust(nbytes, b"\n")
    path.write_bytes(whole)
    with pytest.raises(InputError, match="pax header"):
        inspect(path)


def test_a_tar_is_never_taken_for_a_pickle(tmp_path: Path) -> None:
    """torch tries the tar first: what starts as both must not be read as the other."""
    torch.save(1, path := tmp_path / "both.pt", _use_new_zipfile_serialization=False)
    head = respelled(path.read_bytes()[:20].ljust(512, b"\0"), 156, b"0")
    path.write_bytes(head + bytes(1024))
    with tarfile.open(path, "r:") as tar:
        assert len(tar.getmembers()) == 1
    with pytest.raises(InputError):
        inspect(path)


def test_what_torch_does_not_read_is_told(tmp_path: Path) -> None:
    more = {**WHOLE, "more": b"?", "pickle": WHOLE["pickle"] + b"junk"}
    path = write(tmp_path / "odd.pt", more)
    path.write_bytes(path.read_bytes() + b"?" * 20_000)
    told = " ".join(inspect(path).warnings)
    for each in ("member 'more'", "4 bytes follow", "end of the tar"):
        assert each in told
    relocate(path, moved := tmp_path / "moved.pt", to="cuda:1")
    assert members(moved)["more"] == b"?"
    with pytest.raises(CorruptError):
        inspect(write(tmp_path / "bad.pt", {**WHOLE, "storages": WHOLE["storages"][:-1]}))
