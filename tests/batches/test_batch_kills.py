"""Batches that are killed, broken off, run twice at once, or run out of room."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import RefusedError
from ckptmove.batches.trees import LEDGER
from ckptmove.writing.in_place.journal_name import SUFFIX
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.staging import mounted
from tests.making.trees import (
    children,
    contents,
    entered,
    kill,
    left_over,
    many,
    outcomes,
    stamps,
    start,
    until,
)
from tests.servers.fronts import HANG

ITEMS = 48
SWAP = ("--map", "cuda:0=cuda:1", "--map", "cuda:1=cuda:0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that take a while."""
    return many(tmp_path_factory.mktemp("tree") / "tree", ITEMS, 60_000)


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run makes of it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with ThreadPoolExecutor(4) as executor:
        outcomes(ckptmove.batch("convert", tree, out, executor=executor))
    return out


def killed(process: subprocess.Popen[str], out: Path, chance: random.Random, most: int) -> None:
    """Kill a run at a random instant: after so many items, or a little later; or before any."""
    aim = len(entered(out)) + chance.randrange(most)
    until(lambda: len(entered(out)) >= aim or process.poll() is not None)
    with suppress(subprocess.TimeoutExpired):
        process.wait(chance.random() * 0.02)
    workers = children(process.pid)
    if chance.random() < 0.3:
        kill(process.pid)  # its workers have to notice
    else:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(process.pid, signal.SIGSTOP)
        for pid in (*children(process.pid), *workers, process.pid):
            kill(pid)
    process.communicate()


def test_killed_at_any_instant_it_goes_on(tree: Path, whole: Path, tmp_path: Path) -> None:
    """Again and again; then the tree is that of an uninterrupted run, nothing was written twice."""
    out, chance = tmp_path / "out", random.Random(7)
    finished: dict[str, tuple[int, int]] = {}
    kills = 0
    while kills < 20 and len(finished) < ITEMS * 3 // 4:  # a fast machine has done more by then
        kills += 1
        process = start("convert", tree, out, "--jobs", "2", "-q")
        killed(process, out, chance, 4)
        now = stamps(out) if out.exists() else {}
        assert finished.items() <= now.items()  # untouched: same inode, same time
        finished = dict(now)
        names = {name.removesuffix(".safetensors") for name in now}
        known = {name.removesuffix(".pt") for name in entered(out)}
        assert known <= names
    assert kills >= 8
    assert 0 < len(finished) < ITEMS
    process = start("convert", tree, out, "--jobs", "2", "-v")
    said, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert said.count("\ndone ") + said.startswith("done ") == ITEMS - len(finished)
    assert finished.items() <= stamps(out).items()
    assert contents(out) == contents(whole)
    assert left_over(out) == []


@pytest.mark.slow
def test_at_most_one_item_a_worker_was_not_entered(tree: Path, whole: Path, tmp_path: Path) -> None:
    out, chance = tmp_path / "out", random.Random(3)
    for _ in range(6):
        process = start("convert", tree, out, "--jobs", "2", "-q")
        until(lambda: len(entered(out)) > 2)
        killed(process, out, chance, 2)
        assert len(stamps(out)) - len(set(entered(out))) <= 2
        shutil.rmtree(out)


@pytest.mark.slow
def test_in_place_each_file_is_changed_exactly_once(tree: Path, tmp_path: Path) -> None:
    """Devices are swapped: what would be done twice would be as it was."""
    place = shutil.copytree(tree, tmp_path / "place")
    expected = shutil.copytree(tree, tmp_path / "expected")
    for path in expected.rglob("*.pt"):
        swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
        ckptmove.relocate(path, in_place=True, map=swap, allow_unmatched=True)
    chance = random.Random(5)
    for _ in range(8):
        process = start("relocate", place, "--in-place", *SWAP, "--jobs", "2", "-q")
        killed(process, place, chance, 6)
    process = start("relocate", place, "--in-place", *SWAP, "--jobs", "2", "-q")
    assert process.communicate() == ("", "")
    assert process.returncode == 0
    assert contents(place) == contents(expected)
    assert left_over(place) == []
    inodes = {path.stat().st_ino for path in place.rglob("*.pt")}
    assert len(inodes) == ITEMS


@pytest.mark.slow
@pytest.mark.parametrize("state", ["journal", "begun", "changed"])
def test_in_place_a_change_that_was_interrupted_is_told_apart(
    state: str, tree: Path, tmp_path: Path
) -> None:
    """Whether it was undone, not begun, or done but not entered."""
    place = tmp_path / "place"
    place.mkdir()
    shutil.copy(tree / "run-0" / "step-000.pt", place)
    swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    old = (place / "step-000.pt").read_bytes()
    assert outcomes(ckptmove.batch("relocate", place, in_place=True, map=swap, jobs=1)) == {
        "step-000.pt": "done"
    }
    new = (place / "step-000.pt").read_bytes()
    begun, done = (place / LEDGER).read_text().splitlines(keepends=True)
    assert '"begun"' in begun
    if state != "changed":
        with (place / "step-000.pt").open("r+b") as file:
            file.write(old)  # the same inode
    if state == "journal":
        ckptmove.relocate(place / "step-000.pt", tmp_path / "x.pt", to="cpu")
    (place / LEDGER).write_text(begun)
    found = outcomes(ckptmove.batch("relocate", place, in_place=True, map=swap, jobs=1))
    assert found == {"step-000.pt": "skipped" if state == "changed" else "done"}
    assert (place / "step-000.pt").read_bytes() == new
    assert (place / LEDGER).read_text().endswith(done) or state != "changed"
    again = outcomes(ckptmove.batch("relocate", place, in_place=True, map=swap, jobs=1))
    assert again == {"step-000.pt": "skipped"}


@pytest.mark.slow
def test_two_runs_at_once_share_the_work(tree: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = [start("convert", tree, out, "--jobs", "2", "-v") for _ in range(2)]
    said = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    done = [line.split()[1] for text, _ in said for line in text.splitlines() if "done  " in line]
    assert len(done) == len(set(done)) == ITEMS
    assert contents(out) == contents(whole)
    assert left_over(out) == []
    assert len(entered(out)) == ITEMS


@pytest.mark.slow
def test_two_runs_at_once_in_place(tree: Path, tmp_path: Path) -> None:
    place = shutil.copytree(tree, tmp_path / "place")
    command = ("relocate", place, "--in-place", *SWAP, "--jobs", "2", "-q")
    runs = [start(*command) for _ in range(2)]
    assert [(run.communicate(), run.returncode) for run in runs] == [(("", ""), 0)] * 2
    for path in place.rglob("*.pt"):
        [device] = ckptmove.inspect(path).devices
        [before] = ckptmove.inspect(tree / path.relative_to(place)).devices
        assert {device, before} == {"cuda:0", "cuda:1"}
    assert len(entered(place)) == ITEMS


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Path]:
    """One that takes long enough to be caught, and two that don't."""
    (tmp_path / "big").mkdir()
    save(tmp_path / "big" / "large.pt", torch.ones(50_000_000), "cuda:1")
    for n in range(2):
        save(tmp_path / "big" / f"small-{n}.pt", torch.ones(100 + n), "cuda:1")
    yield tmp_path / "big"
    shutil.rmtree(tmp_path)  # pytest keeps what tests leave


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_item_alone(big: Path, tmp_path: Path) -> None:
    def hunt() -> None:
        """Kill whoever has the unfinished file open."""
        until(lambda: left_over(tmp_path / "out") if (tmp_path / "out").exists() else None)
        for pid in children(os.getpid()):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if link.readlink().name.startswith(".large"):
                        kill(pid)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    batch = ckptmove.batch("relocate", big, tmp_path / "out", to="cpu", jobs=1)
    results = {result.name: result for result in batch}
    hunter.join()
    assert results["large.pt"].outcome == "failed"
    assert results["large.pt"].reason == "its worker was killed by SIGKILL"
    assert results["large.pt"].hint == "perhaps the machine ran out of memory"
    assert results["small-0.pt"].outcome == results["small-1.pt"].outcome == "done"
    assert left_over(tmp_path) == []
    again = outcomes(ckptmove.batch("relocate", big, tmp_path / "out", to="cpu", jobs=1))
    assert again == {"large.pt": "done", "small-0.pt": "skipped", "small-1.pt": "skipped"}


def test_the_command_forks_its_workers_and_replaces_one_that_dies(
    big: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start("relocate", big, out, "--to", "cpu", "--jobs", "1")
    until(lambda: left_over(out) if out.exists() else None)
    [worker] = children(process.pid)
    assert _command_of(worker) == _command_of(process.pid)
    kill(worker)
    said, _ = process.communicate(timeout=HANG)
    assert "failed  large.pt: its worker was killed by SIGKILL" in said
    assert process.returncode == 1
    assert left_over(out) == []
    assert {path.name for path in out.glob("*.pt")} == {"small-0.pt", "small-1.pt"}


def _command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cleans_up_and_sums_up(number: signal.Signals, big: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("relocate", big, out, "--to", "cpu", "--jobs", "1", cold=True)
    until(lambda: left_over(out) if out.exists() else None)
    workers = children(process.pid)
    process.send_signal(number)
    said, errors = process.communicate(timeout=HANG)
    assert process.returncode == -number
    assert errors.strip() == ""
    assert "3 not done because the run stopped" in said
    assert f"resume: ckptmove batch relocate {big} {out} --to cpu --jobs 1\n" in said
    assert left_over(out) == []
    assert list(stamps(out)) == []
    assert workers
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert outcomes(ckptmove.batch("relocate", big, out, to="cpu", jobs=2)) == {
        "large.pt": "done",
        "small-0.pt": "done",
        "small-1.pt": "done",
    }


@pytest.mark.slow
def test_workers_end_with_the_run_that_started_them(big: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("relocate", big, out, "--to", "cpu", "--jobs", "1")
    until(lambda: left_over(out) if out.exists() else None)
    workers = children(process.pid)
    kill(process.pid)
    process.communicate()
    until(lambda: not any(_lives(pid) for pid in workers))
    assert left_over(out) == []
    assert list(stamps(out)) == []


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# No room


def test_no_room_is_known_before_anything_is_written(tree: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "none") as small:
        with pytest.raises(RefusedError, match="not enough free space"):
            ckptmove.batch("convert", tree, small / "out")
        assert list(small.iterdir()) == []
        ckptmove.batch("convert", tree, small / "out", select="step", dry_run=True)


def test_a_disk_that_fills_up_is_told_and_the_run_taken_up(
    tree: Path, whole: Path, tmp_path: Path
) -> None:
    options = ("-t", "tmpfs", "-o", "size=40m", "none")
    with mounted(tmp_path / "disk", *options) as disk, ThreadPoolExecutor(1) as executor:
        batch = ckptmove.batch("convert", tree, disk / "out", executor=executor)
        first = next(batch)
        with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        results = list(batch)
        failed = [result for result in results if not result.ok]
        assert len(failed) > ITEMS // 2
        assert all("free space" in each.reason or "No space" in each.reason for each in failed)
        assert left_over(disk) == []
        (disk / "filler").unlink()
        before = stamps(disk / "out")
        again = outcomes(ckptmove.batch("convert", tree, disk / "out", executor=executor))
        assert again[first.name] == "skipped"
        assert set(again.values()) == {"done", "skipped"}
        assert before.items() <= stamps(disk / "out").items()
        assert contents(disk / "out") == contents(whole)


def test_a_limit_on_files_fails_those_above_it(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "tree").mkdir()
    save(tmp_path / "tree" / "large.pt", torch.ones(100_000))
    save(tmp_path / "tree" / "small.pt", torch.ones(10))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        done = run_cli("batch", "convert", "tree", "out", exit=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "failed  large.pt: writing failed: File too large" in done.stdout
    assert "converted 1 item" in done.stdout
    assert left_over(tmp_path) == []
    assert f"{SUFFIX}" not in done.stdout
