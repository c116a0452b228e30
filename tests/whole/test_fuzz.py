"""Thousands of damaged files of every kind: an answer or one of our errors, soon, in little memory.

The same seeds make the same files each time. Each file is inspected and shown in every form, and
relocated where it was read; what came out must be readable. Where torch itself reads the damaged
file, it must read the relocated one.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from ckptmove.display.blocks import text_of
from ckptmove.errors import CkptmoveError
from ckptmove.reports import inspect as rendering
from ckptmove.reports.tree import tree
from tests.conftest import ROOT
from tests.making.building import at_most
from tests.making.checkpoints import MAKERS, rezip, save
from tests.making.families import FAMILIES
from tests.making.mutating import mutated
from tests.oracles.bounds import limited_memory
from tests.oracles.readers import load
from tests.servers.warm_python import WarmCommand

BLOCKS, CASES = 6, 170  # of each kind: blocks, and cases in one
SECONDS = 2.0  # of processor time, for files of a few kB
HANGING = 60  # seconds by the clock, after which a case has hung
ROOM = 384 << 20  # bytes of address space that a case may add
LARGEST = 20_000  # bytes of a file to be damaged
MOST = 24  # files of a kind
SUBPROCESSES = 60
KINDS = ("zip", "packed", *FAMILIES, "anything")


@functools.cache
def originals(kind: str) -> tuple[bytes, ...]:
    """Small sound files of a kind."""
    if kind == "anything":
        return tuple(each for other in KINDS[:-1] for each in originals(other)[:6])
    dice = random.Random(kind)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(_made(kind, Path(name), dice))
    return tuple(found)


def _made(kind: str, folder: Path, dice: random.Random) -> Iterator[bytes]:
    names = list(FAMILIES.get(kind, MAKERS))
    dice.shuffle(names)
    names.sort(key=lambda name: name.startswith("saved_"))  # what is special to the kind first
    count = 0
    for name in names:
        path = folder / f"{name}.pt2"  # which the makers of such files insist on
        if kind in FAMILIES:
            FAMILIES[kind][name](path, "cuda:1")
        else:
            save(path, MAKERS[name](), "cuda:1")
        if kind == "packed":
            path = rezip(path, folder / f"{name}.packed")
        if path.stat().st_size <= LARGEST or (count == 0 and name == names[-1]):
            yield path.read_bytes()
            count += 1
        if count == MOST:
            return


class Case:
    """One damaged file in a folder of its own."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self.path, self.out, self.data = folder / "in.pt", folder / "out.pt", data
        self.path.write_bytes(data)

    def run(self) -> bool:
        """Inspect and relocate it; whether both could be done."""
        try:
            return self._run()
        finally:
            self.out.unlink(missing_ok=True)

    def _run(self) -> bool:
        done = refused(self._inspect, (3,)) is None and refused(self._relocate, (3, 4)) is None
        assert self.path.read_bytes() == self.data, "the source was changed"
        found = sorted(each.name for each in self.path.parent.iterdir())
        assert found == ["in.pt", "out.pt"] if done else found == ["in.pt"], found
        if done:
            assert refused(lambda: self._inspect(self.out), ()) is None
            if zlib.crc32(self.data) % 4 == 0:
                self._compare()
        return done

    def _inspect(self, path: Path | None = None) -> None:
        manifest = ckptmove.inspect(path or self.path)
        manifest.to_json()
        for lines in (manifest.lines(), text_of(tree(manifest))):
            assert all("\n" not in line for line in lines)
        assert all("\n" not in line for line in text_of(rendering.tensors(manifest)))

    def _relocate(self) -> None:
        ckptmove.relocate(self.path, self.out, to="cuda:0", all=True, values=True)

    def _compare(self) -> None:
        """What torch reads, it reads afterwards. Never unpickled freely."""
        if self.data.startswith(b"PK") and not sound(self.path):
            return  # torch takes what does not inflate for whatever is in its memory
        for path in (self.path, self.out):
            try:
                load(path, weights_only=True)
            except Exception:
                assert path == self.path, "torch no longer reads it"
                return


def sound(path: Path) -> bool:
    """Whether every record of a zip can be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError):
        return False


def refused(act: Callable[[], object], codes: tuple[int, ...]) -> CkptmoveError | None:
    """What it refuses with; anything else that goes wrong is let through."""
    refusal = None
    try:
        act()
    except CkptmoveError as error:
        refusal = error
    assert refusal is None or refusal.exit_code in codes, f"{refusal.exit_code}: {refusal}"
    return refusal


def measured(case: Case) -> bool:
    """Run a case within its bounds; one that was slow gets a second chance on a noisy machine."""
    for last in (False, True):
        started = time.process_time()
        with at_most(HANGING), limited_memory(ROOM):
            done = case.run()
        if time.process_time() - started < SECONDS:
            break
        assert not last, f"it took {time.process_time() - started:.1f} s"
    return done


def cases(kind: str, seed: str) -> Iterator[bytes]:
    """Damaged files without end."""
    dice, sources = random.Random(f"{kind} {seed}"), originals(kind)
    donors = (*sources, *originals("anything"))
    while True:
        yield mutated(dice.choice(sources), donors, dice)


BLOCKS_OF_KINDS = [(kind, block) for kind in KINDS for block in range(BLOCKS)]


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize(("kind", "block"), BLOCKS_OF_KINDS)
def test_damaged_files_are_refused_or_relocated(
    kind: str, block: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("files", CASES)
    forged = cases(kind, str(block))
    for n in range(CASES):
        data = next(forged)
        try:
            measured(Case(tmp_path, data))
        except BaseException as error:
            (tmp_path / "in.pt").write_bytes(data)
            pytest.fail(f"case {n}, kept as {tmp_path / 'in.pt'}: {error!r}")


def test_there_are_ten_thousand_cases() -> None:
    assert len(KINDS) * BLOCKS * CASES >= 10_000


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(6))
def test_the_command_line_says_one_line(block: int, tmp_path: Path) -> None:
    for n in range(block * len(KINDS), (block + 1) * len(KINDS)):
        source = tmp_path / "in.pt"
        source.write_bytes(next(cases(KINDS[n % len(KINDS)], f"subprocess {n}")))
        verbs = (
            ["inspect", "--json"],
            ["relocate", os.fspath(tmp_path / "out"), "--to", "cuda:0"],
        )
        verb, *options = verbs[n % 2]
        with WarmCommand(
            [sys.executable, "-m", "ckptmove", verb, os.fspath(source), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        ) as process:
            out, said = process.communicate(timeout=120)
        assert process.returncode in (0, 3, 4, 5), said
        if process.returncode:
            assert out == ""
            assert said.startswith("ckptmove: ")
            assert said.count("\n") == 1
            assert said.endswith("\n")
        assert "Traceback" not in said
