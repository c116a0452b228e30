"""What ckptmove makes of checkpoints without torch, as digests: the same on every Python.

Usage: python scripts/digests.py FOLDER...
       python scripts/digests.py --threads FOLDER...   (each file in 16 threads at once, 4 in each)
       python scripts/digests.py --make FOLDER         (needs torch: writes checkpoints to look at)

Prints a line for each file and verb: the SHA-256 of what came out, or the refusal. Two Pythons that
print the same lines have read and written the same; so have threads, that differ in nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

_THREADS, _AT_ONE = 16, 4  # threads, and how many of them do the same file


def make(folder: Path) -> None:
    """Write a checkpoint of each kind that the tests know, in several formats."""
    import torch

    from tests.making.checkpoints import MAKERS, save

    for name, maker in MAKERS.items():
        try:
            saved = maker()
            save(folder / f"{name}.pt", saved, "cuda:1")
            torch.save(saved, folder / f"{name}.legacy.pt", _use_new_zipfile_serialization=False)
        except Exception as error:  # what this torch can't save is of no use here
            print(f"not made: {name}: {type(error).__name__}", file=sys.stderr)


def digests(path: Path, out: Path) -> Iterator[tuple[str, str]]:
    """Each verb, and what it made of a file."""
    import ckptmove

    def run(verb: str, suffix: str) -> str:
        target = out / f"{verb}{suffix}"
        try:
            if verb == "inspect":
                found = ckptmove.inspect(path).to_json()
                data = json.dumps({**found, "path": ""}, sort_keys=True).encode()
                return hashlib.sha256(data).hexdigest()
            if verb == "relocate":
                ckptmove.relocate(path, target, to="cuda:0")
            elif verb == "convert":
                ckptmove.convert(path, target, drop="*")
            else:
                ckptmove.convert(out / "convert.safetensors", target)
            return hashlib.sha256(target.read_bytes()).hexdigest()
        except ckptmove.CkptmoveError as error:
            return f"{type(error).__name__}: {error}".replace(str(out), "").replace(str(path), "")
        except FileNotFoundError:
            return "nothing to convert back"

    for verb, suffix in (
        ("inspect", ""),
        ("relocate", ".pt"),
        ("convert", ".safetensors"),
        ("back", ".pt"),
    ):
        yield verb, run(verb, suffix)


def lines(path: Path) -> list[str]:
    """What becomes of a file, a line for each verb."""
    with tempfile.TemporaryDirectory() as out:
        return [f"{path.name}\t{verb}\t{digest}" for verb, digest in digests(path, Path(out))]


def lines_in_threads(paths: Sequence[Path]) -> list[list[str]]:
    """The same of several files, with many threads, several of which do the same at once.

    ValueError if two of these differ.
    """
    start = threading.Barrier(_THREADS)

    def several(part: int) -> list[list[str]]:
        start.wait()  # the first of them imports all that is loaded when it is first used
        return [lines(path) for path in paths[part % (_THREADS // _AT_ONE) :: _THREADS // _AT_ONE]]

    with ThreadPoolExecutor(_THREADS) as executor:
        found = list(executor.map(several, range(_THREADS)))
    each = _THREADS // _AT_ONE
    for part in range(each, _THREADS):
        if found[part] != found[part % each]:
            raise ValueError("two threads made different things of one file")
    return sorted(one for some in found[:each] for one in some)


def main() -> None:
    """Make checkpoints, or tell what becomes of them."""
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
        return
    for name in ("torch", "numpy"):
        sys.modules[name] = None  # type: ignore[assignment] # the core needs neither
    threaded = sys.argv[1:2] == ["--threads"]
    for folder in map(Path, sys.argv[1 + threaded :]):
        paths = sorted(each for each in folder.iterdir() if each.is_file())
        for found in lines_in_threads(paths) if threaded else map(lines, paths):
            print("\n".join(found))


if __name__ == "__main__":
    main()
