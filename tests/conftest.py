"""What every test may ask for: the corpus of public files, the command line."""

from __future__ import annotations

import csv
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from hypothesis import settings

from tests.servers.object_store import s3_server, store, web
from tests.servers.roots import root
from tests.servers.warm_python import WarmCommand, WarmPopen, WarmRun

__all__ = ["root", "s3_server", "store", "web"]  # fixtures for all

ROOT = Path(__file__).resolve().parents[1]
Case = TypeVar("Case")
Ways = tuple[str, ...]  # arguments of a test

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes are the parallelism
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their models; nothing is downloaded

#: Whether all that is costly runs: `scripts/test --all`.
ALL = bool(os.environ.get("CKPTMOVE_TEST_ALL"))


def examples(most: int) -> int:
    """So many random examples with `scripts/test --all`, else a tenth of them."""
    return most if ALL else max(3, most // 10)


settings.register_profile("dev", deadline=None, max_examples=examples(100))
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# What runs in the background of a script ignores Ctrl-C, and under nohup that its terminal is
# gone; so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def corpus_folder() -> Path:
    """Where checkpoints from public repositories lie, if they do: see `MANIFEST.tsv` in it."""
    return Path(os.environ.get("CKPTMOVE_CORPUS") or ROOT.parent / "shared" / "corpus")


def corpus_files(kind: str) -> list[pytest.ParameterSet]:
    """A parameter for each file of that kind; without a corpus, one that skips.

    Rows of a kind that starts with `malicious/` run code when they are unpickled.
    """
    folder = corpus_folder()
    if not (folder / "MANIFEST.tsv").is_file():
        absent = pytest.mark.skip(reason=f"no corpus in {folder}")
        return [pytest.param(None, marks=absent, id=f"no-{kind}")]
    with (folder / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    names = [row["file"] for row in rows if row["kind"] == kind]
    return [pytest.param(folder / name, id=name) for name in names]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`corpus_zip` runs a test for each torch zip of the corpus."""
    if "corpus_zip" in metafunc.fixturenames:
        metafunc.parametrize("corpus_zip", corpus_files("zip"))


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of public checkpoints."""
    folder = corpus_folder()
    if not (folder / "MANIFEST.tsv").is_file():
        pytest.skip(f"no corpus in {folder}; CKPTMOVE_CORPUS names another place")
    return folder


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests that are marked `sample`, have all but a few cases be slow."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        quick = spread(len(cases), *mark.args)
        for n, item in enumerate(cases):
            if n not in quick:
                item.add_marker("slow")


_frozen = 0  # modules


def pytest_collection_finish() -> None:
    """Have no collection of garbage look at the tests and what they import again and again."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Nor at a library that a test has imported."""
    if len(sys.modules) > _frozen + 50:
        pytest_collection_finish()


def spread(total: int, count: int) -> set[int]:
    """So many of the numbers below a total, from the first on, evenly apart."""
    return {n * total // count for n in range(count)}


def some(cases: Sequence[Case], count: int) -> list[Case]:
    """Cases of one test: all with `scripts/test --all`, else the last and so many, evenly apart."""
    if ALL:
        return list(cases)
    last = len(cases) - 1
    return [cases[n] for n in sorted({*spread(len(cases), count), last} & {*range(len(cases))})]


def in_turn(cases: Sequence[Ways], ways: Sequence[Ways], count: int) -> list[Ways]:
    """Each case by so many of the ways, which take turns.

    For what is independent of each other: every way is taken, and every case goes some way.
    """
    return [
        (*case, *ways[(n + turn) % len(ways)])
        for n, case in enumerate(cases)
        for turn in range(count)
    ]


@pytest.fixture
def warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts with this Python have torch before they begin."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(subprocess, "Popen", WarmPopen)


class TrainingFolder(Protocol):
    """A copy of a folder that a framework saved: `tests.making.training_folders.FOLDERS[name]`."""

    def __call__(self, name: str, tag: str = "cuda:0") -> Path: ...


@pytest.fixture(scope="session")
def made_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Each folder that a framework saved, made once."""

    @functools.cache
    def made(name: str, tag: str) -> Path:
        from tests.making.training_folders import FOLDERS

        return FOLDERS[name](tmp_path_factory.mktemp(name), tag)

    return made


@pytest.fixture
def training_folder(made_folder: Callable[[str, str], Path], tmp_path: Path) -> TrainingFolder:
    """Folders that frameworks saved, each copied to the test's own folder under its own name."""

    def copied(name: str, tag: str = "cuda:0") -> Path:
        made = made_folder(name, tag)
        return Path(shutil.copytree(made, tmp_path / made.name))

    return copied


class RunCli(Protocol):
    """`ckptmove ARGUMENTS` in a process of its own, which must end with the code `exit`.

    It is a fork of one that has imported the command line, unless the test is marked `cold`.
    """

    def __call__(
        self,
        *arguments: str | os.PathLike[str],
        exit: int,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run_cli(request: pytest.FixtureRequest, tmp_path: Path) -> RunCli:
    """The command line as users meet it; without `cwd`, in the test's own folder."""
    cold = request.node.get_closest_marker("cold") is not None
    warm = WarmRun if "warm" in request.fixturenames else WarmCommand
    start = subprocess.Popen if cold else warm

    def run(
        *arguments: str | os.PathLike[str],
        exit: int,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ckptmove", *[os.fspath(part) for part in arguments]]
        with start(
            command,
            stdin=None if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT), **(env or {})},
        ) as process:
            try:
                out, err = process.communicate(input, timeout=120)
            finally:
                process.kill()
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
        said = f"exit code {done.returncode}, not {exit}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == exit, said
        return done

    return run


class RunHere(Protocol):
    """`ckptmove ARGUMENTS` in this process, which must give the code `exit`."""

    def __call__(
        self, *arguments: str | os.PathLike[str], exit: int
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run_here(
    warm: None, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunHere:
    """The command line in the test's own folder; what it starts has torch before it begins."""
    from ckptmove.cli import run as command_line

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | os.PathLike[str], exit: int) -> subprocess.CompletedProcess[str]:
        command = [os.fspath(part) for part in arguments]
        try:
            code = command_line(command)
        finally:
            gc.enable()  # a command needs none, and ends
        done = subprocess.CompletedProcess(command, code, *capfd.readouterr())
        assert code == exit, f"exit code {code}, not {exit}\n{done.stdout}\n{done.stderr}"
        return done

    return run
