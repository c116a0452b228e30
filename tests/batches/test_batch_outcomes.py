"""What becomes of items: foretold, counted, limited in time, and with their sources removed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.batches.executors.time_limit import TimedOut, time_limit
from ckptmove.batches.options import VerbName
from ckptmove.batches.trees import LEDGER
from ckptmove.errors import UsageError
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.trees import every_kind, many, model_folder, outcomes, small_tree
from tests.servers.object_store import Store

VERBS: dict[VerbName, dict[str, Any]] = {"convert": {}, "relocate": {"to": "cpu"}}


def mixed(folder: Path, *, whole: bool) -> Path:
    """All that a batch may meet: damage, losses, other files, and outputs that are there."""
    small_tree(folder)
    if whole:
        every_kind(folder / "kinds")
    torch.save({"w": torch.ones(3), "f": torch.nn.functional.relu}, folder / "callable.pt")
    torch.save({"w": torch.ones(3).to_sparse()}, folder / "sparse.pt")
    (folder / "bad.index.json").write_text('{"weight_map": {"a": "missing.safetensors"}}')
    (folder / "x.safetensors").write_bytes(b"not really")
    save(folder / "there.pt", torch.ones(3), "cuda:1")
    save(folder / f"{'n' * 239}.pt", torch.ones(3), "cuda:1")  # no room for a longer name
    save_file({"w": torch.ones(3)}, folder / "cut.safetensors")
    os.truncate(folder / "cut.safetensors", 70)
    return folder


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "every kind"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_foretells_outcomes_sizes_and_nothing_else(
    verb: VerbName, whole: bool, tmp_path: Path
) -> None:
    tree, out = mixed(tmp_path / "tree", whole=whole), tmp_path / "out"
    options = {**VERBS[verb], "copy_rest": True}
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch(verb, tree, out, dry_run=True, executor=executor, **options)
        foretold = {each.name: each for each in work}
        assert not out.exists()
        out.mkdir()
        plan = work.plan
        found = {
            each.name: each
            for each in ckptmove.batch(verb, tree, out, executor=executor, **options)
        }
    assert {name: each.outcome for name, each in foretold.items()} == {
        name: each.outcome for name, each in found.items()
    }
    for name, each in found.items():
        assert foretold[name].reason == each.reason, name
        assert foretold[name].copied == each.copied
        if each.ok:
            assert foretold[name].bytes_written == each.bytes_written
    assert plan.exit_code == 1
    assert plan.outcomes is not None
    assert plan.outcomes["refused"] >= 1
    assert plan.outcomes["failed"] >= 1


@pytest.mark.slow
def test_a_dry_run_says_where_it_can_not_tell(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 3, 10)
    said = json.loads(
        run_cli("batch", "convert", "tree", "out", "--dry-run", "--json", exit=0).stdout
    )
    assert said["exit_code"] == 0
    assert said["outcomes"] == {"done": 3, "skipped": 0, "left-out": 0, "refused": 0, "failed": 0}
    run_cli("batch", "convert", "tree", "out", exit=0)
    for n in range(2):
        (tmp_path / "out" / f"run-{n}" / f"step-00{n}.safetensors").write_bytes(b"x" * 10**n)
    (tmp_path / "out" / LEDGER).unlink()
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch("convert", tree, tmp_path / "out", dry_run=True, executor=executor)
        found = outcomes(work)
    assert found == {
        "run-0/step-000.pt": "refused",  # its size tells
        "run-1/step-001.pt": "refused",
        "run-2/step-002.pt": "done",
    }
    assert "kept if it is identical" in next(
        each.reason for each in work.plan.forecasts or () if each.ok
    )
    done = run_cli("batch", "validate", "tree", "--dry-run", exit=0)
    assert "; the checks were not run" in done.stdout
    with ThreadPoolExecutor(2) as executor:
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        torch.save({"w": torch.ones(3), "q": quantized}, tree / "q.pt")
        options: dict[str, Any] = {"bare": True, "drop": "q", "executor": executor}
        work = ckptmove.batch("convert", tree, tmp_path / "o", dry_run=True, **options)
        assert set(outcomes(work).values()) == {"done"}
    assert sorted(each.dropped for each in work.plan.items) == [(), (), (), ("q",)]
    assert "; 1 would lose something that you allowed" in str(work.plan)


def test_nothing_found_is_refused_unless_that_is_accepted(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 2, 10)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("x")
    done = run_cli("batch", "convert", "none", "out", exit=4)
    assert done.stderr == (
        "ckptmove: none: no checkpoint was found; 1 other file left out "
        "(--allow-empty accepts that)\n"
    )
    run_cli("batch", "convert", "tree", "out", "--include=nope.pt", exit=4)
    run_cli("batch", "convert", "none", "out", "--allow-empty", exit=0)
    for n in range(1, 9):  # what another share has was found
        ckptmove.batch("convert", tree, tmp_path / "out", shard_of=f"{n}/8", dry_run=True)


def test_what_is_copied_counts_apart(tmp_path: Path, run_cli: RunCli) -> None:
    small_tree(tmp_path / "tree")
    options = ("--include=a/run.pt", "--include=*.txt")
    done = run_cli(
        *("batch", "relocate", "tree", "out", "--to=cpu", "--copy-rest", *options), exit=0
    )
    assert done.stdout.startswith("relocated 1 item, ")
    assert "; 1 copied unchanged" in done.stdout


def test_it_stops_after_so_many_failures(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 3, 10)
    for n in range(6):  # small, so they come last
        (tree / f"{n}.pt").write_bytes(b"PK\3\4")
    done = run_cli(*("batch", "convert", "tree", "out", "-j1", "--max-failures=2"), exit=1)
    assert "ckptmove: tree: stopped after 2 failures\n" in done.stderr
    assert "; 4 not done because the run stopped" in done.stdout
    assert "\nresume: ckptmove batch convert tree out" in done.stdout
    done = run_cli(*("batch", "convert", "tree", "out", "-j1", "--max-failures=6"), exit=1)
    assert "stopped" not in done.stderr  # all were done by then


def test_an_item_that_takes_too_long_fails_alone(tmp_path: Path, run_cli: RunCli) -> None:
    many(tmp_path / "tree", 2, 10)
    save(tmp_path / "tree" / "slow.pt", {"w": torch.ones(3)}, "cpu")
    (tmp_path / "code.py").write_text(
        "import time, torch\n\ndef Net():\n    time.sleep(600)\n    return torch.nn.Linear(1, 1)\n"
    )
    done = run_cli(
        *("batch", "validate", "tree", "--include=slow.pt", "--model=code.py:Net", "-j1"),
        "--timeout=1",
        exit=1,
    )
    assert done.stdout.startswith("failed  slow.pt: took longer than 1 s (--timeout gives it ")
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if b"code.py" in _read(each)]
    run_cli("batch", "convert", "tree", "out", "--timeout=500", exit=0)
    with pytest.raises(UsageError, match="timeout"), ThreadPoolExecutor(1) as executor:
        ckptmove.batch("convert", tmp_path / "tree", tmp_path / "o", timeout=1, executor=executor)


def write_by(kind: str, source: Path, store: str) -> None:
    """Write what is made of a checkpoint by one of the ways in which something is committed."""
    out = source.with_name("out")
    if kind == "file":
        ckptmove.convert(source, f"{out}.safetensors")
    elif kind == "folder":
        ckptmove.convert(source, out, max_shard_size="10GB")
    elif kind == "in place":
        ckptmove.relocate(source, in_place=True, to="cpu")
    else:
        ckptmove.convert(source, f"{store}/out.safetensors")


@pytest.mark.parametrize("kind", ["file", "folder", "in place", "in a store"])
def test_what_is_committed_is_not_told_to_take_too_long(kind: str, tmp_path: Path) -> None:
    save(source := tmp_path / "a.pt", {"w": torch.ones(3)}, "cuda:1")
    with pytest.raises(TimedOut), time_limit(600):
        signal.raise_signal(signal.SIGALRM)
    with time_limit(600):
        write_by(kind, source, "memory://timed")
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("kind", ["file", "folder", "in place", "in a store"])
def test_an_item_whose_time_is_up_is_not_committed(kind: str, tmp_path: Path) -> None:
    """Not even if something caught what was raised then, as an import may that tries something."""
    save(source := tmp_path / "a.pt", {"w": torch.ones(3)}, "cuda:1")
    before = source.read_bytes()

    def be_late() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGALRM)

    def write_late() -> None:
        be_late()
        write_by(kind, source, "memory://late")

    for each in (be_late, write_late):
        with pytest.raises(TimedOut), time_limit(600):
            each()
    assert (list(tmp_path.iterdir()), source.read_bytes()) == ([source], before)
    assert kind != "in a store" or not fsspec.filesystem("memory").find("late")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_source_is_removed_when_its_output_was_read_again(
    tmp_path: Path, run_cli: RunCli
) -> None:
    tree, out = many(tmp_path / "tree", 4, 10), tmp_path / "out"
    model_folder(tree / "model")
    (tree / "link.pt").symlink_to("run-0/step-000.pt")
    (tree / "cut.pt").write_bytes((tree / "run-1" / "step-001.pt").read_bytes()[:-50])
    before = {path.name: torch.load(path, map_location="cpu") for path in tree.glob("run-*/*.pt")}
    run_cli("batch", "convert", "tree", "out", "--include=step-000.pt", exit=0)
    damaged = out / "run-0" / "step-000.safetensors"
    data = bytearray(damaged.read_bytes())
    about = damaged.stat()
    data[-1] ^= 1
    damaged.write_bytes(data)
    os.utime(damaged, ns=(about.st_atime_ns, about.st_mtime_ns))
    done = run_cli("batch", "convert", "tree", "out", "--delete-source", "-v", exit=1)
    assert "; 3 sources removed; 3 sources kept" in done.stdout
    left = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    assert [each for each in left if not each.startswith("model/")] == [
        *("cut.pt", "link.pt", "run-0/step-000.pt"),
    ]
    assert (
        "skipped run-0/step-000.pt → out/run-0/step-000.safetensors: done before; its source was "
        "kept: its output has changed" in done.stdout
    )
    assert "its source was kept: its source is a folder" in done.stdout
    assert "its source was kept: its source is a link" in done.stdout
    for n in (1, 2, 3):
        found = load_file(out / f"run-{n % 3}" / f"step-{n:03}.safetensors")
        assert torch.equal(found["w0"], before[f"step-{n:03}.pt"]["model"]["w0"])
    entries = [json.loads(line) for line in (out / LEDGER).read_text().splitlines()]
    assert sum(each.get("removed", False) for each in entries) == 3


def test_a_run_that_was_killed_before_it_removed_a_source_does_it_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    tree, out = many(tmp_path / "tree", 2, 10), tmp_path / "out"
    (tree / "notes.txt").write_text("x")
    with ThreadPoolExecutor(2) as executor:
        options: dict[str, Any] = {"executor": executor, "copy_rest": True}
        outcomes(ckptmove.batch("convert", tree, out, **options))  # as far as it had come
        work = ckptmove.batch("convert", tree, out, delete_source=True, **options)
        assert set(outcomes(work).values()) == {"skipped"}
        assert work.report().sources_removed == 3
        assert not [path for path in tree.rglob("*") if path.is_file()]
    with pytest.raises(UsageError, match="--select"):
        ckptmove.batch("convert", tree, out, delete_source=True, select="model")


@pytest.mark.parametrize("count", [2, 20])  # alone, and in bundles
def test_a_rerun_after_all_sources_were_removed_is_a_success(
    count: int, tmp_path: Path, run_cli: RunCli
) -> None:
    tree, out = many(tmp_path / "tree", count, 10), tmp_path / "out"
    convert = ("batch", "convert", "tree", "out", "-j1")
    run_cli(*convert, "--delete-source", exit=0)
    for again in ((), ("--delete-source",), ("--dry-run",)):
        done = run_cli(*convert, *again, exit=0)
        said = f"nothing is left to do: earlier runs removed {count} sources"
        assert said in done.stdout + done.stderr
    run_cli(*convert, "--include=other.pt", exit=4)
    shutil.rmtree(tree)
    run_cli(*convert, exit=0)
    changed = out / "run-1" / "step-001.safetensors"
    with changed.open("ab") as file:
        file.write(b"x")
    said = run_cli(*convert, exit=4).stderr
    assert "step-001.safetensors: is not as an earlier run wrote it, which then removed its" in said
    run_cli("batch", "convert", "tree", "elsewhere", exit=3)


@pytest.mark.slow
def test_a_source_in_a_store_is_removed(tmp_path: Path, store: Store, run_cli: RunCli) -> None:
    source, out = store.put_folder("runs", many(tmp_path / "tree", 2, 10)), store.url("out")
    command = ("batch", "convert", source, out, "--delete-source")
    run_cli(*command, exit=0)
    assert b"<Key>runs/" not in store.say("GET", f"/{store.bucket}?list-type=2&prefix=runs/")
    assert len(store.front.asked("PUT", "/out/")) == 2 * 2, "the output, and that it is done"
    assert ckptmove.inspect(store.url("out/run-1/step-001.safetensors")).tensors
    assert "earlier runs removed 2 sources" in run_cli(*command, exit=0).stderr
    elsewhere = ("batch", "convert", source, store.url("other"))
    assert "runs: there is nothing below it (--allow-empty" in run_cli(*elsewhere, exit=4).stderr
    run_cli(*elsewhere, "--allow-empty", exit=0)


def test_what_holds_no_weights_is_left_out_where_weights_are_asked_for(
    tmp_path: Path, run_cli: RunCli
) -> None:
    """As verl's loader of data, and poutyne's optimizer; what may be weights is refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    apart = {
        "run/data.pt": {"_snapshot": {"_generator": torch.get_rng_state(), "_last": 3}},
        "run/checkpoint.optim": optimizer.state_dict(),
    }
    for name, state in {**apart, "run/model.pt": model.state_dict()}.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    given = ("batch", "convert", "tree", "out", "--preset", "hf")
    plan = json.loads(run_cli(*given, "--dry-run", "--json", exit=0).stdout)
    done = run_cli(*given, "--log", "log", "--manifest", "sums", exit=0)
    assert "converted 1 item" in done.stdout
    assert "; 2 left out, without weights (-v or --log says why)" in done.stdout
    assert done.stderr == ""
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    left_out = {each["name"]: each["reason"] for each in told if each["outcome"] == "left-out"}
    assert left_out == {
        "run/data.pt": "it holds no weights of a model among its 1 tensor",
        "run/checkpoint.optim": "it holds no weights of a model among its 6 tensors",
    }
    assert (plan["exit_code"], plan["outcomes"]["left-out"]) == (0, 2)
    again = run_cli(*given, "--retry", "log", "--allow-empty", exit=0)
    assert again.stdout.startswith("converted 0 items")
    (tmp_path / "tree/run/model.pt").unlink()
    for more in ((), ("--dry-run",)):
        refused = run_cli(*given, "--force", *more, exit=4).stderr
        assert "every item is left out: none holds weights of a model" in refused
    run_cli(*given, "--force", "--allow-empty", exit=0)
    torch.save({"what": [torch.ones(3)]}, tmp_path / "tree/run/unknown.pt")
    assert "refused run/unknown.pt" in run_cli(*given, "--force", exit=1).stdout
