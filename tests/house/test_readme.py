"""The README is true: its commands run and print what it shows, its table is that of the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmove.formats import FORMATS
from tests.servers.warm_python import WarmPopen

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
TIMING = re.compile(r"in \d+\.\d\d s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `run.pt` lies, the checkpoint of the demo."""
    path = tmp_path_factory.mktemp("readme")
    script = PROJECT / "scripts" / "demo_checkpoint.py"
    with WarmPopen(
        [sys.executable, str(script), str(path / "run.pt")], stdout=subprocess.DEVNULL
    ) as process:
        assert process.wait() == 0
    shutil.copy(script, path / "train.py")
    for name in "abc":
        (path / "runs" / name).mkdir(parents=True)
        shutil.copy(path / "run.pt", path / "runs" / name / "last.ckpt")
    os.truncate(path / "runs" / "c" / "last.ckpt", 1_000_000)
    return path


def run(command: str, folder: Path) -> str:
    """What a command of the README prints, with `ckptmove` being this one."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    ckptmove = tools / "ckptmove"
    ckptmove.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptmove "$@"\n')
    ckptmove.chmod(0o755)
    paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | paths,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.slow
def test_console_blocks_print_what_they_show(folder: Path) -> None:
    sessions = [text for kind, text in BLOCKS if kind == "console"]
    assert sessions
    for session in sessions:
        for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
            command, _, shown = step.partition("\n")
            printed = run(command, folder)
            assert TIMING.sub("in … s", printed) == TIMING.sub("in … s", shown), command


@pytest.mark.slow
def test_python_blocks_run(folder: Path) -> None:
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert blocks
    for text in blocks:
        (folder / "moved.pt").unlink(missing_ok=True)
        (folder / "block.py").write_text(text)
        printed = run(f'"{sys.executable}" block.py', folder)
        assert "Traceback" not in printed
        assert ("LanguageModel on " if "import torch" in text else "mixed: cuda:1") in printed


@pytest.mark.slow
def test_shell_blocks_name_what_exists(folder: Path) -> None:
    for kind, text in BLOCKS:
        if kind != "sh":
            continue
        for line in text.splitlines():
            if line.startswith("scripts/"):
                assert os.access(PROJECT / line.split()[0], os.X_OK), line
        if text.startswith("ckptmove"):
            (folder / "moved.pt").unlink(missing_ok=True)
            assert "would write moved.pt" in run(text, folder)


def test_format_table_is_that_of_the_code() -> None:
    formats = [row.format for row in FORMATS]
    rows = ["| format | written by | dtypes | refused |", "|---|---|---|---|"]
    rows += [f"| {f.name} | {f.summary} | {f.carries.dtypes} | {f.refused} |" for f in formats]
    assert "\n".join(rows) in README
    for each in formats:  # as the sentence above the table has it, of all that torch writes
        # what ranks wrote is relocated file by file
        of_ranks = ("dcp", "dcp-safetensors", "deepspeed", "universal", "fsdp-ranks")
        if each.name in ("safetensors", *of_ranks):
            continue
        assert all((each.carries.devices, each.carries.aliases, each.carries.strides))
        assert each.carries.objects


def test_every_promise_names_tests_that_exist() -> None:
    promises = README[README.index("## What is promised") : README.index("## How fast")]
    named = re.findall(r"`((?:tests|scripts)/[\w/.]+)`", promises)
    assert len(named) >= promises.count("\n- **")
    for name in named:
        assert (PROJECT / name).is_file(), name


def test_exit_codes_are_those_of_the_code() -> None:
    text = (PROJECT / "ckptmove" / "errors.py").read_text()
    codes = set(re.findall(r"exit_code = (\d+)", text))
    table = README[README.index("## Exit codes") :]
    assert codes <= set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 260
