"""Folders of torch.distributed.checkpoint that are written: torch reads them, and so do we."""

from __future__ import annotations

import io
import pickle
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, RefusedError, UsageError
from tests.conftest import RunCli, examples
from tests.faults.injecting import WRITING, Call, calls_of, command, few, needs_strace, run
from tests.formats.test_dcp import BOXES, SAVED, by_torch, in_rows, state
from tests.making.distributed import boxes_of, save_dcp
from tests.making.staging import mounted
from tests.oracles.sameness import assert_same_tree

WORLDS = (1, 2, 3, 7)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(state(), tmp_path / "in.pt")
    return tmp_path / "in.pt"


def written(source: Path, out: Path, ranks: int = 1, **options: Any) -> Path:
    """The folder that a checkpoint becomes."""
    report = ckptmove.convert(source, out, format="dcp", ranks=ranks, **options)
    assert report.format == "dcp"
    return out


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def metadata_of(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_torch_reads_what_is_written(ranks: int, source: Path, tmp_path: Path) -> None:
    folder = written(source, tmp_path / "out", ranks)
    torch.manual_seed(0)
    saved = in_rows(state())
    assert_same_tree(by_torch(folder), saved)
    assert_same_tree(ckptmove.load(folder), saved)
    assert ckptmove.validate(folder).ok
    assert ckptmove.diff(source, folder).equal
    assert contents(written(source, tmp_path / "again", ranks)) == contents(folder)


@pytest.mark.parametrize("ranks", WORLDS)
def test_items_are_those_of_torch(ranks: int, source: Path, tmp_path: Path) -> None:
    """Rows as `torch.chunk` divides them, in zips with right checksums; paths as torch has them."""
    folder = written(source, tmp_path / "out", ranks)
    torch.manual_seed(0)
    by_itself, ours = metadata_of(save_dcp(tmp_path / "torch", state())), metadata_of(folder)
    assert ours.planner_data == by_itself.planner_data
    theirs: dict[str, Any] = by_itself.state_dict_metadata
    for name, about in theirs.items():
        mine: Any = ours.state_dict_metadata[name]
        assert isinstance(mine, type(about))
        if isinstance(about, BytesStorageMetadata):
            continue
        assert (mine.size, mine.properties) == (about.size, about.properties)
        whole = torch.empty(about.size)
        divided = whole.chunk(ranks) if whole.numel() and about.size else [whole]
        assert [each.sizes for each in mine.chunks] == [each.shape for each in divided]
    ends = dict.fromkeys((each.relative_path for each in ours.storage_data.values()), 0)
    assert len(ends) == ranks
    for info in sorted(ours.storage_data.values(), key=lambda each: each.offset):
        assert info.offset == ends[info.relative_path]
        ends[info.relative_path] = info.offset + info.length
        content = (folder / info.relative_path).read_bytes()[info.offset :][: info.length]
        assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
        torch.load(io.BytesIO(content), weights_only=True)
    sizes = {each.name: each.stat().st_size for each in folder.iterdir() if "distcp" in each.name}
    assert ends == sizes


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    """From .pt over DCP and safetensors: the same tree, and the same bytes of DCP."""
    folder = written(source, tmp_path / "out", 3)
    torch.manual_seed(0)
    ckptmove.convert(folder, tmp_path / "back.pt")
    assert_same_tree(torch.load(tmp_path / "back.pt", weights_only=True), in_rows(state()))
    ckptmove.convert(folder, tmp_path / "back.safetensors")
    again = written(tmp_path / "back.safetensors", tmp_path / "again", 3)
    assert contents(again) == contents(folder)


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_folder_of_torch_is_divided_anew(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save_dcp(tmp_path / "in", state(), BOXES, files=3)
    again = written(folder, tmp_path / "out", ranks)
    torch.manual_seed(0)
    assert_same_tree(by_torch(again), in_rows(state()))
    assert metadata_of(again).planner_data == metadata_of(folder).planner_data


@hypothesis_settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(SAVED),
    shape=st.lists(st.integers(0, 9), max_size=3),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    seed=st.integers(0),
)
def test_any_tensor_for_any_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    shape: list[int],
    ranks: list[int],
    seed: int,
) -> None:
    """From chunks of any form, once or twice, with every checksum right."""
    folder = tmp_path_factory.mktemp("any")
    numel = torch.Size(shape).numel()
    content = torch.arange(numel * dtype.itemsize) % (2 if dtype == torch.bool else 251)
    tensor = content.to(torch.uint8).view(dtype).reshape(shape)
    boxes = boxes_of(shape, Random(seed)) if numel else []
    now = save_dcp(folder / "0", {"t": tensor}, {"t": boxes} if boxes else {}, files=2)
    for n, many in enumerate(ranks, 1):
        now = written(now, folder / str(n), many)
        assert_same_tree(ckptmove.load(now), {"t": tensor})
        assert ckptmove.validate(now).ok
    assert_same_tree(by_torch(now), {"t": tensor})


# -- training goes on ------------------------------------------------------------------------------


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with an optimizer of two groups, after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    rest = list(model[1].parameters())
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()]},
        {"params": rest, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    step(model, optimizer, 2)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for n in range(times):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(n))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_goes_on(ranks: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    about, state = get_state_dict(model, optimizer)
    torch.save({"model": about, "optim": state}, tmp_path / "in.pt")
    folder = written(tmp_path / "in.pt", tmp_path / "out", ranks)
    torch.manual_seed(1)
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    rest = list(fresh[1].parameters())
    groups: list[dict[str, Any]] = [
        {"params": [*fresh[0].parameters()]},
        {"params": rest, "weight_decay": 0.1},
    ]
    other = torch.optim.AdamW(groups, lr=0.5)
    about, state = get_state_dict(fresh, other)
    whole: dict[str, Any] = {"model": about, "optim": state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(whole, checkpoint_id=folder, no_dist=True)
    set_state_dict(fresh, other, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    step(model, optimizer, 10)
    step(fresh, other, 10)
    assert_same_tree(fresh.state_dict(), model.state_dict())
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_same_tree(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("world", "mesh"), [(2, "2"), (4, "4"), (4, "2x2")])
def test_ranks_of_another_mesh_go_on(world: int, mesh: str, tmp_path: Path) -> None:
    """FSDP2 over gloo: what DTensors get is bit-equal, and so are the steps after it."""
    model, optimizer = trained()
    about, state = get_state_dict(model, optimizer)
    torch.save({"model": about, "optim": state}, tmp_path / "in.pt")
    folder = written(tmp_path / "in.pt", tmp_path / "out", 3)
    step(model, optimizer, 3)
    about, state = get_state_dict(model, optimizer)
    torch.save({"model": about, "optim": state}, tmp_path / "after.pt")
    arguments = ["-m", "tests.oracles.fsdp_ranks", world, mesh, folder, tmp_path / "after.pt"]
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments), str(n), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(world)
    ]
    said = [each.communicate(timeout=240)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * world, said


# -- what has no form there ------------------------------------------------------------------------


def test_what_is_no_dict_is_refused(tmp_path: Path, source: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(RefusedError, match="its top is not a dict"):
        written(tmp_path / "list.pt", tmp_path / "out")
    torch.save({"a.b": torch.ones(2), "a": {"b": 1}}, tmp_path / "twice.pt")
    with pytest.raises(RefusedError, match=r"two entries would be called 'a\.b'"):
        written(tmp_path / "twice.pt", tmp_path / "out")
    held: dict[str, Any] = {"t": torch.ones(2)}
    held["itself"] = held
    torch.save(held, tmp_path / "cycle.pt")
    with pytest.raises(RefusedError, match="holds itself"):
        written(tmp_path / "cycle.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_that_are_lost_are_told(tmp_path: Path) -> None:
    torch.save({"a": {1: torch.ones(2), 3: torch.zeros(2)}, "b": 1}, tmp_path / "in.pt")
    with pytest.raises(RefusedError, match="would lose a, which has keys that are numbers"):
        written(tmp_path / "in.pt", tmp_path / "out")
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="dcp", drop="a")
    assert [loss.name for loss in report.dropped] == ["a"]
    assert set(ckptmove.load(tmp_path / "out")["a"]) == {"1", "3"}
    torch.save({"a": {1: 0, "1": 2}}, tmp_path / "same.pt")
    with pytest.raises(RefusedError, match=r"'a\.1' would be there twice"):
        written(tmp_path / "same.pt", tmp_path / "other", drop="a")


def test_kinds_of_dicts_and_tensors_are_told(tmp_path: Path) -> None:
    from collections import Counter, OrderedDict

    shared = torch.arange(6.0)
    saved = {
        "ordered": OrderedDict(a=shared, b=shared[2:4]),
        "counter": Counter(x=2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "empty": {},
    }
    torch.save(saved, tmp_path / "in.pt")
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="dcp", ranks=2)
    assert report.duplicates == ("ordered.b",)
    told = "\n".join(report.warnings)
    assert "1 collections.OrderedDict became a plain dict" in told
    assert "1 parameter became" in told
    assert "sparse is saved as a value" in told
    found = by_torch(tmp_path / "out")
    assert found["sparse"].to_dense().equal(torch.eye(2))
    del found["sparse"]
    expected = {
        "ordered": {"a": shared, "b": shared[2:4].clone()},
        "counter": {"x": 2},
        "parameter": torch.ones(2),
        "empty": {},
    }
    assert_same_tree(found, expected)
    with pytest.raises(RefusedError, match=r"'ordered\.b' shares its bytes"):
        written(tmp_path / "in.pt", tmp_path / "other", shared="error")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "from 1 to"),
        ({"ranks": 10**6}, "from 1 to"),
        ({"max_shard_size": "1MB"}, "divided by ranks"),
        ({"format": "safetensors", "ranks": 2}, "is not divided by ranks"),
        ({"metadata": {"a": "b"}}, "takes no --metadata"),
    ],
)
def test_options_that_make_no_sense(
    options: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        ckptmove.convert(source, tmp_path / "out", **{"format": "dcp", **options})
    with pytest.raises(UsageError, match="called like a file"):
        ckptmove.convert(source, tmp_path / "out.pt", format="dcp")


@pytest.mark.slow
def test_an_old_folder_is_replaced_by_force(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = written(source, tmp_path / "out", 4)
    with pytest.raises(RefusedError, match="exists"):
        written(source, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match=r"'notes\.txt' in it would be gone"):
        written(source, out, force=True)
    (out / "notes.txt").unlink()
    said = run_cli("convert", source, out, "--format", "dcp", "--force", exit=0).stdout
    assert "as dcp: 9 tensors" in said
    assert sorted(contents(out)) == [".metadata", "__0_0.distcp"]


def test_it_needs_no_torch(source: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import ckptmove
how = {"format": "dcp", "exclude_tensors": "model.transposed"}  # which is gathered
for made, ranks in (("a", 2), ("b", 3)):
    ckptmove.convert(sys.argv[1], sys.argv[2] + made, ranks=ranks, **how)
ckptmove.convert(sys.argv[2] + "a", sys.argv[2] + "c", ranks=3, format="dcp")
"""
    subprocess.run([sys.executable, "-c", code, source, f"{tmp_path}/"], check=True)
    assert contents(tmp_path / "b") == contents(tmp_path / "c")


# -- damage and faults -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["file", "rows", "columns"])
def test_a_damaged_source_is_found(kind: str, ranks: int, tmp_path: Path) -> None:
    """A changed byte of a tensor, whether or not a file gets all of what a checksum is of."""
    tensor = torch.arange(6 * 8, dtype=torch.int32).reshape(6, 8)
    boxes = {
        "rows": [((at, 0), (2, 8)) for at in (0, 2, 4)],
        "columns": [((0, at), (6, 4)) for at in (0, 4)],
    }
    if kind == "file":
        torch.save({"t": tensor}, tmp_path / "in")
        path = tmp_path / "in"
    else:
        path = next(save_dcp(tmp_path / "in", {"t": tensor}, {"t": boxes[kind]}).glob("*.distcp"))
    content = path.read_bytes()
    assert content.count(b"\x2f\0\0\0") == 1
    path.write_bytes(content.replace(b"\x2f\0\0\0", b"\x2e\0\0\0"))
    with pytest.raises(CorruptError, match="checksum is wrong"):
        written(tmp_path / "in", tmp_path / "out", ranks)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=32k", "none") as small:
        with pytest.raises(CkptmoveError, match="space"):
            written(source, small / "out", 3)
        assert list(small.iterdir()) == []


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("how", [("dcp", "--ranks", "2"), ("universal",)])
def test_a_kill_or_a_full_disk_at_any_call(how: Sequence[str], tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    source, place = tmp_path / "in.pt", tmp_path / "there"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, source)
    place.mkdir()
    convert = command("convert", "-q", source, place / "out", "--format", *how)
    names = (*WRITING, "mkdir", "mkdirat", "rmdir")
    calls: list[Call] = [
        each
        for each in few(calls_of(convert, source, tmp_path / "log", names), 2)
        if each.name != "openat" or "O_CREAT" in each.text
    ]
    whole = contents(place / "out")
    for call in calls:
        takes_room = call.name not in ("close", "fchmod", "ioctl", "rmdir", "unlink", "unlinkat")
        for what in ("signal=KILL", "error=ENOSPC")[: 1 + takes_room]:
            for each in place.iterdir():
                subprocess.run(["rm", "-r", each], check=True)
            ended = run(convert, f"{call.name}:{what}:when={call.ordinal}", names=names)
            if (place / "out").exists():
                assert contents(place / "out") == whole
            if "signal" in what:
                assert ended.code == -signal.SIGKILL
            else:
                assert ended.code in (0, 4, 5), ended.said
                assert {each.name for each in place.iterdir()} <= {"out"}


@pytest.mark.slow
def test_many_small_tensors_for_many_ranks(tmp_path: Path) -> None:
    """What is around their items is far larger than they are, and what was asked for."""
    saved = {f"layers.{n}": torch.full((3,), float(n)) for n in range(1000)}
    save_file(saved, tmp_path / "in.safetensors")
    out = written(tmp_path / "in.safetensors", tmp_path / "out", ranks=3)
    assert sum(each.stat().st_size for each in out.iterdir()) > 30 * 100_000
    assert ckptmove.diff(tmp_path / "in.safetensors", out).equal


@pytest.mark.slow
def test_in_a_batch(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    source.rename(tmp_path / "tree" / "deep" / "step.pt")
    save_dcp(tmp_path / "tree" / "saved", {"t": torch.ones(3, 2)})
    for _ in range(2):
        found = ckptmove.batch(
            "convert", tmp_path / "tree", tmp_path / "out", format="dcp", ranks=2
        )
        assert {each.outcome for each in found} <= {"done", "skipped"}
    assert ckptmove.diff(tmp_path / "tree" / "deep" / "step.pt", tmp_path / "out/deep/step").equal
    assert ckptmove.load(tmp_path / "out" / "saved")["t"].shape == (3, 2)


# -- stores ----------------------------------------------------------------------------------------


def test_in_a_store(source: Path, tmp_path: Path) -> None:
    folder = written(source, tmp_path / "out", 3)
    where = f"memory://{tmp_path.name}/dcp"
    ckptmove.convert(source, where, format="dcp", ranks=3)
    ckptmove.convert(where, tmp_path / "back", format="dcp", ranks=3)
    assert contents(tmp_path / "back") == contents(folder)


class Hooked:
    """A parameter with a hook, as a pickle can spell one."""

    def __init__(self, value: torch.Tensor, *more: object) -> None:
        self.value, self.more = value, more

    def __reduce__(self) -> tuple[Any, ...]:
        maker = "_rebuild_parameter_with_state" if self.more else "_rebuild_parameter"
        hooks = {} if self.more else {0: print}
        return getattr(torch._utils, maker), (self.value, True, hooks, *self.more)


def test_what_a_parameter_has_besides_its_values_is_kept_or_told(tmp_path: Path) -> None:
    """Its hooks run code when it is loaded; attributes are Python's."""
    saved = {
        "plain": torch.nn.Parameter(torch.ones(2)),
        "hooked": Hooked(torch.zeros(2)),
        "marked": Hooked(torch.zeros(3), {"tensor_parallel": True}),
        "module": torch.nn.Linear(2, 2),
    }
    torch.save(saved, tmp_path / "in.pt")
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="dcp")
    assert report.warnings[:2] == (
        "2 parameters became tensors, without the attributes of 1",
        "hooked and 1 more is saved as a value: dcp.load can't reshard it",
    )
    assert report.unknown_callables == ("builtins.print",)
    assert {each.name for each in ckptmove.inspect(tmp_path / "out").tensors} >= {"plain", "marked"}
