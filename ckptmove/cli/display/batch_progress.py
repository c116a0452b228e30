"""Show the progress of a batch: a bar on a terminal, a line at intervals elsewhere, or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from ...batches.running import Batch
from ...display.text import cut, printable, size
from ...reports.batch.items import Result
from ...reports.batch.report import batch_line
from ...sources import mask_secrets
from .batch_metrics import MetricsFile
from .output import emit
from .terminal import byte_bar

FORMS = ("auto", "json", "none")
_OFTEN = 0.1  # seconds between two updates
_SECOND = 1.0  # between two lines of JSON
_HALF_A_MINUTE = 30.0  # between two lines of text
_LONGEST_NAME = 30
_RECENT = 0.1  # weight of the last interval in the rate


class BatchProgress:
    """The progress of a batch: items done, failed and left, bytes, their rate, the time left."""

    def __init__(self, form: str, metrics: MetricsFile) -> None:
        """`form` is one of `FORMS`, or `errors` for failed items only; `metrics` get the facts."""
        self._metrics = metrics
        if form == "auto":
            form = "bar" if sys.stderr.isatty() else "lines"
        self._form = form
        self._bar: Any = None
        self._work: Batch | None = None
        self._pause = {"bar": _OFTEN, "json": _SECOND, "lines": _HALF_A_MINUTE}.get(form, 0.0)
        self._started = self._at = time.monotonic()
        self._next = self._at + (_HALF_A_MINUTE if form == "lines" else 0.0)
        self._nbytes = self._before = 0
        self._rate = 0.0
        self._failures = list[Result]()  # failures not shown yet
        self._is_long = False  # whether a line was due: after that, failures are shown at once
        self._done = self._failed = 0

    @contextlib.contextmanager
    def over(self, work: Batch) -> Iterator[None]:
        """Context of a running batch: update the display until it ends."""
        self._work = work
        self._metrics.write(self.facts(), running=True)
        if self._metrics.error is not None:
            raise self._metrics.error
        try:
            with self._show_bar(work):
                yield
        finally:
            facts = {**self.facts(), "current": []}
            self._metrics.write(facts, running=False)
            if self._form == "json":
                _say(json.dumps(facts))

    @contextlib.contextmanager
    def _show_bar(self, work: Batch) -> Iterator[None]:
        """Show a bar while the batch runs, if requested."""
        if self._form != "bar":
            yield
            return
        with byte_bar(work.plan.nbytes) as self._bar:
            yield
        self._bar = None

    def advance(self, nbytes: int) -> None:
        """Count this many bytes as done."""
        self._nbytes += nbytes
        self._tell()
        if self._bar is not None:
            self._bar.update(nbytes)

    def add(self, result: Result) -> None:
        """Count an item as done or failed."""
        self._done += result.ok
        self._failed += not result.ok
        if not result.ok:
            self._failures.append(result)
        self._tell()

    def print(self, lines: Iterable[str]) -> None:
        """Print lines of a result; a bar stays below them."""
        if self._bar is not None:
            self._bar.clear()
        emit(lines)
        if self._bar is not None:
            sys.stdout.flush()
            self._bar.refresh()

    def facts(self) -> dict[str, Any]:
        """Return the progress as plain data."""
        assert self._work is not None
        plan = self._work.plan
        total = len(plan.tasks) + len(plan.done)
        left = max(0, plan.nbytes - self._nbytes)
        return {
            "items": total,
            "done": self._done,
            "failed": self._failed,
            "left": total - self._done - self._failed,
            "nbytes": self._nbytes,
            "total_nbytes": plan.nbytes,
            "nbytes_per_second": round(self._rate),
            "seconds": round(time.monotonic() - self._started, 1),
            "seconds_left": round(left / self._rate, 1) if self._rate else None,
            "current": self._work.current,
        }

    def _tell(self) -> None:
        now = time.monotonic()
        if self._work is None:
            return
        if self._metrics.is_due:
            self._metrics.write(self.facts(), running=True)
        if self._form == "errors":
            self._tell_failures()
        if self._form in ("none", "errors"):
            return
        if now < self._next:
            if self._is_long and self._form == "lines":
                self._tell_failures()
            return
        self._next = now + self._pause
        passed = now - self._at
        if passed > 0:
            rate = (self._nbytes - self._before) / passed
            recent = min(1.0, max(_RECENT, passed / _HALF_A_MINUTE))
            self._rate = rate if not self._rate else self._rate + recent * (rate - self._rate)
            self._at, self._before = now, self._nbytes
        facts = self.facts()
        if self._form == "json":
            _say(json.dumps(facts))
        elif self._form == "bar":
            self._bar.set_postfix_str(_short(facts))  # drawn now, for a short batch too
        else:
            self._is_long = True
            self._tell_failures()
            _say(f"ckptmove: {_long(facts)}")

    def _tell_failures(self) -> None:
        for each in self._failures:
            _say(f"ckptmove: {batch_line(each)}")
        self._failures.clear()


def _say(line: str) -> None:
    click.echo(mask_secrets(line), err=True)


def _short(facts: dict[str, Any]) -> str:
    names: list[str] = facts["current"]
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    name = cut(printable(names[0]), _LONGEST_NAME) if names else ""
    failed = f", {facts['failed']:,} failed" if facts["failed"] else ""
    return f"{facts['done']:,} done{failed}, {facts['left']:,} left: {name}{more}"


def _long(facts: dict[str, Any]) -> str:
    said = f"{facts['done']:,} of {facts['items']:,} items done"
    if facts["failed"]:
        said += f", {facts['failed']:,} failed or refused"
    said += f"; {size(facts['nbytes'])} of {size(facts['total_nbytes'])}"
    said += f", {size(facts['nbytes_per_second'])}/s"
    seconds = facts["seconds_left"]
    return said if seconds is None else f"{said}; about {_time(seconds)} left"


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if not minutes:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
