"""Two checkpoints differ in what was changed, and in nothing else."""

from __future__ import annotations

import json
import math
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptmove
from ckptmove import Diff, Kind, diff
from tests.conftest import ROOT, RunCli, some
from tests.making.checkpoints import MAKERS, save_tagged
from tests.making.families import FAMILIES
from tests.making.relaying import big_endian, rezipped
from tests.making.strategies import Checkpoint, base_tensors, checkpoint_trees, values

Tree = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Planted = list[tuple[str, str]]  # kind and name of each difference


def saved(path: Path, tree: object, **options: Any) -> Path:
    torch.save(tree, path, **options)
    return path


def kinds(found: Diff) -> Planted:
    return [(str(each.kind), each.name) for each in found.differences]


def changed(found: Diff) -> ckptmove.Values:
    """The values of the only difference."""
    (only,) = found.differences
    assert only.kind is Kind.CHANGED
    assert only.values is not None
    return only.values


# -- one planted change ------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A state dict, a copy of one of its tensors, and a value."""
    names = st.sampled_from(["weight", "bias", "0", "a.b", "running_mean", "step"])
    model = draw(st.dictionaries(names, base_tensors(), min_size=2, max_size=5))
    tensor = model[draw(st.sampled_from(sorted(model)))]
    twin = tensor.view(-1).view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape)
    return {"model": model, "twin": twin, "rest": draw(values()), "epoch": draw(st.integers())}


def flip(tree: Tree, draw: Draw) -> Planted:
    names = sorted(name for name, tensor in tree["model"].items() if tensor.numel())
    if not names:
        return []
    name = draw(st.sampled_from(names))
    raw = tree["model"][name].view(-1).view(torch.uint8)
    raw[draw(st.integers(0, len(raw) - 1))] ^= 1
    return [("changed", f"model.{name}")]


def rename(tree: Tree, draw: Draw) -> Planted:
    name = draw(st.sampled_from(sorted(tree["model"])))
    tree["model"] = {k + "~" if k == name else k: v for k, v in tree["model"].items()}
    return [("renamed", f"model.{name}")]


def remove(tree: Tree, draw: Draw) -> Planted:
    name = draw(st.sampled_from(sorted(tree["model"])))
    del tree["model"][name]
    return [("removed", f"model.{name}")]


def add(tree: Tree, draw: Draw) -> Planted:
    tree["model"]["new"] = draw(base_tensors())
    return [("added", "model.new")]


def reshape(tree: Tree, draw: Draw) -> Planted:
    name = draw(st.sampled_from(sorted(tree["model"])))
    tree["model"][name] = tree["model"][name][None]
    return [("reshaped", f"model.{name}")]


def retype(tree: Tree, draw: Draw) -> Planted:
    name = draw(st.sampled_from(sorted(tree["model"])))
    old = tree["model"][name]
    new = torch.float32 if old.dtype != torch.float32 else torch.int32
    tree["model"][name] = torch.zeros(old.shape, dtype=new)
    return [("retyped", f"model.{name}")]


def reorder(tree: Tree, draw: Draw) -> Planted:
    tree["model"] = dict(reversed(tree["model"].items()))
    return [("order", "model")]


def other_type(tree: Tree, draw: Draw) -> Planted:
    tree["model"] = OrderedDict(tree["model"])
    return [("type", "model")]


def count_on(tree: Tree, draw: Draw) -> Planted:
    tree["epoch"] += 1
    return [("value", "epoch")]


def add_value(tree: Tree, draw: Draw) -> Planted:
    tree["lr"] = draw(values())
    return [("value added", "lr")]


def remove_value(tree: Tree, draw: Draw) -> Planted:
    del tree["rest"]
    return [("value removed", "rest")]


def tie(tree: Tree, draw: Draw) -> Planted:
    same = [k for k, v in tree["model"].items() if v.numel() and same_bits(v, tree["twin"])]
    if not same:
        return []
    tree["twin"] = tree["model"][same[0]]
    return [("shared", f"model.{same[0]}")]


def require_grad(tree: Tree, draw: Draw) -> Planted:
    names = [name for name, v in tree["model"].items() if v.dtype is torch.float32]
    for name in names[:1]:
        tree["model"][name].requires_grad_()
    return [("value", f"model.{name}.requires_grad") for name in names[:1]]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raws = [t.contiguous().view(-1).view(torch.uint8).tolist() for t in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and raws[0] == raws[1]


FAULTS: Sequence[Callable[[Tree, Draw], Planted]] = (
    *(flip, rename, remove, add, reshape, retype, reorder, other_type, count_on, add_value),
    *(remove_value, tie, require_grad),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("plant", FAULTS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exactly_what_was_planted_is_found(
    plant: Callable[[Tree, Draw], Planted], data: st.DataObject, tmp_path: Path
) -> None:
    tree = data.draw(trees())
    before = saved(tmp_path / "a.pt", tree)
    planted = plant(tree, data.draw)
    after = saved(tmp_path / "b.pt", tree)
    found = diff(before, after)
    assert kinds(found) == planted
    assert found.equal is not bool(planted)
    backwards = diff(after, before)
    assert len(backwards.differences) == len(planted)
    json.dumps([found.to_json(), backwards.to_json()], allow_nan=False)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoint=checkpoint_trees())
def test_the_same_tree_is_equal_in_every_format(checkpoint: Checkpoint, tmp_path: Path) -> None:
    one = tmp_path / "a.pt"
    save_tagged(checkpoint.tree, one, checkpoint.tag)
    other = saved(tmp_path / "b.pt", checkpoint.tree, _use_new_zipfile_serialization=False)
    assert kinds(diff(one, other, ignore_devices=True)) == []
    try:
        ckptmove.convert(one, tmp_path / "c.safetensors", force=True)
    except (ckptmove.RefusedError, ckptmove.UnsupportedError):
        return
    assert kinds(diff(one, tmp_path / "c.safetensors")) == []


# -- everything worth saving -------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_bytes_that_change_are_never_missed(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", MAKERS[name]())
    assert kinds(diff(path, saved(tmp_path / "same.pt", MAKERS[name]()))) == []
    manifest = ckptmove.inspect(path)
    used = {entry.storage for entry in manifest.tensors if entry.nbytes}
    content = path.read_bytes()
    for storage in [manifest.storages[key] for key in used if key][:6]:
        assert storage.extent is not None
        start, end = storage.extent.start, storage.extent.end
        flipped = bytes(byte ^ 1 for byte in content[start:end])
        (tmp_path / "b.pt").write_bytes(content[:start] + flipped + content[end:])
        assert not diff(path, tmp_path / "b.pt").equal, storage


@pytest.mark.parametrize("name", sorted(MAKERS)[::4])
def test_what_was_relocated_is_equal_but_for_devices(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", MAKERS[name]())
    report = ckptmove.relocate(path, tmp_path / "b.pt", to="cuda:1", all=True)
    assert kinds(diff(path, tmp_path / "b.pt", ignore_devices=True)) == []
    moved = diff(path, tmp_path / "b.pt")
    assert moved.equal is not bool(report.moved)
    assert {each.kind for each in moved.differences} <= {Kind.MOVED, Kind.VALUE}


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_equal_to_itself(family: str, tmp_path: Path) -> None:
    for name, make in some(sorted(FAMILIES[family].items())[:8], 3):
        path = tmp_path / name
        try:
            make(path, "cpu")
        except pytest.skip.Exception:
            continue
        copy = tmp_path / f"{name}.copy"
        copy.write_bytes(path.read_bytes())
        assert diff(path, copy).equal, name


# -- values ------------------------------------------------------------------------------------


def test_nan_counts_by_its_bits(tmp_path: Path) -> None:
    nan, payload = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (0x7FC00000, 1))
    a = torch.tensor([nan, 1.0, nan, 2.0, 0.0])
    bits = a.view(torch.int32).clone()
    bits[2] = 0x7FC00001
    b = bits.view(torch.float32).clone()
    one, other = saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b)
    assert diff(one, saved(tmp_path / "c.pt", a.clone())).equal
    found = changed(diff(one, other))
    assert (found.differing, found.of, found.first) == (1, 5, (2,))
    assert (found.old, found.new, found.max_abs) == ("nan", "nan", None)
    assert diff(one, other, atol=1e-9).close == 1
    b[1], b[4] = nan, payload
    found = changed(diff(one, saved(other, b), atol=1e-3))
    assert (found.differing, found.first, found.new) == (1, (1,), "nan")


@pytest.mark.parametrize(
    "dtype", [*(torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.complex64]
)
def test_numbers_are_those_of_numpy(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    a = torch.randn(70, 1000).to(dtype)
    b = a.clone()
    b[3:60:7, ::13] *= 1.01
    b[69, 999] = 0
    a[69, 998] = 0
    found = changed(diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    old, new = a.to(wide).numpy(), b.to(wide).numpy()
    apart = np.abs(new - old)
    assert found.differing == np.count_nonzero(old != new)
    assert found.of == a.numel()
    assert found.first == tuple(np.argwhere(old != new)[0])
    assert found.max_abs == pytest.approx(apart.max())
    assert found.max_rel == pytest.approx((apart[old != 0] / np.abs(old[old != 0])).max())
    far = ~np.isclose(new, old, rtol=0.02, atol=0.01)
    loose = diff(tmp_path / "a.pt", tmp_path / "b.pt", rtol=0.02, atol=0.01)
    assert changed(loose).differing == far.sum()


@pytest.mark.parametrize(
    ("old", "new", "most"),
    [
        ("inf", "nan", (None, None)),
        ("nan", "inf", (None, None)),
        ("-1", "nan", (None, None)),
        ("inf", "-inf", (math.inf, None)),
        ("0", "inf", (math.inf, None)),
        ("2", "inf", (math.inf, math.inf)),
    ],
)
@pytest.mark.parametrize("atol", [0.0, 0.001])
def test_the_largest_difference_is_a_number_or_not_told(
    old: str, new: str, most: tuple[float | None, float | None], atol: float, tmp_path: Path
) -> None:
    one, other = (torch.tensor([float(each), 1.0]) for each in (old, new))
    report = diff(saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", other), atol=atol)
    found = changed(report)
    assert (found.max_abs, found.max_rel) == most
    assert "-0" not in str(report)


@pytest.mark.usefixtures("warm")
def test_what_is_within_the_tolerance_is_equal(tmp_path: Path, run_cli: RunCli) -> None:
    a = {"w": torch.ones(5), "n": torch.arange(3)}
    one = saved(tmp_path / "a.pt", a)
    other = saved(tmp_path / "b.pt", {**a, "w": a["w"] * 1.001})
    assert run_cli("diff", one, other, "--rtol", "0.01", exit=0).stdout == (
        "equal: 2 tensors, 44 B (1 within the tolerance)\n"
    )
    run_cli("diff", one, other, "--atol", "1e-5", exit=1)
    counted = saved(tmp_path / "c.pt", {**a, "n": a["n"] + 1})
    assert not diff(one, counted, atol=5.0).equal, "integers have no tolerance"
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ckptmove.UsageError):
            diff(one, other, atol=bad)


def test_integers_are_counted_and_shown(tmp_path: Path) -> None:
    a = torch.arange(12).view(3, 4)
    b = a.clone()
    b[1, 2] = -7
    found = changed(diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b)))
    assert found == (1, 12, (1, 2), "6", "-7", None, None)


def test_strided_views_are_compared_by_what_they_show(tmp_path: Path) -> None:
    a = torch.randn(30, 40)
    views = {
        "t": a.t(),
        "s": a[::2, 1::3],
        "c": torch.complex(a, a).conj(),
        "e": a[:1].expand(9, 40),
    }
    one = saved(tmp_path / "a.pt", views)
    plain = {name: view.resolve_conj().contiguous() for name, view in views.items()}
    other = saved(tmp_path / "b.pt", plain)
    found = diff(one, other)
    assert {each.kind for each in found.differences} == {Kind.UNSHARED}
    plain["s"][1, 2] += 1
    found = diff(one, saved(other, plain))
    assert ("changed", "s") in kinds(found)
    values = next(each.values for each in found.differences if each.kind is Kind.CHANGED)
    assert values is not None
    assert values.first == (1, 2)
    gap = a.clone()
    gap[1, 0] += 1  # what no view shows but t
    moved = {"s": gap[::2, 1::3]}
    assert diff(saved(one, {"s": a[::2, 1::3]}), saved(other, moved)).equal


@pytest.mark.filterwarnings("ignore")
def test_what_composite_tensors_say_besides_their_bytes_counts(tmp_path: Path) -> None:
    def both(old: object, new: object) -> Planted:
        return kinds(
            diff(saved(tmp_path / "a.pt", {"t": old}), saved(tmp_path / "b.pt", {"t": new}))
        )

    ones = torch.ones(4)
    quantized = [torch.quantize_per_tensor(ones * s, s, 0, torch.qint8) for s in (0.5, 0.25)]
    assert both(quantized[0], quantized[0].clone()) == []
    ((kind, name),) = both(*quantized)
    assert (kind, name[:1]) == ("value", "t")
    indices = torch.tensor([[0, 2]])
    sparse = [torch.sparse_coo_tensor(indices, ones[:2] * n, (n,)) for n in (3, 4)]
    assert both(*sparse) == [("changed", "t.values"), ("reshaped", "t")]
    meta = [torch.empty(3, dtype=d, device="meta") for d in (torch.float32, torch.int32)]
    assert both(*meta) == [("retyped", "t")]
    assert both(ones, torch.nn.Parameter(ones)) == [
        ("value", "t.requires_grad"),
        ("type", "t"),
    ]
    with_attribute = torch.nn.Parameter(ones)
    with_attribute.note = 1  # type: ignore[attr-defined]
    other = torch.nn.Parameter(ones)
    other.note = 2  # type: ignore[attr-defined]
    assert both(with_attribute, other) == [("value", "t.note")]


def test_compressed_and_swapped_bytes_are_compared_as_they_are_meant(tmp_path: Path) -> None:
    a = torch.randn(500, 30)
    views = {"w": a, "t": torch.randn(60, 20).t(), "n": torch.arange(7)}
    one = saved(tmp_path / "a.pt", views)
    swapped = big_endian(one, tmp_path / "big.pt", {"0": 4, "1": 4, "2": 8})
    squeezed = rezipped(one, tmp_path / "squeezed.pt", lambda _, data: data, deflated=True)
    for other in (swapped, squeezed):
        assert kinds(diff(one, other)) == []
        assert kinds(diff(other, one)) == []
    views["t"][3, 2] += 1
    a[7, 7] += 1
    changed_ = saved(tmp_path / "b.pt", {**views, "t": views["t"].contiguous()})
    for other in (swapped, squeezed):
        found = diff(changed_, other)
        firsts = {each.name: each.values.first for each in found.differences if each.values}
        assert firsts == {"w": (7, 7), "t": (3, 2)}


# -- names, aliases, sections ------------------------------------------------------------------


def test_renamed_tensors_are_found_whatever_their_order(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tensors = {f"layers.{n}.w": torch.randn(8) for n in range(9)}
    one = saved(tmp_path / "a.pt", {"model." + name: t for name, t in tensors.items()})
    other = saved(tmp_path / "b.pt", dict(reversed(tensors.items())))
    found = diff(one, other)
    assert {(each.old, each.new) for each in found.of("renamed")} == {
        ("model." + name, name) for name in tensors
    }
    assert len(found.differences) == len(tensors)


@pytest.mark.parametrize("size", [4, 1 << 16])
def test_progress_counts_the_bytes_of_tied_weights_once(size: int, tmp_path: Path) -> None:
    tied, reported = torch.ones(size), list[int]()
    saved(tmp_path / "a.pt", {"a": tied, "b": tied, "c": torch.ones(2)})
    saved(tmp_path / "b.pt", {"a": tied, "b": tied, "c": torch.ones(2)})
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt", progress=reported.append)
    assert sum(reported) == found.nbytes == 4 * size + 8


def test_untied_weights_are_an_alias_lost(tmp_path: Path, run_cli: RunCli) -> None:
    embedding = torch.randn(7, 4)
    tied = {"wte.weight": embedding, "h": torch.randn(3), "lm_head.weight": embedding}
    one = saved(tmp_path / "a.pt", tied)
    untied = saved(tmp_path / "b.pt", {**tied, "lm_head.weight": embedding.clone()})
    (lost,) = diff(one, untied).differences
    assert (lost.kind, lost.names) == (Kind.UNSHARED, ("wte.weight", "lm_head.weight"))
    assert kinds(diff(untied, one)) == [("shared", "wte.weight")]
    said = run_cli("diff", one, untied, exit=1).stdout
    assert said.splitlines()[0] == "different: 1 alias removed"
    assert "no longer shared  wte.weight    lm_head.weight" in said


def test_objects_that_are_one_and_the_same(tmp_path: Path) -> None:
    group = {"lr": 0.1}
    one = saved(tmp_path / "a.pt", {"a": group, "b": group, "w": torch.ones(1)})
    two = saved(tmp_path / "b.pt", {"a": {"lr": 0.1}, "b": {"lr": 0.1}, "w": torch.ones(1)})
    assert [each.names for each in diff(one, two).of("unshared")] == [("a", "b")]
    assert kinds(diff(two, one)) == [("shared", "a")]


def test_a_cast_checkpoint_equals_its_source_after_the_same_cast(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = {"a.weight": torch.randn(300, 40), "a.bias": torch.randn(40), "n": torch.arange(4)}
    one = saved(tmp_path / "a.pt", {"model": model, "step": 3})
    half = tmp_path / "half.safetensors"
    ckptmove.convert(one, half, dtype="bf16")
    assert kinds(diff(one, half)) == [("retyped", "model.a.weight"), ("retyped", "model.a.bias")]
    found = diff(one, half, cast=True)
    assert found.equal
    assert found.cast == {"float32→bfloat16": 2}
    half.unlink()
    model["a.bias"][7] += 1
    ckptmove.convert(saved(tmp_path / "b.pt", {"model": model, "step": 3}), half, dtype="bf16")
    values = changed(diff(one, half, cast=True))
    assert (values.differing, values.first) == (1, (7,))


def test_a_plain_file_of_tensors_against_its_checkpoint(tmp_path: Path) -> None:
    model = {"w": torch.randn(3, 3), "b": torch.randn(3)}
    one = saved(tmp_path / "a.pt", model)
    save_file(model, tmp_path / "b.safetensors")
    found = diff(one, tmp_path / "b.safetensors")
    assert set(kinds(found)) <= {("order", "(root)")}
    model["w"][0, 0] += 1
    save_file(model, tmp_path / "b.safetensors")
    assert ("changed", "w") in kinds(diff(one, tmp_path / "b.safetensors"))


def test_a_device_that_is_not_stored_is_no_other_device(tmp_path: Path, run_cli: RunCli) -> None:
    save_tagged({"w": torch.ones(2), "b": torch.ones(1)}, tmp_path / "a.pt", "cuda:0")
    ckptmove.convert(tmp_path / "a.pt", tmp_path / "bare.safetensors", bare=True)
    ckptmove.convert(tmp_path / "bare.safetensors", tmp_path / "dcp", format="dcp")
    ckptmove.relocate(tmp_path / "a.pt", tmp_path / "cpu.pt", to="cpu")
    for name in ("bare.safetensors", "dcp"):
        path = tmp_path / name
        found = diff(path, tmp_path / "a.pt").of("moved")
        assert {(each.old, each.new) for each in found} == {("not stored", "cuda:0")}
        assert not diff(tmp_path / "a.pt", path, ignore_devices=True).of("moved")
        assert not diff(path, tmp_path / "cpu.pt").of("moved")  # it is loaded there
        said = run_cli("diff", tmp_path / "a.pt", path, exit=1).stdout
        assert "cuda:0 → not stored" in said
    ckptmove.convert(tmp_path / "a.pt", tmp_path / "tree.safetensors")
    assert diff(tmp_path / "a.pt", tmp_path / "tree.safetensors").equal  # its tree has devices


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["model folder", "training folder"])
def test_other_files_of_folders_are_compared(kind: str, tmp_path: Path, run_cli: RunCli) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / name / "pytorch_model.bin")
        (tmp_path / name / "config.json").write_text('{"layers": 1}')
        (tmp_path / name / "modeling.py").write_text("scale = 1\n")
        if kind == "training folder":
            torch.save({"state": {}, "param_groups": []}, tmp_path / name / "optimizer.pt")
    a, b = tmp_path / "a", tmp_path / "b"
    assert (diff(a, b).equal, diff(a, b).records) == (True, 2)
    ckptmove.convert(a, tmp_path / "converted", format="safetensors")
    assert diff(a, tmp_path / "converted").equal
    (b / "modeling.py").write_text("scale = 2\n")
    assert kinds(diff(a, b)) == [("record", "modeling.py")]
    assert diff(a, b, ignore_code=True).equal
    assert run_cli("validate", b, "--against", a, exit=1).stdout.count("modeling.py")
    (b / "config.json").write_text('{"layers": 2}')
    assert kinds(diff(a, b, ignore_code=True)) == [("record", "config.json")]
    assert diff(a, b, select="*w").equal
    (b / "config.json").unlink()
    (b / "config.json").symlink_to(a / "config.json")
    assert kinds(diff(a, b, ignore_code=True)) == []
    assert diff(a, b).of("not compared")
    assert diff(a, b, follow_links=True, ignore_code=True).equal


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["model folder", "training folder"])
def test_files_that_one_folder_has_are_named(kind: str, tmp_path: Path, run_cli: RunCli) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / "code").mkdir(parents=True)
        (folder / "empty").mkdir()
        torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
        (folder / "code" / "modeling.py").write_text("scale = 1\n")
        if kind == "training folder":
            torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    (b / "empty").rmdir()
    assert (diff(a, b).equal, diff(a, b).records) == (True, 1)
    (b / "code" / "modeling.py").write_text("scale = 2\n")
    (a / "trainer_state.json").write_text("{}")
    (b / "notes.txt").write_text("more")
    expected = [
        ("record", "code/modeling.py"),
        ("record added", "notes.txt"),
        ("record removed", "trainer_state.json"),
    ]
    assert sorted(kinds(diff(a, b))) == expected
    assert "trainer_state.json" in run_cli("diff", a, b, exit=1).stdout
    assert "trainer_state.json" in run_cli("validate", b, "--against", a, exit=1).stdout
    assert kinds(diff(a, b, ignore_code=True)) == expected[1:]
    assert diff(a, b, select="*w").equal
    (a / "linked").symlink_to(b / "code")
    (b / "linked").symlink_to(a / "code")
    assert ("not compared", "linked") in kinds(diff(a, b))


def test_very_many_files_of_folders_are_compared(tmp_path: Path) -> None:
    resource: Any = pytest.importorskip("resource")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / name / "model.pt")
        for n in range(150):
            (tmp_path / name / f"{n}.json").write_text("{}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, most[1]))
        assert diff(tmp_path / "a", tmp_path / "b").records == 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_a_selection_leaves_out_the_rest(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tree: Tree = {"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 1}
    one = saved(tmp_path / "a.pt", tree)
    tree = deepcopy(tree)
    tree["net"]["bias"] += 1
    tree["opt"]["state"][0]["exp_avg"] += 1
    tree["epoch"] = 2
    other = saved(tmp_path / "b.pt", tree)
    assert kinds(diff(one, other, select="net")) == [("changed", "net.bias")]
    assert kinds(diff(one, other, select="model")) == [("changed", "net.bias")]
    assert kinds(diff(one, other, select=["optimizer", "epoch"])) == [
        ("changed", "opt.state.0.exp_avg"),
        ("value", "epoch"),
    ]
    assert diff(one, other, select="*.weight").equal
    del tree["opt"]["state"][0]["exp_avg_sq"]
    assert ("removed", "opt.state.0.exp_avg_sq") in kinds(
        diff(one, saved(other, tree), select="*.exp_avg_sq")
    )
    with pytest.raises(ckptmove.RefusedError, match="nothing in either"):
        diff(one, other, select="nix")


def test_sets_do_not_depend_on_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.pkl" for n in range(3)]
    for protocol in (2, 4):
        for path, names in zip(paths, ("ab", "ba", "ac"), strict=True):
            text = pickle.dumps({"s": set(names)}, protocol)
            path.write_bytes(text)
        assert diff(paths[0], paths[1]).equal
        assert kinds(diff(paths[0], paths[2])) == [
            ("value added", "s.<member>"),
            ("value removed", "s.<member>"),
        ]
    paths[1].write_bytes(pickle.dumps({"s": {"b", "a"}, "x": b"\xff\0"}, 2))
    paths[0].write_bytes(pickle.dumps({"s": {"a", "b"}, "x": b"\xff\0"}, 4))
    assert kinds(diff(paths[0], paths[1])) == []


def test_keys_of_other_types_are_other_keys(tmp_path: Path) -> None:
    one = saved(tmp_path / "a.pt", {0: "x", "w": torch.ones(1)})
    for key in ("0", 0.0, False):
        found = kinds(diff(one, saved(tmp_path / "b.pt", {key: "x", "w": torch.ones(1)})))
        assert found == [("value added", str(key)), ("value removed", "0")]


# -- cost --------------------------------------------------------------------------------------


def sparse_safetensors(path: Path, nbytes: int) -> int:
    """A file that is one big hole behind its header; gives where the tensor begins."""
    entry = {"w": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}
    header = json.dumps(entry).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    return 8 + len(header)


def test_huge_sparse_files_take_no_memory_and_no_time(tmp_path: Path) -> None:
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    nbytes = 1 << 40
    starts = [sparse_safetensors(path, nbytes) for path in (one, other)]
    at = nbytes // 2 + 12
    tracemalloc.start()
    assert diff(one, other).equal
    with other.open("r+b") as file:
        file.seek(starts[1] + at)
        file.write(struct.pack("<f", 0.5))
    values = changed(diff(one, other))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert (values.differing, values.first, values.new) == (1, (at // 4,), "0.5")


def test_a_cast_compares_no_payload_of_nan(tmp_path: Path) -> None:
    bits = torch.tensor([0x7F800001, -1, 0x7FC00000, 0x3F800000] * 20, dtype=torch.int32)
    one = saved(tmp_path / "a.pt", {"w": bits.view(torch.float32)})
    other = saved(tmp_path / "b.pt", {"w": bits.view(torch.float32).to(torch.bfloat16)})
    assert diff(one, other, cast=True).equal
    script = f"""
import sys
sys.modules["torch"] = None
import ckptmove
assert ckptmove.diff({str(one)!r}, {str(other)!r}, cast=True).equal
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
    numbers = bits.view(torch.float32).to(torch.bfloat16)
    numbers[0] = 1
    saved(tmp_path / "b.pt", {"w": numbers})
    assert changed(diff(one, other, cast=True)).differing == 1
    same = saved(tmp_path / "c.pt", {"w": (bits ^ -(1 << 31)).view(torch.float32)})
    assert not diff(one, same, cast=True).equal  # nothing is cast


def test_without_torch_bits_are_compared(tmp_path: Path) -> None:
    a = {"w": torch.arange(6.0), "i": torch.arange(3)}
    one = saved(tmp_path / "a.pt", a)
    other = saved(tmp_path / "b.pt", {"w": a["w"] + 1, "i": a["i"] * 2})
    script = f"""
import sys
sys.modules["torch"] = None
import ckptmove
one, other = {str(one)!r}, {str(other)!r}
assert ckptmove.diff(one, one).equal
found = ckptmove.diff(one, other)
assert [each.values.differing for each in found.differences] == [6, 2], found
assert found.differences[1].values.new == "2"
try:
    ckptmove.diff(one, other, atol=1.0)
except ckptmove.UnsupportedError as error:
    assert "needs torch" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# -- the command line --------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
def test_the_exit_code_says_it(tmp_path: Path, run_cli: RunCli) -> None:
    layers = {f"layers.{n}.weight": torch.ones(4, 4) for n in range(8)}
    one = saved(tmp_path / "a.pt", {"model": layers, "epoch": 1})
    assert run_cli("diff", one, one, exit=0).stdout == "equal: 8 tensors, 512 B\n"
    for n in (2, 3, 4):
        layers[f"layers.{n}.weight"][1, 2] = 1.5
    other = saved(tmp_path / "b.pt", {"model": layers, "epoch": 2})
    done = run_cli("diff", one, other, exit=1)
    assert done.stdout.splitlines()[0] == "different: 3 tensors changed, 1 value"
    assert "model.layers.{2..4}.weight  ×3  float32, 3 of 48, max abs 0.5" in done.stdout
    assert "at [1, 2] 1 → 1.5" in done.stdout
    assert "epoch    1 → 2" in done.stdout
    assert run_cli("diff", one, other, "-q", exit=1).stdout == ""
    assert "layers.3.weight" in run_cli("diff", one, other, "-v", exit=1).stdout
    said = json.loads(run_cli("diff", one, other, "--json", exit=1).stdout)
    assert said == {**diff(one, other).to_json(), "seconds": said["seconds"]}
    assert (said["schema"], said["equal"], said["counts"]) == (1, False, {"changed": 3, "value": 1})


def cycle(length: int) -> list[Any]:
    first: list[Any] = []
    last = first
    for _ in range(length - 1):
        last.append([])
        last = last[0]
    last.append(first)
    return first


def grid(rows: int, columns: int, *, across: bool) -> list[list[int]]:
    """Every list stands beside every list of the other kind."""
    lists = [list(range(columns)) for _ in range(rows)]
    return [lists[m if across else n] for n in range(rows) for m in range(rows)]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_hostile_files_give_one_line(tmp_path: Path, run_cli: RunCli) -> None:
    good = saved(tmp_path / "a.pt", {"w": torch.ones(3000)})
    cut, none = tmp_path / "cut.pt", tmp_path / "none.pt"
    cut.write_bytes(good.read_bytes()[:-400])
    none.write_bytes(b"nothing of the kind")
    rings = [tmp_path / "37.pkl", tmp_path / "31.pkl"]
    for path, length in zip(rings, (37, 31), strict=True):
        path.write_bytes(pickle.dumps(cycle(length)))
    grids = [tmp_path / "down.pkl", tmp_path / "across.pkl"]
    for path, across in zip(grids, (False, True), strict=True):
        path.write_bytes(pickle.dumps(grid(200, 1000, across=across)))
    many = [tmp_path / "x.pt", tmp_path / "y.pt"]
    for path, value in zip(many, (1.0, 2.0), strict=True):
        saved(path, torch.full((1 << 20,), value).as_strided((1 << 25, 1 << 20), (0, 1)))
    for pair in ((good, cut), (none, good), rings, grids, many, (good, tmp_path / "missing")):
        done = run_cli("diff", *pair, exit=3)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
    short = [tmp_path / "3.pkl", tmp_path / "4.pkl"]
    for path, length in zip(short, (3, 4), strict=True):
        path.write_bytes(pickle.dumps(cycle(length)))
    assert diff(short[0], short[0]).equal
    assert {each.kind for each in diff(*short).differences} == {Kind.SHARED, Kind.UNSHARED}


@pytest.mark.slow
def test_a_name_can_do_nothing_to_a_terminal(tmp_path: Path, run_cli: RunCli) -> None:
    one = saved(tmp_path / "a.pt", {"a\x1b[31m\n": torch.ones(1), "v": "x"})
    other = saved(tmp_path / "b.pt", {"b\x1b[31m\n": torch.zeros(1), "v": "\x1b]0;\x07"})
    done = run_cli("diff", one, other, "-v", exit=1)
    assert "\x1b" not in done.stdout + done.stderr


def test_long_bytes_in_a_set_are_compared(tmp_path: Path) -> None:
    one, other, out = tmp_path / "one.pt", tmp_path / "other.pt", tmp_path / "out.safetensors"
    for path, last in ((one, b"a"), (other, b"b")):
        torch.save({"kept": {b"x" * 5000 + last, b"short", b"y" * 6000}, "w": torch.ones(1)}, path)
    ckptmove.convert(one, out)
    assert diff(one, one).equal
    assert diff(one, out).equal
    for first in (one, out):
        (found,) = diff(first, other).differences
        assert (found.kind, found.name) == (Kind.VALUE, "kept.<member>")
        assert found.old != found.new
