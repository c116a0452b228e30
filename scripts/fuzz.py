"""Damage checkpoints at random and give them to every verb, for some minutes of processor time.

Usage: .venv/bin/python scripts/fuzz.py [--minutes 5] [--seed N] [--keep FOLDER]

Files are taken apart and put together again (`tests/making/mutating.py`). A damaged file that got
answers that no other file got, such as a new error, is damaged further: answers are the guide, as
coverage is for other fuzzers. A verb may answer or raise a `CkptmoveError` of one line, in 10 s;
anything else is a find, and the file is kept. Ends with 1 if there is a find.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ckptmove  # noqa: E402
from ckptmove.errors import CkptmoveError  # noqa: E402
from tests.making.building import at_most  # noqa: E402
from tests.making.mutating import mutated  # noqa: E402
from tests.whole.test_fuzz import KINDS, originals  # noqa: E402

_SECONDS = 10
_MOST_KEPT = 4096  # files that are damaged further
_ROOM = 8 << 30  # bytes of address space that all of it may add
#: What differs between answers that are alike: numbers, and what is quoted.
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9]+|/\S+")


class Count(NamedTuple):
    """What was tried, and what came of it."""

    tries: int
    answers: int
    finds: list[str]
    minutes: float


def _verbs(path: Path, sound: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    out = path.with_name("out")
    yield "inspect", lambda: str(ckptmove.inspect(path))
    yield "relocate", lambda: ckptmove.relocate(path, out.with_suffix(".pt"), to="cuda:1")
    yield "convert", lambda: ckptmove.convert(path, out.with_suffix(".safetensors"), force=True)
    yield "convert", lambda: ckptmove.convert(path, out.with_suffix(".pt"), force=True)
    yield "load", lambda: ckptmove.load(path, map_location="cpu")
    yield "diff", lambda: str(ckptmove.diff(path, sound))
    yield "validate", lambda: str(ckptmove.validate(path))
    yield "salvage", lambda: ckptmove.salvage(path, out.with_name("saved.safetensors"))


def _answer(act: Callable[[], object]) -> tuple[str, str]:
    """The answer of a verb in short, and what is wrong with it; "" if nothing is."""
    try:
        with at_most(_SECONDS):
            act()
    except CkptmoveError as error:
        said = f"{type(error).__name__}: {error}"
        wrong = "several lines" if "\n" in str(error) else ""
        return _PARTICULAR.sub("#", said)[:200], wrong
    except (Exception, RecursionError) as error:
        return type(error).__name__, f"{type(error).__name__}: {str(error)[:100]}"
    return "answered", ""


def fuzz(minutes: float, seed: int, keep: Path) -> Count:
    """Damage files until the processor time is over."""
    dice = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != "anything"]
    pool: dict[str, list[bytes]] = {}
    met: set[tuple[str, ...]] = set()
    finds: list[str] = []
    tries: Counter[str] = Counter()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "in")
        sound = Path(name, "sound.pt")
        sound.write_bytes(originals(kinds[0])[0])
        while time.process_time() - started < 60 * minutes:
            kind = dice.choice(kinds)
            if kind not in pool:
                making = time.process_time()
                pool[kind] = list(originals(kind))
                started += time.process_time() - making  # which is no fuzzing
            data = mutated(dice.choice(pool[kind]), pool[kind], dice)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            path = folder / "in.pt"
            path.write_bytes(data)
            answers = []
            for verb, act in _verbs(path, sound):
                told, wrong = _answer(act)
                answers.append(f"{verb} {told}")
                tries[verb] += 1
                for each in folder.glob("out*"):
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
                if wrong:
                    finds.append(f"{verb}: {wrong}")
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{len(finds)}-{verb}.pt").write_bytes(data)
                if path.read_bytes() != data:
                    finds.append(f"{verb}: the source was changed")
                    path.write_bytes(data)
            if tuple(answers) not in met:
                met.add(tuple(answers))
                if len(pool[kind]) < _MOST_KEPT:
                    pool[kind].append(data)
    return Count(tries.total(), len(met), finds, (time.process_time() - started) / 60)


def main() -> None:
    """Fuzz, and print what came of it."""
    parser = argparse.ArgumentParser(description="Damage checkpoints, and give them to every verb.")
    parser.add_argument("--minutes", type=float, default=5, help="of processor time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--keep", type=Path, default=ROOT / ".fuzz", help="where finds are kept")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, resource.RLIM_INFINITY))
    count = fuzz(asked.minutes, asked.seed, asked.keep)
    for each, n in Counter(count.finds).most_common(20):
        print(f"{n} × {each}", file=sys.stderr)
    told = f"{count.tries:,} tries of 7 verbs in {count.minutes:.1f} CPU minutes"
    told += f" (seed {asked.seed}); {count.answers:,} kinds of answers"
    print(f"{told}; {len(count.finds)} tracebacks, hangs or changed sources")
    raise SystemExit(bool(count.finds))


if __name__ == "__main__":
    main()
