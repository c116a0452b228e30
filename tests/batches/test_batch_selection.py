"""Which items a batch does, what it opens to find out, and what two of one name come to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.batches.options import VerbName
from ckptmove.errors import UsageError
from tests.conftest import ROOT, RunCli
from tests.making.trees import CLI, many, model_folder, outcomes, small_tree
from tests.servers.object_store import Store


def planned(src: Path, dst: Path, verb: VerbName = "convert", **options: Any) -> list[str]:
    plan = ckptmove.batch(verb, src, dst, dry_run=True, **options).plan
    return [each.name for each in plan.items]


def opened(tmp_path: Path, *arguments: str) -> set[str]:
    """The files of `tree` that planning a batch opens, by strace."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = tmp_path / "strace"
    command = [*CLI, "convert", "tree", "out", "--dry-run"]
    subprocess.run(
        ["strace", "-f", "-qq", "-o", str(log), "-e", "trace=openat", *command, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found = re.findall(r'"tree/([^"]+)", (.*)', log.read_text())
    return {name for name, flags in found if "O_DIRECTORY" not in flags}


@pytest.mark.slow
def test_what_a_name_excludes_is_not_opened(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 30, 10)
    assert opened(tmp_path, "--include", "step-004.pt") == {"run-1/step-004.pt"}
    names = {str(each.relative_to(tree)) for each in tree.rglob("*.pt")}
    share = opened(tmp_path, "--shard-of=2/3")
    assert share == set(planned(tree, tmp_path / "out", shard_of="2/3"))
    assert 0 < len(share) < len(names)
    (tmp_path / "log").write_text('{"name": "run-0/step-003.pt", "outcome": "failed"}\n')
    assert opened(tmp_path, "--retry", "log") == {"run-0/step-003.pt"}


def test_shares_are_the_whole_whatever_is_in_the_tree(tmp_path: Path) -> None:
    """Also where an index or a folder of another share says what a file is."""
    tree = small_tree(tmp_path / "tree")
    model_folder(tree / "model" / "deep" / "other")
    for n in range(4):
        parts = model_folder(tree / f"parts-{n}")
        shutil.copytree(parts, tree / "flat", dirs_exist_ok=True)
        (parts / "more").mkdir()
        (parts / "more" / "notes.txt").write_text("x")
    save_file({"x": torch.ones(2)}, tree / "flat" / "alone.safetensors")
    cases: dict[VerbName, Any] = {"convert": {}, "relocate": {"to": "cpu"}}
    for verb, options in cases.items():
        whole = ckptmove.batch(verb, tree, tmp_path / "o", dry_run=True, copy_rest=True, **options)
        expected = sorted((each.name, each.kind, each.nbytes) for each in whole.plan.items)
        for count in (2, 3):
            found = [
                ckptmove.batch(
                    verb,
                    tree,
                    tmp_path / "o",
                    dry_run=True,
                    copy_rest=True,
                    shard_of=f"{n}/{count}",
                    **options,
                ).plan
                for n in range(1, count + 1)
            ]
            got = [(each.name, each.kind, each.nbytes) for plan in found for each in plan.items]
            assert sorted(got) == expected


def test_by_format_size_and_age(tmp_path: Path) -> None:
    tree, out = small_tree(tmp_path / "tree"), tmp_path / "out"
    every = planned(tree, out)
    for mtime in (-1e9, 1e9):  # a clock may have been wrong
        for path in tree.rglob("*"):
            os.utime(path, (0, mtime))
        assert planned(tree, out) == every
    os.utime(tree / "a" / "run.pt")
    assert planned(tree, out, newer="2d") == ["a/run.pt"]
    assert planned(tree, out, newer="2020-01-01") == ["a/run.pt"]
    assert (
        planned(
            tree, out, newer=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(5e9)), allow_empty=True
        )
        == []
    )
    os.utime(tree / "model" / "model-00001-of-00002.safetensors")
    assert set(planned(tree, out, newer="1h")) == {"a/run.pt", "model"}
    assert planned(tree, out, format_in="torch-legacy") == ["a/deep/old.pth"]
    assert set(planned(tree, out, format_in=["model-folder", "torch-legacy"])) == {
        *("a/deep/old.pth", "model"),
    }
    large = {"a/last.ckpt", "a/cut.pt"}
    assert set(planned(tree, out, min_size="100kB")) == large
    assert large.isdisjoint(planned(tree, out, max_size=100_000))
    nbytes = sum(path.stat().st_size for path in (tree / "model").iterdir())
    assert "model" in planned(tree, out, min_size=nbytes, max_size=nbytes)
    with pytest.raises(UsageError, match="is no format"):
        planned(tree, out, format_in="gguf")


def same_names(folder: Path) -> Path:
    """Two that differ in the suffix, and another."""
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "params.pt")
    save_file({"w": torch.zeros(3)}, folder / "params.safetensors")
    torch.save({"w": torch.ones(5)}, folder / "other.pt")
    return folder


@pytest.mark.slow
def test_two_of_one_name_are_refused_and_the_others_done(tmp_path: Path, run_cli: RunCli) -> None:
    same_names(tmp_path / "tree")
    done = run_cli("batch", "convert", "tree", "out", "-j1", exit=1)
    first, second, summary, _ = done.stdout.splitlines()
    assert first == (
        "refused params.pt: would have the same name in the destination as params.safetensors "
        "(--keep-suffix keeps both; --exclude leaves one out)"
    )
    assert second.startswith("refused params.safetensors: would have the same name")
    assert summary.startswith("converted 1 item, ")
    done = run_cli("batch", "convert", "tree", "out", "--keep-suffix", "--force", "-j1", exit=0)
    found = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert found["params.pt.safetensors"]["w"].tolist() == [1, 1, 1]
    assert found["params.safetensors"]["w"].tolist() == [0, 0, 0]
    run_cli("batch", "validate", "out", "--against", "tree", "--exclude=other.safetensors", exit=0)


def test_two_of_one_name_are_refused_in_whatever_share_they_are(tmp_path: Path) -> None:
    tree = same_names(tmp_path / "tree")
    (tree / "params.txt").write_text("no checkpoint")
    with ThreadPoolExecutor(2) as executor:
        found = {
            name: outcome
            for n in range(1, 6)
            for name, outcome in outcomes(
                ckptmove.batch(
                    "convert", tree, tmp_path / "out", shard_of=f"{n}/5", executor=executor
                )
            ).items()
        }
    assert found == {
        **{"other.pt": "done", "params.pt": "refused", "params.safetensors": "refused"},
    }


def test_an_item_in_the_output_of_another_is_refused(tmp_path: Path) -> None:
    tree = same_names(tmp_path / "tree")
    (tree / "other").mkdir()
    shutil.copy(tree / "other.pt", tree / "other" / "x.pt")
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch(
            *("convert", tree, tmp_path / "out"),
            max_shard_size="1GB",
            exclude="params.*",
            executor=executor,
        )
        assert outcomes(work) == {"other.pt": "refused", "other/x.pt": "refused"}


def test_a_share_asks_a_store_for_its_own_items(tmp_path: Path, store: Store) -> None:
    """One of 20 shares, and an item by its name, cost few requests however large the tree is."""
    source = store.put_folder("runs", many(tmp_path / "tree", 24, 10))
    cases: list[Any] = [{"include": "step-003.pt"}, {"shard_of": "3/12"}]
    for options in cases:
        store.front.reset()
        plan = ckptmove.batch("convert", source, store.url("o"), dry_run=True, **options).plan
        assert 1 <= len(plan.tasks) <= 4
        asked = {each.path for each in store.front.seen if ".pt" in each.path}
        assert len(asked) == len(plan.tasks)
