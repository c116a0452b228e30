"""Batches on a real Ray cluster: several nodes in one machine, some of which die."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import UsageError, WriteError
from ckptmove.batches.executors.ray_driver import _performing
from ckptmove.batches.executors.ray_executor import Cluster
from ckptmove.batches.trees import LEDGER
from ckptmove.reports.batch.items import Result
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import save
from tests.making.trees import (
    children,
    contents,
    kill,
    left_over,
    many,
    outcomes,
    stamps,
    start,
    until,
)
from tests.servers.fronts import HANG

pytest.importorskip("ray", reason="needs Ray")
from ray import cluster_utils

SMALL: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[cluster_utils.Cluster]:
    """A head that works on nothing, and two nodes."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.fspath(ROOT)
    cluster = cluster_utils.Cluster()
    try:
        cluster.add_node(**{**SMALL, "num_cpus": 0}, include_dashboard=False, wait=False)
        for _ in range(2):
            cluster.add_node(wait=False, **SMALL)
        cluster.wait_for_nodes(timeout=HANG)  # add_node would not wait for so long
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints, a damaged one, and some that take a while."""
    folder = many(tmp_path_factory.mktemp("tree") / "tree", 24)
    (folder / "damaged.pt").write_bytes((folder / "run-0" / "step-000.pt").read_bytes()[:-100])
    for n in range(3):
        save(folder / f"large-{n}.pt", torch.full((25_000_000,), float(n)), "cuda:1")
    return folder


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run on this machine makes of it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", tree, out, executor=executor))
    return out


@contextmanager
def meanwhile(do: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread; what goes wrong there goes wrong here."""
    with ThreadPoolExecutor(1) as executor:
        doing = executor.submit(do)
        yield
        doing.result(60)


def writers_of(out: Path, name: str) -> list[int]:
    """The processes that have a file so called open, under its name for the time being."""
    if not any(out.glob(f".{name}*")):  # to look at all processes takes its time
        return []
    found = list[int]()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for link in folder.iterdir():
                with suppress(OSError):
                    if link.readlink().name.startswith(f".{name}"):
                        found.append(int(folder.parent.name))
    return found


def caught(out: Path, name: str) -> int:
    """Wait until somebody is at it; gives who."""
    found = list[int]()

    def look() -> bool:
        found.extend(writers_of(out, name))
        return bool(found)

    until(look)
    return found[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(pid: int, nodes: cluster_utils.Cluster) -> Any:
    """The node that a worker belongs to."""
    [node] = [
        node
        for node in nodes.worker_nodes
        for each in node.all_processes["raylet"]
        if each.process.pid == parent_of(pid)
    ]
    return node


@pytest.mark.slow
def test_the_command_does_what_it_does_without_a_cluster(
    nodes: cluster_utils.Cluster, tree: Path, whole: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    given = ("batch", "convert", str(tree), "out", "--ray", "auto")
    done = run_cli(*given, "--log", "log", exit=1)
    failed, summary, again = done.stdout.splitlines()
    assert failed.startswith("failed  damaged.pt: the zip directory is missing")
    assert summary.startswith("converted 27 items, ")
    assert again.startswith("retry: ckptmove batch convert --retry=log ")
    assert again.endswith("--ray auto --log log")
    last = done.stderr.splitlines()[-1]  # a cluster that is slow to start has it tell progress
    assert last == f"ckptmove: {tree}: 1 of 28 items failed or were refused"
    assert contents(tmp_path / "out") == contents(whole)
    assert left_over(tmp_path) == []
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(line["outcome"] for line in lines) == [*["done"] * 27, "failed"]
    before = stamps(tmp_path / "out")
    said = json.loads(run_cli(*given, "--json", exit=1).stdout)
    assert said["outcomes"] == {"done": 0, "skipped": 27, "left-out": 0, "refused": 0, "failed": 1}
    assert stamps(tmp_path / "out") == before


@pytest.mark.slow
def test_progress_comes_while_an_item_is_done_and_adds_up(
    nodes: cluster_utils.Cluster, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.batches.executors.ray_executor._QUIET", 0.0)
    told, finished = list[tuple[int, int]](), list[str]()
    batch = ckptmove.batch(
        "relocate",
        tree,
        tmp_path / "out",
        to="cpu",
        include="large-*",
        ray=nodes.address,
        progress=lambda nbytes: told.append((nbytes, len(finished))),
    )
    for result in batch:
        finished.append(result.name)
    assert sum(nbytes for nbytes, _ in told) == batch.plan.nbytes
    assert any(nbytes > 0 and before == 0 for nbytes, before in told)
    assert max(nbytes for nbytes, _ in told) <= 100_010_000


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(
    nodes: cluster_utils.Cluster, tree: Path, whole: Path, tmp_path: Path
) -> None:
    batch = ckptmove.batch("convert", tree, tmp_path / "out", ray=nodes.address)
    with meanwhile(lambda: kill(caught(tmp_path / "out", "large-2.safetensors"))):
        found = dict(outcomes(batch))
    assert found.pop("damaged.pt") == "failed"
    assert set(found.values()) <= {"done", "skipped"}  # it may have died before it could answer
    assert contents(tmp_path / "out") == contents(whole)
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_what_kills_its_worker_each_time_fails_alone(
    nodes: cluster_utils.Cluster, tree: Path, tmp_path: Path
) -> None:
    ended = threading.Event()

    def hunt() -> None:
        while not ended.is_set():
            for pid in writers_of(tmp_path / "out", "large-1.pt"):
                kill(pid)
            time.sleep(0.005)

    def run() -> dict[str, Result]:
        batch = ckptmove.batch(
            "relocate", tree, tmp_path / "out", to="cpu", include="*-1.pt", ray=nodes.address
        )
        return {result.name: result for result in batch}

    with meanwhile(hunt):
        results = run()
        ended.set()
    assert results["large-1.pt"].reason == "its worker died, 4 times"
    assert results["large-1.pt"].hint == "perhaps the machine ran out of memory"
    assert [name for name, result in results.items() if not result.ok] == ["large-1.pt"]
    assert left_over(tmp_path) == []
    assert run()["large-1.pt"].outcome == "done"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_broken_off_leaves_nothing_behind(
    number: signal.Signals, nodes: cluster_utils.Cluster, tree: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start("relocate", tree, out, "--to", "cpu", "--ray", nodes.address)
    caught(out, "large-")
    drivers = children(process.pid)
    process.send_signal(number)
    said, errors = process.communicate(timeout=HANG)
    assert process.returncode == -number
    assert errors.strip() == ""
    if number != signal.SIGKILL:
        assert "not done because the run stopped" in said
        assert left_over(out) == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in drivers)
    until(lambda: not left_over(out))  # the tasks are told, and clean up
    assert len(stamps(out)) < 27


@pytest.mark.slow
def test_what_a_node_that_dies_was_at_is_done_by_another(
    nodes: cluster_utils.Cluster, tree: Path, whole: Path, tmp_path: Path
) -> None:
    def remove() -> None:
        node = node_of(caught(tmp_path / "out", "large-"), nodes)
        nodes.remove_node(node, allow_graceful=False)

    try:
        batch = ckptmove.batch("convert", tree, tmp_path / "out", ray=nodes.address)
        with meanwhile(remove):
            found = dict(outcomes(batch))
    finally:
        nodes.add_node(**SMALL)
    assert found.pop("damaged.pt") == "failed"
    assert set(found.values()) <= {"done", "skipped"}
    assert contents(tmp_path / "out") == contents(whole)
    assert left_over(tmp_path) == []
    entered = [json.loads(line) for line in (tmp_path / "out" / LEDGER).read_text().splitlines()]
    done = [line["name"] for line in entered if line["outcome"] == "done"]
    assert sorted(done) == sorted(found)  # each once


def test_a_cluster_that_is_not_there_is_told_in_a_line(
    tree: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = run_cli("batch", "convert", str(tree), "out", "--ray", f"127.0.0.1:{port}", exit=2)
    assert done.stderr.startswith(
        f"ckptmove: cannot reach a Ray cluster at '127.0.0.1:{port}': Connection refused"
    )
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_answers_but_is_no_cluster_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmove.batches.executors.ray_executor._CONNECTING", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        hangs = threading.Timer(HANG, server.close)
        hangs.start()
        with pytest.raises(UsageError, match="no Ray cluster answers there"):
            Cluster(address)
        hangs.cancel()
        assert server.fileno() >= 0, "it was waited for until the server went away"


def test_a_dry_run_needs_no_cluster(tree: Path, tmp_path: Path) -> None:
    batch = ckptmove.batch("convert", tree, tmp_path / "out", ray="127.0.0.1:1", dry_run=True)
    assert len(batch.plan.tasks) == 28
    with pytest.raises(UsageError, match="cannot be combined with jobs or an executor"):
        ckptmove.batch("convert", tree, tmp_path / "out", ray="auto", jobs=2)


@pytest.mark.slow
def test_a_cluster_that_is_lost_ends_the_run(
    nodes: cluster_utils.Cluster, tree: Path, whole: Path, tmp_path: Path
) -> None:
    before = set(children(os.getpid()))
    batch = ckptmove.batch("convert", tree, tmp_path / "out", ray=nodes.address)
    [driver] = set(children(os.getpid())) - before
    first = next(batch)
    assert first.ok
    kill(driver)
    with pytest.raises(WriteError, match="the connection to the Ray cluster is lost") as caught:
        list(batch)
    assert caught.value.hint == "run the same command again; finished items stay finished"
    again = outcomes(ckptmove.batch("convert", tree, tmp_path / "out", ray=nodes.address))
    assert again[first.name] == "skipped"
    assert contents(tmp_path / "out") == contents(whole)
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_node_that_sees_another_destination_ends_the_run(
    nodes: cluster_utils.Cluster, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that means another folder there than here."""
    monkeypatch.chdir(tmp_path)
    batch = ckptmove.batch("convert", tree, "/proc/self/cwd/out", ray=nodes.address)
    with pytest.raises(UsageError, match=r"the node .* does not see .*/out/.* as it is here"):
        list(batch)
    assert stamps(tmp_path / "out") == {}
    assert not (ROOT / "out").exists()


@pytest.mark.slow
def test_a_node_with_another_ckptmove_does_nothing() -> None:
    answer = pickle.loads(_performing("0.0.1")(1, b"", ""))
    assert answer == ("unfit", f"the node {socket.gethostname()} has ckptmove "
                      f"{ckptmove.__version__}, not 0.0.1")  # fmt: skip
