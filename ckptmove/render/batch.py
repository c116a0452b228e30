"""What a batch will do, and what became of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from glob import escape

from ..batches.items import FAILED, REFUSED, Result
from ..batches.planning import BatchPlan
from ..batches.running import BatchReport
from .text import printable, size, table

_MOST = 20  # lines of a kind
_MOST_NAMED = 8  # items that a command names
_WOULD = {"relocate": "would relocate", "convert": "would convert", "validate": "would validate"}
_DID = {"relocate": "relocated", "convert": "converted", "validate": "validated"}
_NARROWING = ("--include", "--exclude", "--shard-of")


def batch_plan(plan: BatchPlan, *, full: bool = False) -> Iterator[str]:
    """What there is to do.

    Args:
        plan: what was planned.
        full: whether to shorten nothing.
    """
    rows = [
        (item.name, size(item.nbytes), f"→ {item.output}" if item.output else "")
        for item in (task.item for task in plan.tasks)
    ]
    shown = rows if full else rows[:_MOST]
    if shown:
        yield from table(shown, right=[1])
    if len(shown) < len(rows):
        yield f"and {len(rows) - len(shown):,} more"
    for note in plan.notes:
        yield printable(note)
    told = [f"{_WOULD[plan.verb]} {_items(len(rows))}, {size(plan.nbytes)}"]
    if plan.done:
        told.append(f"{len(plan.done):,} are done")
    if plan.others:
        told.append(f"{_others(plan.others)} left alone")
    if plan.free_nbytes is not None:
        told.append(f"{size(plan.free_nbytes)} are free")
    yield "; ".join(told)


def batch_line(result: Result) -> str:
    """What became of an item."""
    why = f": {result.reason}" if result.reason else ""
    to = f" → {result.output}" if result.output and result.output != result.path else ""
    hint = f" ({result.hint})" if result.hint else ""
    return printable(f"{result.outcome:8}{result.name}{to}{why}{hint}")


def batch_summary(
    report: BatchReport, again: Sequence[str], warned: int = 0, *, told: bool = False
) -> Iterator[str]:
    """What became of all of them.

    Args:
        report: of the batch.
        again: the command line that it was run by, without `ckptmove`.
        warned: of how many items there is something that the user should know.
        told: whether every item was told of before.
    """
    for outcome in () if told else (REFUSED, FAILED):
        some = [each for each in report.failures if each.outcome == outcome]
        yield from map(batch_line, some[:_MOST])
        if len(some) > _MOST:
            yield f"{outcome:8}and {len(some) - _MOST:,} more (-v or --log)"
    counts = report.outcomes
    parts = [f"{_DID[report.verb]} {_items(counts['done'])}, {size(report.nbytes)}"]
    parts[0] += f" in {report.seconds:.2f} s"
    parts += [
        f"{counts[each]:,} {word}"
        for each, word in (("skipped", "done before"), (REFUSED, "refused"), (FAILED, "failed"))
        if counts[each]
    ]
    if report.remaining:
        parts.append(f"{len(report.remaining):,} not done, since the run was broken off")
    if report.others:
        parts.append(f"{_others(report.others)} left alone")
    if warned and not told:
        parts.append(f"{warned:,} with warnings (-v or --log)")
    yield "; ".join(parts)
    if report.remaining:
        yield printable(f"go on: {shlex.join(['ckptmove', *again])}")
    elif report.failures:
        yield printable(f"these again: {retry(report, again)}")


def retry(report: BatchReport, again: Sequence[str]) -> str:
    """The command that does just what was refused or failed.

    What is done is not done again, if there is where to enter it: many need no naming then.
    """
    narrowed = any(part.partition("=")[0] in _NARROWING for part in again)
    most = _MOST_NAMED if report.destination is not None else len(report.failures)
    words = ["ckptmove", *again]
    if not narrowed and len(report.failures) <= most:
        for each in report.failures:
            words += ["--include", escape(each.name)]
    return shlex.join(words)


def _items(count: int) -> str:
    return f"{count:,} item{'' if count == 1 else 's'}"


def _others(count: int) -> str:
    return f"{count:,} other file{'' if count == 1 else 's'}"
