"""What converters of this field are known to get wrong, each a file that torch wrote."""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptmove import CorruptError, RefusedError, convert, diff, inspect, save
from tests.conftest import RunCli
from tests.making.checkpoints import MAKERS, rezip, sparse_zip64
from tests.making.legacy import LEGACY_MAKERS
from tests.making.objects import Settings
from tests.making.relaying import big_endian
from tests.oracles.readers import assert_sound_zip, load, loads_with_computed_offsets
from tests.oracles.sameness import assert_same_tree, assert_shows_the_same, shown_bytes
from tests.oracles.showing import elements


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def there_and_back(source: Path, folder: Path) -> tuple[Path, Path]:
    there, back = folder / "there.safetensors", folder / "back.pt"
    convert(source, there)
    convert(there, back, trust_objects=True)
    return there, back


def assert_comes_back(saved: object, folder: Path, *, protocol: int = 2) -> Path:
    """What torch saves and loads is the same after a round trip; gives the safetensors file."""
    torch.save(saved, folder / "made.pt", pickle_protocol=protocol)
    there, back = there_and_back(folder / "made.pt", folder)
    wanted = load(folder / "made.pt", weights_only=False)
    assert_shows_the_same(wanted, load(back, weights_only=False))
    return there


# -- names -------------------------------------------------------------------------------------

NAMES: dict[str, str] = {
    "a.b": "a.b",
    "/x/é\n\0": "/x/é\n\0",
    "__metadata__": "__metadata__~",
    "": "tensor",
    "\ud800": "\\ud800",
    "tensor": "tensor~2",
    "$": "$",
    "a" * 300: "a" * 300,
}


def test_any_key_is_a_name_or_gets_one(tmp_path: Path) -> None:
    saved = {key: torch.tensor([float(n)]) for n, key in enumerate(NAMES)}
    there = assert_comes_back(saved, tmp_path)
    found = {name: float(value) for name, value in load_file(there).items()}
    assert found == {NAMES[key]: float(value) for key, value in saved.items()}


def test_only_the_tensors_of_one_state_dict_have_its_names(tmp_path: Path) -> None:
    one, two = {"conv.w": torch.ones(1)}, {"fc.w": torch.ones(1)}
    saved = {
        "one": ({"model": one, "again": one}, {"conv.w"}),
        "two": (
            {"generator": one, "discriminator": two},
            {"generator.conv.w", "discriminator.fc.w"},
        ),
        "optimizer": (
            {"model": one, "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}},
            {"model.conv.w", "optimizer.state.0.exp_avg"},
        ),
    }
    for name, (tree, wanted) in saved.items():
        torch.save(tree, tmp_path / f"{name}.pt")
        convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
        assert load_file(tmp_path / f"{name}.safetensors").keys() == wanted


def test_paths_that_are_spelled_alike_get_names_of_their_own(tmp_path: Path) -> None:
    saved = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "a.b~2": torch.ones(3)}
    there = assert_comes_back([saved, 0], tmp_path)
    shapes = {name: tuple(value.shape) for name, value in load_file(there).items()}
    assert sorted(shapes.values()) == [(1,), (2,), (3,)]
    assert (shapes['0."a.b"'], shapes["0.a.b"]) == ((1,), (2,))


def test_keys_of_any_type_come_back(tmp_path: Path) -> None:
    keys = [1, "1", 1.5, None, (1, "x"), b"raw", frozenset({2}), 2**70, float("inf")]
    there = assert_comes_back({key: torch.tensor(n) for n, key in enumerate(keys)}, tmp_path)
    assert sorted(map(int, load_file(there).values())) == list(range(len(keys)))


# -- numbers -----------------------------------------------------------------------------------


def test_bits_stay_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x400000, -0x80000000, 1]).to(torch.int32)
    saved = {
        "float": bits.view(torch.float32),
        "strided": bits.view(torch.float32).repeat(2).view(2, 5).t(),
        "half": torch.tensor([0x7C01, -0x8000]).to(torch.int16).view(torch.bfloat16),
        "scalars": [float("nan"), -0.0, struct.unpack("d", b"\1\0\0\0\0\0\xf0\x7f")[0]],
        "zero": torch.tensor(-0.0),
        "none": [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.int8)],
        "whole": torch.tensor([2**63 - 1, -(2**63)]),
        "bool": torch.tensor([True, False]),
        "tiny": torch.tensor(True),
    }
    there = assert_comes_back(saved, tmp_path)
    assert shown_bytes(load_file(there)["strided"]) == shown_bytes(saved["strided"])  # type: ignore[arg-type]


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
def test_every_view_of_every_dtype(deflated: bool, tmp_path: Path) -> None:
    every: Any = MAKERS["every_dtype"]()
    saved = {
        name: [tensor, tensor.view(2, 3).t(), tensor[::2], tensor[None].expand(4, 6), tensor[1:2]]
        for name, tensor in every.items()
    }
    alone = {name: each.clone().view(2, 3).t() for name, each in every.items() if _clones(each)}
    torch.save([saved, alone], tmp_path / "made.pt")
    source = tmp_path / "made.pt"
    if deflated:
        source = rezip(source, tmp_path / "deflated.pt", compress=lambda _: True)
    _, back = there_and_back(source, tmp_path)
    assert_shows_the_same([saved, alone], load(back, weights_only=False))


def _clones(tensor: torch.Tensor) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex32
            tensor.clone()
    except RuntimeError:
        return False
    return True


def test_two_numbers_to_a_byte_have_twice_the_last_dimension(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2)
    there = assert_comes_back({"w": packed, "t": packed.view(4, 2)}, tmp_path)
    found = load_file(there)["w"]
    assert (found.dtype, found.shape) == (packed.dtype, packed.shape)
    assert torch.equal(found.view(torch.uint8), packed.view(torch.uint8))
    head = there.read_bytes()[8:400]
    assert b'"F4","shape":[2,8]' in head.replace(b" ", b"")


@pytest.mark.parametrize("lazy", ["conj", "neg", "both", "strided"])
def test_lazy_bits_are_resolved_or_kept(lazy: str, tmp_path: Path) -> None:
    base = torch.randn(3, 2, dtype=torch.complex128)
    views: dict[str, torch.Tensor] = {
        "conj": base.conj(),
        "neg": base.conj().imag,
        "both": torch._neg_view(base.conj()),
        "strided": base.conj().t(),
    }
    there = assert_comes_back({"w": views[lazy]}, tmp_path)
    resolved = views[lazy].resolve_conj().resolve_neg()
    (name,) = inspect(there).storages
    (shown,) = elements(there, inspect(there)).values()
    assert shown == shown_bytes(resolved), name


# -- trees -------------------------------------------------------------------------------------


def recursive() -> object:
    weight = torch.ones(2)
    inner: dict[str, Any] = {"weight": weight}
    outer: list[Any] = [inner, (inner, weight)]
    inner["up"] = outer
    return outer


TREES: dict[str, Callable[[], object]] = {
    "recursive": recursive,
    "tensors in a tuple": lambda: ((torch.ones(1), (torch.zeros(2),)),),
    "tensors in a set": lambda: [{torch.ones(1)}, frozenset({torch.zeros(1)})],
    "tensors in objects": lambda: argparse.Namespace(
        weight=torch.ones(2), inner=Settings("x", torch.device("cuda", 1), torch.ones(1).t())
    ),
    "no tensors": lambda: {"epoch": 3, "args": [None, True, 2.5, "text", b"bytes", {1, 2}]},
    "a leaf": lambda: "text",
    "a tensor": lambda: torch.ones(2).requires_grad_(),
    "long bytes": lambda: [b"x" * 10_000, b"w" * 10_000, bytearray(b"y" * 5000), b"z" * 4096],
    "an array": lambda: {"array": np.arange(5000), "number": np.float32(0.1)},
    "long integers": lambda: [10**400, -(2**63), 2**63, 2**64],
    "deep": lambda: _deep(400),
    "one of all": lambda: (lambda each: [each, each, {"x": each}])([torch.ones(1)]),
}


def _deep(depth: int) -> object:
    tree: object = torch.ones(1)
    for n in range(depth):
        tree = [tree] if n % 2 else {"x": tree}
    return tree


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("what", TREES)
def test_any_structure_comes_back(what: str, protocol: int, tmp_path: Path) -> None:
    torch.save(TREES[what](), tmp_path / "made.pt", pickle_protocol=protocol)
    there, back = there_and_back(tmp_path / "made.pt", tmp_path)
    convert(back, tmp_path / "again.safetensors")
    assert there.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    ours, theirs = (load(each, weights_only=False) for each in (tmp_path / "made.pt", back))
    if what == "recursive":
        ours, theirs = _unrolled(ours), _unrolled(theirs)
    assert_shows_the_same(ours, theirs)


def _unrolled(outer: Any) -> object:
    inner, pair = outer
    assert inner["up"] is outer
    assert pair[0] is inner
    assert pair[1] is inner["weight"]
    return [inner["weight"], list(inner), len(outer)]


def test_equal_long_bytes_become_one(tmp_path: Path) -> None:
    """The pickle recalls their text, and calls that encode one text share its bytes."""
    made = [b"x" * 10_000, bytes(bytearray(b"x" * 10_000))]
    torch.save(made, tmp_path / "made.pt")
    _, back = there_and_back(tmp_path / "made.pt", tmp_path)
    convert(back, tmp_path / "again.safetensors")
    assert load(back, weights_only=False) == made
    assert len(load_file(tmp_path / "again.safetensors")) == 1


def test_long_bytes_do_not_lie_in_the_header(tmp_path: Path) -> None:
    array = np.random.default_rng(0).bytes(3_000_000)
    for protocol in (2, 4):
        there = assert_comes_back({"a": array, "w": torch.ones(1)}, tmp_path, protocol=protocol)
        with safe_open(there, "pt") as file:
            assert len(file.metadata()["ckptmove"]) < 1000
            names = sorted(set(file.keys()) - {"w"})
            assert [bytes(file.get_tensor(name).numpy()) for name in names] == [array]
        for made in tmp_path.iterdir():
            made.unlink()


def test_a_key_set_twice_has_its_last_value(tmp_path: Path) -> None:
    def set_twice(data: bytes) -> bytes:
        """Set the key of the second tensor to be that of the first."""
        return data.replace(b"X\x02\x00\x00\x00w2", b"X\x02\x00\x00\x00w1")

    torch.save({"w1": torch.ones(1), "w2": torch.zeros(2)}, tmp_path / "plain.pt")
    rezip(tmp_path / "plain.pt", tmp_path / "made.pt", edit_pickle=set_twice)
    _, back = there_and_back(tmp_path / "made.pt", tmp_path)
    wanted = load(tmp_path / "made.pt", weights_only=True)
    assert_same_tree({"w1": torch.zeros(2)}, wanted)
    assert_shows_the_same(wanted, load(back, weights_only=True))


# -- files -------------------------------------------------------------------------------------

LIMIT = 100_000_000  # safetensors' own


@pytest.mark.slow
def test_a_header_may_be_as_long_as_the_library_reads(tmp_path: Path, run_cli: RunCli) -> None:
    def make(length: int) -> None:
        torch.save({"w": torch.ones(2), "text": "x" * length}, tmp_path / "made.pt")

    make(1)
    convert(tmp_path / "made.pt", tmp_path / "small.safetensors")
    with (tmp_path / "small.safetensors").open("rb") as file:
        rest = int.from_bytes(file.read(8), "little")
    room = LIMIT - rest
    make(room + 1 - 8)
    convert(tmp_path / "made.pt", tmp_path / "full.safetensors")
    with (tmp_path / "full.safetensors").open("rb") as file:
        assert LIMIT - 8 <= int.from_bytes(file.read(8), "little") <= LIMIT
    assert torch.equal(load_file(tmp_path / "full.safetensors")["w"], torch.ones(2))
    make(room + 16)
    done = run_cli("convert", "made.pt", "over.safetensors", exit=4)
    assert "header" in done.stderr
    assert not (tmp_path / "over.safetensors").exists()


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
def test_numbers_of_big_machines_are_turned_around(
    target: str, deflated: bool, tmp_path: Path
) -> None:
    base = torch.arange(24, dtype=torch.int32).view(4, 6)
    saved = {
        "double": torch.randn(5, dtype=torch.float64),
        "short": torch.arange(300, dtype=torch.int16),
        "half": torch.randn(7).bfloat16(),
        "byte": torch.arange(5, dtype=torch.uint8),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex128).conj(),
        "t": base.t(),
        "row": base[1],
        "zero": torch.tensor(3.5),
        "strided": torch.randn(3, 4).t(),
    }
    torch.save(saved, tmp_path / "little.pt")
    widths = [8, 2, 2, 1, 4, 8, 4, 4, 4]
    source = big_endian(
        tmp_path / "little.pt",
        tmp_path / "made.pt",
        {str(n): width for n, width in enumerate(widths)},
        deflated=deflated,
    )
    assert_same_tree(saved, load(source, weights_only=True))
    convert(source, tmp_path / target)
    convert(tmp_path / target, tmp_path / "back.pt")
    assert_shows_the_same(saved, load(tmp_path / "back.pt", weights_only=True))
    assert_sound_zip(tmp_path / "back.pt")


@pytest.mark.parametrize("name", ["adamw_training", "slices_of_one_storage", "sparse_csr"])
def test_deflated_records_are_stored_again(name: str, tmp_path: Path) -> None:
    torch.save(MAKERS[name](), tmp_path / "plain.pt")
    rezip(tmp_path / "plain.pt", tmp_path / "made.pt", compress=lambda _: True)
    there, back = there_and_back(tmp_path / "made.pt", tmp_path)
    assert_shows_the_same(MAKERS[name](), load(back, weights_only=False))
    convert(tmp_path / "plain.pt", tmp_path / "plain.safetensors")
    assert there.read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_what_lies_behind_4_gib_is_found(tmp_path: Path) -> None:
    source = sparse_zip64(tmp_path / "made.pt", 5)
    convert(source, tmp_path / "there.safetensors", exclude_tensors="big")
    found = load_file(tmp_path / "there.safetensors")
    for key, name in ((0, "before"), (2, "after")):
        mark = f"data/{key}".encode().ljust(16, b"~")
        assert raw(found[name])[:16] == raw(found[name])[-16:] == mark


@pytest.mark.slow
def test_a_record_of_more_than_4_gib(tmp_path: Path) -> None:
    nbytes = (1 << 32) + 4096
    entry = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    head = json.dumps({"big": entry}).encode()
    source, out = tmp_path / "made.safetensors", tmp_path / "out.pt"
    with source.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head + b"start")
        file.truncate(8 + len(head) + nbytes)
        file.seek(-3, os.SEEK_END)
        file.write(b"end")
    convert(source, out)
    assert out.stat().st_blocks * 512 < 1 << 24, "holes stay holes"
    found: Any = load(out, weights_only=True, mmap=True)
    assert found["big"].shape == (nbytes,)
    assert raw(found["big"][:5]) + raw(found["big"][-3:]) == b"startend"
    mapped: Any = loads_with_computed_offsets(out)
    assert raw(mapped["big"][-3:]) == b"end"


@pytest.mark.parametrize("name", [name for name in LEGACY_MAKERS if "python2" in name])
def test_files_of_python_2(name: str, tmp_path: Path) -> None:
    LEGACY_MAKERS[name](tmp_path / "made.pt", "cpu")
    _, back = there_and_back(tmp_path / "made.pt", tmp_path)
    ours: Any = load(tmp_path / "made.pt", weights_only=False)
    theirs: Any = load(back, weights_only=False)
    pairs = zip(ours.values(), theirs.values(), strict=True) if isinstance(ours, dict) else None
    for pair in pairs or [(ours, theirs)]:
        assert_shows_the_same(*pair)


def test_a_damaged_source_is_found_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000), "t": torch.ones(40, 30).t()}, tmp_path / "made.pt")
    data = bytearray((tmp_path / "made.pt").read_bytes())
    at = data.index(torch.ones(1000).numpy().tobytes()) + 17
    data[at] ^= 1
    (tmp_path / "made.pt").write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        convert(tmp_path / "made.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


TENSOR = {"$": "tensor", "of": "w"}
MALFORMED: dict[str, object] = {
    "a dtype that is a list": {**TENSOR, "dtype": []},
    "a storage that is a dict": {**TENSOR, "storage": {}},
    "an unknown storage": {**TENSOR, "storage": "float7"},
    "a stride that is a number": {**TENSOR, "shape": [2], "stride": 1},
    "a shape of text": {**TENSOR, "shape": ["2"]},
    "a negative offset": {**TENSOR, "shape": [1], "offset": -1},
    "more than there is": {**TENSOR, "shape": [3]},
    "a stride too far": {**TENSOR, "shape": [2], "stride": [2]},
    "a huge stride": {**TENSOR, "shape": [2], "stride": [1 << 62]},
    "a device that is a number": {**TENSOR, "device": 0},
    "a flag that is a number": {**TENSOR, "grad": 1},
    "a key too many": {**TENSOR, "colour": "red"},
    "a name that is none": {"$": "tensor", "of": 3},
    "a storage's dtype that is a list": {"$": "storage", "of": "w", "dtype": []},
    "a storage of another size": {"$": "storage", "of": "w", "dtype": "complex128"},
    "two dtypes": [{"$": "storage", "of": "w", "dtype": "int32"}, TENSOR],
    "two devices": [{**TENSOR, "device": "cuda:0"}, TENSOR],
    "a blob that says more": {"$": "blob", "of": "w", "dtype": "uint8"},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_tree_that_contradicts_its_file_is_refused(what: str, tmp_path: Path) -> None:
    tree = json.dumps({"version": 1, "root": MALFORMED[what]})
    save_file({"w": torch.ones(2)}, tmp_path / "made.safetensors", {"ckptmove": tree})
    for run in (inspect, lambda path: convert(path, tmp_path / "out.pt")):
        with pytest.raises(CorruptError, match="its tree"):
            run(tmp_path / "made.safetensors")
    assert not (tmp_path / "out.pt").exists()


def test_a_tree_that_does_not_fit_its_tensors_is_ignored_with_a_warning(tmp_path: Path) -> None:
    for n, root in enumerate(([{**TENSOR, "of": "gone"}], {"epoch": 3})):
        tree = json.dumps({"version": 1, "root": root})
        source = tmp_path / f"{n}.safetensors"
        save_file({"w": torch.ones(2)}, source, {"ckptmove": tree})
        report = convert(source, tmp_path / f"{n}.pt")
        assert "its tree" in report.warnings[0]
        assert_same_tree({"w": torch.ones(2)}, load(tmp_path / f"{n}.pt", weights_only=True))


# -- casts of bytes that are more than numbers of one kind ---------------------------------------


@pytest.mark.parametrize(
    ("content", "tensors", "why"),
    [
        (
            10,
            {"a": {"dtype": "float32", "shape": [2]}},
            "its storage ends in the middle of an element",
        ),
        (
            16,
            {"a": {"dtype": "float32", "shape": [4]}, "b": {"dtype": "bfloat16", "shape": [4]}},
            "tensors of several dtypes use its bytes",
        ),
    ],
)
def test_what_is_more_than_numbers_of_one_kind_is_not_cast(
    content: int, tensors: dict[str, dict[str, Any]], why: str, tmp_path: Path
) -> None:
    """As only terms can say it: torch gives no storage two dtypes, nor half of a number."""
    path = tmp_path / "saved.safetensors"
    term = {"$": "tensor", "of": "x", "storage": "untyped"}
    root = {name: {**term, **said} for name, said in tensors.items()}
    tree = json.dumps({"version": 1, "root": root})
    save_file({"x": torch.arange(content, dtype=torch.uint8)}, path, {"ckptmove": tree})
    for out in ("out.pt", "out.safetensors"):
        with pytest.raises(RefusedError, match=why):
            convert(path, tmp_path / out, dtype={"*": "bf16"})


def test_more_files_are_written_than_can_be_open(tmp_path: Path) -> None:
    torch.save([torch.ones(1) for _ in range(100)], path := tmp_path / "saved.pt")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        convert(path, tmp_path / "out", max_shard_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 100
    assert diff(path, tmp_path / "out").equal


# -- tensors that overlap, where no tree tells how ------------------------------------------------


@pytest.mark.parametrize("options", [{"bare": True}, {"shared": "duplicate"}, {"preset": "hf"}])
@pytest.mark.parametrize("what", ["overlap", "part", "transposed", "repeated"])
def test_each_name_has_its_own_numbers_and_shape(
    what: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = torch.arange(9.0)
    saved = {
        "overlap": {"a": base[0:6], "b": base[3:9]},
        "part": {"a": base, "b": base[2:4], "c": base.view(3, 3)},
        "transposed": {"a": base.view(3, 3).T, "b": base[2:4], "c": base.view(3, 3).T},
        "repeated": {"a": base[:1].expand(4), "b": base[0]},
    }[what]
    torch.save(saved, path := tmp_path / "saved.pt")
    report = convert(path, out := tmp_path / "out.safetensors", **options)
    found = load_file(out)
    for name, tensor in saved.items():
        twin = found[report.shared.get(name, name)]
        assert (twin.shape, raw(twin)) == (tensor.shape, raw(tensor))
    if "shared" in options:
        assert saved.keys() <= found.keys()
        convert(out, back := tmp_path / "back.pt")
        assert_shows_the_same(load(path, weights_only=True), load(back, weights_only=True))


BY_THE_TREE: dict[str, Callable[[], torch.Tensor]] = {
    "int8 numbers with a scale": lambda: torch.quantize_per_tensor(
        torch.ones(2), 0.1, 0, torch.qint8
    ),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("what", BY_THE_TREE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_the_tree_alone_tells_is_a_loss_without_it(what: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "q": BY_THE_TREE[what]()}, path := tmp_path / "saved.pt")
    out = tmp_path / "out.safetensors"
    with pytest.raises(RefusedError, match="would lose q, which is"):
        save({"q": BY_THE_TREE[what]()}, out, bare=True)
    with pytest.raises(RefusedError, match="would lose q, which is"):
        convert(path, out, bare=True)
    assert [loss.name for loss in convert(path, out, bare=True, drop="q").dropped] == ["q"]
    assert not convert(path, out, force=True).dropped
