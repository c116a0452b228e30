"""Measure what is promised, row by row, and print it as a table.

Usage: scripts/acceptance [--write] [--minutes N] [--from REPORT.xml] [--planted LOG] [ROW...]

Most rows are tests, run with more trials than usual. With `--from` they are looked up in the report
of a run of all tests (pytest's `--junitxml`), with the trials of that. What they measure besides is
what they record (pytest's `record_property`): numbers are added up, but for those called `peak` or
`longest`, of which the largest counts. `--planted` is what `scripts/mutants` printed, in one run or
several, of which the last counts: the faults are not planted again. `--write` puts the rows into
CONTRIBUTING.md, where those that were not run stay as they are. `--minutes` is the processor time
of the fuzzer. Ends with 1 if a row does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from mutants import MUTANTS

ROOT = Path(__file__).parents[1]
_START, _END = "<!-- acceptance: by scripts/acceptance --write -->", "<!-- end of acceptance -->"
_TRIALS = {"CKPTMOVE_ROUNDS": "100", "CKPTMOVE_TEST_ALL": "1", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT = {**os.environ, **_TRIALS}
_MANY = 100_000  # tensors
#: Files of 10 MB that are refused: nothing, marks, tuples in tuples, a zip and a header cut short.
_REFUSED: tuple[Callable[[], bytes], ...] = (
    lambda: bytes(10_000_000),
    lambda: b"\x80\x02" + b"(" * 9_999_998,
    lambda: b"\x80\x02)" + b"\x85" * 9_999_997,
    lambda: b"PK\3\4" + bytes(9_999_996),
    lambda: (9_999_992).to_bytes(8, "little") + b'{"a":' + b"[" * 9_999_987,
)
_VERDICT = re.compile(r"(?m)^(noticed|SURVIVED) +\d+ s  (.+)$")  # as `scripts/mutants` prints it


class Outcome(NamedTuple):
    """What a row came to: whether it holds, and what was measured."""

    holds: bool
    measured: str


class Row(NamedTuple):
    """A promise.

    Attributes:
        claim: what is promised.
        figure: what it must come to.
        how: arguments of pytest, or what measures it.
    """

    claim: str
    figure: str
    how: str | Callable[..., Outcome]


def tested(arguments: str) -> Outcome:
    """Run tests, and tell how many held and what they recorded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-n", "auto", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *shlex.split(arguments)],
            cwd=ROOT,
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            return Outcome(False, f"the tests can't run: {done.stdout.splitlines()[-1:]}")
        return outcome_of(ElementTree.parse(report).iter("testcase"))


def looked_up(arguments: str, report: Path) -> Outcome:
    """What the tests of a row came to in a run of all."""
    files, _, words = arguments.partition("-k")
    modules = {each.removesuffix(".py").replace("/", ".") for each in files.split()}
    wanted = shlex.split(words)[0].split(" or ") if words else [""]
    return outcome_of(
        case
        for case in ElementTree.parse(report).iter("testcase")
        if case.get("classname") in modules and any(word in case.get("name", "") for word in wanted)
    )


def outcome_of(cases: Iterable[ElementTree.Element]) -> Outcome:
    """How many tests held, what they recorded, and the time they took, on one core."""
    passed = failed = skipped = 0
    seconds = 0.0
    recorded: dict[str, float] = {}
    for case in cases:
        bad = case.find("failure") is not None or case.find("error") is not None
        left_out = case.find("skipped") is not None
        passed, failed = passed + (not bad and not left_out), failed + bad
        skipped += left_out
        seconds += float(case.get("time", 0))
        for each in case.iter("property"):
            name, value = each.get("name", ""), float(each.get("value", 0))
            before = recorded.get(name, 0)
            largest = name.startswith(("peak", "longest"))
            recorded[name] = max(before, value) if largest else before + value
    told = [f"{passed:,} tests passed, {failed} failed", *([f"{skipped} skipped"] * bool(skipped))]
    told += [f"{name}: {value:,.10g}" for name, value in recorded.items()]
    return Outcome(passed > 0 and not failed, f"{'; '.join(told)} ({seconds:.0f} s)")


def inspect_many() -> Outcome:
    """How long it takes to inspect very many tensors, and to refuse 10 MB, as a whole process."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.fspath(Path(folder) / "many.pt")
        make = (
            "import sys, torch; n = int(sys.argv[2]); whole = torch.zeros(n); "
            "torch.save({f'layers.{i}.weight': whole[i : i + 1] for i in range(n)}, sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", make, path, str(_MANY)], check=True)
        seconds, code = _inspected(path)
        slowest = 0.0
        refused = True
        for damage in _REFUSED:
            Path(path).write_bytes(damage())
            took, answer = _inspected(path)
            slowest, refused = max(slowest, took), refused and answer == 3
    told = f"{_MANY:,} tensors of one storage in {seconds:.1f} s"
    told += f"; {len(_REFUSED)} files of 10 MB refused, the slowest in {slowest:.1f} s"
    return Outcome(code == 0 and seconds <= 5 and refused and slowest <= 2, told)


def _inspected(path: str) -> tuple[float, int]:
    """The seconds and the exit code of `ckptmove inspect`."""
    command = [sys.executable, "-m", "ckptmove", "inspect", path]
    quiet = subprocess.DEVNULL
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, stdout=quiet, stderr=quiet).returncode
    return time.monotonic() - started, code


def fuzzed(minutes: float) -> Outcome:
    """What the fuzzer found in so many minutes of processor time."""
    command = [sys.executable, os.fspath(ROOT / "scripts" / "fuzz.py"), f"--minutes={minutes:g}"]
    done = subprocess.run(command, cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True)
    lines = done.stdout.splitlines() or [f"it ended early: {done.stderr.strip()[-200:]}"]
    return Outcome(done.returncode == 0, lines[-1])


def planted(log: Path | None = None) -> Outcome:
    """How many planted faults the tests let pass, by what `scripts/mutants` prints, or printed."""
    if log is None:
        command = [sys.executable, os.fspath(ROOT / "scripts" / "mutants.py")]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    else:
        said = log.read_text(encoding="utf-8")
    verdicts = {name: verdict for verdict, name in _VERDICT.findall(said)}
    left = [mutant.name for mutant in MUTANTS if mutant.name not in verdicts]
    survived = [mutant.name for mutant in MUTANTS if verdicts.get(mutant.name) == "SURVIVED"]
    told = f"{len(MUTANTS) - len(left)} planted, {len(survived)} survived"
    told += f"; not planted: {', '.join(left)}" if left else ""
    return Outcome(not left and not survived, told)


ROWS = {
    1: Row(
        "Damaged files: an answer, or one line and an exit code",
        "10,000 files, 0 tracebacks, 0 hangs",
        "tests/whole/test_fuzz.py tests/whole/test_mutations.py tests/pickles/test_walk_faults.py",
    ),
    2: Row(
        "Memory is bounded by the metadata, bombs included",
        "≤ 150 MB + 2 × the file; besides, torch's own import where `validate` loads with torch",
        "tests/whole/test_memory.py tests/whole/test_bombs.py",
    ),
    3: Row(
        "Very many tensors are inspected soon, and large files refused",
        "100,000 in ≤ 5 s; 10 MB in ≤ 2 s",
        inspect_many,
    ),
    4: Row(
        "Fuzzing of every verb finds nothing",
        "8 CPU hours before a release (`--minutes 480`), 0 finds",
        fuzzed,
    ),
    5: Row(
        "Nothing in a file is executed; callables are listed",
        "≥ 60 families, 0 executed",
        "tests/whole/test_payloads.py",
    ),
    6: Row(
        "Killed at any system call: the source is as it was, the output absent or whole",
        "0 exceptions",
        "tests/writing/test_staged_file_faults.py tests/writing/test_in_place_kills.py "
        "tests/batches/test_batch_kills.py",
    ),
    7: Row(
        "Power cut: the output is absent or whole; what was done stays",
        "0 exceptions",
        "tests/writing/test_staged_file_power.py tests/writing/test_in_place_power.py",
    ),
    8: Row(
        "Full disks, quotas, limits",
        "one line, nothing left behind",
        "tests/writing/test_staged_file_disks.py tests/writing/test_in_place_faults.py",
    ),
    9: Row(
        "Errors, interrupts and short writes at any system call",
        "right output, or an error",
        "tests/writing/test_staged_file_faults.py tests/writing/test_in_place_faults.py",
    ),
    10: Row(
        "Bit rot is found where there is a checksum",
        "100 %",
        "tests/whole/test_bit_rot.py tests/api/test_convert_damage.py",
    ),
    11: Row(
        "Several writers of one destination",
        "100 rounds, one winner, always whole",
        "tests/whole/test_concurrency.py -k writers",
    ),
    12: Row(
        "Readers while a file is changed in place",
        "100 changes there and back, no wrong tensor",
        "tests/whole/test_concurrency.py -k reads",
    ),
    13: Row(
        "A source that changes meanwhile is noticed",
        "no output",
        "tests/writing/test_staged_file.py tests/writing/test_staged_folder.py "
        "tests/writing/test_in_place.py -k meanwhile",
    ),
    14: Row(
        "Destinations that can't be written",
        "one line, exit code 4",
        "tests/writing/test_staged_file_disks.py tests/cli/test_cli.py",
    ),
    15: Row(
        "Names that lead elsewhere",
        "0 files opened or written outside",
        "tests/formats/test_sharded.py tests/formats/test_model_folder.py "
        "tests/writing/test_staged_folder.py "
        "tests/batches/test_batch_traps.py",
    ),
    16: Row(
        "A batch that was killed goes on where it was",
        "finished items stay, same result",
        "tests/batches/test_batch_kills.py tests/batches/test_batch_ledger.py",
    ),
    17: Row(
        "Object stores with faults",
        "no object in part",
        "tests/sources/test_stores_faults.py tests/writing/test_uploads.py "
        "tests/writing/test_uploads_transacted.py",
    ),
    18: Row(
        "Signals",
        "nothing left behind, ends by the signal",
        "tests/writing/test_uploads_signals.py tests/cli/test_cli.py "
        "tests/writing/test_staged_file_faults.py "
        "-k 'signal or interrupt'",
    ),
    19: Row("Streams that are closed or full", "data on stdout alone", "tests/cli/test_cli.py"),
    20: Row(
        "There and back again is the same",
        "bit for bit",
        "tests/api/test_round_trips.py tests/pickles/test_emit.py",
    ),
    21: Row(
        "The same input gives the same bytes",
        "equal digests",
        "tests/api/test_relocate.py tests/api/test_convert.py",
    ),
    22: Row("Planted faults are noticed", "≥ 24 planted, none survives", planted),
}


def line(number: int, outcome: Outcome | None) -> str:
    """A row of the table."""
    row = ROWS[number]
    measured = "not measured" if outcome is None else outcome.measured
    holds = "" if outcome is None else "yes" if outcome.holds else "**no**"
    return f"| {number} | {row.claim} | {row.figure} | {measured} | {holds} |"


def write(lines: dict[int, str]) -> None:
    """Put rows into CONTRIBUTING.md."""
    path = ROOT / "CONTRIBUTING.md"
    before, rest = path.read_text(encoding="utf-8").split(_START)
    table, after = rest.split(_END)
    old = {int(found[1]): found[0] for found in re.finditer(r"(?m)^\| (\d+) \|.*$", table)}
    rows = [lines.get(n) or old.get(n) or line(n, None) for n in ROWS]
    head = ["| # | promise | to hold | measured | holds |", "|---|---|---|---|---|"]
    path.write_text(
        "\n".join([f"{before}{_START}", *head, *rows, f"{_END}{after}"]), encoding="utf-8"
    )


def measured(
    numbers: list[int], report: Path | None, log: Path | None, minutes: float
) -> Iterator[tuple[int, Outcome]]:
    """What the rows came to, one by one."""
    for number in numbers:
        how = ROWS[number].how
        if how is planted:
            yield number, planted(log)
        elif how is fuzzed:
            yield number, fuzzed(minutes)
        elif not isinstance(how, str):
            yield number, how()
        else:
            yield number, tested(how) if report is None else looked_up(how, report)


def main() -> None:
    """Measure rows, print them, and write them if that is wanted."""
    parser = argparse.ArgumentParser(description="Measure what is promised, row by row.")
    parser.add_argument("--write", action="store_true", help="put the rows into CONTRIBUTING.md")
    parser.add_argument("--minutes", type=float, default=5, help="CPU time of the fuzzer")
    parser.add_argument("--from", dest="report", type=Path, help="report of a run of all tests")
    parser.add_argument("--planted", type=Path, help="what scripts/mutants printed")
    parser.add_argument("rows", nargs="*", type=int, choices=[[], *ROWS], help="all by default")
    asked = parser.parse_args()
    failed = False
    rows = asked.rows or list(ROWS)
    for number, outcome in measured(rows, asked.report, asked.planted, asked.minutes):
        row = line(number, outcome)
        print(row, flush=True)
        failed |= not outcome.holds
        if asked.write:
            write({number: row})
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
