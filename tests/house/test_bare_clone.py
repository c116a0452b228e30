"""A clone with nothing beside it: its tests are found, and what needs more skips with a reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, corpus_files


def tracked_files() -> list[str]:
    """The files of this checkout that a clone has too."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    command = ["git", "-C", os.fspath(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if listed.returncode:  # such as a checkout of somebody else's
        pytest.skip(f"git can't list the files: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as they are now, in a folder of their own."""
    folder = tmp_path_factory.mktemp("bare") / "clone"
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_pytest(clone: Path, *arguments: str) -> str:
    """What pytest prints in the clone, where nothing may fail, be it to be collected."""
    environment = {**os.environ, "PYTHONPATH": os.fspath(clone)}
    for name in [each for each in environment if each.startswith(("CKPTMOVE_", "PYTEST_"))]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        cwd=clone,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def naming_the_corpus(clone: Path) -> list[str]:
    """The test files that know of the public checkpoints, or of tests that do."""
    return [
        path.relative_to(clone).as_posix()
        for path in sorted((clone / "tests").rglob("test_*.py"))
        if "corpus" in path.read_text("utf-8")
    ]


@pytest.mark.slow
def test_what_needs_the_corpus_skips_with_a_reason(clone: Path) -> None:
    files = naming_the_corpus(clone)
    assert len(files) > 5
    printed = run_pytest(clone, "-k", "corpus or public", "-rs", *files)
    assert re.search(r"SKIPPED .*test_round_trips.py.*: no corpus in", printed)
    assert re.search(r"\d+ passed, \d+ skipped", printed)


def test_an_absent_corpus_of_any_kind_has_an_id_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPTMOVE_CORPUS", os.fspath(tmp_path))
    ids = {corpus_files(kind)[0].id for kind in ("zip", "legacy", "malicious/pickle")}
    assert ids == {"no-zip", "no-legacy", "no-malicious/pickle"}
