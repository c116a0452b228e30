"""The examples in scripts/deploy: their commands are run here as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.making.checkpoints import save
from tests.making.trees import many, small_tree

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"


def steps() -> list[str]:
    """The commands of the workflow, in their order."""
    yaml = pytest.importorskip("yaml")
    said = yaml.safe_load((DEPLOY / "pipeline.yml").read_text())
    (job,) = said["jobs"].values()
    return [each["run"] for each in job["steps"]]


def run(command: str, cwd: Path) -> int:
    """Run a step as its shell would, with this checkout as `ckptmove`."""
    bin_ = cwd / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "ckptmove").write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptmove "$@"\n')
    (bin_ / "ckptmove").chmod(0o755)
    about = {
        **{**os.environ, "PYTHONPATH": os.fspath(ROOT), "SRC": "runs", "DST": "out"},
        "PATH": f"{bin_}:{os.environ['PATH']}",
    }
    return subprocess.run(["bash", "-e", "-c", command], cwd=cwd, env=about, check=False).returncode


@pytest.mark.slow
def test_the_workflow_publishes_what_is_whole(tmp_path: Path) -> None:
    many(tmp_path / "runs", 3, 100)
    save(tmp_path / "runs" / "gpu.pt", {"w": torch.ones(3)}, "cuda:1")
    for command in steps():
        assert run(command, tmp_path) == 0, command
    lines = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    assert lines[0].split("  ")[1] == "gpu.pt"
    assert len(lines) == 4
    assert len((tmp_path / "validate.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_the_workflow_stops_at_the_first_step_that_fails(tmp_path: Path) -> None:
    many(tmp_path / "runs", 2, 100)
    (tmp_path / "runs" / "bad.pt").write_bytes(b"PK\3\4")
    foretold, relocated, *_ = steps()
    assert run(foretold, tmp_path) == 1
    assert not (tmp_path / "out").exists()
    assert run(relocated, tmp_path) == 1
    said = [json.loads(line) for line in (tmp_path / "relocate.jsonl").read_text().splitlines()]
    assert {each["name"]: each["outcome"] for each in said}["bad.pt"] == "failed"


@pytest.mark.slow
def test_the_pipeline_in_python(tmp_path: Path) -> None:
    script = [sys.executable, os.fspath(DEPLOY / "pipeline.py"), "runs", "out"]
    about = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    many(tmp_path / "runs", 2, 100)
    for _ in range(2):  # the second finds all done
        done = subprocess.run(
            script, cwd=tmp_path, env=about, check=True, capture_output=True, text=True
        )
        (tmp_path / "SHA256SUMS").write_text(done.stdout)
        assert run("(cd out && sha256sum --check --strict) < SHA256SUMS", tmp_path) == 0
        assert len(done.stdout.splitlines()) == 2
    small_tree(tmp_path / "other")
    done = subprocess.run(
        [*script[:2], "other", "out2"],
        cwd=tmp_path,
        env=about,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert not done.stdout
    assert "failed" in done.stderr


def test_the_dockerfile_is_one_that_can_be_built() -> None:
    """As far as that can be told without docker: its instructions, what it copies, what it runs."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    assert lines[0][0] == "FROM"
    for name, rest in lines:
        if name == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert all((ROOT / each).exists() for each in sources), rest
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(each, str) for each in json.loads(rest))
        if name == "RUN":
            assert shlex.split(rest)
    project = (ROOT / "pyproject.toml").read_text()
    assert 'readme = "README.md"' in project, "it is copied, as the build needs it"
    extra = re.search(r"ARG EXTRAS=(\w+)", text)
    assert extra is not None
    assert extra[1] in re.findall(r"^(\w+) = \[", project, re.MULTILINE)
