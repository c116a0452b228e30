"""The first minutes with the command line: no command, a wrong one, a file instead, completion."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, RunCli


def suggested(text: str) -> list[list[str]]:
    """The commands that follow the help, without the program's name."""
    lines = text.partition("For a file in this folder:")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["run.pt", "a b.ckpt", "é'x.pth"])
def test_alone_it_shows_commands_that_work_on_the_file_at_hand(
    name: str, tmp_path: Path, run_cli: RunCli
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / "notes.txt").touch()
    shown = suggested(run_cli(exit=2).stdout)
    assert [verb for verb, *_ in shown] == ["inspect", "convert", "validate"]
    for command in shown:
        run_cli(*command, exit=0)
    assert (tmp_path / name).with_suffix(".safetensors").exists()


@pytest.mark.parametrize("name", [None, ".pt", "-x.pt", "a\nb.pt", "run.txt"])
def test_without_one_it_shows_the_help_alone(
    name: str | None, tmp_path: Path, run_cli: RunCli
) -> None:
    if name is not None:
        (tmp_path / name).touch()
    assert suggested(run_cli(exit=2).stdout) == []


def test_a_file_in_place_of_a_command(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "a b.pt").touch()
    printed = run_cli("a b.pt", exit=2).stderr
    assert printed == (
        "ckptmove: the command is missing before 'a b.pt' (ckptmove inspect 'a b.pt')\n"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("wrong", "right"), [("convrt", "convert"), ("validat", "validate"), ("Inspect", "inspect")]
)
def test_a_misspelled_command_names_the_right_one(wrong: str, right: str, run_cli: RunCli) -> None:
    assert f"did you mean {right!r}?" in run_cli(wrong, "run.pt", exit=2).stderr
    assert "did you mean" not in run_cli("zzz", exit=2).stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_completion(shell: str, tmp_path: Path) -> None:
    """click's scripts, by the variable that the README names; each knows our commands."""
    assert f"{shell}_source" in (ROOT / "README.md").read_text("utf-8")
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    program = tmp_path / "ckptmove"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptmove "$@"\n')
    program.chmod(0o755)
    script = subprocess.run(
        [program], env={**env, "_CKPTMOVE_COMPLETE": f"{shell}_source"}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert script.returncode == 0
    if shutil.which(shell) is not None and shell != "fish":
        checked = subprocess.run(
            [shell, "-n"], input=script.stdout, text=True, capture_output=True, timeout=120
        )
        assert (checked.returncode, checked.stderr) == (0, "")
    words = {"COMP_WORDS": "ckptmove rel", "COMP_CWORD": "rel" if shell == "fish" else "1"}
    completed = subprocess.run(
        [program], env={**env, "_CKPTMOVE_COMPLETE": f"{shell}_complete", **words},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "relocate" in completed.stdout
    assert "convert" not in completed.stdout


@pytest.mark.parametrize(
    ("options", "written"),
    [((), "run.safetensors"), (("--format", "torch-zip"), "run.pt"), (("--bare",), None)],
)
def test_convert_without_a_destination_writes_beside(
    options: tuple[str, ...], written: str | None, tmp_path: Path, run_cli: RunCli
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    torch.save({"w": torch.arange(3.0)}, folder / "run.bin")
    said = run_cli("convert", "runs/run.bin", *options, exit=0)
    name = written or "run.safetensors"
    assert f"wrote runs/{name} as " in said.stdout + said.stderr
    again = run_cli("convert", "runs/run.bin", *options, exit=4)
    assert "the destination exists" in again.stderr
    if name.endswith(".safetensors"):
        run_cli("convert", f"runs/{name}", exit=0)
        assert torch.equal(torch.load(folder / "run.pt")["w"], torch.arange(3.0))
    assert "the destination is missing" in run_cli("convert", "runs", exit=2).stderr
    same = run_cli(
        "convert",
        f"runs/{name}",
        "--format",
        options[1] if written == "run.pt" else "safetensors",
        exit=4,
    )
    assert "the destination is the source itself" in same.stderr
