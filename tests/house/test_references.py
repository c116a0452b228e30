"""What names files and modules of the package by text or by place, which no import would miss."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import ckptmove

ROOT = Path(ckptmove.__file__).parent
PROJECT = ROOT.parent
sys.path.insert(0, str(PROJECT / "scripts"))

from mutant import Mutant  # noqa: E402
from mutants import MUTANTS  # noqa: E402

SAID = re.compile(r"(?<![\w./-])ckptmove((?:\.[A-Za-z_]\w*)+)")
PATH = re.compile(r"(?<![\w./-])ckptmove/([\w/]+\.py)\b")
#: What looks like a module of ours and is the name of something else.
OTHERS = re.compile(r"\.(json|toml|egg|exe|whl|txt|log|pt|write_text|chmod)$")


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [PROJECT / name for name in listed.stdout.split("\0") if name]


def texts() -> Iterator[tuple[str, str]]:
    """The project's own files of text, but for those that tell of the past, or show faults."""
    for path in tracked():
        if (
            path.suffix in (".py", ".md", ".toml", "")
            and path.name
            not in (
                "CHANGELOG.md",
                "LICENSE",
                Path(__file__).name,
            )
            and path.is_file()
        ):
            yield path.relative_to(PROJECT).as_posix(), path.read_text(errors="replace")


def is_there(dotted: str) -> bool:
    """Whether it is a module, or can be had from one, as deep as it goes."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        name = ".".join(parts[:n])
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if found is None:
            continue
        held: object = importlib.import_module(name)
        for part in parts[n:]:
            if not hasattr(held, part):
                return False
            held = getattr(held, part)
        return True
    return False


@pytest.mark.slow
def test_modules_that_text_names_are_there() -> None:
    """In strings, comments and documents, where renaming a module breaks nothing at once."""
    said = {
        f"ckptmove{found[1]}": name
        for name, text in texts()
        for found in SAID.finditer(text)
        if not OTHERS.search(found[0])
    }
    assert len(said) > 50
    assert not {dotted: name for dotted, name in said.items() if not is_there(dotted)}


def test_files_that_text_names_are_there() -> None:
    said = {found[1]: name for name, text in texts() for found in PATH.finditer(text)}
    assert not {file: name for file, name in said.items() if not (ROOT / file).exists()}


def test_rooms_that_contributing_names_are_there() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    said = re.findall(r"`([a-z_]+/(?:[a-z_/]+)?)`", text)
    said = [each for each in said if each.split("/")[0] not in ("tests", "scripts", "ckptmove")]
    assert said
    there = [(ROOT / each).is_dir() or (ROOT / f"{each}.py").is_file() for each in said]
    assert all(there), [each for each, is_ in zip(said, there, strict=True) if not is_]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_faults_have_their_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    for each in mutant.tests.split():
        if each.startswith("tests/"):
            assert (PROJECT / each.partition("::")[0]).exists()


def settings() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    found: dict[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    return found


def braces(pattern: str) -> Iterator[str]:
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        yield pattern
        return
    for each in found[1].split(","):
        yield from braces(pattern[: found.start()] + each + pattern[found.end() :])


def test_exceptions_of_lint_are_for_files_that_are_there() -> None:
    ignores = settings()["tool"]["ruff"]["lint"]["per-file-ignores"]
    names = [path.relative_to(PROJECT).as_posix() for path in tracked()]
    for pattern in ignores:
        for each in braces(pattern):
            assert any(fnmatch(name, each) for name in names), f"{each} of {pattern}"


def test_version_is_built_from_a_file_that_is_there() -> None:
    said = settings()
    assert (PROJECT / said["tool"]["hatch"]["version"]["path"]).is_file()
    for entry in said["project"]["scripts"].values():
        assert is_there(entry.replace(":", "."))


def test_what_pickles_are_told_to_make_can_be_found() -> None:
    from ckptmove.runtime.opaque import STAND_IN

    assert is_there(STAND_IN)


def test_a_cluster_is_driven_by_a_module_that_is_there() -> None:
    from ckptmove.batches.executors import ray_driver, ray_executor

    assert ray_driver.__name__ == ray_executor._DRIVER


def test_code_of_ours_is_told_from_code_of_users() -> None:
    """By the folder of the package, and by the one in it that stands in for torch."""
    pytest.importorskip("torch")
    from ckptmove.live.tracing.program import source_lines
    from ckptmove.trial import simulation

    assert str(ROOT) + os.sep == source_lines._OURS
    assert [each + os.sep for each in simulation.__path__] == [source_lines._LIKE_TORCH]


def test_what_simulates_a_device_is_known_by_its_folder() -> None:
    pytest.importorskip("torch")
    from ckptmove import trial
    from ckptmove.trial import stage_fake
    from ckptmove.trial.simulation import script_host

    inside = pkgutil.walk_packages(trial.__path__, f"{trial.__name__}.")
    files = [found.origin for each in inside if (found := importlib.util.find_spec(each.name))]
    assert len(files) > 20
    assert str(script_host.__file__) in files
    assert all(str(file).startswith(stage_fake._OURS) for file in files)
