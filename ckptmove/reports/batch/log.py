"""A line of the log of a batch, and of its manifest of digests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...display.plain import Plain, Seconds, to_json
from ...display.report import Report
from ...display.text import cut_to_bytes
from .items import Result

#: The most bytes of a line, without the name of the item, which is never cut.
LONGEST_LINE = 4000
_MOST_WARNINGS = 8
_LONGEST_TEXT = 300
#: The keys of a verb's report that are logged unchanged; others are counted, or left out.
_TOLD = (
    *("method", "format", "source_format", "tensors", "moved", "cast", "renamed"),
    *("devices", "dtypes"),
)


@dataclass(frozen=True, kw_only=True)
class LogLine(Plain):
    """The result of an item, in one line of JSON that `--log` writes.

    Attributes:
        time: when it was written, such as `2026-11-01T12:30:05.123+00:00`.
        host: the machine that ran the batch.
        shard: the share of the tree that was done, such as `1/8`; None for all of it.
        version: the version of ckptmove.
        verb: `inspect`, `relocate`, `convert` or `validate`.
        name, outcome, reason, hint, nbytes, bytes_written, copied, source_removed, seconds: as the
            result has them.
        source, destination: the paths; None if the line would be too long.
        source_stamp: what the file system or the store tells of the version of the source: size
            and time, or the ETag.
        digests: from the name of each file of the output, relative to DST, to its SHA-256; empty if
            it was not computed.
        source_digests: the same of each file of the source, relative to SRC.
        report: the verb's report, without long values.
        kept: from a reason to the number of tensors that stay for it.
        dropped: the number of entries that were dropped.
        warnings: the first warnings.
        cut: whether something was left out because the line would be too long.
    """

    schema = Report.schema
    time: str
    host: str
    shard: str | None
    version: str
    verb: str
    name: str
    outcome: str
    reason: str = ""
    hint: str | None = None
    source: str | None = None
    destination: str | None = None
    nbytes: int = 0
    bytes_written: int = 0
    copied: bool = False
    source_removed: bool = False
    seconds: Seconds = 0.0
    source_stamp: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    source_digests: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    warnings: tuple[str, ...] = ()
    cut: bool = False

    def text(self) -> str:
        """Return the line, of at most `LONGEST_LINE` bytes plus the name."""
        most = LONGEST_LINE + len(json.dumps(self.name))
        shorter: tuple[dict[str, Any], ...] = (
            {"warnings": ()},
            {"report": {}},
            {"source_digests": {}},
            {"digests": {}},
            {"kept": {}},
            {"source": None, "destination": None, "hint": None},
        )
        line = self
        for change in ({}, *shorter):
            line = replace(line, **change, cut=bool(change))
            text = json.dumps(to_json(line))
            if len(text) <= most:
                break
        return text


def log_line(result: Result, **about: str | None) -> LogLine:
    """Return the line of a result; `about` has the run's time, host, shard, version and verb."""
    report = result.report or {}
    run: dict[str, Any] = dict(about)
    return LogLine(
        **run,
        name=result.name,
        outcome=result.outcome,
        reason=cut_to_bytes(result.reason, _LONGEST_TEXT),
        hint=None if result.hint is None else cut_to_bytes(result.hint, _LONGEST_TEXT),
        source=result.path,
        destination=result.output,
        nbytes=result.nbytes,
        bytes_written=result.bytes_written,
        copied=result.copied,
        source_removed=result.source_removed,
        seconds=result.seconds,
        source_stamp=cut_to_bytes(result.source_stamp, _LONGEST_TEXT),
        digests=result.digests,
        source_digests=result.source_digests,
        report={key: report[key] for key in _TOLD if key in report},
        kept=Counter(str(each["why"]) for each in report.get("kept", ())),
        dropped=len(report.get("dropped", ())),
        warnings=tuple(
            cut_to_bytes(each, _LONGEST_TEXT) for each in result.warnings[:_MOST_WARNINGS]
        ),
        cut=len(result.warnings) > _MOST_WARNINGS,
    )


def manifest_lines(digests: Mapping[str, str]) -> Iterable[str]:
    r"""Return lines that `sha256sum -c` reads in DST; in a name, `\n`, `\r` and `\\` are
    escaped."""
    for name, digest in sorted(digests.items()):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        yield f"{chr(92) if escaped != name else ''}{digest}  {escaped}\n"
