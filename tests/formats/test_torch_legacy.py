"""torch-legacy: damaged in every region, on every protocol, views, and giants."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove import InputError, Moved, inspect, relocate
from tests.conftest import RunCli, examples, in_turn
from tests.making.checkpoints import MAKERS, tagging
from tests.making.expected import having_every_device
from tests.making.legacy import (
    LEGACY_MAKERS,
    WRITE_ONLY,
    On,
    Part,
    StorageIds,
    python3_dumps,
    save_legacy,
    stream,
)
from tests.making.strategies import TAGS, Checkpoint, checkpoint_trees
from tests.oracles.readers import load
from tests.oracles.sameness import assert_same_tree
from tests.whole.test_memory import peak

ORDINARY = [name for name in LEGACY_MAKERS if name.startswith(("saved_", "view", "python2"))]


class Laid(NamedTuple):
    """A legacy file taken apart.

    Attributes:
        pickles: magic, protocol, machine, object, keys.
        tail: for each key, how many elements, and the bytes.
    """

    pickles: list[bytes]
    tail: list[tuple[int, bytes]]

    def joined(self) -> bytes:
        """The file."""
        tail = b"".join(struct.pack("<q", numel) + data for numel, data in self.tail)
        return b"".join(self.pickles) + tail

    def with_keys(self, keys: object) -> Laid:
        """With another list of keys."""
        return self._replace(pickles=[*self.pickles[:4], pickle.dumps(keys, 2)])


def laid(tag: str = "cuda:1") -> Laid:
    """Two storages: `0` of six floats, `1` of four bytes."""
    first, second = torch.arange(6.0), torch.arange(4, dtype=torch.uint8)
    numbers = {id(first): "0", id(second): "1"}
    kinds = {id(first): torch.FloatStorage, id(second): torch.ByteStorage}

    def name(obj: object) -> object:
        if not isinstance(obj, torch.Tensor):
            return None
        return ("storage", kinds[id(obj)], numbers[id(obj)], tag, obj.numel(), None)

    tree = {"a": On(first, 0, (2, 3), (3, 1)), "b": On(second, 0, (4,), (1,)), "device": "cuda:1"}
    whole = stream({}, StorageIds(tag), python3_dumps)
    head = split(whole)[:3]
    pickles = [*head, python3_dumps(tree, name), pickle.dumps(["0", "1"], 2)]
    return Laid(pickles, [(6, first.numpy().tobytes()), (4, second.numpy().tobytes())])


def split(data: bytes) -> list[bytes]:
    """The five pickles at the start, by the standard library."""
    file, found = io.BytesIO(data), []
    for _ in range(5):
        start = file.tell()
        for _ in pickletools.genops(file):
            pass
        found.append(data[start : file.tell()])
    return found


def write(tmp_path: Path, data: bytes) -> Path:
    """A file of these bytes."""
    path = tmp_path / "made.pt"
    path.write_bytes(data)
    return path


def refused(path: Path, match: str) -> None:
    """Both verbs say why in one line, and write nothing."""
    for act in (inspect, lambda path: relocate(path, path.with_name("out.pt"), to="cpu")):
        with pytest.raises(InputError, match=match) as raised:
            act(path)
        assert "\n" not in str(raised.value)
    assert not path.with_name("out.pt").exists()


def test_the_file_taken_apart_is_one_that_torch_reads(tmp_path: Path) -> None:
    path = write(tmp_path, laid().joined())
    loaded: Any = load(path, weights_only=True)
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert {key: each.location for key, each in inspect(path).storages.items()} == {
        "data/0": "cuda:1",
        "data/1": "cuda:1",
    }


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [5, 7, 0, -1, -(1 << 63), 1 << 62])
def test_a_storage_of_another_length_is_refused(numel: int, tmp_path: Path) -> None:
    made = laid()
    refused(write(tmp_path, made._replace(tail=[(numel, made.tail[0][1]), made.tail[1]]).joined()),
            "should have 24 bytes and has")  # fmt: skip


def test_bytes_where_elements_are_counted_are_refused(tmp_path: Path) -> None:
    made = laid()
    refused(write(tmp_path, made._replace(tail=[(24, made.tail[0][1])]).joined()), "should have 24")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (["0"], "'1' is missing"),
        ([], "is missing"),
        (["0", "0"], "malformed"),
        (["0", "1", "1"], "malformed"),
        (["0", "1", "2"], "'2' is listed"),
        (["1", "0"], "should have 4 bytes and has 6"),
        ([0, 1], "malformed"),
        (["0", None], "malformed"),
        ([b"0", b"1"], "names '_codecs.encode'"),
        ({"0": 1}, "is not a list"),
        (None, "is not a list"),
        (("0", "1"), "is not a list"),
    ],
)
def test_lists_of_keys_that_lie(keys: object, match: str, tmp_path: Path) -> None:
    refused(write(tmp_path, laid().with_keys(keys).joined()), match)


@pytest.mark.parametrize(
    ("which", "new", "match"),
    [
        (1, 1002, "protocol"),
        (1, True, "protocol"),
        (2, [1], "third pickle"),
        (2, None, "third pickle"),
    ],
)
def test_heads_that_are_others(which: int, new: object, match: str, tmp_path: Path) -> None:
    made = laid()
    made.pickles[which] = pickle.dumps(new, 2)
    refused(write(tmp_path, made.joined()), match)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = laid().joined()
    for nbytes in range(len(data)):
        with pytest.raises(InputError):
            inspect(write(tmp_path, data[:nbytes]))
    inspect(write(tmp_path, data))


@pytest.mark.parametrize("trailing", [b"\0", b"x" * 1000, b"\x80\x02N."])
def test_bytes_that_follow_are_told_of_and_kept(trailing: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, laid().joined() + trailing)
    behind = f"{len(trailing):,} bytes follow the last storage, as where two ranks wrote one file"
    assert inspect(path).warnings == (behind,)
    for to in ("cpu", "privateuseone:15"):
        relocate(path, tmp_path / "out.pt", to=to, force=True)
        assert (tmp_path / "out.pt").read_bytes().endswith(laid().joined()[-12:] + trailing)


def test_two_locations_of_one_storage_are_refused(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    tags = iter(["cpu", "cuda:1"])

    def name(obj: object) -> object:
        if not isinstance(obj, torch.Tensor):
            return None
        return ("storage", torch.FloatStorage, "0", next(tags), 4, None)

    made, on = laid(), On(base, 0, (4,), (1,))
    again = On(base.view(4), 0, (4,), (1,))
    made.pickles[3] = python3_dumps([on, again], name)
    made = made.with_keys(["0"])._replace(tail=[(4, base.numpy().tobytes())])
    refused(write(tmp_path, made.joined()), "is listed on 'cpu' and on 'cuda:1'")


# -- views -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "cuda:3", "privateuseone:15"])
def test_views_of_storages(to: str, tmp_path: Path) -> None:
    LEGACY_MAKERS["view_metadata"](path := tmp_path / "made.pt", "cuda:1")
    manifest = inspect(path)
    places = {each.name: (each.offset, each.storage) for each in manifest.tensors}
    flat, hidden, whole = (places[name][1] for name in ("flat", "inside", "whole"))
    assert places == {
        "left": (0, flat),
        "flat": (0, flat),
        "middle": (4, flat),
        "again": (3, flat),
        "inside": (2, hidden),
        "nothing": (10, flat),
        "whole": (0, whole),
    }
    assert len({flat, hidden, whole}) == 3
    shared = {each.name: set(each.shared_with) for each in manifest.tensors}
    assert shared["left"] == {"flat", "middle", "again", "nothing"}
    assert shared["inside"] == shared["whole"] == set()
    assert [manifest.storages[str(key)].nbytes for key in (flat, hidden, whole)] == [40, 48, 16]
    report = relocate(path, out := tmp_path / "out.pt", to=to)
    assert report.moved == {f"cuda:1→{to}": Moved(3, 104)}
    assert_same_tree(load(path, weights_only=False), load(out, weights_only=False))


@pytest.mark.parametrize("view", [("v", 0, 11), ("v", 11, 0), ("v", 8, 3), ("v", -1, 2), ("v", 0)])
def test_views_that_leave_their_storage_are_refused(view: object, tmp_path: Path) -> None:
    base = torch.arange(10.0)

    def name(obj: object) -> object:
        if not isinstance(obj, Part):
            return None
        return ("storage", torch.FloatStorage, "0", "cuda:1", 10, view)

    made = laid()
    made.pickles[3] = python3_dumps([On(Part(base, 0, 0), 0, (0,), (1,))], name)
    made = made.with_keys(["0"])._replace(tail=[(10, base.numpy().tobytes())])
    refused(write(tmp_path, made.joined()), "a storage")


def test_a_tensor_that_leaves_its_view_is_refused(tmp_path: Path) -> None:
    on = On(Part(torch.arange(10.0), 2, 3), 1, (3,), (1,))
    refused(write(tmp_path, stream([on], StorageIds("cuda:1"), python3_dumps)), "reaches outside")


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.sample(35)
@pytest.mark.parametrize(
    ("name", "to"),
    in_turn([(name,) for name in ORDINARY], [("cpu",), ("cuda:0",), ("privateuseone:15",)], 1),
)
def test_ordinary_files_keep_their_length(name: str, to: str, tmp_path: Path) -> None:
    LEGACY_MAKERS[name](path := tmp_path / "made.pt", "cuda:1")
    report = relocate(path, out := tmp_path / "out.pt", to=to, all=True)
    assert report.method == ("patch" if report.moved else "clone")
    assert out.stat().st_size == path.stat().st_size


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("to", ["cpu", "mps", "privateuseone:15"])
def test_protocols(protocol: int, to: str, tmp_path: Path) -> None:
    saved = MAKERS["adamw_training"]()
    save_legacy(saved, path := tmp_path / "made.pt", "cuda:1", protocol)
    report = relocate(path, out := tmp_path / "out.pt", to=to)
    longer = protocol >= 4 and to == "privateuseone:15"  # every memo slot is counted
    assert report.method == ("relay" if longer else "patch")
    assert_same_tree(load(path, weights_only=False), load(out, weights_only=False))
    assert set(inspect(out).devices) == {to, "cpu"}


within = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
random_tags = st.sampled_from((*TAGS, "cuda:12", "privateuseone:7"))


@within
@given(
    made=checkpoint_trees(),
    protocol=st.integers(2, 5),
    rules=st.dictionaries(st.sampled_from(TAGS), random_tags, min_size=1),
)
def test_any_rules_on_any_tree(
    made: Checkpoint, protocol: int, rules: dict[str, str], tmp_path: Path
) -> None:
    path, out, twice = (tmp_path / f"{name}.pt" for name in ("made", "out", "twice"))
    if not save_random(made, path, protocol):
        return
    before = {key: each.location for key, each in inspect(path).storages.items()}
    relocate(path, out, map=rules, force=True, allow_unmatched=True)
    after = {key: each.location for key, each in inspect(out).storages.items()}
    assert after == {key: rules.get(where, where) for key, where in before.items()}
    assert devices(out) == {rules.get(where, where) for where in devices(path)}
    if not any(each.dtype in NO_CLASS for each in made.bases):
        assert_same_tree(load(path, weights_only=False), load(out, weights_only=False))
    stay = {where: where for where in after.values()} or {"cpu": "cpu"}
    assert relocate(out, twice, map=stay, force=True, allow_unmatched=True).method == "clone"
    assert twice.read_bytes() == out.read_bytes()


NO_CLASS = {getattr(torch, name[6:]) for name in WRITE_ONLY if name.startswith("dtype_")}


def save_random(made: Checkpoint, path: Path, protocol: int) -> bool:
    """Whether the old format can hold it."""
    options: Any = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    try:
        with tagging(made.tag):
            torch.save(made.tree, path, **options)
    except RuntimeError as error:  # one storage as several dtypes
        if "different types" not in str(error):
            raise
        return False
    return True


def devices(path: Path) -> set[str]:
    """The locations that torch meets; those of dtypes that it can't load too."""
    with having_every_device() as restored:
        try:
            torch.load(path, weights_only=False)
        except (AttributeError, RuntimeError, KeyError):
            return {each.location for each in inspect(path).storages.values()}
    return set(restored.tags.values())


# -- giants ----------------------------------------------------------------------------------------


def giant(path: Path, nbytes: int) -> Path:
    """A file whose second storage is a hole of so many bytes."""
    sizes = {"0": 16, "1": nbytes, "2": 16}

    def name(obj: object) -> object:
        return ("storage", torch.ByteStorage, obj.key, "cuda:1", sizes[obj.key], None) if (
            isinstance(obj, Keyed)
        ) else None  # fmt: skip

    tree = {key: On(Keyed(key), 0, (size,), (1,)) for key, size in sizes.items()}  # type: ignore[arg-type]
    head = [*laid().pickles[:3], python3_dumps(tree, name), pickle.dumps(list(sizes), 2)]
    with path.open("wb") as file:
        file.write(b"".join(head))
        for key, size in sizes.items():
            file.write(struct.pack("<q", size))
            start = file.tell()
            file.write(key.encode() * 16)
            file.seek(start + size - 16)
            file.write(key.encode() * 16)
    return path


class Keyed:
    """What stands for a storage."""

    def __init__(self, key: str) -> None:
        self.key = key


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
@pytest.mark.parametrize("to", ["cpu", "privateuseone:15"])
def test_a_giant_stays_on_disk_and_its_hole_a_hole(to: str, tmp_path: Path) -> None:
    path, out = giant(tmp_path / "made.pt", 3 << 30), tmp_path / "out.pt"
    if path.stat().st_blocks * 512 > 1 << 24:
        pytest.skip("no holes in files here")
    peaks = [peak("relocate", path, out, "--to", to), peak("inspect", path), peak("inspect", out)]
    assert min(peaks) > 1_000_000
    assert max(peaks) < 60_000_000, peaks
    assert out.stat().st_blocks * 512 < 1 << 24, "holes stay holes"
    assert {each.location for each in inspect(out).storages.values()} == {to}
    for each in inspect(out).storages.values():
        assert each.extent is not None
        with out.open("rb") as file:
            file.seek(each.extent.start)
            first = file.read(16)
            file.seek(each.extent.end - 16)
            assert first == file.read(16) == each.id[-1:].encode() * 16


# -- command line ----------------------------------------------------------------------------------


BAD: dict[str, Callable[[Laid], bytes]] = {
    "truncated": lambda made: made.joined()[:-1],
    "head alone": lambda made: b"".join(made.pickles[:3]),
    "missing key": lambda made: made.with_keys(["0"]).joined(),
    "magic alone": lambda made: made.pickles[0],
    "other protocol": lambda made: made.pickles[0] + pickle.dumps(1000, 2) + made.joined(),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_a_line(name: str, tmp_path: Path, run_cli: RunCli) -> None:
    path = write(tmp_path, BAD[name](laid()))
    commands: tuple[tuple[str | Path, ...], ...]
    commands = ("inspect", path), ("relocate", path, "out.pt", "--to", "cpu")
    for command in commands:
        done = run_cli(*command, exit=3)
        assert done.stdout == ""
        assert done.stderr.startswith("ckptmove: ")
        assert done.stderr.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["made.pt"]


def test_what_was_saved_to_one_file_again_is_read_too(tmp_path: Path) -> None:
    saved = [{"w": torch.full((n,), n)} for n in (3, 2, 1)]
    path, out = tmp_path / "made.pt", tmp_path / "out.pt"
    with tagging("cuda:1"), path.open("wb") as file:
        for each in saved:
            torch.save(each, file, _use_new_zipfile_serialization=False)
    assert [(e.name, e.device) for e in inspect(path).tensors] == [
        (f"{n}.w", "cuda:1") for n in range(3)
    ]
    assert relocate(path, out, to="mps").moved == {"cuda:1→mps": Moved(3, 24 + 16 + 8)}
    with having_every_device() as restored, out.open("rb") as file:
        loaded = [torch.load(file, weights_only=True) for _ in saved]
        assert file.read() == b""
    assert set(restored.tags.values()) == {"mps"}
    assert_same_tree(saved, loaded)


def test_a_frame_hides_no_pickle(tmp_path: Path) -> None:
    """An unpickler in C reads a frame whole, and goes on after it, wherever its pickle ended."""
    protocol, machine = pickle.dumps(1001, 2), pickle.dumps({"little_endian": True}, 2)
    magic, *others = laid().pickles
    shown = magic[2:] + b"".join(others) + bytes(1 << 18)
    hidden = protocol + machine + b"cos\ngetpid\n)R." + pickle.dumps([], 2)
    data = b"\x80\4\x95" + struct.pack("<Q", len(shown)) + shown + hidden
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert isinstance(torch.load(path, weights_only=False), int)
    with pytest.raises(InputError, match="frame longer than itself"):
        inspect(path)
