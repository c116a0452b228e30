"""Files of ranks: put together where they say where their parts lie, and refused where not."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptmove
from ckptmove.errors import CheckFailed, CkptmoveError, CorruptError, InputError, UnsupportedError
from tests.conftest import RunCli, examples
from tests.making.distributed import boxes_of
from tests.making.ranks import divided, save_ranks, sharded
from tests.making.trees import contents
from tests.oracles.sameness import assert_same_tree

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
WEIGHT = torch.arange(35.0).reshape(5, 7)
SHARD = Shard(0)


def trained(sizes: tuple[int, ...]) -> tuple[torch.nn.Module, Any]:
    """A model that FSDP2 divides over a mesh, and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    names = ("replicate", "shard")[-len(sizes) :]
    if sizes != (1,):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for each in (model[0], model):
            fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for n, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, n + 1.0)
    optimizer.step()
    return model, optimizer


def extra(rank: int) -> dict[str, Any]:
    """What verl saves besides."""
    rng = {
        "cpu": torch.Generator().manual_seed(rank).get_state(),
        "random": random.Random(rank).getstate(),
    }
    return {"lr_scheduler": {"last_epoch": 5}, "rng": rng}


def save_verl(folder: Path, sizes: tuple[int, ...]) -> Path:
    """The folder of an actor of verl."""
    world = prod(sizes)
    save_ranks(folder, world, lambda _: trained(sizes)[0].state_dict(), apart=True)
    save_ranks(folder, world, lambda _: trained(sizes)[1].state_dict(), "optim", apart=True)
    return save_ranks(folder, world, extra, "extra_state")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
def test_verl(sizes: tuple[int, ...], tmp_path: Path, run_cli: RunCli) -> None:
    folder = save_verl(tmp_path / "tree" / "actor", sizes)
    model, optimizer = trained((1,))
    ranks = {rank: extra(rank) for rank in range(prod(sizes))}
    whole = {"extra_state": ranks, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same_tree(ckptmove.load(folder), whole)
    found = ckptmove.inspect(folder)
    assert (found.format, found.verdict) == ("fsdp-ranks", "merged of files tagged cpu")
    assert found.divisions["model.0.weight"] == f"rows/{sizes[-1]}"
    names = ("replicate", "shard")[-len(sizes) :]
    assert found.mesh_shapes == (f"{'×'.join(map(str, sizes))} ({', '.join(names)})",)
    assert not found.warnings
    assert not found.unknown_callables
    assert {"model", "optimizer", "rng"} <= {str(each.section) for each in found.tensors}
    assert f"mesh: {found.mesh_shapes[0]}\n" in run_cli("inspect", folder, exit=0).stdout
    chunks = run_cli("inspect", folder, "--chunks", exit=0).stdout
    assert f"model_world_size_{len(ranks)}_rank_0.pt" in chunks
    ckptmove.convert(folder, tmp_path / "all.pt")
    assert_same_tree(ckptmove.load(tmp_path / "all.pt"), whole)
    assert ckptmove.diff(folder, tmp_path / "all.pt").equal
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    weights = ckptmove.load(tmp_path / "hf")
    assert_same_tree({key: weights[key] for key in model.state_dict()}, dict(model.state_dict()))
    (done,) = ckptmove.batch("convert", tmp_path / "tree", tmp_path / "out")
    assert (done.name, done.outcome) == ("actor", "done")
    again = torch.optim.AdamW(trained((1,))[0].parameters())
    again.load_state_dict(ckptmove.load(folder)["optimizer"])
    assert_same_tree(again.state_dict()["state"], optimizer.state_dict()["state"])


def _strided(shard: Shard, shape: list[int], sizes: tuple[int, ...]) -> Any:
    """In strides, if all parts are equal: else `distribute_tensor` and FSDP2 differ."""
    is_even = shape[shard.dim] % prod(sizes) == 0
    return _StridedShard(shard.dim, split_factor=sizes[1]) if is_even else shard


@st.composite
def placements(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...], list[Any]]:
    """A tensor, a mesh, and how the mesh divides it."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    sizes = tuple(draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])))
    by = st.sampled_from([Replicate(), *(Shard(n) for n in range(len(shape)))])
    found: list[Any] = [draw(by) for _ in sizes]
    first, last = found[0], found[-1]
    if len(sizes) == 2 and isinstance(first, Shard) and first == last and draw(st.booleans()):
        found[0] = _strided(first, shape, sizes)
    tensor = torch.arange(prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor, sizes, found


@hypothesis_settings(max_examples=examples(40))
@given(placements())
def test_any_mesh(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[torch.Tensor, tuple[int, ...], list[Any]]
) -> None:
    tensor, sizes, found = case
    folder = tmp_path_factory.mktemp("ranks")
    save_ranks(folder, prod(sizes), lambda _: {"w": divided(tensor, sizes, found)})
    assert_same_tree(ckptmove.load(folder), {"model": {"w": tensor.contiguous()}})
    shutil.rmtree(folder)


@pytest.mark.parametrize("rows", [6, 7, 8, 12, 13])
def test_strides_of_uneven_parts(rows: int, tmp_path: Path) -> None:
    """`distribute_tensor` and FSDP2 differ in those of 7 and of 13 rows, and in their sizes."""
    weight = torch.arange(rows * 2.0).reshape(rows, 2)
    by = [_StridedShard(0, split_factor=2), Shard(0)]
    folder = save_ranks(tmp_path / "a", 6, lambda _: {"w": divided(weight, (3, 2), by)})
    if rows in (7, 13):
        with pytest.raises(UnsupportedError, match="w is divided in strides, unevenly"):
            ckptmove.inspect(folder)
        return
    assert_same_tree(ckptmove.load(folder), {"model": {"w": weight}})


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_sharded_tensors_in_any_boxes(seed: int, tmp_path: Path) -> None:
    boxes = boxes_of(WEIGHT.shape, random.Random(seed), most=5)
    state = {"step": 3, "buffer": torch.ones(2)}
    save_ranks(
        tmp_path / "a",
        len(boxes),
        lambda rank: {"model": {"w": sharded(WEIGHT, boxes, rank)}, **state},
        "rank{rank}.pt",
    )
    assert_same_tree(ckptmove.load(tmp_path / "a"), {"model": {"w": WEIGHT}, **state})


def test_a_mesh_as_older_versions_stored_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DeviceMesh,
            "__getstate__",
            lambda self: {"device_type": "cpu", "mesh": self.mesh, "mesh_dim_names": None},
        )
        by = [Shard(1), Shard(0)]
        save_ranks(tmp_path / "a", 4, lambda _: {"w": divided(WEIGHT, (2, 2), by)})
    assert_same_tree(ckptmove.load(tmp_path / "a"), {"model": {"w": WEIGHT}})


# -- what ranks have alike, or not -----------------------------------------------------------------


def test_what_differs_is_told(tmp_path: Path, run_cli: RunCli) -> None:
    def state(rank: int) -> dict[str, Any]:
        same = {"name": "run", "rows": [1, 2.5, None], "same": torch.ones(2)}
        mean = torch.full((2,), rank)
        return {"w": divided(WEIGHT, (2,), [Shard(0)]), **same, "mean": mean, "rank": rank}

    folder = save_ranks(tmp_path / "a", 2, state)
    told = "ranks differ in 2 values that are not divided; those of rank 0 are read: mean, rank"
    assert told in ckptmove.inspect(folder).warnings
    assert told in run_cli("convert", folder, tmp_path / "out.pt", exit=0).stderr
    assert ckptmove.load(folder)["model"]["mean"].tolist() == [0, 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("spelled", ["rank{rank}.pt", "model_rank_{rank}.pt"])
def test_plain_tensors_that_differ_are_not_put_together(spelled: str, tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "run"
    save_ranks(folder, 2, lambda rank: {"w": torch.full((2, 2), rank)}, spelled)
    for verb in (ckptmove.inspect, ckptmove.load):
        with pytest.raises(UnsupportedError, match="no file says how ranks divide it"):
            verb(folder)
    (done,) = ckptmove.batch("convert", tmp_path / "tree", tmp_path / "out")
    assert (done.name, done.outcome) == ("run", "refused")
    assert not [*(tmp_path / "out").rglob("*.safetensors")]
    save_ranks(folder, 2, lambda _: {"w": torch.ones(2, 2)}, spelled)
    loaded = ckptmove.load(folder)
    assert_same_tree(loaded.get("model", loaded), {"w": torch.ones(2, 2)})


@pytest.mark.slow
def test_files_of_ranks_are_relocated_as_a_whole(tmp_path: Path) -> None:
    folder = save_verl(tmp_path / "actor", (2,))
    before = ckptmove.inspect(folder)
    done = ckptmove.relocate(folder, tmp_path / "moved", to="cuda:0")
    assert not any("put the files of all ranks" in each for each in done.warnings)
    assert contents(tmp_path / "moved").keys() == contents(folder).keys()
    found = ckptmove.inspect(tmp_path / "moved" / "model_world_size_2_rank_1.pt")
    devices = {each.device for each in found.tensors if "_rank_map" not in each.name}
    assert devices == {"cuda:0"}
    moved = ckptmove.inspect(tmp_path / "moved")
    assert any("tagged cuda:0" in each for each in moved.warnings)
    assert moved.verdict == "merged of files tagged cuda:0, cpu"  # steps are on the CPU
    moved.require("cuda:0")
    for manifest, device in ((moved, "cpu"), (moved, "cuda:1"), (before, "cuda:0")):
        with pytest.raises(CheckFailed, match=r"is on c(pu|uda:0)"):
            manifest.require(device)
    before.require("cpu")
    differing = ckptmove.diff(folder, tmp_path / "moved")
    assert {(each.old, each.new) for each in differing.of("moved")} == {("cpu", "cuda:0")}
    assert ckptmove.diff(folder, tmp_path / "moved", ignore_devices=True).equal
    (folder / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(InputError, match=r"optim_world_size_2_rank_1\.pt"):
        ckptmove.relocate(folder, tmp_path / "other", to="cuda:0")
    assert not (tmp_path / "other").exists()


# -- damage ----------------------------------------------------------------------------------------


def divide(rank: int, by: Any = SHARD) -> dict[str, Any]:
    """What a rank of three has."""
    return {"w": divided(WEIGHT, (3,), [by]), "b": divided(WEIGHT[0], (3,), [Replicate()])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ranks", 3, divide)


def name(rank: int, world: object = 3) -> str:
    return f"model_world_size_{world}_rank_{rank}.pt"


def swap(folder: Path) -> None:
    (folder / name(0)).rename(folder / "x")
    (folder / name(1)).rename(folder / name(0))
    (folder / "x").rename(folder / name(1))


def other(folder: Path, state: Callable[[int], object]) -> None:
    """Put a file of another save in the place of that of rank 1."""
    made = save_ranks(folder.parent / "other", 3, state)
    shutil.copy(made / name(1), folder / name(1))


def of_another_rank(folder: Path) -> None:
    """Put what another rank has into the file of rank 1, which has its own name."""
    made = save_ranks(folder.parent / "last", 3, divide, name(1, "{world}"))
    shutil.copy(made / name(1), folder / name(1))


def of_another_world(folder: Path) -> None:
    save_ranks(folder, 2, lambda _: {"w": divided(WEIGHT, (2,), [Shard(0)])})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / name(2)).unlink(), r"missing: model_world_size_3_rank_2"),
    "swapped": (swap, "was saved as model_world_size_3_rank_[01].pt, which is the name of"),
    "of another rank": (of_another_rank, "says that it is of rank"),
    "beyond": (lambda folder: shutil.copy(folder / name(0), folder / name(7)), "of more ranks"),
    "of another world": (of_another_world, "of two saves"),
    "overlapping": (
        lambda folder: other(folder, lambda _: divide(1, Shard(1))),
        "overlap",
    ),
    "of another shape": (
        lambda folder: other(
            folder, lambda _: {**divide(1), "w": divided(WEIGHT.t().contiguous(), (3,), [Shard(0)])}
        ),
        "differ in the shape",
    ),
    "of another dtype": (
        lambda folder: other(
            folder, lambda _: {**divide(1), "w": divided(WEIGHT.bfloat16(), (3,), [Shard(0)])}
        ),
        "differ in the dtype",
    ),
    "whole": (
        lambda folder: other(folder, lambda _: {**divide(1), "w": WEIGHT}),
        "has all of 'w'",
    ),
    "other names": (
        lambda folder: other(folder, lambda _: {"w": divide(1)["w"], "c": WEIGHT}),
        "ranks have different entries",
    ),
    "truncated": (
        lambda folder: (folder / name(1)).write_bytes((folder / name(1)).read_bytes()[:700]),
        "truncated|damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_together_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    spoil, message = DAMAGES[damage]
    ckptmove.inspect(folder)
    spoil(folder)
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(InputError, match=message) as raised:
            verb(folder)
        assert len(str(raised.value)) <= 300
    assert not (tmp_path / "out.pt").exists()


def test_a_partial_placement_has_no_values(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "a", 2, lambda _: {"w": divided(WEIGHT, (2,), [Partial()])})
    with pytest.raises(UnsupportedError, match="Partial"):
        ckptmove.inspect(folder)


def test_flat_parameters_are_refused_by_name(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    boxes = [((0,), (4,)), ((4,), (4,))]
    folder = save_ranks(tmp_path / "a", 2, lambda rank: {"_flat_param": sharded(flat, boxes, rank)})
    with pytest.raises(UnsupportedError, match="flat parameter '_flat_param'"):
        ckptmove.inspect(folder)


def test_the_file_of_one_rank_tells_that_it_has_parts(folder: Path, tmp_path: Path) -> None:
    path, out = folder / name(1), tmp_path / "out.pt"
    said = [ckptmove.inspect(path).warnings, ckptmove.validate(path).warnings]
    said.append(ckptmove.convert(path, out).warnings)
    assert all(any("(DTensor)" in each for each in warnings) for warnings in said)
    assert not any("(DTensor)" in each for each in ckptmove.inspect(folder).warnings)
    for target in (tmp_path / "out.safetensors", tmp_path / "dcp"):
        format = "safetensors" if target.suffix else "dcp"
        with pytest.raises(InputError, match="the parts of rank 0, 2 are missing"):
            ckptmove.convert(path, target, format=format)
        assert not target.exists()


@pytest.mark.parametrize("kept", [1, 2])
def test_ranks_of_which_only_the_contents_tell_are_missed(kept: int, tmp_path: Path) -> None:
    whole = save_ranks(tmp_path / "whole", 3, divide, "rank{rank}.pt")
    assert_same_tree(ckptmove.load(whole), {"w": WEIGHT, "b": WEIGHT[0].clone()})
    folder = tmp_path / "part"
    folder.mkdir()
    for rank in range(kept):
        shutil.copy(whole / f"rank{rank}.pt", folder)
    missing = ", ".join(map(str, range(kept, 3)))
    verbs: list[Callable[[], object]] = [
        lambda: ckptmove.inspect(folder),
        lambda: ckptmove.convert(folder, tmp_path / "out.pt"),
        lambda: ckptmove.relocate(folder, tmp_path / "out", to="cuda:1"),
    ]
    for verb in verbs:
        with pytest.raises(InputError, match=f"the parts of rank {missing} are missing"):
            verb()
    assert not ckptmove.validate(folder).ok
    assert not list(tmp_path.glob("out*"))


def test_every_damaged_byte_of_a_part_is_told(folder: Path, tmp_path: Path) -> None:
    path = folder / name(1)
    held = path.read_bytes()
    part = WEIGHT[2:4].numpy().tobytes()
    at = held.index(part)
    for n in (at, at + len(part) - 1):
        path.write_bytes(held[:n] + bytes([held[n] ^ 1]) + held[n + 1 :])
        with pytest.raises(CorruptError, match="checksum"):
            ckptmove.convert(folder, tmp_path / "out.pt")
        with pytest.raises(CorruptError, match="checksum"):
            ckptmove.load(folder)
        assert not (tmp_path / "out.pt").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_any_damaged_byte_is_told_or_harmless(seed: int, folder: Path, tmp_path: Path) -> None:
    path, random_ = folder / name(1), random.Random(seed)
    held = bytearray(path.read_bytes())
    for n in range(25):
        spoiled = bytearray(held)
        spoiled[random_.randrange(len(held))] ^= 1 << random_.randrange(8)
        path.write_bytes(spoiled)
        out = tmp_path / f"{n}.pt"
        with contextlib.suppress(CkptmoveError):
            ckptmove.convert(folder, out)
        if out.exists():
            loaded = torch.load(out, weights_only=True)
            assert_same_tree(loaded["model"]["w"], WEIGHT)


@pytest.mark.parametrize("value", [lambda n: {n: 1}, lambda n: {"x": n}], ids=["a key", "a value"])
def test_long_numbers(value: Callable[[int], Any], tmp_path: Path) -> None:
    def state(rank: int) -> dict[object, object]:
        return {"w": divided(WEIGHT, (2,), [SHARD]), "of": value(10**5000 + rank)}

    found = ckptmove.inspect(save_ranks(tmp_path / "long", 2, state))
    assert any("ranks differ in 1 value" in each for each in found.warnings)


def test_a_long_rank(tmp_path: Path) -> None:
    def state(_: int) -> dict[str, Any]:
        found = divided(WEIGHT, (2,), [SHARD])
        found.device_mesh._rank = 10**5000
        return {"w": found}

    folder = save_ranks(tmp_path / "long", 2, state, apart=True)
    with pytest.raises(CkptmoveError):
        ckptmove.inspect(folder)


class Reduced:
    """What is pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def stand_in(kind: type, *state: object) -> Reduced:
    """A tensor of four elements that is divided, with a state as the caller wants it."""
    made = (object, kind, torch.Size([4]))
    return Reduced(torch._tensor._rebuild_from_type_v2, (object, kind, made, *state))


def dtensor(mesh: object, **told: object) -> Reduced:
    """A DTensor of which this rank has the first half."""
    spec = {"mesh": mesh, "placements": (Reduced(Shard, (0,), {"dim": 0}),), **told}
    return stand_in(DTensor, {"_local_tensor": torch.ones(2), "_spec": spec})


def shared_parts(_: int) -> list[Reduced]:
    about = {"shard_offsets": [0], "shard_sizes": [2]}
    shards = [{"metadata": about, "tensor": torch.ones(2)}] * 600
    return [stand_in(ShardedTensor, (shards,)) for _ in range(600)]


def shared_ranks(_: int) -> list[Reduced]:
    ranks, layout = tuple(range(1 << 17)), {"shape": (2,), "stride": (1,)}
    return [dtensor({"_flatten_rank_map": ranks, "_layout": layout}) for _ in range(60)]


def shared_order(_: int) -> list[Reduced]:
    mesh, order = {"mesh": torch.arange(2)}, [(0, [0])] * 2000
    return [dtensor(mesh, shard_order=order) for _ in range(20)]


def shared_fields(_: int) -> list[Reduced]:
    mesh = {"mesh": torch.arange(2), **{str(n): None for n in range(2000)}}
    return [dtensor(mesh) for _ in range(20)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("made", [shared_parts, shared_ranks, shared_order, shared_fields])
def test_what_tensors_share_is_bounded(
    made: Callable[[int], list[Reduced]], tmp_path: Path
) -> None:
    folder = save_ranks(tmp_path / "shared", 2, lambda n: {"of": made(n)})
    with pytest.raises(CorruptError, match=r"too many (tensors|ranks)|malformed$"):
        ckptmove.inspect(folder)


def test_views_of_the_same_bytes(tmp_path: Path) -> None:
    def state(_: int) -> list[Any]:
        base = torch.zeros(1 << 20, dtype=torch.uint8)
        return [divided(WEIGHT, (2,), [SHARD]), *(base[n:] for n in range(1, 100))]

    folder = save_ranks(tmp_path / "views", 2, state)
    with pytest.raises(UnsupportedError, match="too many tensors that share their bytes"):
        ckptmove.inspect(folder)


def test_shapes_of_one_storage_stay_shapes_of_one(tmp_path: Path) -> None:
    base, other = torch.arange(1 << 16), torch.arange(6.0).reshape(2, 3)
    plain = {f"{n}": base.view(1 << n, -1) for n in range(16)}
    plain |= {"a": other, "b": other.t(), "c": other.clone(), "e": torch.ones(0)}

    def state(_: int) -> dict[str, Any]:
        return {"w": divided(WEIGHT, (2,), [SHARD]), **plain}

    folder = save_ranks(tmp_path / "views", 2, state)
    ckptmove.convert(folder, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 600_000
    found = ckptmove.load(tmp_path / "out.pt")["model"]
    assert all(torch.equal(found[key], {"w": WEIGHT, **plain}[key]) for key in found)
    assert found.keys() == {"w", *plain}
    assert len({found[f"{n}"].data_ptr() for n in range(16)}) == 1
    assert found["a"].data_ptr() != found["c"].data_ptr()
    assert ckptmove.diff(folder, tmp_path / "out.pt").equal


def test_keys_of_any_kind_are_compared_by_what_they_are(tmp_path: Path) -> None:
    rows = {(1, "a"): 1, (1, ("a",)): 2, torch.float32: 3, (): 4, True: 5, 2.5: 6, b"x": 7}

    def state(rank: int) -> dict[str, Any]:
        return {"w": divided(WEIGHT, (2,), [SHARD]), "rows": rows, "own": {(rank,): 1}}

    folder = save_ranks(tmp_path / "keys", 2, state)
    assert ckptmove.load(folder)["model"]["rows"] == rows
    [told] = ckptmove.inspect(folder).warnings
    assert told.startswith("ranks differ in 1 value ")
    assert told.endswith(": own")
