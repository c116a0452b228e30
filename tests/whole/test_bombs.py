"""Files that ask for far more than they are take little memory, and end in one clear line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from ckptmove.pickles.walk import walk
from ckptmove.sources.budget import Budget
from tests.conftest import ROOT, some
from tests.making.bombs import BOMBS, FLOOR, PER_BYTE, dense, zipped
from tests.making.bombs import DENSE as DENSE_KINDS

SMALL, LARGE = 600_000, 10_000_000  # bytes of a bomb
VERBS = ("inspect", "relocate", "convert", "convert back", "diff", "validate")
CODES = {0, 1, 3, 4}

_MEASURE = """
import json, sys
from tests.making.bombs import measure
for line in sys.stdin:
    path, *verbs = line[:-1].split("\t")
    print(json.dumps(measure(path, tuple(verbs))), flush=True)
"""


class Measure(Protocol):
    """Check what each verb takes of a file, apart from the import of torch, which is measured.

    Gives the most memory beyond twice its bytes, and the most seconds of processor time. `each`:
    diff may take as much for each of its two files.
    """

    def __call__(
        self, path: Path, codes: Set[int], verbs: Sequence[str] = VERBS, *, each: bool = False
    ) -> tuple[float, float]: ...


@pytest.fixture(scope="module")
def measuring() -> Iterator[subprocess.Popen[str]]:
    """A process that forks each verb for the path of a bomb, and tells what it took.

    Bombs are not made in it, since a child has the memory of its parent to begin with.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _MEASURE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    ) as process:
        yield process
        process.communicate()
    assert process.returncode == 0


@pytest.fixture
def measure(measuring: subprocess.Popen[str]) -> Measure:
    """Measures in that process."""

    def check(
        path: Path, codes: Set[int], verbs: Sequence[str] = VERBS, *, each: bool = False
    ) -> tuple[float, float]:
        size = path.stat().st_size
        print(path, *verbs, sep="\t", file=measuring.stdin, flush=True)
        assert measuring.stdout is not None
        most = longest = 0.0
        for verb, code, taken, seconds, said, torch in json.loads(measuring.stdout.readline()):
            assert code in codes, (verb, code, said)
            files = 2 if verb == "diff" else 1
            beyond = taken - torch - files * PER_BYTE * size
            assert beyond < FLOOR * (files if each else 1), (verb, taken, torch)
            most, longest = max(most, beyond), max(longest, seconds)
            if code in (3, 4):
                (line,) = said.splitlines()
                assert line.startswith("ckptmove: ")
        return most, longest

    return check


@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("name", some([*{Path(name).suffix: name for name in BOMBS}.values()], 2))
def test_a_bomb_takes_little(name: str, measure: Measure, tmp_path: Path) -> None:
    """A small one of each kind of file, by every verb: the test below takes all of them, larger."""
    measure(_bomb(name, SMALL, tmp_path), CODES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_large_bomb_takes_little(
    name: str,
    measure: Measure,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    most, seconds = measure(_bomb(name, LARGE, tmp_path), CODES)
    record_property("peak RssAnon of 10 MB but for twice the file, MB", most / 1e6)
    record_property("peak CPU, s", seconds)


READERS = ("relocate", "convert", "diff", "validate")
#: Each kind alone by all verbs, but that validate, which takes least beside torch, reads a third of
#: them; and random mixtures of two or three, which the verbs read in turn.
MIXTURES = [
    *(((kind,), READERS[: 3 + (n % 3 == 0)]) for n, kind in enumerate(DENSE_KINDS)),
    *(
        (tuple(Random(n).sample(sorted(DENSE_KINDS), 2 + n % 2)), (READERS[n // 2 % 4],))
        for n in range(12)
    ),
]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize(
    ("kinds", "verbs"), MIXTURES, ids=["+".join(kinds) for kinds, _ in MIXTURES]
)
def test_the_densest_file_that_is_read_takes_little(
    kinds: tuple[str, ...], verbs: tuple[str, ...], measure: Measure, tmp_path: Path
) -> None:
    """It is as large as the budget allows; with a tenth more it is refused."""
    one = dense(kinds, 1000)
    budget = Budget()
    room = budget.room
    walk(one, budget=budget)
    most = min(int(1000 * room / max(1, room - budget.room)), LARGE * 1000 // len(one))
    path = tmp_path / "dense.pt"
    path.write_bytes(zipped(dense(kinds, int(0.99 * most))))
    measure(path, {0, 1, 3, 4}, ("inspect", *verbs), each=True)
    if path.stat().st_size < 0.9 * LARGE:
        path.write_bytes(zipped(dense(kinds, int(1.1 * most))))
        measure(path, {3}, ("inspect",))


def _bomb(name: str, nbytes: int, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(BOMBS[name](nbytes))
    return path


#: What right files hold in a byte or two each.
DENSE: dict[str, Callable[[], object]] = {
    "flags": lambda: [False] * 2_000_000,
    "zeros": lambda: [0] * 3_000_000,
    "mask": lambda: [None if n % 7 == 0 else n % 3 == 0 for n in range(3_000_000)],
    "tokens": lambda: [[n % 200 for n in range(50)] for _ in range(60_000)],
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("name", sorted(DENSE))
def test_a_right_file_of_very_many_values_is_no_bomb(
    name: str, measure: Measure, tmp_path: Path
) -> None:
    path = tmp_path / "dense.pt"
    path.write_bytes(zipped(pickle.dumps({"values": DENSE[name]()}, 2)))
    # validate has torch unpickle it, in Python: that takes longer than all the rest, and no more of
    # one kind of value than of another
    measure(
        path, {0}, VERBS if name == "tokens" else [each for each in VERBS if each != "validate"]
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
def test_memory_that_does_not_suffice_is_the_file_s_fault(tmp_path: Path) -> None:
    """Without exit code 70, and the same in the library and in a batch."""
    path = tmp_path / "runs" / "numbers.pt"
    path.parent.mkdir()
    path.write_bytes(BOMBS["large_numbers.pkl"](12_000_000))
    limit = (
        "import resource, ckptmove, ckptmove.cli, ckptmove.batches.executors.worker\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "room = pages * resource.getpagesize() + (50 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
    )
    library = (
        "import sys, ckptmove\n"
        "try:\n    ckptmove.inspect(sys.argv[1])\n"
        "except ckptmove.CorruptError as error:\n    print(error)\n"
    )
    command = "import sys; from ckptmove.cli import run; sys.exit(run(sys.argv[1:]))"
    worker = (
        "import sys, ckptmove\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as executor:\n"
        "    for result in ckptmove.batch('validate', sys.argv[1], executor=executor):\n"
        "        print(result.outcome, result.reason)\n"
    )
    for code, argument, exit in (
        (library, path, 0),
        (command, path, 3),
        (worker, path.parent, 0),
    ):
        arguments = ["inspect"] if code == command else []
        done = subprocess.run(
            [sys.executable, "-c", limit + code, *arguments, os.fspath(argument)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "MALLOC_ARENA_MAX": "1"},
        )
        assert done.returncode == exit, done.stderr
        assert "needs more memory than this process can get" in done.stdout + done.stderr
