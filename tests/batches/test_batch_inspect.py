"""`batch inspect`: one table of a tree, with a row for each item and the totals."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.reports.batch.table import InspectedItem
from tests.conftest import RunCli, TrainingFolder
from tests.making.saving import save
from tests.making.trees import contents, small_tree


@pytest.fixture
def tree(training_folder: TrainingFolder, tmp_path: Path) -> Path:
    root = small_tree(tmp_path / "runs")
    shutil.copytree(training_folder("accelerate", "cuda:1"), root / "b" / "checkpoint-1")
    save_file({"w": torch.ones(3, dtype=torch.bfloat16)}, root / "alone.safetensors")
    return root


def rows_of(tree: Path | str, **options: Any) -> dict[str, InspectedItem]:
    with ckptmove.batch("inspect", tree, executor=ThreadPoolExecutor(1), **options) as batch:
        assert {each.name for each in batch} == {each.name for each in batch.report().items or ()}
        return {each.name: each for each in batch.report().items or ()}


def test_each_item_is_a_row_with_the_devices_that_inspect_tells(tree: Path) -> None:
    before, rows = contents(tree), rows_of(tree)
    unread = {"a/cut.pt", "empty.pt"}
    assert {name for name, row in rows.items() if not row.format} == unread
    assert all(rows[name].reason for name in unread)
    assert len(rows) == 9
    for name in rows.keys() - unread - {"model"}:
        alone = ckptmove.inspect(tree / name)
        assert rows[name].tensors == sum(each.part_of is None for each in alone.tensors)
        assert rows[name].format == alone.format
        assert rows[name].reason == ""
        assert sum(rows[name].dtypes.values()) == sum(each.nbytes for each in alone.dtypes.values())
    assert rows["alone.safetensors"].devices == {"not stored": 6}
    assert rows["alone.safetensors"].dtypes == {"bfloat16": 6}
    assert rows["model"].format == "model-folder"
    assert rows["b/checkpoint-1"].devices.keys() >= {"cuda:1"}
    assert contents(tree) == before


def test_the_table_shows_all_rows_totals_and_reasons(
    tree: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    page = tmp_path / "runs.html"
    done = run_cli("batch", "inspect", tree, "--html", page, exit=1)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["item", "format", "device", "dtype", "tensors", "bytes"]
    assert [line.split()[0] for line in lines[1:12] if not line.startswith(" ")][:2] == [
        "a/cut.pt",
        "a/deep/old.pth",
    ]
    assert "the zip directory is missing" in lines[2]
    assert lines[-2].startswith("total: 9 items")
    assert done.stderr.endswith("2 of 9 items failed or were refused\n")
    assert "the zip directory is missing" in page.read_text()
    said = json.loads(run_cli("batch", "inspect", tree, "--json", exit=1).stdout)
    assert said["totals"]["items"] == 9
    assert said["totals"]["unread"] == 2
    assert said["totals"]["nbytes"] == sum(each["nbytes"] for each in said["items"])
    assert not (tree / ".ckptmove-batch.jsonl").exists()


def test_items_are_selected_as_by_other_verbs(tree: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "inspect", tree, "--format-in", "torch-legacy", "--json", exit=0)
    assert [each["name"] for each in json.loads(done.stdout)["items"]] == ["a/deep/old.pth"]
    done = run_cli("batch", "inspect", tree, "--include", "b/*", "--exclude", "*.pt", exit=0)
    assert "total: 1 item " in done.stdout


def test_an_item_that_is_not_where_it_must_be_is_a_row_with_the_reason(
    tmp_path: Path, run_cli: RunCli
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    save(root / "moved.pt", {"w": torch.ones(3)}, "cpu")
    save(root / "late.pt", {"w": torch.ones(3), "v": torch.ones(2)}, "cuda:1")
    done = run_cli("batch", "inspect", root, "--require", "cpu", exit=1)
    assert "not on cpu: " in done.stdout
    rows = rows_of(root, require="cpu")
    assert (rows["late.pt"].devices, rows["moved.pt"].reason) == ({"cuda:1": 20}, "")
    assert rows_of(root, select="w")["late.pt"].devices == {"cuda:1": 12}


def test_what_a_folder_holds_and_can_not_be_read_is_named(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(training_folder("accelerate"), tmp_path / "runs" / "checkpoint-1")
    (folder / "strange.bin").write_bytes(b"no checkpoint at all")
    row = rows_of(tmp_path / "runs")["checkpoint-1"]
    assert "strange.bin" in row.reason
    assert row.format == "training-folder"
    assert row.devices


def test_a_tree_in_a_store_has_the_same_table(tree: Path) -> None:
    store = fsspec.filesystem("memory")
    for name, data in contents(tree).items():
        store.pipe_file(f"/inspected/{name}", data)
    try:
        there = rows_of("memory://inspected")
    finally:
        store.rm("/inspected", recursive=True)
    here = rows_of(tree)
    assert there.keys() == here.keys()
    for name in there:
        assert there[name][1:6] == here[name][1:6]


def test_it_takes_no_destination(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no destination"):
        ckptmove.batch("inspect", tree, tmp_path / "out")
    with pytest.raises(UsageError):
        ckptmove.batch("inspect", tree, require="nowhere:x")
