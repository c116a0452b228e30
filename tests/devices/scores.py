"""Judge what doctor says of programs with one planted fault each, and of right ones."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.devices.galleries import ran
from tests.making import held_out_faults, held_out_right
from tests.making.device_faults import FAULTS, Fault
from tests.making.device_programs import Programs, programs, public
from tests.making.right_programs import RIGHT

_PATH = re.compile(r"[^\s'\"]*\.py\b")


class Judged(NamedTuple):
    """A program, how doctor was judged on it, and what doctor said."""

    name: str
    wrong: bool
    word: str
    told: Mapping[str, Any]


def judged(found: Mapping[str, Any], causes: Collection[str], texts: Collection[str]) -> str:
    """`found`, `in part` (without a name or line), `another cause`, `not simulated`, `missed`."""
    told = {each["cause"] for each in found["verdicts"]}
    if found["not_simulated"]:
        return "not simulated"
    if not told:
        return "missed"
    if not told & set(causes):
        return "another cause"
    shown = "\n".join(
        "\n".join([each["title"], each["fix"], *each["evidence"]]) for each in found["verdicts"]
    )
    shown = _PATH.sub(".py", shown)  # whose name may be what is looked for
    texts = [_PATH.sub(".py", text) for text in texts]
    return "found" if all(text in shown for text in texts) else "in part"


def clean(found: Mapping[str, Any]) -> str:
    """`clean`, `false alarm` or `not simulated`, of a right program."""
    if found["not_simulated"]:
        return "not simulated"
    return "clean" if found["ok"] else "false alarm"


#: The sets of programs; those of `forum` and `unseen` are the halves of one, and of one author.
SETS = {
    "": Programs(FAULTS, RIGHT),
    "held out": Programs(held_out_faults.FAULTS, held_out_right.RIGHT),
    "forum": programs("forum"),
    "unseen": programs("unseen"),
    "later": programs("later"),
    "libraries": programs("libraries"),
    "posts": programs("posts"),
    "answers": programs("answers"),
    "outsider": programs("outsider"),
    "strangers": programs("strangers"),
}
#: The halves of the recipes, for which clones of the repositories are needed.
PUBLIC = {"public": False, "public, unseen": True}


def set_judged(
    kind: str, only: Collection[str] = (), clones: Path | None = None
) -> Iterator[Judged]:
    """The programs of a set."""
    if kind in PUBLIC:
        found = Programs({}, {}) if clones is None else public(clones, unseen=PUBLIC[kind])
        return _all_judged(*found, only)
    return _all_judged(*SETS[kind], only)


def _all_judged(
    faults: Mapping[str, Fault], right: Mapping[str, str], only: Collection[str]
) -> Iterator[Judged]:
    """Programs on a simulated GPU: each wrong one, and mended; then the right ones."""
    with tempfile.TemporaryDirectory() as folder:
        programs = {}
        for name, fault in faults.items():
            programs[f"{name}_wrong"] = name, True, fault.text(wrong=True)
            programs[f"{name}_right"] = name, False, fault.text(wrong=False)
        programs |= {name: (name, False, text) for name, text in right.items()}
        programs = {key: each for key, each in programs.items() if not only or each[0] in only}
        for key, (_, _, text) in programs.items():
            Path(folder, f"{key}.py").write_text(text)
        found = ran("simulated", [(str(Path(folder, key)),) for key in programs])
    for (name, wrong, _), told in zip(programs.values(), found, strict=True):
        if wrong:
            fault = faults[name]
            texts = [fault.told(each) for each in fault.texts]
            yield Judged(name, True, judged(told, fault.causes, texts), told)
        else:
            yield Judged(name, False, clean(told), told)
