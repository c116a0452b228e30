"""What ckptmove makes of checkpoints without torch, as digests: the same on every Python.

Usage: python scripts/digests.py FOLDER...
       python scripts/digests.py --make FOLDER     (needs torch: writes checkpoints to look at)

Prints a line for each file and verb: the SHA-256 of what came out, or the refusal. Two Pythons that
print the same lines have read and written the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


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


def main() -> None:
    """Make checkpoints, or tell what becomes of them."""
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
        return
    for name in ("torch", "numpy"):
        sys.modules[name] = None  # type: ignore[assignment] # the core needs neither
    for folder in map(Path, sys.argv[1:]):
        for path in sorted(each for each in folder.iterdir() if each.is_file()):
            with tempfile.TemporaryDirectory() as out:
                for verb, digest in digests(path, Path(out)):
                    print(f"{path.name}\t{verb}\t{digest}")


if __name__ == "__main__":
    main()
