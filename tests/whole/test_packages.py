"""What is published: a wheel and an sdist, each of which is enough to run."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import click
import pytest
import torch

_PROJECT = Path(__file__).parents[2]


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, kind: str, out: Path) -> Path:
    """The package of that kind, built as a front end does it, without isolation."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=project)
    (made,) = out.iterdir()
    return made


def test_the_package_is_typed_and_has_its_command() -> None:
    assert (_PROJECT / "ckptmove" / "py.typed").is_file()
    module, _, name = re.findall(r'^ckptmove = "(.*)(:)(.*)"$', text("pyproject.toml"), re.M)[0]
    assert callable(getattr(importlib.import_module(module), name))


def text(name: str) -> str:
    """A file of the project."""
    return (_PROJECT / name).read_text()


@pytest.mark.slow
def test_the_sdist_alone_builds_a_wheel_that_runs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    sdist = build(_PROJECT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    wheel = build(source, "wheel", tmp_path / "wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ckptmove/py.typed", "ckptmove/display/page/page.js"} <= names
    assert not {name for name in names if name.startswith(("tests/", "scripts/"))}
    ours = {f"ckptmove/{each.relative_to(_PROJECT / 'ckptmove')}" for each in modules()}
    assert ours <= names

    venv.create(tmp_path / "env")
    tools = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", tools / "python")
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    libraries = os.pathsep.join(
        {str(Path(str(each.__file__)).parents[1]) for each in (click, torch)}
    )
    env = {**os.environ, "PYTHONPATH": libraries}
    demo = source / "scripts" / "demo_checkpoint.py"
    run(tools / "python", demo, tmp_path / "run.pt", env=env, cwd=source)
    for command in (
        ("inspect", "run.pt"),
        ("relocate", "run.pt", "moved.pt", "--to", "cpu"),
        ("convert", "run.pt"),
        ("validate", "moved.pt", "--against", "run.pt"),
    ):
        run(tools / "ckptmove", *command, env=env, cwd=tmp_path)
    where = run(
        tools / "python", "-c", "import ckptmove; print(ckptmove.__file__)", cwd=tmp_path, env=env
    )
    assert Path(where).is_relative_to(tmp_path / "env")
    torch.load(tmp_path / "moved.pt")


def modules() -> list[Path]:
    """All modules of the package."""
    return [each for each in (_PROJECT / "ckptmove").rglob("*.py") if each.is_file()]
