"""Plan how one checkpoint is written in another format, and which entries are dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RefusedError
from ...formats.base import WritableFormat
from ...formats.writing import WriteOptions
from ...graph.draft import CheckpointGraph
from ...graph.patterns import covers
from ...pickles.terms import TooLong
from ...reports.convert import Loss
from .trust import TrustedPlan, plan_trusted

if TYPE_CHECKING:
    from ...writing.verify import Progress

_MOST_LISTED = 6  # losses
_MOST_TIMES = 8  # times the size of the source, unless `force` is set
_MOST_AT_LEAST = 1 << 20  # bytes: the output of a small source may have this size in any case


class ConversionOptions(NamedTuple):
    """The options of a conversion that do not change the graph."""

    options: WriteOptions  #: how the weights are written
    drops: Sequence[str]
    keep_files: Collection[str]
    strict: bool
    otherwise: str  #: what happens without `strict`
    trusted: bool
    follow_links: bool
    force: bool
    dry_run: bool
    progress: Progress | None


def plan_conversion(
    graph: CheckpointGraph,
    format: WritableFormat,
    options: WriteOptions,
    drops: Sequence[str],
    *,
    trusted: bool,
    force: bool,
) -> TrustedPlan:
    """Plan how to write a draft, and list what is dropped.

    Raises:
        RefusedError: an entry would be lost that `drops` does not name, a callable would be written
            that must not be, or the result is far larger than its source and `force` is not set.
    """
    source = graph.source_nbytes
    most = _most_nbytes(source) + format.item_nbytes * options.ranks * len(graph.stored)
    if not force:
        options = options._replace(most_nbytes=most)
    try:
        graph.losses += format.losses(graph, options)
        check_losses(graph.losses, drops)
        plan = plan_trusted(graph, format, options, drops, trusted=trusted)
        nbytes = sum(file.nbytes for file in plan.weights.files.values())
        if force or nbytes <= most:
            return plan._replace(dropped=(*graph.losses, *plan.dropped))
        size = f"{nbytes:,}"
    except TooLong:
        size = f"more than {most:,}"
    raise _too_large(size, source)


def check_size(nbytes: int, source: int) -> None:
    """Raises RefusedError if the files made from so many bytes are far larger."""
    if nbytes > _most_nbytes(source):
        raise _too_large(f"{nbytes:,}", source)


def _most_nbytes(source: int) -> int:
    """The largest output that is allowed without `force`."""
    return max(_MOST_TIMES * source, _MOST_AT_LEAST)


def _too_large(size: str, source: int) -> RefusedError:
    return RefusedError(
        f"would write {size} bytes from {source:,}: more than {_MOST_TIMES} times as many",
        hint="--force writes them all the same",
    )


def refused_losses(losses: Sequence[Loss], drops: Sequence[str]) -> list[Loss]:
    """Return the losses that no pattern of `drops` allows."""
    return [loss for loss in losses if not any(covers(each, loss.name) for each in drops)]


def check_losses(losses: Sequence[Loss], drops: Sequence[str]) -> None:
    """Raises RefusedError if an entry would be lost that no pattern of `drops` allows."""
    refused = refused_losses(losses, drops)
    if refused:
        lines = [f"{loss.name}, which {loss.why}" for loss in refused[:_MOST_LISTED]]
        more = [f"{len(refused) - len(lines):,} more"] if len(refused) > len(lines) else []
        accept = " ".join(f"--drop '{loss.name}'" for loss in refused[:_MOST_LISTED])
        raise RefusedError(
            f"would lose {'; '.join([*lines, *more])}",
            hint=f"{accept} {'accepts' if len(refused) == 1 else 'accept'} that",
        )
