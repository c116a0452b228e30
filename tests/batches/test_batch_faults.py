"""Batches over trees and destinations that are not as they should be: each fault stays its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove import RefusedError
from ckptmove.batches.options import VerbName
from ckptmove.batches.trees import LEDGER
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import save
from tests.making.staging import mounted
from tests.making.trees import (
    CLI,
    contents,
    left_over,
    many,
    model_folder,
    outcomes,
    stamps,
    unprivileged,
)

SWAP = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
NOT_READABLE = Path("/sys/class/net/lo/speed")  # a file of 4,096 bytes: to read it is an error


def results(verb: VerbName, *where: Path, **options: Any) -> dict[str, ckptmove.Result]:
    """The results by name, by threads: no process has to start."""
    with ThreadPoolExecutor(2) as executor:
        batch = ckptmove.batch(verb, *where, executor=executor, **options)
        return {each.name: each for each in batch}


def run(verb: VerbName, *where: Path, **options: Any) -> dict[str, str]:
    """The outcomes."""
    return {name: each.outcome for name, each in results(verb, *where, **options).items()}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three checkpoints."""
    return many(tmp_path / "tree", 3, 500)


THREE = {f"run-{n}/step-00{n}.pt": "done" for n in range(3)}
SKIPPED = dict.fromkeys(THREE, "skipped")


# What lies in the tree


def test_links_that_lead_nowhere_are_told_and_the_rest_is_done(tree: Path, tmp_path: Path) -> None:
    (tree / "loop").symlink_to("loop")
    (tree / "loop.pt").symlink_to(tree / "loop")
    (tree / "under.pt").symlink_to(tree / "run-0" / "step-000.pt" / "x")
    (tree / "long.pt").symlink_to("x" * 300)
    with ThreadPoolExecutor(2) as executor:
        batch = ckptmove.batch("convert", tree, tmp_path / "out", executor=executor)
        assert outcomes(batch) == THREE
    said = "is a broken link"
    names = ("long.pt", "loop", "loop.pt", "under.pt")
    assert sorted(batch.plan.notes) == [f"{name} {said}" for name in names]
    assert batch.report().to_json()["notes"] == list(batch.plan.notes)
    few = ckptmove.batch("convert", tree, tmp_path / "out", include=["/run-0", "l*"], dry_run=True)
    assert sorted(few.plan.notes) == [f"{name} {said}" for name in names[:3]]


@pytest.mark.slow
def test_what_can_not_be_searched_or_read_fails_alone(tree: Path, tmp_path: Path) -> None:
    (tree / "closed").mkdir()
    save(tree / "closed" / "x.pt", torch.ones(2))
    (tree / "hidden").mkdir()
    save(tree / "linked.pt", torch.ones(2))
    (tree / "linked.pt").rename(tree / "hidden" / "linked.pt")
    (tree / "linked.pt").symlink_to("hidden/linked.pt")
    (tree / "mine.pt").write_bytes(b"")
    modes = {"closed": 0o400, "hidden": 0o000, "mine.pt": 0o000}
    for name, mode in modes.items():
        (tree / name).chmod(mode)
    try:
        command = ("batch", "convert", tree, "out", "--json", "-j1")
        done = unprivileged(tmp_path, *command)
        included = unprivileged(tmp_path, *command, "--include", "run-*/*", "--exclude", "*-000.pt")
    finally:
        for name in modes:
            (tree / name).chmod(0o700)
    said = json.loads(done.stdout)
    assert (done.returncode, said["outcomes"]["done"]) == (1, 3)
    assert {each["name"]: (each["outcome"], each["reason"]) for each in said["failures"]} == {
        name: ("failed", "can't be read: Permission denied")
        for name in ("closed/x.pt", "hidden", "linked.pt", "mine.pt")
    }
    assert included.returncode == 0
    assert json.loads(included.stdout)["outcomes"]["skipped"] == 2


@pytest.mark.skipif(not NOT_READABLE.is_file(), reason=f"there is no {NOT_READABLE}")
def test_a_fault_while_looking_is_that_of_one_file(tree: Path, tmp_path: Path) -> None:
    (tree / "strange").symlink_to(NOT_READABLE)
    found = results("convert", tree, tmp_path / "out")
    assert found.pop("strange").reason == "can't be read: Invalid argument"
    assert {name: each.outcome for name, each in found.items()} == THREE


def test_what_is_gone_or_another_since_it_was_found_fails_alone(tree: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        batch = ckptmove.batch("convert", tree, tmp_path / "out", executor=executor)
        (tree / "run-0" / "step-000.pt").unlink()
        (tree / "run-1" / "step-001.pt").unlink()
        (tree / "run-1" / "step-001.pt").mkdir()
        found = {each.name: each for each in batch}
    assert {name: each.outcome for name, each in found.items()} == {
        **THREE,
        "run-0/step-000.pt": "failed",
        "run-1/step-001.pt": "refused",
    }
    assert found["run-0/step-000.pt"].reason == "can't be read: No such file or directory"
    assert found["run-1/step-001.pt"].reason.startswith("is a directory")


def test_one_rule_for_links(tmp_path: Path) -> None:
    """Those to files are followed, those to folders are not, and that is said."""
    model = model_folder(tmp_path / "tree" / "model")
    many(tmp_path / "elsewhere", 3)
    (tmp_path / "words").write_text("words")
    (model / "vocab.txt").symlink_to(tmp_path / "words")
    (model / "data").symlink_to(tmp_path / "elsewhere")
    (model / "up").symlink_to("..")
    tree, out = tmp_path / "tree", tmp_path / "out"
    with ThreadPoolExecutor(1) as executor:
        batch = ckptmove.batch("convert", tree, out, executor=executor, follow_links=True)
        [item] = [task.item for task in batch.plan.tasks]
        inside = [path for path in model.rglob("*") if path.is_file()]
        assert item.nbytes == sum(path.stat().st_size for path in inside)
        [result] = batch
    assert sorted(batch.plan.notes) == [
        f"model/{name} is a link to a folder and was not followed" for name in ("data", "up")
    ]
    assert result.warnings == tuple(
        f"{name} is a link to a folder and was not followed" for name in ("data", "up")
    )
    assert {path.name for path in (out / "model").iterdir()} == {
        *("config.json", "model.safetensors", "vocab.txt")
    }
    assert run("convert", tree, out, follow_links=True) == {"model": "skipped"}
    assert run("convert", tree, tmp_path / "inside") == {"model": "refused"}


# What is done depends on all that it was made of


def test_another_version_looks_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("convert", tree, out)
    before = stamps(out)
    with ThreadPoolExecutor(1) as executor:
        batch = ckptmove.batch("convert", tree, out, executor=executor, dry_run=True)
        assert len(batch.plan.done) == 3
        monkeypatch.setattr("ckptmove.batches.fingerprints.__version__", "0.0")
        batch = ckptmove.batch("convert", tree, out, executor=executor)
        assert len(batch.plan.done) == 0
        assert outcomes(batch) == SKIPPED  # compared, and equal
    assert stamps(out) == before


def test_the_content_of_a_device_map_counts(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"": "cpu"}')
    assert run("relocate", tree, tmp_path / "out", device_map=path) == THREE
    assert run("relocate", tree, tmp_path / "out", device_map=path) == SKIPPED
    path.write_text('{"": "cuda:3"}')
    assert set(run("relocate", tree, tmp_path / "out", device_map=path).values()) == {"refused"}


@pytest.mark.parametrize("kind", ["file", "index", "folder"])
def test_what_it_was_compared_with_counts(kind: str, tmp_path: Path) -> None:
    source, other = tmp_path / "tree", tmp_path / "other"
    for folder in (source, other):
        if kind == "file":
            many(folder, 1)
        elif kind == "index":
            model_folder(folder)
        else:
            model_folder(folder / "model")
    assert set(run("validate", source, tmp_path / "reports", against=other).values()) == {"done"}
    assert set(run("validate", source, tmp_path / "reports", against=other).values()) == {"skipped"}
    path = max(other.rglob("*.pt" if kind == "file" else "*-00002-*"))
    if kind == "file":
        save(path, torch.ones(3))
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + b"\1")
    found = run("validate", source, tmp_path / "reports", against=other)
    assert "failed" in found.values()


def test_code_of_a_model_counts(tmp_path: Path, tree: Path) -> None:
    code = tmp_path / "net.py"
    code.write_text("import torch\ndef Net():\n    return torch.nn.Linear(1, 1)\n")
    with ThreadPoolExecutor(1) as executor:

        def planned() -> int:
            batch = ckptmove.batch(
                *("validate", tree, tmp_path / "reports"), model=f"{code}:Net", executor=executor
            )
            outcomes(batch)
            return len({task.request for task in batch.plan.tasks} - seen)

        seen: set[str] = set()
        batch = ckptmove.batch("validate", tree, tmp_path / "r", model=f"{code}:Net", dry_run=True)
        seen = {task.request for task in batch.plan.tasks}
        assert planned() == 0
        code.write_text("import torch\ndef Net():\n    return torch.nn.Linear(1, 12)\n")
        assert planned() == 1


def test_in_place_a_file_that_was_written_anew_is_changed_again(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 1)
    [path] = tree.rglob("*.pt")
    fresh = path.read_bytes()
    assert set(run("relocate", tree, in_place=True, map=SWAP).values()) == {"done"}
    swapped = path.read_bytes()
    for _ in range(2):
        assert set(run("relocate", tree, in_place=True, map=SWAP).values()) == {"skipped"}
    with path.open("r+b") as file:  # the same inode, size and devices: who knows?
        file.write(swapped)
    assert set(run("relocate", tree, in_place=True, map=SWAP).values()) == {"refused"}
    with path.open("r+b") as file:
        file.write(fresh)
    assert set(run("relocate", tree, in_place=True, map=SWAP).values()) == {"done"}
    assert path.read_bytes() == swapped


def test_in_place_a_new_version_changes_nothing_twice(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("relocate", tree, in_place=True, map=SWAP) == THREE
    monkeypatch.setattr("ckptmove.batches.fingerprints.__version__", "0.0")
    assert run("relocate", tree, in_place=True, map=SWAP) == SKIPPED


def test_in_place_a_tree_that_was_moved_is_not_changed_again(tree: Path, tmp_path: Path) -> None:
    assert run("relocate", tree, in_place=True, map=SWAP) == THREE
    moved = shutil.copytree(tree, tmp_path / "moved")  # with times, as cp -a does
    assert run("relocate", moved, in_place=True, map=SWAP) == SKIPPED
    assert contents(moved) == contents(tree)


def test_in_place_a_file_of_several_names_is_changed_once(tree: Path, tmp_path: Path) -> None:
    one = tree / "run-0" / "step-000.pt"
    alone = shutil.copy(one, tmp_path / "alone.pt")
    ckptmove.relocate(alone, in_place=True, map=SWAP, allow_unmatched=True)
    os.link(one, tree / "run-2" / "linked.pt")
    (tree / "a.pt").symlink_to(one)
    batch = ckptmove.batch("relocate", tree, in_place=True, map=SWAP, force=True, jobs=1)
    assert outcomes(batch) == THREE
    assert one.read_bytes() == Path(alone).read_bytes()
    assert sorted(batch.plan.notes) == [
        f"{name} is the same file as run-0/step-000.pt and changes with it"
        for name in ("a.pt", "run-2/linked.pt")
    ]
    assert run("relocate", tree, in_place=True, map=SWAP, force=True) == SKIPPED


# The ledger


def test_a_ledger_that_is_a_trap_is_refused(tree: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.write_text("precious\n")
    ledger = out / LEDGER
    traps: list[Callable[[], None]] = [
        lambda: ledger.symlink_to(elsewhere),
        lambda: ledger.symlink_to(tmp_path / "nowhere"),
        lambda: os.link(elsewhere, ledger),
        lambda: os.mkfifo(ledger),
        lambda: ledger.mkdir(),
    ]
    for make in traps:
        make()
        for dry_run in (True, False):
            with pytest.raises(RefusedError, match="ledger"):
                ckptmove.batch("convert", tree, out, jobs=1, dry_run=dry_run)
        ledger.rmdir() if ledger.is_dir() and not ledger.is_symlink() else ledger.unlink()
    assert elsewhere.read_text() == "precious\n"
    assert not (tmp_path / "nowhere").exists()
    assert list(out.iterdir()) == []


def test_a_ledger_that_says_anything_is_not_believed(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", tree, out)
    whole = contents(out)
    lines = [json.loads(line) for line in (out / LEDGER).read_text().splitlines()]
    (tmp_path / "elsewhere").write_bytes(b"x")
    for line in lines:
        line["output"] = "../elsewhere"
    (out / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(out / "run-1")
    assert set(run("convert", tree, out).values()) <= {"done", "skipped"}
    assert contents(out) == whole
    assert (tmp_path / "elsewhere").read_bytes() == b"x"


def test_batches_in_one_process_share_no_ledger(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(3):
        assert run("convert", tree, out) == THREE
        shutil.rmtree(out)


def test_what_was_moved_is_read_once(tree: Path, tmp_path: Path) -> None:
    """Then the ledger knows it by its new stamp."""
    run("convert", tree, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    plans = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as executor:
            batch = ckptmove.batch("convert", tree, tmp_path / "moved", executor=executor)
            plans.append(len(batch.plan.done))
            assert outcomes(batch) == SKIPPED
    assert plans == [0, 3]


# The destination


def test_a_folder_that_can_not_be_made_fails_what_goes_there(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run-1").write_text("precious")
    found = results("convert", tree, out)
    assert {name: each.outcome for name, each in found.items()} == {
        **THREE,
        "run-1/step-001.pt": "refused",
    }
    assert found["run-1/step-001.pt"].reason.startswith("can't be written: ")
    assert (out / "run-1").read_text() == "precious"


@pytest.mark.slow
def test_a_folder_that_can_not_be_written_fails_what_goes_there(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", tree, out)
    (out / LEDGER).unlink()
    (out / "run-1").chmod(0o500)
    (out / "run-2" / "step-002.safetensors").unlink()
    (out / "run-2").chmod(0o500)
    try:
        command = ("batch", "convert", tree, out, "-j1", "--json")
        planned = unprivileged(tmp_path, *command, "--dry-run")
        done = unprivileged(tmp_path, *command)
    finally:
        for n in (1, 2):
            (out / f"run-{n}").chmod(0o700)
    reasons = {each["name"]: each["reason"] for each in json.loads(done.stdout)["failures"]}
    assert set(reasons) == {"run-1/step-001.pt", "run-2/step-002.pt"}
    assert all(each.startswith("can't be written: ") for each in reasons.values())
    obstacles = {each["name"]: each["obstacle"] for each in json.loads(planned.stdout)["items"]}
    assert {name for name, each in obstacles.items() if each} == set(reasons)


def test_names_that_are_too_long_are_refused_and_told(tree: Path, tmp_path: Path) -> None:
    for count in (252, 255):
        save(tree / ("x" * count), {"w": torch.ones(2)})
    plan = ckptmove.batch("convert", tree, tmp_path / "out", dry_run=True).plan
    told = {task.item.name: task.obstacle for task in plan.tasks if task.obstacle}
    found = results("convert", tree, tmp_path / "out")
    refused = {name: each for name, each in found.items() if each.outcome == "refused"}
    assert set(refused) == set(told) == {"x" * 252, "x" * 255}
    for name, each in refused.items():
        nbytes = f"{len(name) + 12} bytes in the destination"
        assert each.reason == told[name] == f"its name would have {nbytes}, and 255 is the most"
    assert run("validate", tree, tmp_path / "reports")["x" * 255] == "refused"
    assert run("relocate", tree, tmp_path / "moved", to="cpu")["x" * 255] == "done"
    assert left_over(tmp_path) == []


# Dry runs, and room


def test_a_dry_run_tells_what_is_there(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    run("convert", tree, out, include="*-000.pt")
    (out / "run-1").mkdir()
    there = out / "run-1" / "step-001.safetensors"
    ckptmove.convert(tree / "run-2" / "step-002.pt", there)  # of the same size
    before = sorted(out.rglob("*"))
    plan = ckptmove.batch("convert", tree, out, dry_run=True).plan
    assert {task.item.name: task.existing for task in plan.tasks} == {
        "run-1/step-001.pt": "compared",
        "run-2/step-002.pt": "",
    }
    said = run_cli("batch", "convert", "tree", "out", "--dry-run", exit=0).stdout
    assert (
        "out/run-1/step-001.safetensors exists; kept if it is identical, otherwise refused" in said
    )
    said = run_cli("batch", "convert", "tree", "out", "--dry-run", "--force", exit=0).stdout
    assert "out/run-1/step-001.safetensors exists and will be replaced" in said
    assert sorted(out.rglob("*")) == before


def test_a_dry_run_tells_that_nothing_can_be_written(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="can't be written: Not a directory"):
        ckptmove.batch("convert", tree, tmp_path / "file" / "out", dry_run=True)
    options = ("-t", "tmpfs", "-o", "ro", "none")
    with mounted(tmp_path / "disk", *options) as disk:
        for dry_run in (True, False):
            with pytest.raises(RefusedError, match="can't be written"):
                ckptmove.batch("convert", tree, disk / "out", dry_run=dry_run)


@pytest.mark.slow
def test_a_dry_run_leaves_nothing_not_even_for_a_moment(tree: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16k", "none") as disk:
        traced = ("strace", "-f", "-o", str(trace), "-e", "trace=openat,open,mkdir,mkdirat")
        command = (*CLI, "convert", str(tree), str(disk), "--dry-run")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*traced, *command], env=env, capture_output=True, check=False)
        made = [line for line in trace.read_text().splitlines() if str(disk) in line]
        assert not [line for line in made if "O_CREAT" in line or "mkdir" in line]


def test_what_is_there_takes_no_room(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 8, 30_000)  # 240 kB each
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "none") as disk:
        done = run("convert", tree, disk)
        assert set(done.values()) == {"done"}
        (disk / LEDGER).unlink()
        before = stamps(disk)
        for _ in range(2):
            with ThreadPoolExecutor(1) as executor:
                batch = ckptmove.batch("convert", tree, disk, executor=executor)
                assert set(outcomes(batch).values()) == {"skipped"}
        assert stamps(disk) == before
        os.truncate(disk / "run-0" / "step-000.safetensors", 0)
        found = results("convert", tree, disk, include="*-000.pt")
        [result] = found.values()
        assert "differs from what would be written" in result.reason  # their sizes tell
        assert left_over(disk) == []


def test_a_page_on_a_full_disk_is_no_refusal_once_the_work_is_done(
    tmp_path: Path, run_cli: RunCli
) -> None:
    many(tmp_path / "tree", 2, 10)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16k", "none") as disk:
        said = run_cli("batch", "convert", "tree", "out", "--html", disk / "x.html", exit=5)
        assert "x.html: the page can't be written: not enough free space" in said.stderr
        assert not list(disk.iterdir())
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 2


# Reports of validations


def test_reports_of_others_are_not_overwritten(tree: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    path = reports / "run-0" / "step-000.pt.validation.json"
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    found = results("validate", tree, reports)
    assert {name: each.outcome for name, each in found.items()} == {
        **THREE,
        "run-0/step-000.pt": "refused",
    }
    assert path.read_text() == "precious"
    assert run("validate", tree, reports, force=True) == {**SKIPPED, "run-0/step-000.pt": "done"}
    assert json.loads(path.read_text())["ok"]
    save(tree / "run-0" / "step-000.pt", torch.ones(3))  # ours may be replaced
    assert run("validate", tree, reports) == {**SKIPPED, "run-0/step-000.pt": "done"}


def test_a_report_that_says_the_same_is_left(tree: Path, tmp_path: Path) -> None:
    out, reports = tmp_path / "out", tmp_path / "reports"
    run("convert", tree, out)
    save(tree / "run-0" / "step-000.pt", torch.ones(3))
    name = "run-0/step-000.safetensors"
    assert run("validate", out, reports, against=tree)[name] == "failed"
    before = stamps(reports)
    assert run("validate", out, reports, against=tree)[name] == "failed"
    assert stamps(reports) == before
    ckptmove.convert(tree / "run-0" / "step-000.pt", out / name, force=True)
    assert run("validate", out, reports, against=tree)[name] == "done"
    assert json.loads((reports / f"{name}.validation.json").read_text())["ok"]


def test_against_is_found_from_wherever_an_executor_is(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        batch = ckptmove.batch("validate", "tree", against="tree", executor=executor)
        monkeypatch.chdir("/")
        assert outcomes(batch) == THREE


# Workers


@pytest.mark.slow
def test_a_worker_whose_run_is_gone_ends_without_a_word(tmp_path: Path) -> None:
    code = "from ckptmove.batches.executors.process_pool import serve; serve()"
    for _ in range(12):
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.stderr == ""


# Again


def test_the_ledger_of_a_model_in_place_is_no_part_of_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    model = model_folder(tree / "model")
    (model / LEDGER).write_text("")
    run("convert", tree, tmp_path / "out")
    (model / LEDGER).write_text("{}\n")
    assert run("convert", tree, tmp_path / "out") == {"model": "skipped"}
    assert set(load_file(tmp_path / "out/model/model.safetensors")) == {"a.weight", "b.weight"}
