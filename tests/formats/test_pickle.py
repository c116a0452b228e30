"""pickle: storages in bytes, in frames, in each other; and bytes that are nothing of the kind."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove import InputError, inspect, relocate
from tests.conftest import ROOT, RunCli, examples
from tests.making import python2
from tests.making.checkpoints import tagging
from tests.making.expected import having_every_device
from tests.making.pickled import PICKLED_MAKERS, to_legacy, to_zip
from tests.making.strategies import TAGS, Checkpoint, checkpoint_trees
from tests.oracles.families import unfolded
from tests.oracles.sameness import assert_same_tree
from tests.whole.test_memory import peak

LONG = "privateuseone:15"


def dump(saved: object, path: Path, tag: str = "cpu", protocol: int = 4) -> Path:
    """`pickle.dump` as a machine with the tag would have written it."""
    with tagging(tag):
        path.write_bytes(pickle.dumps(saved, protocol))
    return path


def bytes_for(tag: str, saved: object, save: Callable[[object], bytes]) -> bytes:
    """What `save` makes of it there."""
    with tagging(tag):
        return save(saved)


def moved(path: Path, to: str) -> Path:
    """Where it is after going there."""
    relocate(path, out := path.with_name("out.pkl"), to=to, force=True)
    return out


def loaded(path: Path) -> tuple[Any, set[str]]:
    """What pickle reads, and the locations that torch meets."""
    with having_every_device() as restored, path.open("rb") as file:
        tree = unfolded(pickle.load(file))
    return tree, set(restored.tags.values())


def check_frames(data: bytes) -> int:
    """Every frame ends where an opcode starts, and none holds the start of another; how many."""
    ops: list[tuple[int, str, Any]]
    ops = [(int(at or 0), op.name, arg) for op, arg, at in pickletools.genops(data)]
    starts = {at for at, _, _ in ops} | {len(data)}
    ends: list[int] = []
    for at, name, length in ops:
        if name == "FRAME":
            assert not ends or at >= ends[-1], "a frame within a frame"
            ends.append(at + 9 + length)
            assert ends[-1] in starts, "a frame ends within an opcode"
    # Python's own unpickler falls over a frame that is too short for what it starts.
    with having_every_device():
        slow: Any = pickle
        slow._Unpickler(io.BytesIO(data)).load()
    return len(ends)


# -- lengths and frames ----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "cuda:3", LONG])
@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("protocol", range(6))
def test_protocols(protocol: int, tag: str, to: str, tmp_path: Path) -> None:
    saved = {"a": torch.arange(6.0), "b": [torch.ones(2), "cpu", "cuda:1"], "cpu": torch.ones(0)}
    path = dump(saved, tmp_path / "made.pkl", tag, protocol)
    tree, where = loaded(moved(path, to))
    assert where == {to}
    assert_same_tree(saved, tree)


@pytest.mark.sample(2)
@pytest.mark.parametrize("to", ["cpu", LONG])
@pytest.mark.parametrize("count", [1, 90, 400])
@pytest.mark.parametrize("nbytes", [4, 16_000, 65_000, 65_536])
def test_frames_are_as_long_as_they_say(nbytes: int, count: int, to: str, tmp_path: Path) -> None:
    """One frame and many; storages within them, at their edge and outside."""
    count = min(count, 3_000_000 // nbytes)
    saved = [torch.full((nbytes,), n % 256, dtype=torch.uint8) for n in range(count)]
    path = dump(saved, tmp_path / "made.pkl", "cuda:1")
    before = check_frames(path.read_bytes())
    out = moved(path, to)
    assert check_frames(out.read_bytes()) == before
    tree, where = loaded(out)
    assert where == {to}
    assert_same_tree(saved, tree)


def tight(numel: int, tag: str = "cuda:1") -> bytes:
    """A storage by `torch.save` whose pickles have no PUT to spare: it can't keep its length."""
    kind = b"ctorch\nByteStorage\n"
    spelled = b"X" + struct.pack("<I", len(tag)) + tag.encode()
    head = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    size = struct.pack("<i", numel)
    pid = b"(X\x07\0\0\0storage" + kind + b"X\x01\0\0\x000" + spelled + b"J" + size + b"NtQ."
    keys = b"\x80\x02]X\x01\0\0\x000a."
    return head + b"\x80\x02" + pid + keys + struct.pack("<q", numel) + b"s" * numel


FRAME = len(tight(0))  # of a storage, without its bytes


@pytest.mark.sample(15)
@pytest.mark.parametrize("to", ["cpu", "cuda:12", LONG])
@pytest.mark.parametrize("nbytes", range(243, 258))
def test_short_bytes_become_long_ones(nbytes: int, to: str, tmp_path: Path) -> None:
    saved = [Loaded(tight(nbytes - FRAME)), "device", Loaded(tight(3))]
    for protocol in (3, 4):
        (path := tmp_path / "made.pkl").write_bytes(pickle.dumps(saved, protocol))
        assert loaded(path)[1] == {"cuda:1"}
        out = moved(path, to)
        tree, where = loaded(out)
        assert where == {to}
        assert (bytes(tree[0].untyped()), tree[1]) == (b"s" * (nbytes - FRAME), "device")
        grown = [nbytes + len(to) - 6, FRAME + 3 + len(to) - 6]
        assert held_bytes(path) == [kind(nbytes), kind(FRAME + 3)]
        assert [length for _, length in held_bytes(out)] == grown
        assert check_frames(out.read_bytes()) == check_frames(path.read_bytes())


def kind(nbytes: int) -> tuple[str, int]:
    """The opcode by which pickle pushes so many bytes."""
    return "SHORT_BINBYTES" if nbytes < 256 else "BINBYTES", nbytes


def held_bytes(path: Path) -> list[tuple[str, int]]:
    """Each string of bytes: its opcode and length."""
    ops = pickletools.genops(path.read_bytes())
    return [(op.name, len(arg or b"")) for op, arg, _ in ops if op.name.endswith("BINBYTES")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("to", ["cpu", LONG])
@pytest.mark.parametrize("numels", [[1] * 500, [65_300] * 3, [70_000, 3] * 20, [65_536, 1, 200]])
def test_frames_grow_with_what_is_in_them(numels: list[int], to: str, tmp_path: Path) -> None:
    saved = [[Loaded(tight(numel)), "cuda:1", n] for n, numel in enumerate(numels)]
    (path := tmp_path / "made.pkl").write_bytes(pickle.dumps(saved, 4))
    out = moved(path, to)
    growth = (len(to) - 6) * len(numels)
    assert out.stat().st_size - path.stat().st_size in (growth, growth + 3 * len(numels))
    assert check_frames(out.read_bytes()) == check_frames(path.read_bytes())
    tree, where = loaded(out)
    assert where == {to}
    assert [(each[0].size(), each[1:]) for each in tree] == [
        (numel, ["cuda:1", n]) for n, numel in enumerate(numels)
    ]


# -- nesting ---------------------------------------------------------------------------------------


def deep(levels: int, tag: str, protocol: int = 4) -> bytes:
    """A checkpoint in bytes in bytes."""
    data = bytes_for(tag, {"w": torch.ones(2)}, to_zip)
    for level in range(levels - 1):
        data = pickle.dumps({"level": level, "inner": data}, protocol)
    return data


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("levels", range(1, 9))
def test_checkpoints_within_checkpoints(levels: int, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "made.pkl"
    path.write_bytes(pickle.dumps([deep(levels, "cuda:1", protocol)], protocol))
    (entry,) = inspect(path).tensors
    assert entry.name == "0." + "inner." * (levels - 1) + "w"
    for to in ("cpu", LONG):
        (data,) = pickle.loads(moved(path, to).read_bytes())
        with having_every_device() as restored:
            tree = unfolded(data)
        assert set(restored.tags.values()) == {to}
        for _ in range(levels - 1):
            tree = tree["inner"]
        assert tree["w"].tolist() == [1, 1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_nine_levels_are_refused(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "made.pkl"
    path.write_bytes(pickle.dumps([deep(9, "cuda:1", protocol)], protocol))
    with pytest.raises(InputError, match="more than 8 levels"):
        inspect(path)


@pytest.mark.parametrize("to", ["cpu", LONG])
def test_a_blob_that_is_used_twice(to: str, tmp_path: Path) -> None:
    """By the call that loads it, and as a value; the memo has it once."""
    blob = bytes_for("cuda:1", torch.ones(2).storage(), to_legacy)
    path = tmp_path / "made.pkl"
    path.write_bytes(pickle.dumps([blob, blob, Loaded(blob), Loaded(blob)], 4))
    assert path.read_bytes().count(b"FloatStorage") == 1
    out = moved(path, to)
    with having_every_device() as restored:
        tree = pickle.loads(out.read_bytes())
        assert tree[0] is tree[1]
        assert unfolded(tree[0])[0] == tree[2][0] == 1
    assert set(restored.tags.values()) == {to}


class Loaded:
    """Pickled as a storage is."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.data,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_bytes_that_only_look_like_checkpoints_stay(protocol: int, tmp_path: Path) -> None:
    blob = bytes_for("cuda:1", {"w": torch.ones(9)}, to_zip)
    looks = {
        "cut zip": blob[:-30],
        "cut pickle": pickle.dumps({"w": list(range(100)), "device": "cuda:1"}, 4)[:-1],
        "zip of text": b"PK\3\4" + b"cuda:1" * 40,
        "proto": b"\x80\x02" + b"cuda:1" * 40,
        "proto 4": b"\x80\x04\x95" + b"\xff" * 50 + b"cuda:1",
        "no prefix": b"x" + blob,
        "behind": pickle.dumps("cuda:1", 2) + b"\0" * 40,
        "array": bytearray(b"\x80\x04" + b"cuda:1" * 10),
    }
    saved = {**looks, "weight": torch.ones(3)}
    path = dump(saved, tmp_path / "made.pkl", "cuda:1", protocol)
    for to in ("cpu", LONG):
        with having_every_device():
            tree = pickle.loads(moved(path, to).read_bytes())
        assert {key: tree[key] for key in looks} == looks


# -- several pickles -------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("to", ["cpu", "cuda:3", LONG])
@pytest.mark.parametrize("protocol", range(6))
def test_several_pickles_in_a_file(protocol: int, to: str, tmp_path: Path) -> None:
    saved = [{"w": torch.full((n,), n)} for n in (3, 20_000, 1)]
    with tagging("cuda:1"):
        data = b"".join(pickle.dumps(each, protocol) for each in saved)
    (path := tmp_path / "made.pkl").write_bytes(data)
    assert [entry.name for entry in inspect(path).tensors] == ["0.w", "1.w", "2.w"]
    out = moved(path, to)
    with having_every_device() as restored, out.open("rb") as file:
        trees = [pickle.load(file) for _ in saved]
        assert file.read() == b""
    assert set(restored.tags.values()) == {to}
    assert_same_tree(saved, trees)


@pytest.mark.parametrize("encoding", ["ASCII", "bytes"])
def test_strings_of_python_2_stay_of_their_kind(encoding: str, tmp_path: Path) -> None:
    saved = [python2.dumps(value, 2) for value in ("cuda:1", ["cuda:1", "x", "cuda:1"])]
    blob = bytes_for("cuda:1", torch.ones(2), to_legacy)
    (path := tmp_path / "made.pkl").write_bytes(b"".join(saved) + pickle.dumps(blob, 3))
    out = tmp_path / "out.pkl"
    report = relocate(path, out, to="cpu", values=True)
    assert len(report.values_rewritten) == 3
    with out.open("rb") as file:
        values = [pickle.load(file, encoding=encoding) for _ in saved]
    cpu: object = "cpu" if encoding == "ASCII" else b"cpu"
    assert values == [cpu, [cpu, "x" if encoding == "ASCII" else b"x", cpu]]


def test_what_follows_the_last_pickle_stays(tmp_path: Path) -> None:
    path = dump([torch.ones(2)], tmp_path / "made.pkl", "cuda:1")
    path.write_bytes(path.read_bytes() + b"tail \x80\x04N.")
    behind = "9 bytes follow the end of the pickle, as where two ranks wrote one file"
    assert inspect(path).warnings == (behind,)
    assert moved(path, LONG).read_bytes().endswith(b".tail \x80\x04N.")


# -- lies ------------------------------------------------------------------------------------------


def forged(content: bytes) -> bytes:
    """A pickle that loads a storage from these bytes."""
    return pickle.dumps([Loaded(content), "more"], 4)


LEGACY = to_legacy(torch.ones(40).storage())
LIES: dict[str, bytes] = {
    "nothing": forged(b""),
    "text": forged(b"hello" * 20),
    "truncated": forged(LEGACY[:-1]),
    "cut": forged(LEGACY[:200]),
    "a zip of text": forged(b"PK\3\4" + b"x" * 200),
    "two pickles": forged(pickle.dumps([1] * 40, 2) * 2),
    "more bytes than there are": forged(LEGACY).replace(
        b"B" + struct.pack("<I", len(LEGACY)), b"B" + struct.pack("<I", len(LEGACY) + 999)
    ),
    "fewer bytes than there are": forged(LEGACY).replace(
        b"B" + struct.pack("<I", len(LEGACY)), b"B" + struct.pack("<I", len(LEGACY) - 7)
    ),
    "2^63 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + LEGACY + b".",
    "a negative count": b"\x80\x02T" + struct.pack("<i", -5) + LEGACY + b".",
    "no end": forged(LEGACY)[:-1],
    "a persistent id": b"\x80\x02X\x03\0\0\0keyQ.",
    "buffers elsewhere": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused_in_a_line(name: str, tmp_path: Path, run_cli: RunCli) -> None:
    (path := tmp_path / "made.pkl").write_bytes(LIES[name])
    with pytest.raises(InputError) as raised:
        inspect(path)
    assert "\n" not in str(raised.value)
    done = run_cli("relocate", path, "out.pkl", "--to", LONG, exit=3)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert [each.name for each in tmp_path.iterdir()] == ["made.pkl"]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.pkl"
    data = dump([torch.ones(2), "end"], path, "cuda:1").read_bytes()
    for nbytes in range(len(data)):
        path.write_bytes(data[:nbytes])
        with pytest.raises(InputError):
            inspect(path)


# -- any tree --------------------------------------------------------------------------------------

within = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
random_tags = st.sampled_from((*TAGS, "cuda:12", "privateuseone:7"))


@within
@given(
    made=checkpoint_trees(),
    protocol=st.integers(0, 5),
    optimize=st.booleans(),
    rules=st.dictionaries(st.sampled_from(TAGS), random_tags, min_size=1),
)
def test_any_rules_on_any_tree(
    made: Checkpoint, protocol: int, optimize: bool, rules: dict[str, str], tmp_path: Path
) -> None:
    path, out, twice = (tmp_path / f"{name}.pkl" for name in ("made", "out", "twice"))
    with tagging(made.tag):
        data = pickle.dumps(made.tree, protocol)
    path.write_bytes(pickletools.optimize(data) if optimize else data)
    if not path.read_bytes().startswith(b"\x80") and not held(made.tree):
        return  # a lone number or string of protocol 0 may be anything
    before = [each.location for each in inspect(path).storages.values()]
    relocate(path, out, map=rules, force=True, allow_unmatched=True)
    after = [each.location for each in inspect(out).storages.values()]
    assert after == [rules.get(where, where) for where in before]
    try:
        was, places = loaded(path)
    except (AttributeError, KeyError, RuntimeError):
        return  # a dtype without a storage class, which torch writes and can't read
    tree, new_places = loaded(out)
    assert_same_tree(was, tree)
    assert new_places == {rules.get(where, where) for where in places}
    stay = {where: where for where in after} or {"cpu": "cpu"}
    assert relocate(out, twice, map=stay, force=True, allow_unmatched=True).method == "clone"
    assert twice.read_bytes() == out.read_bytes()


def held(tree: object) -> bool:
    """Whether it is a container or a tensor."""
    return isinstance(tree, (dict, list, tuple, torch.Tensor))


# -- memory ----------------------------------------------------------------------------------------

BIG = """
import pickle, sys, torch
with open(sys.argv[1], "wb") as file:
    pickle.dump([torch.zeros(1 << 28, dtype=torch.uint8) for _ in range(4)], file, protocol=4)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_a_gigabyte_is_never_in_memory(tmp_path: Path) -> None:
    path, out = tmp_path / "made.pkl", tmp_path / "out.pkl"
    subprocess.run([sys.executable, "-c", BIG, path], check=True, cwd=ROOT)
    peaks = [peak("inspect", path)]
    peaks += [peak("relocate", path, out, "--to", to, "--force") for to in ("cuda:1", LONG)]
    assert min(peaks) > 1_000_000
    assert max(peaks) < 80_000_000, peaks
    assert inspect(out).devices.keys() == {LONG}
    assert list(frames(out)) == list(frames(path))
    path.unlink()
    out.unlink()


def frames(path: Path) -> Iterator[int]:
    """The length of each storage of the file."""
    yield from (each.nbytes for each in inspect(path).storages.values())


def test_makers_of_large_storages_leave_them_outside_of_frames(tmp_path: Path) -> None:
    PICKLED_MAKERS["large_4"](path := tmp_path / "made.pkl", "cuda:1")
    assert check_frames(path.read_bytes()) > 1
    assert check_frames(moved(path, LONG).read_bytes()) > 1
