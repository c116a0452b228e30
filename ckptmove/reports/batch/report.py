"""The plan and the report of a batch."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Annotated, Any, NamedTuple

from ...display.blocks import Block, Table, Wrong
from ...display.columns import PageBlock
from ...display.phrases import plural
from ...display.plain import OMITTED, Key, Seconds, derived_key
from ...display.report import Report
from ...display.text import LONGEST_REASON, one_line, printable, size
from ...errors import CheckFailed, RefusedError
from .items import DONE, FAILED, LEFT_OUT, OUTCOMES, REFUSED, Item, Result, Task, is_unsure
from .table import InspectedItem, InspectedTree, page_table, table_of

_MOST = 20  # most lines of a kind
_MOST_NAMED = 8  # most items that a command names, if it could also name none
_MOST_NAMED_AT_ALL = 200
_DID = {
    "inspect": "inspected",
    "relocate": "relocated",
    "convert": "converted",
    "validate": "validated",
}
#: The words for the treatment of an existing output.
_THERE = {
    "checked": " and will be read again to check it",
    "compared": "; kept if it is identical, otherwise refused",
    "replaced": " and will be replaced",
}
_SUMMED = {
    "checked": "exist and will be read again",
    "compared": "exist and will be compared",
    "replaced": "exist and will be replaced",
}


_NAMES = Key(plain=lambda items: [item.name for item in items], gives=list[str])


class PlannedItem(NamedTuple):
    """The planned treatment of an item.

    The fields after `obstacle` are None or empty, unless a dry run has read the item's metadata.
    """

    name: str
    kind: str
    nbytes: int
    destination: str | None
    there: str | None
    obstacle: str | None
    outcome: str | None
    reason: str | None
    hint: str | None
    nbytes_to_write: int | None
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class BatchPlan(Report):
    """What a batch will do.

    Attributes:
        verb: `inspect`, `relocate`, `convert` or `validate`.
        source: the tree.
        destination: the tree to write; None if nothing is written elsewhere.
        tasks: the items to do, largest first.
        done: the items that are already done.
        kept: the digests of outputs of earlier runs that still exist and that are not outputs of
            this run, by names in the destination, as far as known; only if digests are wanted.
        others: the number of files that are left out because they are not checkpoints.
        nbytes: the bytes to read.
        free_nbytes: the free space at the destination, or None if nothing is written there.
        notes: what the user should know, one sentence each.
        forecasts: what a dry run has foretold; None if it is none.
        allows_empty: whether a run is fine that finds nothing to do.
    """

    verb: str
    source: str
    destination: str | None
    tasks: Annotated[tuple[Task, ...], OMITTED]
    done: Annotated[tuple[Item, ...], _NAMES] = ()
    kept: Annotated[tuple[Mapping[str, str], ...], OMITTED] = ()
    others: int = 0
    nbytes: int = 0
    free_nbytes: int | None = None
    notes: tuple[str, ...] = ()
    forecasts: Annotated[tuple[Result, ...] | None, OMITTED] = None
    allows_empty: Annotated[bool, OMITTED] = False

    @derived_key(after="destination")
    def items(self) -> tuple[PlannedItem, ...]:
        """The planned treatment of each item."""
        foretold = {each.name: each for each in self.forecasts or ()}
        return tuple(
            PlannedItem(
                *(task.item.name, task.item.kind, task.item.nbytes),
                *(task.item.output or None, task.existing or None, task.obstacle or None),
                *_foretold(foretold.get(task.item.name)),
            )
            for task in self.tasks
        )

    @derived_key(after="items")
    def outcomes(self) -> dict[str, int] | None:
        """The number of items by predicted outcome; None without a dry run."""
        if self.forecasts is None:
            return None
        counted = Counter(each.outcome for each in self.forecasts)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    @derived_key(after="outcomes")
    def exit_code(self) -> int | None:
        """The exit code of the run; None if it depends on bytes that a dry run does not read."""
        if self.failures:
            return CheckFailed.exit_code
        if self.is_empty:
            return RefusedError.exit_code
        if self.forecasts is None or self.verb == "validate" or any(map(is_unsure, self.forecasts)):
            return None
        return 0

    @property
    def is_empty(self) -> bool:
        """Whether every item would be left out, without permission."""
        return not self.allows_empty and only_left_out(self.outcomes or {})

    @property
    def failures(self) -> tuple[Result, ...]:
        """Items that would be refused or fail, by name, as far as a dry run can tell."""
        return tuple(sorted(each for each in self.forecasts or () if not each.ok))

    def remarks(self) -> tuple[str, ...]:
        """Return nothing: `blocks` shows the notes."""
        return ()

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show a row for each item, the notes, and a summary."""
        left_out = tuple(each for each in self.forecasts or () if each.outcome == LEFT_OUT)
        bad = {each.name for each in (*self.failures, *left_out)}
        tasks = [task for task in self.tasks if task.item.name not in bad]
        rows = [(task.item.name, size(task.item.nbytes), _where(task)) for task in tasks]
        shown = rows if full else rows[:_MOST]
        yield Table(shown, right=[1])
        if len(shown) < len(rows):
            yield f"and {len(rows) - len(shown):,} more"
        yield from self.notes
        yield from _failures((*sorted(left_out), *self.failures), full=full)
        nbytes = sum(task.item.nbytes for task in tasks)
        copied = sum(each.copied for each in self.forecasts or ())
        told = [f"would {self.verb} {plural(len(rows) - copied, 'item')}, {size(nbytes)}"]
        unchanged = (
            f"{copied:,} unchanged" if self._in_place else f"would copy {copied:,} unchanged"
        )
        told += [unchanged] if copied else []
        told += self._forecast_parts()
        held_up = sum(bool(task.obstacle) for task in tasks)
        if held_up:
            told.append(f"{held_up:,} of them can't be written")
        there = Counter(task.existing for task in tasks if task.existing and not task.obstacle)
        told += [f"{there[each]:,} {_SUMMED[each]}" for each in _SUMMED if there[each]]
        if self.done:
            told.append(f"{len(self.done):,} are already done")
        if self.others:
            told.append(f"{plural(self.others, 'other file')} left out")
        if self.free_nbytes is not None:
            told.append(f"{size(self.free_nbytes)} are free")
        yield "; ".join(told)

    @property
    def _in_place(self) -> bool:
        return self.destination in (None, self.source)

    def _forecast_parts(self) -> Iterator[str]:
        """Return the predictions of a dry run, for the summary."""
        if self.forecasts is None:
            return
        if self._in_place and self.verb == "relocate":
            yield "in place, where only device tags change"
        elif self.verb != "validate":
            nbytes = sum(each.bytes_written for each in self.forecasts if each.ok)
            yield f"would write {size(nbytes)}"
        counts = self.outcomes or {}
        for outcome, word in (
            (LEFT_OUT, "would be left out, without weights"),
            (REFUSED, "would be refused"),
            (FAILED, "would fail"),
        ):
            if counts[outcome]:
                yield f"{counts[outcome]:,} {word}"
        lossy = sum(bool(_dropped(each)) for each in self.forecasts)
        if lossy:
            yield f"{lossy:,} would lose something that you allowed (--json)"
        warned = sum(bool(each.warnings) for each in self.forecasts)
        if warned:
            yield f"{warned:,} with warnings (--json)"
        if self.verb == "validate":
            yield "the checks were not run"


@dataclass(frozen=True)
class BatchReport(Report):
    """What a batch has done.

    Attributes:
        verb, source, destination: as in the plan.
        outcomes: the numbers of items that are `done`, `skipped`, `left-out`, `refused` and
            `failed`.
        copied: how many of those done have nothing to change: copied, or in place left as they are.
        sources_removed: how many had their source removed.
        failures: the results of items that were refused or failed.
        remaining: the names of items without a result, because the run was stopped.
        others: the number of files that were left out because they are not checkpoints.
        nbytes: the bytes of the items read.
        bytes_written: the bytes written.
        seconds: how long it took.
        notes: those of the plan, and what went wrong at the end.
        items: the contents and the outcome of each item, by name; None unless the verb is
            `inspect`, or `contents` was requested.
    """

    verb: str
    source: str
    destination: str | None
    outcomes: dict[str, int]
    copied: int
    sources_removed: int
    failures: tuple[Result, ...]
    remaining: tuple[str, ...]
    others: int
    nbytes: int
    bytes_written: int
    seconds: Seconds
    notes: tuple[str, ...] = ()
    items: tuple[InspectedItem, ...] | None = None

    @derived_key(after="items")
    def totals(self) -> InspectedTree | None:
        """The totals of these items."""
        return None if self.items is None else InspectedTree.of(self.items)

    @derived_key(after="destination")
    def ok(self) -> bool:
        """Whether every item is done, or left out."""
        return not self.failures and not self.remaining

    def remarks(self) -> tuple[str, ...]:
        """Return the notes."""
        return self.notes

    def page(self) -> Iterator[PageBlock]:
        """Show the summary, and one table of all items, first those that were refused or failed."""
        *_, said = self.blocks(full=True, told=True)
        yield said if self.ok else Wrong(str(said))
        items = self.items
        if items is None:  # the contents of the others were not requested
            items = tuple(InspectedItem.of(each, None) for each in self.failures)
        if items:
            yield page_table(items)
        yield from self.remarks()

    def blocks(
        self, *, full: bool = False, warned: int = 0, kept: int = 0, told: bool = False
    ) -> Iterator[Block]:
        """Show the table of `inspect`, the items that were refused or failed, and a summary.

        `warned` is the number of items with warnings, `kept` the number of sources that should have
        been removed and still exist; `told` means that every item was shown before.
        """
        if self.verb == "inspect" and self.items is not None:
            yield from table_of(self.items)
        elif not told:
            yield from _failures(self.failures, full=full)
        counts, done = self.outcomes, self.outcomes[DONE] - self.copied
        parts = [f"{_DID[self.verb]} {plural(done, 'item')}, {size(self.nbytes)}"]
        parts[0] += f" in {self.seconds:.2f} s"
        if self.copied:
            in_place = self.destination in (None, self.source)
            parts.append(f"{self.copied:,} {'unchanged' if in_place else 'copied unchanged'}")
        if self.sources_removed:
            parts.append(f"{plural(self.sources_removed, 'source')} removed")
        if kept:
            why = "" if told else " (-v or --log says why)"
            parts.append(f"{plural(kept, 'source')} kept{why}")
        parts += [
            f"{counts[each]:,} {word}"
            for each, word in (
                ("skipped", "done before"),
                (LEFT_OUT, f"left out, without weights{'' if told else ' (-v or --log says why)'}"),
                (REFUSED, "refused"),
                (FAILED, "failed"),
            )
            if counts[each]
        ]
        if self.remaining:
            many = len(self.remaining)
            parts.append(f"{many:,} not done because the run stopped")
        if self.others:
            parts.append(f"{plural(self.others, 'other file')} left out")
        if warned and not told:
            parts.append(f"{warned:,} with warnings (-v or --log)")
        yield "; ".join(parts)


def _foretold(result: Result | None) -> tuple[Any, ...]:
    """Return the last fields of a `PlannedItem`."""
    if result is None:
        return None, None, None, None, (), ()
    reason, hint = result.reason or None, result.hint
    return (
        *(result.outcome, reason, hint, result.bytes_written if result.ok else None),
        *(_dropped(result), result.warnings),
    )


def _dropped(result: Result) -> tuple[str, ...]:
    """Return the entries that would be lost, by name."""
    return tuple(each["name"] for each in (result.report or {}).get("dropped", ()))


def _failures(failures: Sequence[Result], *, full: bool) -> Iterator[Block]:
    """Return a line for each item that is not done; only some of many, unless `full`."""
    for outcome in (LEFT_OUT, REFUSED, FAILED):
        some = [each for each in failures if each.outcome == outcome]
        shown = some if full else some[:_MOST]
        lines = map(batch_line, shown)
        yield from lines if outcome == LEFT_OUT else map(Wrong, lines)
        if len(shown) < len(some):
            yield f"{outcome:7} and {len(some) - len(shown):,} more (-v or --log)"


def only_left_out(outcomes: Mapping[str, int]) -> bool:
    """Whether there were items, and all of them were left out."""
    return any(outcomes.values()) and outcomes[LEFT_OUT] == sum(outcomes.values())


def _where(task: Task) -> str:
    output = task.item.output
    if task.obstacle:
        return f"→ {output}: {task.obstacle}"
    if task.existing:
        return f"→ {output} exists{_THERE[task.existing]}"
    return f"→ {output}" if output else ""


def batch_line(result: Result) -> str:
    """Return a line with the result of an item."""
    to = f" → {result.output}" if result.output and result.output != result.path else ""
    name = printable(f"{result.name}{to}")
    if not result.reason:
        return f"{result.outcome:7} {name}"
    why, hint = printable(result.reason), printable(result.hint or "")
    return f"{result.outcome:7} {one_line(name, why, hint, LONGEST_REASON - 8)}"


class RetryCommand(NamedTuple):
    """The command line of a batch, to run it again."""

    verb: Sequence[str]  #: the words before the arguments, without `ckptmove`
    words: Sequence[str]  #: the arguments
    narrowed: Sequence[str]  #: the arguments without `--include` and its values
    log: str | None = None  #: a file that every item was logged to, if there is one

    def command(self, *more: str, without_includes: bool = False) -> str:
        """The command line, with more options, for a shell."""
        words = self.narrowed if without_includes else self.words
        return " ".join(map(shell_word, ("ckptmove", *self.verb, *more, *words)))

    def retry(self, report: BatchReport) -> str:
        """Return the command that does only the refused and failed items.

        It uses the log, if there is one. Otherwise, if the ledger has the finished items, it is the
        same command, or names the items if they are few.
        """
        names = [each.name for each in report.failures]
        if self.log is not None:
            retried = any(word.partition("=")[0] == "--retry" for word in self.words)
            return self.command(*(() if retried else (f"--retry={self.log}",)))
        if report.destination is not None and len(names) > _MOST_NAMED:
            return self.command()
        if len(names) > _MOST_NAMED_AT_ALL:
            return self.command()
        includes = [f"--include=/{escape(name)}" for name in names]
        return self.command(*includes, without_includes=True)

    def lines(self, report: BatchReport) -> Iterator[str]:
        """Return lines that say how to continue, if items are left."""
        if report.remaining:
            yield f"resume: {self.command()}"
        elif report.failures:
            yield f"retry: {self.retry(report)}"


def shell_word(word: str) -> str:
    """Quote a word for a shell, so that a terminal can show it."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in os.fsencode(word)
    )
    return f"$'{''.join(shown)}'"
