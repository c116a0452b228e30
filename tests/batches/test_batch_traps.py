"""What a batch must not do twice, not do at all, and not leave behind."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.trees import children, contents, many, outcomes, until

SWAP: dict[str, Any] = {"in_place": True, "map": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}


def test_verifying_changes_nothing_in_place_again(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 2, 100)
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("relocate", tree, executor=executor, **SWAP))
        before = contents(tree)
        again = ckptmove.batch("relocate", tree, executor=executor, verify=True, **SWAP)
        assert set(outcomes(again).values()) == {"skipped"}
    assert contents(tree) == before


def test_a_swap_that_was_refused_is_not_taken_for_made(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    path = save(tree / "a.pt", {"w": torch.ones(100)}, "cuda:0")
    with ThreadPoolExecutor(1) as executor:
        with path.open("r+b"):
            found = outcomes(ckptmove.batch("relocate", tree, executor=executor, **SWAP))
            assert found == {"a.pt": "refused"}
        other = save(tmp_path / "b.pt", {"w": torch.ones(100)}, "cuda:1")
        assert other.stat().st_size == path.stat().st_size
        path.write_bytes(other.read_bytes())  # the same inode, as a trainer may
        found = outcomes(ckptmove.batch("relocate", tree, executor=executor, **SWAP))
    assert found == {"a.pt": "done"}
    assert ckptmove.inspect(path).tensors[0].device == "cuda:0"


def test_a_swapped_file_that_was_touched_is_not_swapped_back(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 1, 100)
    (path,) = tree.rglob("*.pt")
    with ThreadPoolExecutor(1) as executor:
        outcomes(ckptmove.batch("relocate", tree, executor=executor, **SWAP))
        before = path.read_bytes()
        os.utime(path)
        found = outcomes(ckptmove.batch("relocate", tree, executor=executor, **SWAP))
        assert set(found.values()) == {"refused"}
        assert path.read_bytes() == before
        found = outcomes(ckptmove.batch("relocate", tree, executor=executor, force=True, **SWAP))
    assert set(found.values()) == {"done"}
    assert path.read_bytes() != before


def test_nothing_is_added_to_what_is_no_log(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 1, 100)
    (path,) = tree.rglob("*.pt")
    before = path.read_bytes()
    done = run_cli("batch", "convert", str(tree), "out", "--log", str(path), exit=5)
    assert "is not a log of ckptmove batch" in done.stderr
    assert path.read_bytes() == before


def test_a_torn_log_goes_on(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 3, 100)
    (tree / "bad.pt").write_bytes(b"PK\x03\x04 nothing")
    log = tmp_path / "log"
    asked = ("batch", "convert", str(tree), "out")
    run_cli(*asked, "--log", str(log), exit=1)
    os.truncate(log, log.stat().st_size - 20)
    run_cli(*asked, "--log", str(log), exit=1)
    done = run_cli(*asked, "--retry", str(log), "--json", exit=1)
    assert json.loads(done.stdout)["outcomes"]["failed"] == 1


@pytest.mark.slow
def test_a_batch_that_was_dropped_leaves_no_worker(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 6, 20_000)
    before = children(os.getpid())
    for _ in ckptmove.batch("convert", tree, tmp_path / "out", jobs=2):
        break
    until(lambda: children(os.getpid()) == before)
    with ckptmove.batch("convert", tree, tmp_path / "other", jobs=2) as work:
        next(work)
    assert children(os.getpid()) == before


def test_an_empty_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 1, 100)
    (tmp_path / "out" / "run-0" / "step-000.safetensors").mkdir(parents=True)
    with ThreadPoolExecutor(1) as executor:
        found = outcomes(ckptmove.batch("convert", tree, tmp_path / "out", executor=executor))
    assert set(found.values()) == {"refused"}


@pytest.mark.parametrize("by", ["retry", "include"])
def test_what_was_in_a_folder_that_could_not_be_read_is_tried_again(
    by: str, tmp_path: Path
) -> None:
    tree = many(tmp_path / "tree", 3, 100)
    log = tmp_path / "log"
    log.write_text('{"name": "run-1", "outcome": "failed"}\n')
    asked: dict[str, Any] = {"retry": log} if by == "retry" else {"include": "/run-1"}
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch(
            "convert", tree, tmp_path / "out", executor=executor, dry_run=True, **asked
        )
    assert [task.item.name for task in work.plan.tasks] == ["run-1/step-001.pt"]


def test_no_room_is_what_is_needed_at_least(tmp_path: Path) -> None:
    """Holes take none, and what nobody sees isn't written."""
    tree = tmp_path / "tree"
    tree.mkdir()
    save(tree / "a.pt", {"w": torch.ones(100)}, "cuda:0")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with (tree / "b.pt").open("wb") as file:
        file.truncate(free + (1 << 30))
    ckptmove.batch("relocate", tree, tmp_path / "out", to="cpu", dry_run=True)


def test_validating_again_with_verify_reads_checkpoints_not_reports(tmp_path: Path) -> None:
    """A byte of a tensor that rots keeps the size and the time of its file."""
    path, reports = tmp_path / "tree" / "run.pt", tmp_path / "reports"
    path.parent.mkdir()
    save(path, {"w": torch.ones(1000)}, "cpu")
    with ThreadPoolExecutor(1) as executor:

        def run(**options: Any) -> Any:
            work = ckptmove.batch("validate", path.parent, reports, executor=executor, **options)
            return next(work)

        assert run().outcome == "done"
        about, data = path.stat(), bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert run().outcome == "skipped"
        rotten = run(verify=True)
    assert rotten.outcome == "failed"
    assert "1 fault" in rotten.reason
