"""What a file makes us build has a price, which is what it takes; who trusts it can insist."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.pickles.walk import walk
from ckptmove.sources.budget import VARIABLE, Boundless, Budget, Excess
from tests.conftest import RunCli
from tests.making.bombs import FLOODS, zipped

_LOGGED = ("epoch", "loss", "lr", "grad_norm", "eval_loss", "eval_runtime", "eval_accuracy")
#: A tenth of what real programs keep beside tensors, and what is to be read.
RIGHT: dict[str, Callable[[], object]] = {
    "log": lambda: [
        {"epoch": n, "step": 3 * n, "loss": n / 7, "lr": n / 9, "time": n / 11}
        for n in range(10_000)
    ],
    "log of eight": lambda: [{"step": n, **dict.fromkeys(_LOGGED, n / 9)} for n in range(9_000)],
    "vocabulary": lambda: {f"word{n}": n for n in range(25_000)},
    "merges": lambda: [(f"a{n}", f"b{n}") for n in range(9_000)],
    "numbers": lambda: [37 * n for n in range(100_000)],
    "log with a text": lambda: [{"step": n, "loss": n / 7, "phase": "train"} for n in range(8_000)],
    "ranks of merges": lambda: {(f"a{n}", f"b{n}"): n for n in range(5_000)},
    "numbers of numpy": lambda: [np.float64(n / 7) for n in range(3_500)],
    "file names": lambda: [f"images/{n:08}.jpg" for n in range(30_000)],
}
SHARE_OF_FLOOR = 0.1


def memory_of(data: bytes) -> tuple[int, int]:
    """The bytes that the walk of a pickle takes, and the price of it."""
    budget = Budget()
    budget._room = 1 << 50
    walk(data, budget=Boundless())  # what is made once is there
    tracemalloc.start()
    found = walk(data, budget=budget)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del found
    return taken, (1 << 50) + len(data) - budget.room


@pytest.mark.parametrize("again", [b"K\1a", b"Na", b"(K\1e", b"(e"])
def test_opcodes_that_append_one_by_one_have_a_price(again: bytes) -> None:
    """They take no memory, but 10 MB of them took more than 10 seconds."""
    for flood in (b"\x80\2]" + again * 8000 + b".", b"\x80\2}" + b"(u" * 8000 + b"."):
        budget = Budget()
        budget._room = 1_000_000
        with pytest.raises(Excess):
            walk(flood, budget=budget)
    budget = Budget()
    budget._room = 1_000_000
    walk(pickle.dumps([[1] * 100_000, *([n % 200] for n in range(500))], 2), budget=budget)


def test_a_long_list_of_protocol_0_is_read(tmp_path: Path) -> None:
    """It appends its items one by one; it is looked at twice, and counted once."""
    (tmp_path / "list.pkl").write_bytes(pickle.dumps({"words": list(range(450_000))}, protocol=0))
    assert ckptmove.inspect(tmp_path / "list.pkl").format == "pickle"
    (tmp_path / "dense.pkl").write_bytes(b"(lp0\n" + b"I1\na" * 900_000 + b".")
    with pytest.raises(Excess):
        ckptmove.inspect(tmp_path / "dense.pkl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_expanded_values_count_for_their_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.ones(1000, 1, dtype=dtype).expand(1000, 20_000)
    sparse = torch.sparse_coo_tensor(torch.arange(1000)[None], values, (1000, 20_000))
    torch.save(sparse, tmp_path / "run.pt")
    assert ckptmove.inspect(tmp_path / "run.pt").tensors


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", sorted(set(FLOODS) - {"blobs", "marks", "tuple_keys"}))
def test_the_price_is_no_less_than_what_is_taken(name: str) -> None:
    first, again, last = FLOODS[name]
    taken, price = memory_of(b"\x80\2" + first + again * 3000 + last)
    assert taken < price + 2 * 3000 * len(again) + 100_000


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RIGHT)
def test_what_programs_keep_is_within(name: str) -> None:
    data = pickle.dumps(RIGHT[name](), 2)
    budget = Budget()
    floor = budget.room
    walk(data, budget=budget)
    assert floor - budget.room <= SHARE_OF_FLOOR * floor


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zip_format", [True, False])
def test_tensors_make_the_budget_grow(protocol: int, zip_format: bool, tmp_path: Path) -> None:
    state = {f"layer.{n}.weight": torch.zeros(1) for n in range(300)}
    moments = {n: {"step": n, "exp_avg": torch.zeros(1)} for n in range(300)}
    out = io.BytesIO()
    torch.save(
        {"model": state, "optimizer": {"state": moments}},
        out,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zip_format,
    )
    path = tmp_path / "run.pt"
    path.write_bytes(out.getvalue())
    floor, budgets = Budget().room, list[Budget]()

    class Noted(Budget):
        def __init__(self) -> None:
            super().__init__()
            budgets.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptmove.formats.session.Budget", Noted)
        ckptmove.inspect(path)
    assert all(each.room >= floor for each in budgets)


def test_a_storage_that_is_named_again_adds_nothing() -> None:
    """Else a file of one storage could name it a million times, and take a gigabyte."""
    head = b"\x80\2(X\7\0\0\0storageq\0ctorch\nFloatStorage\nq\1X\3\0\0\0cpuq\2"
    named = b"(h\0h\1X\1\0\0\0%ch\2K\1tQ"
    budget = Budget()
    floor = budget.room
    walk(head + b"".join(named % (97 + n % 2) for n in range(10_000)) + b"l.", budget=budget)
    assert budget.room < 0.95 * floor


@pytest.mark.slow
def test_only_storages_that_a_zip_can_hold_add_to_the_budget(tmp_path: Path) -> None:
    head = b"\x80\2(X\7\0\0\0storageq\0ctorch\nFloatStorage\nq\1X\3\0\0\0cpuq\2"
    names = b"".join(b"(h\0h\1X\6\0\0\0%06dh\2K\1tQ" % n + b"]" * 15 for n in range(40_000))
    path = tmp_path / "run.pt"
    path.write_bytes(zipped(head + names + b"l."))
    with pytest.raises(Excess):
        ckptmove.inspect(path)


@pytest.mark.slow
def test_devices_are_moved_beside_a_long_log(tmp_path: Path) -> None:
    """The log takes most of the budget; each use of the tag is still told apart."""
    log = [{"step": n, **dict.fromkeys(_LOGGED[:4], n / 9)} for n in range(85_000)]
    model = {f"layer.{n}.weight": torch.zeros(1) for n in range(3)}
    path = tmp_path / "run.pt"
    torch.save({"log": log, "model": model}, path, pickle_protocol=4)
    ckptmove.relocate(path, tmp_path / "gpu.pt", to="cuda:0")
    ckptmove.relocate(tmp_path / "gpu.pt", tmp_path / "moved.pt", to="cuda:1")
    assert {each.device for each in ckptmove.inspect(tmp_path / "moved.pt").tensors} == {"cuda:1"}


def dense(folder: Path) -> Path:
    path = folder / "log.pt"
    data = pickle.dumps([{"a": n, "b": n / 2} for n in range(300_000)], 2)
    path.write_bytes(zipped(data))
    return path


@pytest.mark.slow
def test_a_dense_file_is_refused_unless_one_insists(run_cli: RunCli, tmp_path: Path) -> None:
    """The line says what it would take, and how to insist; that reaches the workers of a batch."""
    (tmp_path / "runs").mkdir()
    path = dense(tmp_path / "runs")
    (line,) = run_cli("inspect", path, exit=3).stderr.splitlines()
    assert "far denser than what libraries write" in line
    assert f"if you trust it: {VARIABLE}=1G" in line
    out = tmp_path / "out"
    trusting = {VARIABLE: "1G"}
    run_cli("batch", "relocate", path.parent, out, "--to", "cpu", env=trusting, exit=0)
    assert (out / "log.pt").exists()


@pytest.mark.slow
def test_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dense(tmp_path)
    with pytest.raises(Excess) as raised:
        ckptmove.inspect(path)
    assert raised.value.hint == f"if you trust it: {VARIABLE}=1G"
    monkeypatch.setenv(VARIABLE, "1G")
    assert not ckptmove.inspect(path).tensors


@pytest.mark.parametrize("said", ["much", "-1", "2 G", "1e9", "G"])
def test_a_size_that_is_none_is_said(said: str, run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"w": torch.zeros(1)}, path)
    done = run_cli("inspect", path, env={VARIABLE: said}, exit=2)
    assert f"is not a size (for example {VARIABLE}=2G)" in done.stderr


@pytest.mark.parametrize("said", ["400000000", "400M", "400m", "400MB", "400MiB"])
def test_sizes(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, said)
    assert Budget().room in (400_000_000, 400 << 20)


def test_a_smaller_size_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Budget().room
    monkeypatch.setenv(VARIABLE, "1K")
    assert Budget().room == before


def test_ours_have_no_limit() -> None:
    assert Boundless().room > 1 << 60
