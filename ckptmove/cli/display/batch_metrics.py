"""Write the progress of a batch as a text file that Prometheus' node_exporter reads.

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/; the file is
replaced as a whole, as node_exporter's `textfile` collector requires.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import WriteError
from ...sources import mask_secrets
from .batch_files import ReplacedFile

_START = b"# HELP ckptmove_batch_"  # how such a file begins
_PAUSE = 10.0  # seconds between two versions of the file
_HELP = {
    "items": "Items of the batch, by what became of them; left are those that are not done yet.",
    "bytes": "Bytes of what was done so far, of items that failed too.",
    "total_bytes": "Bytes of all items.",
    "seconds": "How long the batch has run.",
    "running": "1 while the batch runs, 0 when it has ended.",
    "updated_timestamp_seconds": "When this was written.",
}


class MetricsFile:
    """A text file for Prometheus, if requested. If writing fails later, the batch continues."""

    def __init__(self, path: str | None, **labels: str | None) -> None:
        """`labels` identify the batch, unless None. Raises RefusedError for a file of others."""
        self.error: WriteError | None = None
        self._file = None if path is None else ReplacedFile(path, "metrics", _START)
        self._next = 0.0
        self._labels = {name: text for name, text in labels.items() if text is not None}

    @property
    def is_due(self) -> bool:
        """Whether the file is old enough to write it again."""
        return self._file is not None and time.monotonic() >= self._next

    def write(self, facts: Mapping[str, Any], *, running: bool) -> None:
        """Write the file; `facts` are those of `BatchProgress`."""
        if self._file is None:
            return
        self._next = time.monotonic() + _PAUSE
        try:
            self._file.write(self._lines(facts, running))
            self.error = None
        except WriteError as error:
            self.error = error

    def _lines(self, facts: Mapping[str, Any], running: bool) -> Iterator[str]:
        values: dict[str, list[tuple[dict[str, str], float]]] = {
            "items": [({"outcome": each}, facts[each]) for each in ("done", "failed", "left")],
            "bytes": [({}, facts["nbytes"])],
            "total_bytes": [({}, facts["total_nbytes"])],
            "seconds": [({}, facts["seconds"])],
            "running": [({}, int(running))],
            "updated_timestamp_seconds": [({}, round(time.time(), 3))],
        }
        for name, told in values.items():
            yield f"# HELP ckptmove_batch_{name} {_HELP[name]}\n"
            yield f"# TYPE ckptmove_batch_{name} gauge\n"
            for more, value in told:
                labels = {**self._labels, **more}.items()
                text = ",".join(f'{label}="{_escape_label(each)}"' for label, each in labels)
                yield f"ckptmove_batch_{name}{{{text}}} {value}\n"


def _escape_label(text: str) -> str:
    text = mask_secrets(text).encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
