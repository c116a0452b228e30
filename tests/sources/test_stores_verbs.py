"""Verbs that read from stores: the same as of files, and no more is fetched than they need."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import CheckFailed, InputError, RefusedError
from tests.conftest import ROOT, RunCli
from tests.servers.object_store import Fault, Files, Store
from tests.sources.test_stores_inspect import KINDS


class Net(torch.nn.Linear):
    """A model that a checkpoint of two tensors fits."""

    def __init__(self) -> None:
        super().__init__(300, 200)


def saved(folder: Path) -> Path:
    torch.manual_seed(3)
    torch.save(Net().state_dict(), folder / "run.pt")
    return folder / "run.pt"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; nothing may stay there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(folder))
    return folder


# -- relocate, convert -------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "sharded", "folder"])
def test_converted_from_a_store_it_is_the_same(kind: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = KINDS[kind][0](tmp_path / "in")
    store.put_folder("in", tmp_path / "in")
    url = store.url("in" if kind == "folder" else f"in/{path.name}")
    options: dict[str, Any] = {"dtype": {"w": "bf16"}} if kind != "safetensors" else {}
    suffix = "pt" if kind == "safetensors" else "safetensors"
    here, there = tmp_path / "here" / f"out.{suffix}", tmp_path / "there" / f"out.{suffix}"
    here.parent.mkdir()
    there.parent.mkdir()
    ckptmove.convert(path, here, **options)
    store.front.reset()
    ckptmove.convert(url, there, **options)
    assert here.read_bytes() == there.read_bytes()
    total = sum(each.stat().st_size for each in (tmp_path / "in").iterdir())
    times = 2 if kind == "zip" else 1  # what is cast is proved by its checksum, in a second pass
    assert store.front.nbytes() < times * total + 1_000_000


def test_what_is_strided_is_read_from_a_copy(store: Store, tmp_path: Path, temporary: Path) -> None:
    torch.save({"t": torch.arange(600.0).reshape(20, 30).t()}, tmp_path / "run.pt")
    url = store.put("run.pt", tmp_path / "run.pt")
    ckptmove.convert(url, tmp_path / "out.safetensors")
    assert torch.equal(ckptmove.load(tmp_path / "out.safetensors")["t"], ckptmove.load(url)["t"])
    assert not list(temporary.iterdir())


def test_nothing_in_a_store_is_changed_in_place(store: Store, tmp_path: Path) -> None:
    url = store.put("run.pt", saved(tmp_path))
    for dry_run in (False, True):
        with pytest.raises(RefusedError, match="where files cannot be changed in place"):
            ckptmove.relocate(url, to="cuda:0", in_place=True, dry_run=dry_run)


@pytest.mark.slow
def test_recover_and_doctor_take_files(store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    url = store.put("run.pt", saved(tmp_path))
    told = {
        "is in an object store, where files are never changed in place": run_cli(
            "recover", url, exit=4
        ),
        "there is no such script": run_cli("doctor", "--script", url, exit=2),
        "is neither a file or folder": run_cli("doctor", "--model", url, exit=2),
    }
    for said, done in told.items():
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


# -- diff, load --------------------------------------------------------------------------------


@pytest.mark.slow
def test_diff_takes_urls(store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    path = saved(tmp_path)
    url = store.put("run.pt", path)
    changed = torch.load(path)
    changed["weight"][3, 4] += 1
    torch.save(changed, tmp_path / "other.pt")
    other = store.put("other.pt", tmp_path / "other.pt")
    assert ckptmove.diff(path, url).equal
    assert ckptmove.diff(url, url).equal
    assert [each.name for each in ckptmove.diff(url, other).differences] == ["weight"]
    done = run_cli("diff", url, other, exit=1)
    assert f"differs from {url}" in done.stderr


@pytest.mark.slow
def test_only_what_is_selected_is_fetched(store: Store, tmp_path: Path, temporary: Path) -> None:
    state = {f"t{n}": torch.full((500_000,), float(n)) for n in range(20)}
    torch.save(state, tmp_path / "run.pt")
    save_file(state, tmp_path / "run.safetensors")
    for name in ("run.pt", "run.safetensors"):
        url = store.put(name, tmp_path / name)
        store.front.reset()
        loaded = ckptmove.load(url, select="t7")
        assert list(loaded) == ["t7"]
        assert torch.equal(loaded["t7"], state["t7"])
        assert store.front.nbytes() < 2_000_000 + 400_000
        assert not list(temporary.iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_from_a_store_it_is_the_same(kind: str, store: Store, tmp_path: Path) -> None:
    path = KINDS[kind][0](tmp_path)
    store.put_folder("in", tmp_path)
    url = store.url("in" if path == tmp_path else f"in/{path.name}")
    here, there = ckptmove.load(path), ckptmove.load(url)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    with torch.no_grad():
        next(iter(there.values())).add_(1)  # it is private


# -- validate ----------------------------------------------------------------------------------


def test_what_is_valid_in_a_store(store: Store, tmp_path: Path, temporary: Path) -> None:
    path = saved(tmp_path)
    url = store.put("a/run.pt", path)
    report = ckptmove.validate(
        url, against=path, model=Net, input="float32[2,300]", step="train", device="cpu"
    )
    assert [each.outcome for each in report.checks] == ["passed"] * 6, report
    assert report.source == url
    assert os.fspath(temporary) not in json.dumps(report.to_json())
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_validate_against_a_url_compares_its_step(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path)
    url = store.put("a/run.pt", path)
    options: dict[str, Any] = {"model": Net, "input": "float32[2,300]", "step": "train"}
    report = ckptmove.validate(path, against=url, **options)
    assert report.ok
    assert f"{url} gives the same on cpu, bit for bit" in report.of("step").details
    other = torch.load(path)
    other["bias"] += 1
    torch.save(other, tmp_path / "other.pt")
    report = ckptmove.validate(tmp_path / "other.pt", against=url, **options)
    assert (report.of("against").outcome, report.of("step").outcome) == ("failed", "failed")
    assert f"{url} gives a different result" in report.of("step").title


def test_what_is_wrong_in_a_store(store: Store, tmp_path: Path, temporary: Path) -> None:
    content = bytearray(saved(tmp_path).read_bytes())
    content[len(content) // 2] ^= 1
    url = store.put("run.pt", bytes(content))
    report = ckptmove.validate(url)
    assert report.of("container").outcome == "failed"
    assert "is damaged" in report.of("container").details[0]
    report = ckptmove.validate(store.put("cut.pt", bytes(content[:5000])))
    assert report.of("container").outcome == "failed"
    assert report.of("reload").outcome == "skipped"
    wrong = ckptmove.validate(url, model="torch.nn:Identity")
    assert wrong.of("model").outcome == "failed"
    assert os.fspath(temporary) not in json.dumps(wrong.to_json())
    assert not list(temporary.iterdir())


def test_what_is_not_there_is_no_finding(store: Store, tmp_path: Path) -> None:
    url = store.put("run.pt", saved(tmp_path))
    with pytest.raises(InputError, match="no such object"):
        ckptmove.validate(store.url("none.pt"))
    with pytest.raises(InputError, match="no such object"):
        ckptmove.validate(url, against=store.url("none.pt"))
    store.front.faults.append(Fault("status", 403))
    with pytest.raises(InputError, match="access is denied"):
        ckptmove.validate(url)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "folder", "torchscript"])
def test_other_kinds_are_reloaded(kind: str, store: Store, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "in").mkdir()
    path = KINDS[kind][0](tmp_path / "in")
    store.put_folder("in", tmp_path / "in")
    url = store.url("in" if kind == "folder" else f"in/{path.name}")
    report = ckptmove.validate(url, device="cpu")
    assert report.of("reload").outcome == "passed", report
    assert report.of("container").outcome == "passed"
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_model_finds_what_is_beside_its_weights(
    store: Store, tmp_path: Path, temporary: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    url = store.put_folder("hf", tmp_path / "hf")
    other = store.put_folder("other", tmp_path / "hf")
    report = ckptmove.validate(url, against=other, step="train", device="cpu")
    assert report.ok, report
    assert f"{other} gives the same on cpu, bit for bit" in report.of("step").details
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_without_room_it_is_not_copied(store: Store, tmp_path: Path) -> None:
    url = store.put("run.pt", saved(tmp_path))
    script = """
import shutil, sys
from collections import namedtuple
Usage = namedtuple("Usage", "total used free")
shutil.disk_usage = lambda path: Usage(10, 9, 1)
import ckptmove, json
report = ckptmove.validate(sys.argv[1])
assert report.of("container").outcome == "passed"
assert report.of("reload").outcome == "skipped"
print(report.of("reload").title)
try:
    ckptmove.validate(sys.argv[1], model="torch.nn:Identity")
except ckptmove.RefusedError as error:
    print(error, error.hint, error.path == sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, url],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    first, second = done.stdout.splitlines()
    assert "bytes are needed, 1 are free" in first
    assert second == f"{first} set TMPDIR to a folder with more room True"


@pytest.mark.slow
def test_what_fails_is_told_of_the_url(store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    content = bytearray(saved(tmp_path).read_bytes())
    content[len(content) // 2] ^= 1
    url = store.put("run.pt", bytes(content))
    done = run_cli("validate", url, exit=1)
    assert done.stderr == f"ckptmove: {url}: a check failed\n"
    with pytest.raises(CheckFailed) as caught:
        ckptmove.validate(url).raise_if_failed()
    assert caught.value.path == url


# -- the command line --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bar_knows_how_much_there_is(web: Files, tmp_path: Path) -> None:
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))
    torch.save({"w": torch.zeros(10_000_000)}, tmp_path / "run.pt")
    web.faults.append(Fault("slow", 300))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmove", "relocate", web.put("run.pt"), "o.pt", "--to", "cuda:0"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # it is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"/40.0M" in said
