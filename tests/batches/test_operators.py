"""A week of a platform engineer with a bucket, by the commands as they would be typed.

Nodes that die are in `test_batch_ray`, disks that fill up in `test_batch_kills`.
"""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

import ckptmove
from ckptmove.batches.trees import OBJECT_LEDGER
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.trees import children, contents, kill, many, outcomes, small_tree, start, until
from tests.servers.fronts import Fault
from tests.servers.object_store import Store

pytestmark = pytest.mark.slow
DAMAGED = {"a/cut.pt", "empty.pt"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Formats of all kinds, a model, two damaged files, and what is no checkpoint."""
    return many(small_tree(tmp_path / "tree"), 12, 20_000)


def objects(url: str) -> dict[str, bytes]:
    """Every object below a URL, but those of the ledger."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    found = {path[len(root) + 1 :]: fs.cat_file(path) for path in fs.find(root)}
    return {name: data for name, data in found.items() if not name.startswith(OBJECT_LEDGER)}


def check_nothing_left(store: Store) -> None:
    assert b"<UploadId>" not in store.say("GET", f"/{store.bucket}?uploads")
    fs, root = fsspec.core.url_to_fs(store.url("out"))
    fs.invalidate_cache()
    assert not fs.find(f"{root}/{OBJECT_LEDGER}/uploads")


def locally(tree: Path, out: Path) -> dict[str, bytes]:
    """What an undisturbed run on a disk makes of the tree."""
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", tree, out, executor=executor))
    return dict(contents(out))


def test_left_alone_nodes_die_and_others_go_on_with_other_shares(
    tree: Path, tmp_path: Path, store: Store
) -> None:
    source, out = store.put_folder("runs", tree), store.url("out")
    first = [start("convert", source, out, "-q", f"--shard-of={n}/3") for n in (1, 2)]
    until(lambda: len(store.front.asked("PUT", "/out/run-")) > 2)
    for process in first:
        for pid in (*children(process.pid), process.pid):
            kill(pid)
        process.communicate()
    store.front.faults += [
        Fault("status", 503, times=2, path="run-1"),
        Fault("cut", 1000, times=2, path="run-2"),
        Fault("status", 500, method="PUT", times=1, path="out/run-0"),
    ]
    logs = [tmp_path / f"log-{n}" for n in (1, 2)]
    then = [
        start("convert", source, out, "-q", f"--shard-of={n}/2", "--log", logs[n - 1])
        for n in (1, 2)
    ]
    for process in then:
        process.communicate()
    assert {process.returncode for process in then} <= {0, 1}
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    wrong = {each["name"] for each in lines if each["outcome"] in ("failed", "refused")}
    assert wrong == DAMAGED
    assert len({each["name"] for each in lines}) == len(lines) == 12 + 7
    assert objects(out) == locally(tree, tmp_path / "whole")
    check_nothing_left(store)


def test_a_dry_run_and_the_run_after_it_agree_item_by_item(
    tree: Path, store: Store, run_cli: RunCli
) -> None:
    save(tree / "run-0" / "twin.ckpt", {"w": torch.ones(3)})
    save(tree / "run-0" / "twin.pt", {"w": torch.ones(4)})
    source, out = store.put_folder("runs", tree), store.url("out")
    store.put("out/run-1/step-001.safetensors", b"of somebody else")
    before = objects(out)
    with ckptmove.batch("convert", source, out, dry_run=True, jobs=2) as work:
        foretold = {each.name: (each.outcome, each.reason) for each in work}
    assert objects(out) == before
    done = run_cli("batch", "convert", source, out, "--dry-run", "--json", exit=1)
    assert json.loads(done.stdout)["exit_code"] == 1
    with ckptmove.batch("convert", source, out, jobs=2) as work:
        real = {each.name: (each.outcome, each.reason) for each in work}
    assert foretold == real
    wrong = {name for name, (outcome, _) in real.items() if outcome != "done"}
    assert wrong == {"run-0/twin.ckpt", "run-0/twin.pt", "run-1/step-001.pt", *DAMAGED}


def test_a_bucket_that_becomes_denied_midway_is_told_and_the_run_taken_up(
    tmp_path: Path, store: Store, run_cli: RunCli
) -> None:
    source, out = store.put_folder("runs", many(tmp_path / "tree", 10, 100)), store.url("out")
    store.front.faults.append(Fault("status", 403, method="PUT", path="out/run-", skip=4))
    done = run_cli("batch", "convert", source, out, "-j1", "--max-failures=3", exit=1)
    said = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert len(said) == 3
    assert all("access is denied" in line for line in said)
    assert "stopped after 3 failures" in done.stdout + done.stderr
    store.front.faults.clear()
    done = run_cli("batch", "convert", source, out, "-j1", "--json", exit=0)
    assert json.loads(done.stdout)["outcomes"] == {
        **{"done": 6, "skipped": 4, "left-out": 0, "refused": 0, "failed": 0}
    }
    check_nothing_left(store)


def test_two_runs_at_once_one_of_them_on_a_share(tree: Path, tmp_path: Path, store: Store) -> None:
    source, out = store.put_folder("runs", tree), store.url("out")
    runs = [start("convert", source, out, "-q", *more) for more in ((), ("--shard-of=1/2",))]
    for run in runs:
        run.communicate()
    assert runs[0].returncode == 1
    assert objects(out) == locally(tree, tmp_path / "whole")
    check_nothing_left(store)


def test_what_is_published_has_digests_and_its_sources_go(
    tmp_path: Path, store: Store, run_cli: RunCli
) -> None:
    """From a bucket to a disk, which `sha256sum` checks; a damaged source stays where it is."""
    tree = many(tmp_path / "tree", 6, 20_000)
    (tree / "cut.pt").write_bytes((tree / "run-0" / "step-000.pt").read_bytes()[:-50])
    source = store.put_folder("runs", tree)
    options = ("--to=cpu", "--manifest=SUMS", "--log=log", "--delete-source")
    run_cli("batch", "relocate", source, "out", *options, exit=1)
    command = "cd out && sha256sum --check --strict ../SUMS"
    checked = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(": OK") == 6
    assert list(objects(source)) == ["cut.pt"]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum(each["source_removed"] for each in lines) == 6
    for each in lines:
        assert bool(each["source_digests"]) is each["source_removed"]
    state = torch.load(tmp_path / "out" / "run-1" / "step-001.pt", weights_only=True)
    assert state["model"]["w0"].device.type == "cpu"


def test_every_night_again_it_costs_a_few_listings_and_tells_all(
    tmp_path: Path, store: Store, run_cli: RunCli
) -> None:
    requests = dict[int, int]()
    options = ("--manifest=SUMS", "--metrics=batch.prom", "-j1")
    for count in (4, 24):
        source = store.put_folder("runs", many(tmp_path / "tree", count, 100))
        run_cli("batch", "convert", source, store.url("out"), *options, exit=0)
        first = (tmp_path / "SUMS").read_text()
        store.front.reset()
        run_cli("batch", "convert", source, store.url("out"), *options, exit=0)
        requests[count] = len(store.front.seen)
        assert (tmp_path / "SUMS").read_text() == first
        assert first.count("\n") == count
        said = (tmp_path / "batch.prom").read_text().splitlines()
        done = [line for line in said if 'outcome="done"' in line]
        assert done[0].endswith(f" {count}")
    assert requests[24] <= requests[4] + 2 < 20
