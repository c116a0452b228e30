"""Score `doctor --script --simulate` on programs with one planted fault each, and on right ones.

Usage: scripts/doctor_score [--write] [-v] [--set KIND]... [--public CLONES] [NAME...]

The programs are those of `tests/making/device_faults.py` and, unless some are named, of
`tests/gallery`; in rows of their own those of `tests/making/held_out_faults.py`, which were written
before doctor was mended for the others. A fault is found if its cause is told, with the names and
lines that its program has for it; a right program is clean if nothing in it is told to be wrong.
`-v` prints what is said.
`--write` puts the table into CONTRIBUTING.md. Ends with 1 if a right program is told to be wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.devices.galleries import ran  # noqa: E402 - once it is found
from tests.devices.scores import PUBLIC, SETS, Judged, clean, judged, set_judged  # noqa: E402
from tests.live.test_gallery import EXPECTED, MENDED, line_in  # noqa: E402

_START, _END = "<!-- score: by scripts/doctor_score --write -->", "<!-- end of score -->"


def gallery_judged() -> Iterator[Judged]:
    """The programs of the gallery."""
    faulty = [each for each in EXPECTED if EXPECTED[each]]
    found = dict(zip([*faulty, *MENDED], ran("simulated", [*faulty, *MENDED]), strict=True))
    for program, told in found.items():
        name = program[0]
        if program not in EXPECTED:
            yield Judged(name, False, clean(told), told)
            continue
        texts = [text for _, texts in EXPECTED[program] for text in texts]
        texts = [line_in(name, each[2:]) if each.startswith("L:") else each for each in texts]
        causes = [cause for cause, _ in EXPECTED[program]]
        yield Judged(name, True, judged(told, causes, texts), told)


def show(found: Judged) -> None:
    """What doctor says of a program."""
    print(f"== {found.name}, {'wrong' if found.wrong else 'right'}: {found.word}")
    for each in found.told["verdicts"]:
        print(f"   {each['severity']} {each['cause']}: {each['title']}\n      fix {each['fix']}")
        print("".join(f"      {line}\n" for line in each["evidence"]), end="")
    print("".join(f"   note {line}\n" for line in found.told["notes"]), end="")


def rows(kind: str, found: list[Judged]) -> Iterator[str]:
    """Rows of the table: how many were judged how, and which were not as they should be."""
    for wrong in (True, False):
        words: dict[str, list[str]] = {}
        for each in found:
            if each.wrong is wrong:
                words.setdefault(each.word, []).append(each.name)
        for word, names in sorted(words.items(), key=lambda item: -len(item[1])):
            which = "" if word in ("found", "clean") else ", ".join(sorted(names))
            what = "with one fault" if wrong else "right"
            yield f"| {kind}{what} | {word} | {len(names)} | {which} |"


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("-v", action="store_true", dest="shown")
    parser.add_argument("--set", action="append", choices=[*SETS, *PUBLIC], dest="sets")
    parser.add_argument("--public", type=Path, metavar="CLONES")
    parser.add_argument("only", nargs="*", metavar="NAME")
    asked = parser.parse_args(arguments)
    lines = ["| programs | judged | number | which |", "|---|---|---|---|"]
    alarms = 0
    for kind in asked.sets or [*SETS, *(PUBLIC if asked.public else ())]:
        found = list(set_judged(kind, asked.only, asked.public))
        found += gallery_judged() if not kind and not asked.only else ()
        for each in found if asked.only or asked.shown else ():
            show(each)
        lines += rows(f"{kind}: " if kind else "", found)
        alarms += sum(each.word == "false alarm" for each in found)
    print("\n".join(lines))
    if asked.write:
        path = ROOT / "CONTRIBUTING.md"
        head, _, rest = path.read_text().partition(_START)
        tail = rest.partition(_END)[2]
        path.write_text(head + "\n".join([_START, *lines, _END]) + tail)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
