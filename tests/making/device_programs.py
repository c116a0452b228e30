"""Read the programs with planted faults of devices in `programs/`: text, as its files say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.making.device_faults import Fault

_FOLDER = Path(__file__).with_name("programs")
_STAND_INS = (
    f"import sys; sys.path.insert(0, {str(_FOLDER)!r}); import stand_ins; stand_ins.install()\n"
)


class Programs(NamedTuple):
    """Those with a fault, and those that are right alone."""

    faults: dict[str, Fault]
    right: dict[str, str]


class _Recipe(Fault):
    """A public script, `source`, of which `program` says what is replaced."""

    source: str

    def text(self, *, wrong: bool) -> str:
        """The program, right or wrong."""
        made = self.source
        for line in self.program.splitlines():
            tag, _, edit = line.partition(" ")
            if tag == ("+" if wrong else "-"):
                continue
            old, _, new = (each.replace("\\n", "\n") for each in edit.partition(" => "))
            if old not in made:
                raise ValueError(f"the script has no {old!r}")
            made = made.replace(old, new)
        return made


def programs(file: str) -> Programs:
    """Those of a file, e.g. `forum`."""
    found = Programs({}, {})
    for name, head, body in _sections(f"{file}.txt"):
        if "cause" in head:
            found.faults[name] = Fault(body, *_expected(head))
        else:
            found.right[name] = body
    return found


def public(clones: Path, *, unseen: bool) -> Programs:
    """Those of the recipes, of one half.

    Args:
        clones: a folder with the repositories, each as OWNER+NAME.
        unseen: whether the half that is held out is meant.
    """
    found = Programs({}, {})
    for name, head, body in _sections("public.txt"):
        if (head.get("half") == "unseen") is not unseen:
            continue
        begin, _, edits = body.partition("\n")
        repository, commit, path = head["from"].split(" ", 2)
        git = ["git", "-C", str(clones / repository.replace("/", "+")), "show", f"{commit}:{path}"]
        source = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=True).stdout
        recipe = _Recipe(edits, *_expected(head))
        source = source.replace(
            "from __future__ import print_function\n", ""
        )  # which must come first
        recipe.source = _STAND_INS + f"{begin}\n" + source
        found.faults[name] = recipe
    return found


def _expected(head: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The causes and the texts that must be told."""
    causes, texts = head["cause"].split(","), head["told"].split(";")
    return tuple(each.strip() for each in causes), tuple(each.strip() for each in texts)


def _sections(file: str) -> list[tuple[str, dict[str, str], str]]:
    """The name of each program, what is said of it, and the rest after what begins each."""
    begin, *rest = (_FOLDER / file).read_text().split("\n=== ")
    begin = "".join(f"{line}\n" for line in begin.splitlines() if not line.startswith("#"))
    found = []
    for each in rest:
        name, *lines = each.splitlines()
        head = {}
        while lines and lines[0].partition(": ")[0] in ("from", "half", "cause", "told"):
            key, _, value = lines.pop(0).partition(": ")
            head[key] = value
        found.append((name, head, begin + "".join(f"{line}\n" for line in lines)))
    return found
