"""Batches: what is found, what becomes of it, and how it is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove import CkptmoveError, CorruptError, InputError, RefusedError, UsageError
from ckptmove.batches.options import VerbName
from ckptmove.batches.trees import LEDGER
from tests.making.checkpoints import save
from tests.making.trees import (
    contents,
    every_kind,
    left_over,
    many,
    model_folder,
    outcomes,
    small_tree,
    stamps,
)

SMALL = {
    "a/run.pt": "done",
    "a/last.ckpt": "done",
    "a/deep/old.pth": "done",
    "a/nameless": "done",
    "model": "done",
    "a/cut.pt": "failed",
    "empty.pt": "refused",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Mixed checkpoints."""
    return small_tree(tmp_path / "tree")


@pytest.fixture
def threads() -> Any:
    """An executor that starts at once."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


def run(verb: VerbName, *where: Path, **options: Any) -> dict[str, str]:
    """The outcomes, by threads: no process has to start."""
    with ThreadPoolExecutor(2) as executor:
        return dict(outcomes(ckptmove.batch(verb, *where, executor=executor, **options)))


# What is found, and what becomes of it


@pytest.mark.slow
def test_a_tree_is_converted_and_what_is_damaged_is_told(tree: Path, tmp_path: Path) -> None:
    before = contents(tree)
    batch = ckptmove.batch("convert", tree, tmp_path / "out", jobs=2)
    results = {result.name: result for result in batch}
    assert {name: result.outcome for name, result in results.items()} == SMALL
    assert "zip directory is missing" in results["a/cut.pt"].reason
    assert results["empty.pt"].reason == "is empty"
    written = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert written == {
        *("a/run.safetensors", "a/last.safetensors", "a/deep/old.safetensors"),
        *("a/nameless.safetensors", "model/model.safetensors", "model/config.json", LEDGER),
    }
    for name in ("a/run.pt", "a/last.ckpt", "a/deep/old.pth", "a/nameless"):
        output = results[name].output
        assert output is not None
        alone = tmp_path / Path(output).name
        ckptmove.convert(tree / name, alone)
        assert alone.read_bytes() == Path(output).read_bytes()
    found = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert found["a.weight"].tolist() == list(range(6))
    assert contents(tree) == before
    report = batch.report()
    assert report.outcomes == {"done": 5, "skipped": 0, "left-out": 0, "refused": 1, "failed": 1}
    assert [each.name for each in report.failures] == ["a/cut.pt", "empty.pt"]
    assert (report.ok, report.others, report.remaining) == (False, 1, ())
    assert json.loads(json.dumps(report.to_json()))["outcomes"] == report.outcomes


def test_a_tree_is_relocated(tree: Path, tmp_path: Path) -> None:
    assert run("relocate", tree, tmp_path / "out", to="cpu") == SMALL
    assert contents(tmp_path / "out" / "model") == contents(tree / "model")
    for name in ("a/run.pt", "a/last.ckpt", "a/deep/old.pth", "a/nameless"):
        devices = ckptmove.inspect(tmp_path / "out" / name).devices
        assert set(devices) == {"cpu"}
    assert torch.load(tmp_path / "out/a/last.ckpt")["w"].tolist() == list(range(50_000))


@pytest.mark.slow
def test_every_kind_of_checkpoint(tmp_path: Path) -> None:
    """Each becomes what the verb itself makes of it, or is refused for the same reason."""
    count = every_kind(tmp_path / "tree")
    assert count > 300
    batch = ckptmove.batch("convert", tmp_path / "tree", tmp_path / "out", jobs=2)
    results = list(batch)
    assert len(results) == count
    for result in results:
        if result.output is None:
            with pytest.raises(CkptmoveError) as refused:
                ckptmove.convert(result.path, tmp_path / "alone.safetensors")
            assert result.reason == str(refused.value)
            damaged = isinstance(refused.value, CorruptError)
            assert result.outcome == ("failed" if damaged else "refused")
            assert damaged == result.name.startswith("cut/")
    written = sorted(result for result in results if result.output)
    for n, result in enumerate(written[::9]):  # each takes its time
        alone = tmp_path / f"{n}.safetensors"
        ckptmove.convert(result.path, alone)
        assert Path(str(result.output)).read_bytes() == alone.read_bytes(), result.name
    assert left_over(tmp_path) == []


def test_validate_tells_what_is_wrong_and_writes_reports(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "model")
    made = run("convert", tree, tmp_path / "out")
    found = run("validate", tmp_path / "out", tmp_path / "reports", against=tree)
    assert len(set(found.values())) == 2
    without = {name for name, outcome in made.items() if outcome in ("failed", "refused")}
    assert {name for name, outcome in found.items() if outcome == "failed"} == without
    for name in without:  # nothing was made of these
        (tree / name).unlink()
    said = json.loads((tmp_path / "reports/a/run.safetensors.validation.json").read_text())
    assert said["against"] == str(tree / "a" / "run.pt")
    assert [each["outcome"] for each in said["checks"][:2]] == ["passed", "passed"]
    assert set(run("validate", tmp_path / "out", tmp_path / "reports", against=tree).values()) == {
        "skipped"
    }
    save(tree / "a" / "last.ckpt", {"w": torch.zeros(50_000)}, "cuda:1")
    found = run("validate", tmp_path / "out", against=tree)
    assert [name for name, outcome in found.items() if outcome == "failed"] == [
        "a/last.safetensors"
    ]
    assert not (tmp_path / "out" / "a" / "last.safetensors.validation.json").exists()


def test_other_files_are_copied_if_wanted(tree: Path, tmp_path: Path) -> None:
    found = run("convert", tree, tmp_path / "out", copy_rest=True)
    assert found == {**SMALL, "a/notes.txt": "done"}
    assert (tmp_path / "out" / "a" / "notes.txt").read_text() == "precious"


def test_globs(tree: Path, tmp_path: Path) -> None:
    assert set(run("validate", tree, include="a/*")) == {n for n in SMALL if n.startswith("a/")}
    assert set(run("validate", tree, include="*.pth")) == {"a/deep/old.pth"}
    assert set(run("validate", tree, include="run.pt")) == {"a/run.pt"}
    assert set(run("validate", tree, exclude=["deep", "*.pt"])) == {
        *("a/last.ckpt", "a/nameless", "model")
    }
    assert set(run("validate", tree, include="model/model.safetensors.index.json")) == {"model"}
    assert set(run("validate", tree, include="[a]", exclude="*", allow_empty=True)) == set()
    shutil.copytree(tree / "a", tree / "b" / "a")
    assert set(run("validate", tree, include="a/run.pt")) == {"a/run.pt"}
    assert set(run("validate", tree, include="run.pt")) == {"a/run.pt", "b/a/run.pt"}
    assert set(run("validate", tree, include="/empty.pt")) == {"empty.pt"}
    assert set(run("validate", tree, include="/run.pt", allow_empty=True)) == set()
    assert set(run("validate", tree, include="/a/*.pt", exclude="/a/cut.pt")) == {"a/run.pt"}


def test_folders_links_and_what_can_not_be_read(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    model_folder(tree)  # the root itself is no item: its index is
    model_folder(tree / "outer" / "inner")
    shutil.copy(tree / "model-00001-of-00002.safetensors", tree / "outer" / "model.safetensors")
    file = save(tmp_path / "elsewhere.pt", torch.ones(2))
    (tree / "linked.pt").symlink_to(file)
    (tree / "linked").symlink_to(tree / "outer")
    (tree / "nowhere.pt").symlink_to(tree / "none")
    batch = ckptmove.batch("convert", tree, tmp_path / "out", jobs=1)
    assert outcomes(batch) == {
        "model.safetensors.index.json": "done",
        "outer/model.safetensors": "done",
        "outer/inner": "done",
        "linked.pt": "done",
        "config.json": "done",  # of the model that is no item as a whole
    }
    assert sorted(batch.plan.notes) == [
        "linked is a link to a folder and was not followed",
        "nowhere.pt is a broken link",
    ]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a.weight", "b.weight"}


def test_shards_are_the_whole_tree_and_do_not_overlap(tree: Path, tmp_path: Path) -> None:
    shares = [set(run("validate", tree, shard_of=f"{n}/3")) for n in (1, 2, 3)]
    assert set.union(*shares) == set(SMALL)
    assert sum(map(len, shares)) == len(SMALL)
    for wrong in ("0/3", "4/3", "1", "x/2"):
        with pytest.raises(UsageError, match="form I/N"):
            ckptmove.batch("validate", tree, shard_of=wrong)


def test_the_biggest_come_first_and_progress_adds_up(tmp_path: Path) -> None:
    for name, count in (("small", 10), ("huge", 90_000), ("middle", 1000)):
        (tmp_path / "tree").mkdir(exist_ok=True)
        save(tmp_path / "tree" / name, torch.rand(count))
    told: list[int] = []
    batch = ckptmove.batch(
        "relocate", tmp_path / "tree", tmp_path / "out", to="cpu", jobs=1, progress=told.append
    )
    assert [result.name for result in batch] == ["huge", "middle", "small"]
    assert sum(told) == batch.plan.nbytes == sum(map(len, contents(tmp_path / "tree").values()))


# What is refused before anything is done


@pytest.mark.parametrize(
    ("verb", "options", "match"),
    [
        ("relocate", {}, "the device is missing"),
        ("relocate", {"to": "gpu"}, "not a device"),
        ("relocate", {"to": "cpu", "in_place": True}, "either a destination"),
        ("relocate", {"to": "cpu", "dry_run": False, "nope": 1}, "no option 'nope'"),
        ("convert", {"format": "zip"}, "no format that can be written"),
        ("convert", {"dtype": "int7"}, "int7"),
        ("convert", {"max_shard_size": "many"}, "no size"),
        ("convert", {"exclude_tensors": "x", "rename": "y"}, "form s/OLD/NEW/"),
        ("convert", {"jobs": 0}, "at least 1"),
        ("validate", {"copy_rest": True}, "needs a destination"),
        ("diff", {}, "not a verb of batch"),
        ("inspect", {}, "takes no destination"),
    ],
)
def test_options_are_looked_at_first(
    verb: VerbName, options: dict[str, Any], match: str, tree: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=match):
        ckptmove.batch(verb, tree, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_where_it_can_not_go(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="the destination is the source"):
        ckptmove.batch("convert", tree, tree)
    with pytest.raises(RefusedError, match="is inside the source"):
        ckptmove.batch("convert", tree, tree / "out")
    with pytest.raises(InputError, match="is not a directory"):
        ckptmove.batch("convert", tree / "a" / "run.pt", tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="can't be written"):
        ckptmove.batch("convert", tree, tmp_path / "file" / "out")


def test_a_dry_run_does_nothing(tree: Path, tmp_path: Path) -> None:
    batch = ckptmove.batch("convert", tree, tmp_path / "out", dry_run=True)
    assert {each.name for each in batch} == set(SMALL)
    assert {task.item.name for task in batch.plan.tasks} == set(SMALL)
    assert not (tmp_path / "out").exists()
    said = batch.plan.to_json()
    assert said["nbytes"] == sum(task.item.nbytes for task in batch.plan.tasks)
    assert said["free_nbytes"] > 0


# What is done already


def test_what_is_done_is_not_done_again(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", tree, out)
    before = stamps(out)
    skipped = {name: "skipped" if what == "done" else what for name, what in SMALL.items()}
    assert run("convert", tree, out) == skipped
    assert run("convert", tree, out, verify=True) == skipped
    assert stamps(out) == before
    (out / "a" / "last.safetensors").unlink()  # the output is the truth
    again = run("convert", tree, out)
    assert again == {**skipped, "a/last.ckpt": "done"}
    os.truncate(out / "a" / "last.safetensors", 100)
    again = run("convert", tree, out)
    assert again == {**skipped, "a/last.ckpt": "refused"}
    assert run("convert", tree, out, force=True) == {**skipped, "a/last.ckpt": "done"}


def test_a_moved_tree_is_known_by_its_checksums(tree: Path, tmp_path: Path) -> None:
    run("convert", tree, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    plan = ckptmove.batch("convert", tree, tmp_path / "moved", dry_run=True).plan
    assert [task.existing for task in plan.tasks].count("checked") == 5
    path = tmp_path / "moved" / "a" / "last.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    skipped = {name: "skipped" if what == "done" else what for name, what in SMALL.items()}
    found = run("convert", tree, tmp_path / "moved")
    assert found == {**skipped, "a/last.ckpt": "refused"}
    plan = ckptmove.batch("convert", tree, tmp_path / "moved", dry_run=True).plan
    assert len(plan.done) == 4


def test_damage_without_a_trace_is_found_by_verify(tree: Path, tmp_path: Path) -> None:
    run("convert", tree, tmp_path / "out")
    path = tmp_path / "out" / "a" / "last.safetensors"
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert len(ckptmove.batch("convert", tree, tmp_path / "out", dry_run=True).plan.done) == 5
    found = run("convert", tree, tmp_path / "out", verify=True)
    assert (found["a/last.ckpt"], list(found.values()).count("skipped")) == ("refused", 4)


@pytest.mark.slow
def test_another_source_or_other_options_are_another_job(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("relocate", tree, out, to="cpu", include="*/last.ckpt")
    assert run("relocate", tree, out, to="cuda:0", include="*/last.ckpt") == {
        "a/last.ckpt": "refused"
    }
    save(tree / "a" / "last.ckpt", torch.ones(5), "cuda:1")
    [result] = ckptmove.batch("relocate", tree, out, to="cpu", include="*/last.ckpt", jobs=1)
    assert (result.outcome, result.hint) == (
        "refused",
        "--force replaces it; or choose another name",
    )
    assert "differs from what would be written" in result.reason
    assert run("relocate", tree, out, to="cpu", include="*/last.ckpt", force=True) == {
        "a/last.ckpt": "done"
    }


def test_what_is_there_already_and_equal_is_left(tree: Path, tmp_path: Path) -> None:
    """Without a ledger: somebody else made it, or the run was killed before it could say so."""
    cases: dict[VerbName, dict[str, Any]] = {"convert": {}, "relocate": {"to": "cpu"}}
    for verb, options in cases.items():
        out = tmp_path / verb
        done = run(verb, tree, out, **options)
        before = stamps(out)
        (out / LEDGER).unlink()
        again = run(verb, tree, out, **options)
        assert again == {n: "skipped" if what == "done" else what for n, what in done.items()}
        assert stamps(out) == before
        assert left_over(out) == []


def test_what_killed_runs_left_is_removed_but_nothing_else(tree: Path, tmp_path: Path) -> None:
    run("convert", tree, tmp_path / "out")
    inside = tmp_path / "out" / "a"
    (inside / ".last.safetensors.0123abcd.ckptmove-tmp").write_text("torn")
    (inside / ".run.safetensors.0123abcd.ckptmove-tmp").mkdir()
    (inside / ".stranger.0123abcd.ckptmove-tmp").write_text("of another")
    with (inside / ".nameless.safetensors.0123abcd.ckptmove-tmp").open("w"):
        run("convert", tree, tmp_path / "out")
        assert sorted(path.name for path in left_over(tmp_path)) == [
            ".nameless.safetensors.0123abcd.ckptmove-tmp",  # somebody is at it
            ".stranger.0123abcd.ckptmove-tmp",
        ]


# Who does it


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["jobs-1", "jobs-2", "threads", "processes"])
def test_whoever_does_it_the_tree_is_the_same(kind: str, tree: Path, tmp_path: Path) -> None:
    run("relocate", tree, tmp_path / "expected", to="cpu")
    executor: Executor | None = None
    if kind == "threads":
        executor = ThreadPoolExecutor(3)
    elif kind == "processes":
        executor = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    jobs = int(kind[-1]) if executor is None else None
    told: list[int] = []
    batch = ckptmove.batch(
        "relocate",
        tree,
        tmp_path / "out",
        to=torch.device("cpu"),
        jobs=jobs,
        executor=executor,
        progress=told.append,
    )
    assert len(list(batch)) == len(batch.plan.tasks)
    if executor is not None:
        executor.shutdown()
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert sum(told) == batch.plan.nbytes


def test_an_executor_that_breaks_fails_its_items_and_is_told(tree: Path, tmp_path: Path) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    batch = ckptmove.batch("convert", tree, tmp_path / "out", executor=executor)
    results = list(batch)
    assert {result.outcome for result in results} == {"failed"}
    assert "the executor failed: RuntimeError" in results[0].reason
    assert set(run("convert", tree, tmp_path / "out").values()) == {"done", "failed", "refused"}


def test_who_breaks_off_can_go_on(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 12)
    run("convert", tree, tmp_path / "whole")
    for jobs in (1, 2):
        batch = ckptmove.batch("convert", tree, tmp_path / "out", jobs=jobs)
        first = next(result for result in batch if result.outcome == "done")
        batch.close()
        assert next(batch, None) is None
        report = batch.report()
        assert first.name not in report.remaining
        assert len(report.remaining) == len(batch.plan.tasks) - 1
        assert left_over(tmp_path) == []
    run("convert", tree, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_options_reach_every_item(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 3)
    out = tmp_path / "out"
    options = {"select": "model", "exclude_tensors": "*.w1", "dtype": "bf16", "bare": True}
    assert set(run("convert", tree, out, **options).values()) == {"done"}
    for path in out.rglob("*.safetensors"):
        assert {key: value.dtype for key, value in load_file(path).items()} == {
            "w0": torch.bfloat16
        }
    run("convert", tree, tmp_path / "shards", max_shard_size="100kB")
    files = sorted(path.name for path in (tmp_path / "shards" / "run-1" / "step-001").iterdir())
    assert len(files) == 3
    assert files[-1] == "model.safetensors.index.json"
    with pytest.raises(UsageError, match="always one file"):
        ckptmove.batch("convert", tree, out, max_shard_size="100kB", format="torch-zip")
