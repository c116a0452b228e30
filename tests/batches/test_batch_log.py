"""What a batch tells while it runs and afterwards: its log, its manifest, its progress."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.batches.options import VerbName
from ckptmove.reports.batch.items import Result
from ckptmove.reports.batch.log import log_line
from tests.cli.test_printing import on_a_terminal
from tests.conftest import RunCli
from tests.making.trees import CLI, many, model_folder, small_tree
from tests.servers.object_store import Store


def test_a_line_of_the_log_says_when_where_and_what(tmp_path: Path, run_cli: RunCli) -> None:
    schemas = pytest.importorskip("jsonschema")
    small_tree(tmp_path / "tree")
    options = ("--log", "log", "--shard-of", "1/1", "-j1")
    done = run_cli("batch", "convert", "tree", "out", *options, exit=1)
    assert "\nretry: ckptmove batch convert --retry=log tree out --log log" in done.stdout
    lines = {}
    for text in (tmp_path / "log").read_text().splitlines():
        line = json.loads(text)
        schemas.validate(line, ckptmove.LogLine.json_schema())
        lines[line["name"]] = line
    assert len(lines) == 7
    run = lines["a/run.pt"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", run["time"])
    assert (run["host"], run["shard"], run["version"]) == (
        *(run["host"] or "?", "1/1", ckptmove.__version__),
    )
    assert run["report"]["format"] == "safetensors"
    data = (tmp_path / "out" / "a" / "run.safetensors").read_bytes()
    assert run["digests"] == {"a/run.safetensors": hashlib.sha256(data).hexdigest()}
    tree, told = tmp_path / "tree", dict[str, str]()
    for line in lines.values():
        told |= line["source_digests"]
    assert set(told) > {"a/run.pt", "model/config.json", "model/model-00001-of-00002.safetensors"}
    for name, digest in told.items():
        assert hashlib.sha256((tree / name).read_bytes()).hexdigest() == digest
    assert run["source_stamp"].startswith(f"{run['nbytes']}-")
    assert lines["empty.pt"]["reason"] == "is empty"


def test_a_line_is_short_whatever_the_report_says() -> None:
    why = "an optimizer's step stays on the CPU"
    report = {
        "kept": [{"name": f"optimizer.state.{n}.step", "why": why} for n in range(2000)],
        "warnings": ["x" * 5000] * 50,
        "moved": {f"cuda:{n}→cpu": {"storages": n, "nbytes": n} for n in range(2000)},
    }
    digests = {f"{n}": "0" * 64 for n in range(500)}
    result = Result("a" * 3000, "b" * 4000, "done", "c" * 9000, "d" * 9000, digests=digests)
    for one in (result, result._replace(report=report), result._replace(digests={})):
        text = log_line(one, time="", host="h", shard=None, version="1", verb="relocate").text()
        assert len(text.encode()) <= 4000 + 3002
        assert json.loads(text)["name"] == result.name
    short = Result("a.pt", "a.pt", "done", report={"kept": report["kept"]})
    said = json.loads(
        log_line(short, time="", host="h", shard=None, version="1", verb="relocate").text()
    )
    assert said["kept"] == {why: 2000}
    assert not said["cut"]


def test_a_manifest_is_what_sha256sum_reads(tmp_path: Path, run_cli: RunCli) -> None:
    tree, out = many(tmp_path / "tree", 3, 10), tmp_path / "out"
    model_folder(tree / "model")
    (tree / "back\\slash\nand line.pt").write_bytes((tree / "run-0" / "step-000.pt").read_bytes())
    run_cli("batch", "convert", "tree", "out", "--manifest", "SUMS", "-q", exit=0)

    def check() -> list[str]:
        command = ["sha256sum", "--check", "--strict", "--quiet", "../SUMS"]
        subprocess.run(command, cwd=out, check=True)
        return (tmp_path / "SUMS").read_text().splitlines()

    files = [path for path in out.rglob("*") if path.is_file() and path.name[0] != "."]
    assert len(check()) == len(files) == 6
    (tree / "new.pt").write_bytes((tree / "run-1" / "step-001.pt").read_bytes())
    run_cli("batch", "convert", "tree", "out", "--manifest", "SUMS", "-q", exit=0)
    assert len(check()) == 7  # of those done before the ledger knows
    run_cli("batch", "convert", "tree/run-0", "other", exit=0)
    done = run_cli("batch", "convert", "tree/run-0", "other", "--manifest", "SUMS", exit=0)
    assert "ckptmove: SUMS: lacks 1 item of an earlier run; --verify reads" in done.stderr
    run_cli("batch", "convert", "tree/run-0", "other", "--manifest=SUMS", "--verify", exit=0)
    assert len((tmp_path / "SUMS").read_text().splitlines()) == 1
    done = run_cli("batch", "validate", "tree", "--manifest", "SUMS", exit=2)
    assert "needs a destination" in done.stderr


@pytest.mark.parametrize("option", ["--manifest", "--metrics"])
def test_a_file_that_no_batch_wrote_is_not_replaced(
    option: str, tmp_path: Path, run_cli: RunCli
) -> None:
    tree = many(tmp_path / "tree", 1, 10)
    (only,) = tree.rglob("*.pt")
    before = only.read_bytes()
    os.mkfifo(tmp_path / "fifo")
    for path in (only, tmp_path / "fifo", tmp_path):
        done = run_cli("batch", "convert", "tree", "out", option, str(path), exit=4)
        assert "exists, and is not a" in done.stderr
        assert not (tmp_path / "out").exists()
    assert only.read_bytes() == before
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "new").touch()
    for _ in range(2):
        run_cli("batch", "convert", "tree", "out", option, "new", exit=0)
    assert (tmp_path / "new").stat().st_size


def test_the_summary_comes_also_where_the_manifest_does_not(
    tmp_path: Path, run_cli: RunCli
) -> None:
    many(tmp_path / "tree", 1, 10)
    done = run_cli("batch", "convert", "tree", "out", "--manifest=out/none/SUMS", exit=5)
    assert done.stdout.startswith("converted 1 item")
    assert "SUMS: the manifest can't be written: No such file" in done.stderr
    run_cli("batch", "convert", "tree", "out", "--manifest=out/SUMS", exit=0)
    done = run_cli("batch", "convert", "tree", "other", "--manifest=none/SUMS", exit=5)
    assert not (tmp_path / "other").exists()  # known at once


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["--retry=log", "--include=cut.pt", "--delete-source"])
def test_a_manifest_keeps_what_was_done_before(by: str, tmp_path: Path, run_cli: RunCli) -> None:
    tree, out = many(tmp_path / "tree", 3, 10), tmp_path / "out"
    good = (tree / "run-0" / "step-000.pt").read_bytes()
    (tree / "cut.pt").write_bytes(good[:-50])
    if by != "--delete-source":  # which keeps those of folders
        model_folder(tree / "model")
        (tree / "model" / "runs" / "checkpoint-2").mkdir(parents=True)
        (tree / "model" / "runs" / "checkpoint-2" / "last.pt").write_bytes(good)
    removing = ("--delete-source",) if by == "--delete-source" else ()
    asked = ("batch", "convert", "tree", "out", "--manifest=SUMS", "-q", *removing)
    run_cli(*asked, "--log=log", exit=1)
    before = (tmp_path / "SUMS").read_text().splitlines()
    (tree / "cut.pt").write_bytes(good)
    again = () if removing else (by,)
    run_cli(*asked, *again, exit=0)
    command = ["sha256sum", "--check", "--strict", "--quiet", "../SUMS"]
    subprocess.run(command, cwd=out, check=True)
    after = (tmp_path / "SUMS").read_text().splitlines()
    assert len(after) == len(before) + 1
    assert set(before) < set(after)
    gone = out / "run-0" / "step-000.safetensors"
    gone.unlink()
    run_cli(*asked, "--include=cut.pt", "--allow-empty", exit=0)
    assert (tmp_path / "SUMS").read_text().splitlines() == [
        each for each in after if "run-0/step-000" not in each
    ]
    (out / "cut.safetensors").write_bytes(b"other")
    run_cli(*asked, "--include=none.pt", "--allow-empty", exit=0)
    assert "cut" not in (tmp_path / "SUMS").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["relocate", "convert"])
def test_sources_in_a_store_have_digests_of_what_was_read_of_them(
    verb: VerbName, tmp_path: Path, store: Store
) -> None:
    """What is small, or copied as it lies, is not fetched again; nor if there is nothing to do."""
    tree = tmp_path / "tree"
    model_folder(tree / "model")
    torch.save({"w": torch.rand(9_000_000), "b": torch.rand(10)}, tree / "parts.pt")
    torch.save({"w": torch.rand(10)}, tree / "small.pt")
    source = store.put_folder("runs", tree)
    wanted = {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file()
    }
    options: dict[str, Any] = {"to": "cuda:0"} if verb == "relocate" else {}
    for outcome in ("done", "skipped"):
        store.front.reset()
        with ThreadPoolExecutor(1) as executor:
            work = ckptmove.batch(
                verb, source, store.url("out"), digests=True, executor=executor, **options
            )
            results = list(work)
        assert {each.outcome for each in results} == {outcome}
        told = {name: each for result in results for name, each in result.source_digests.items()}
        assert told == wanted
        most = 1.05 if verb == "relocate" or outcome == "skipped" else 2.05
        assert store.front.nbytes("runs/") < most * (tree / "parts.pt").stat().st_size


@pytest.mark.slow
def test_what_is_uploaded_has_digests_without_being_read_again(
    tmp_path: Path, store: Store
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    torch.save({"w": torch.rand(9_000_000)}, tree / "parts.pt")  # of several
    torch.save({"w": torch.rand(10)}, tree / "small.pt")
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch(
            "relocate", tree, store.url("out"), to="cuda:0", digests=True, executor=executor
        )
        found = {name: each for result in work for name, each in result.digests.items()}
    assert set(found) == {"parts.pt", "small.pt"}
    assert not [each for each in store.front.asked("GET", "/out/") if each.nbytes > 10_000]
    for name, digest in found.items():
        data = store.say("GET", f"/{store.bucket}/out/{name}")
        assert hashlib.sha256(data).hexdigest() == digest


def test_progress_is_lines_json_or_a_bar(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 4, 10)
    (tree / "bad.pt").write_bytes(b"PK\3\4")
    done = run_cli("batch", "convert", "tree", "out", "--progress=json", "-j1", exit=1)
    said = [json.loads(line) for line in done.stderr.splitlines()[:-1]]
    assert said
    for each in said:
        assert each["items"] == 5 == each["done"] + each["failed"] + each["left"]
        assert 0 <= each["nbytes"] <= each["total_nbytes"]
    assert (said[-1]["done"], said[-1]["failed"], said[-1]["left"]) == (4, 1, 0)
    assert said[-1]["nbytes"] == said[-1]["total_nbytes"]
    assert said[-1]["current"] == []
    (tree / "bad.pt").unlink()
    printed = on_a_terminal(tmp_path, *CLI[3:], "convert", "tree", "other", "-v")
    assert "%|" in printed  # and the lines of -v as well
    assert re.search(r"\d done, \d left", printed)
    assert len(re.findall(r"done    run-\d/step-00\d\.pt →", printed)) == 4


def test_metrics_are_a_text_file_for_prometheus(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 3, 10)
    (tree / "bad.pt").write_bytes(b"PK\3\4")
    tree.rename(tmp_path / 'a "tree"')
    options = ("--metrics", "batch.prom", "--shard-of", "1/1", "-j1")
    run_cli("batch", "convert", 'a "tree"', "out", *options, exit=1)
    values = {}
    for line in (tmp_path / "batch.prom").read_text().splitlines():
        if not line.startswith("#"):
            found = re.fullmatch(r"ckptmove_batch_(\w+)\{(.+)\} (\S+)", line)
            assert found, line
            assert 'source="a \\"tree\\"",shard="1/1"' in found[2]
            outcome = re.search(r'outcome="(\w+)"', found[2])
            values[found[1], outcome and outcome[1]] = float(found[3])
    assert [values["items", each] for each in ("done", "failed", "left")] == [3, 1, 0]
    assert values["running", None] == 0
    assert values["bytes", None] == values["total_bytes", None] > 0
    assert [path.name for path in tmp_path.glob(".batch.prom*")] == []
    done = run_cli("batch", "convert", 'a "tree"', "out", "--metrics", "none/x.prom", exit=5)
    assert "the metrics can't be written" in done.stderr


def test_without_a_terminal_a_line_now_and_then_and_failures_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptmove.cli.display import batch_progress
    from ckptmove.cli.display.batch_metrics import MetricsFile

    tree = many(tmp_path / "tree", 4, 10)
    (tree / "bad.pt").write_bytes(b"PK\3\4")
    monkeypatch.setattr(batch_progress, "_HALF_A_MINUTE", 1e-6)
    progress = batch_progress.BatchProgress("lines", MetricsFile(None))
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch(
            *("convert", tree, tmp_path / "out"), executor=executor, progress=progress.advance
        )
        with progress.over(work):
            for result in work:
                progress.add(result)
    lines = capsys.readouterr().err.splitlines()
    assert "ckptmove: failed  bad.pt: " in "\n".join(lines)
    assert re.search(r"^ckptmove: 4 of 5 items done, 1 failed or refused; \d", lines[-1])


def test_a_batch_that_is_never_run_warns(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 1, 10)
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch("convert", tree, tmp_path / "out", executor=executor)
        with pytest.warns(RuntimeWarning, match="planned and never run"):
            work.__del__()
        work.close()
        work.__del__()
        ckptmove.batch("convert", tree, tmp_path / "out", dry_run=True).__del__()


def test_a_batch_runs_in_a_thread_and_beside_an_event_loop(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 2, 10)

    def run() -> list[Result]:
        return list(ckptmove.batch("convert", tree, tmp_path / "out", jobs=1, timeout=300))

    async def beside() -> list[Result]:
        return await asyncio.to_thread(run)

    assert [each.outcome for each in asyncio.run(beside())] == ["done", "done"]


def test_the_library_logs_under_its_name(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 1, 10)
    (tree / "bad.pt").write_bytes(b"PK\3\4")
    logs = unittest.TestCase().assertLogs("ckptmove", logging.INFO)
    with logs as kept, ThreadPoolExecutor(1) as executor:
        for _ in ckptmove.batch("convert", tree, tmp_path / "out", executor=executor):
            pass
    said = [(each.name, each.levelname, each.getMessage()) for each in kept.records]
    assert {name for name, _, _ in said} == {"ckptmove.batch"}
    warned = [text for _, level, text in said if level == "WARNING"]
    assert warned[0].startswith("failed bad.pt: ")
    assert len([each for each in said if each[1] == "INFO"]) == 2
