"""Do one item of a batch; this runs in threads, in processes, and on other machines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from ...errors import (
    CkptmoveError,
    CorruptError,
    InputError,
    RefusedError,
    UnsupportedError,
    UntrustedError,
    UsageError,
    WriteError,
)
from ...graph.edit.model_weights import NoWeights
from ...reports.batch.items import (
    BUSY,
    DONE,
    FAILED,
    LEFT_OUT,
    REFUSED,
    UNREADABLE,
    UNSURE,
    Item,
    LedgerEntry,
    Result,
    Task,
    result_of,
    skipped_result,
)
from ...sources import place_of
from ...sources.budget import NO_MEMORY
from ...sources.known_objects import KnownObjects, remembering
from ...sources.passing_digests import PassingDigests, collecting_digests
from ...sources.range_request import CHANGED
from ...system.files import sync_folder, with_those_above
from ...writing.execute import summing_written
from ...writing.final_name import failure_of, syncing_later
from ...writing.in_place import recover_if_interrupted
from ..fingerprints import begun_key_of, is_done, key_of, refresh_entry, source_stamp, tags_of
from ..forecast import forecast_item
from ..run_item import ItemOutcome, contents_of, do_item, is_copied
from ..source_removal import remove_source, why_kept
from ..trees import Ledger, open_ledger, tree_at
from .time_limit import TimedOut, time_limit

_REFUSALS = (RefusedError, UnsupportedError, UntrustedError, UsageError)
_MAYBE = (
    "its devices are already those of the earlier change: it may be the same file with "
    "a new modification time"
)
_MOST_DIGESTS = 300  # most entries in a line of the ledger
_WHOLE = 8 << 20  # objects up to this size are fetched by one request
#: The steps of an item: a generator that pauses while its output waits for a name, and returns the
#: result.
Steps = Generator[None, None, Result]
_T = TypeVar("_T")
_LEDGERS = 4  # most ledgers that a process remembers


def do_alone(task: Task) -> Result:
    """Do an item that is not done yet; its errors are in the result."""
    return _alone(task, _done)


def foretell_alone(task: Task) -> Result:
    """Return what would happen to an item, as far as its metadata tells; write nothing."""
    return _alone(task, _foretold)


def _alone(task: Task, do: Callable[[Task], Result]) -> Result:
    started = time.monotonic()
    with syncing_later() as folders, catching(task) as made, time_limit(task.timeout):
        refuse_clash(task)
        made.result = do(task)
    assert made.result is not None, "what was raised was caught"
    seconds = time.monotonic() - started
    return made.result._replace(seconds=seconds, folders=tuple(sorted(folders)))


def refuse_clash(task: Task) -> None:
    """Raises RefusedError for an item whose output would also be that of another."""
    if task.clash:
        can_keep = task.verb == "convert"
        hint = f"{'--keep-suffix keeps both; ' if can_keep else ''}--exclude leaves one out"
        raise RefusedError(task.clash, hint=hint)


class Caught:
    """The result of an item, once it has one."""

    result: Result | None = None


@contextlib.contextmanager
def catching(task: Task) -> Iterator[Caught]:
    """A context that turns an error of an item into its result."""
    made, item = Caught(), task.item
    held = contents_of(task) if task.contents else None  # the source may be removed afterwards
    try:
        yield made
    except TimedOut:
        why = f"took longer than {task.timeout:g} s"
        made.result = result_of(item, FAILED, why, hint="--timeout gives it longer")
    except CkptmoveError as error:
        made.result = _failure(item, error)
    except OSError as error:
        made.result = _failure(item, failure_of(error, item.output or item.path))
    except MemoryError:
        made.result = result_of(item, FAILED, NO_MEMORY)
    except Exception as error:  # other items must not be affected
        why = f"a bug in ckptmove: {type(error).__name__}: {error}"
        made.result = result_of(item, FAILED, " ".join(why.split()))
    if made.result is not None:
        made.result = made.result._replace(contents=held)


def _done(task: Task) -> Result:
    """Do an item, or find that it is done."""
    if not task.ledger:
        return _asking_once(task, lambda: _unrecorded(task))
    ledger = shared_ledger(task.ledger, task.since)
    with ledger.lock([task.item.name], patient=task.patient) as held:
        if not held:
            return result_of(task.item, BUSY)
        with _recording(ledger):
            return _asking_once(task, lambda: result_at_end(do_in_steps(task, ledger)))


def _unrecorded(task: Task) -> Result:
    """Do an item without a ledger."""
    made = do_item(task, None)
    assert made is not None, "it exists already"
    return _result(task.item, made)


def _asking_once(task: Task, do: Callable[[], _T], *, is_whole: bool = True) -> _T:
    """Do an item; ask a store once about each object.

    `is_whole` fetches small ones by one request, to read all of them.
    """
    try:
        with remembering() as known:
            known.whole_nbytes = _WHOLE if is_whole else 0
            _remember(known, task.item, ahead=not task.existing)
            if task.reference:
                known.put_stamp(str(task.options["against"]), task.reference)
            return do()
    except CorruptError as error:
        if str(error) != CHANGED or not task.item.stamp:
            raise
    with remembering():  # it has changed since it was planned
        return do()


def result_at_end(steps: Steps) -> Result:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: Result = ended.value
            return result


def _foretold(task: Task) -> Result:
    """The result of an item that would be done."""
    made = _asking_once(task, lambda: forecast_item(task), is_whole=False)
    result = _result(task.item, made)
    unsure = made.ok and task.existing in UNSURE
    return result._replace(reason=UNSURE[task.existing]) if unsure else result


def _failure(item: Item, error: CkptmoveError) -> Result:
    outcome = REFUSED if isinstance(error, _REFUSALS) else FAILED
    if isinstance(error, NoWeights):
        outcome = LEFT_OUT
    written = not isinstance(error, InputError)  # otherwise it is not clear what can't be read
    of_itself = error.path in (None, item.path) or (written and error.path == item.output)
    reason = str(error) if of_itself else f"{error.path}: {error}"
    return result_of(item, outcome, reason, hint=error.hint)


@lru_cache(_LEDGERS)
def shared_ledger(path: str, since: int) -> Ledger:
    """Return the ledger; all items of a batch in this process share what was read of it."""
    return open_ledger(path, since)


def _recording(ledger: Ledger) -> contextlib.AbstractContextManager[None]:
    """Record multipart uploads if machines share the ledger."""
    if not ledger.is_shared:
        return contextlib.nullcontext()
    from ...writing.upload.unfinished import recording_uploads  # imported only for URLs

    return recording_uploads(place_of(ledger.path).parent.path)


def _remember(known: KnownObjects, item: Item, *, ahead: bool) -> None:
    """Remember what the plan knows about an item's files, if they are in a store.

    With `ahead`, fetch a small file now, because it will most likely be read.
    """
    if item.kind == "folder":
        tree_at(item.path).remember()
    elif not item.files and known.put_stamp(item.path, item.stamp) and ahead:
        from ...sources.remote_object import RemoteObject  # imported only for URLs

        coming = RemoteObject(item.path).fetch_ahead()
        if coming is not None:
            known.coming[item.path] = coming


def do_in_steps(
    task: Task,
    ledger: Ledger,
    known: Mapping[str, LedgerEntry] | None = None,
    *,
    recorded: bool = True,
) -> Steps:
    """Do an item that no other process is doing, and record it in the ledger, in two steps.

    Between the steps, it may wait for its name. `known` is the entry just read from the ledger. If
    not `recorded` here, the entry is in the result, for the process that collects results, as with
    a ledger that machines share.
    """
    record = _Record(ledger, recorded=recorded)
    result = yield from _recorded(task, ledger, record, known)
    return with_notes(result, record.notes)._replace(entries=tuple(record.entries))


def with_notes(result: Result, notes: Sequence[str]) -> Result:
    """Return the result with more notes for the user."""
    if not notes or result.report is None:
        return result
    told = [*notes, *result.report.get("warnings", ())]
    return result._replace(report={**result.report, "warnings": told})


class _Record:
    """The ledger entries of an item."""

    def __init__(self, ledger: Ledger, *, recorded: bool) -> None:
        self.notes = list[str]()  #: notes for the user
        self.entries = list[LedgerEntry]()  #: entries that another process will add to the ledger
        self._ledger = ledger
        self._later = ledger.is_shared or not recorded

    def add(self, entry: LedgerEntry) -> None:
        """Add an entry, now or later."""
        if self._later:
            self.entries.append(entry)
            return
        try:
            self._ledger.add(entry)
        except (OSError, CkptmoveError) as error:
            self.notes.append(unrecorded_note(error))


def unrecorded_note(error: OSError | CkptmoveError) -> str:
    """Return a note for the user if the ledger can't be written."""
    why = error.strerror if isinstance(error, OSError) else error
    return f"it is done, but the ledger could not record that: {why}"


def _recorded(
    task: Task, ledger: Ledger, record: _Record, read: Mapping[str, LedgerEntry] | None
) -> Steps:
    item = task.item
    if task.in_place:
        record.notes += recover_if_interrupted(item.path)
    if ledger.is_shared and not task.existing and not tree_at(item.output).is_taken():
        known = task.known  # no process has done it since
    else:
        found = ledger.entry(item.name) if read is None else read.get(item.name)
        known = found or task.known
    key = _key(task)
    verify = task.verify and not task.in_place  # there, a finished item must not be done again
    if known is not None and not (verify and task.verb == "validate"):  # it reads its item
        if not verify and is_done(known, task, key):
            why = "done before" if known == task.known else "done by another run"
            result = skipped_result(item, why, known)
            return _without_source(task, ledger, record, known, result)
        moved = refresh_entry(known, task, key)
        if moved is not None:
            if moved != known:
                record.add(moved)
            result = skipped_result(item, "done before", moved)
            return _without_source(task, ledger, record, moved, result)
    with collecting_digests(task.digests) as passed, summing_written() as sums:
        made = _made_by_tags(task, ledger, known) if task.by_tags else do_item(task, known)
    yield
    entry = LedgerEntry(item.name, key, FAILED)
    if made is None or made.ok or item.output:
        entry = _entry(task, key, DONE if made is None or made.ok else FAILED, passed, sums)
        record.add(entry)
    if made is None:
        how = "changed" if task.in_place else "there"
        result = skipped_result(item, f"it was already {how}", entry)
        return _without_source(task, ledger, record, entry, result)
    result = _result(item, made)._replace(
        digests=entry.digests, source_digests=entry.source_digests
    )
    return _without_source(task, ledger, record, entry, result)


def _key(task: Task) -> str:
    """Return the digest of an item's present state. If a file is gone, raises as the verb."""
    if task.item.kind in UNREADABLE:
        return ""
    try:
        return key_of(task, source_stamp(task.item))
    except InputError:
        forecast_item(task._replace(existing="", obstacle=""))
        raise


def _without_source(
    task: Task, ledger: Ledger, record: _Record, entry: LedgerEntry, result: Result
) -> Result:
    """Remove the source of a finished item, if wanted and safe; otherwise say why not.

    The ledger says so first. No other entry of the item is recorded after that.
    """
    if not task.delete_source or not result.ok:
        return result
    kept = why_kept(task, entry, copied=result.copied or is_copied(task))
    if kept:
        reason = f"{result.reason}; " if result.reason else ""
        return result._replace(reason=f"{reason}its source was kept: {kept}")
    try:
        if place_of(task.item.output).opens_by_path:  # sync the name first
            named = os.path.dirname(os.path.abspath(task.item.output))
            for folder in with_those_above([named], os.path.dirname(ledger.path)):
                sync_folder(folder)
        ledger.add(entry._replace(removed=True), synced=True)
    except OSError as error:
        raise failure_of(error, ledger.path) from error
    try:
        remove_source(task)
    except WriteError:
        ledger.add(entry)
        raise
    record.entries.clear()  # it is recorded
    return result._replace(source_removed=True)


def _made_by_tags(task: Task, ledger: Ledger, known: LedgerEntry | None) -> ItemOutcome | None:
    """Change a file in place that must not be changed twice; None if an earlier run changed it.

    Raises RefusedError if it may have been changed already.
    """
    item = task.item
    begun = LedgerEntry(item.name, begun_key_of(task), "begun", tags=tags_of(task))
    may_be_changed = known is not None and (known.outcome, known.tags) == (DONE, begun.tags)
    if known is not None and (known.outcome, known.key) == ("begun", begun.key):
        if known.tags != begun.tags:
            return None
    elif may_be_changed and not task.options.get("force"):
        raise RefusedError(_MAYBE, hint="--force changes it again")
    try:
        ledger.add(begun, synced=True)
    except OSError as error:
        raise failure_of(error, ledger.path) from error
    try:
        return do_item(task, known)
    except CkptmoveError:
        if tags_of(task) == begun.tags:  # so it was not begun
            ledger.add(known or begun._replace(outcome="undone"))
        raise


def _entry(
    task: Task, key: str, outcome: str, passed: PassingDigests, sums: Mapping[str, int]
) -> LedgerEntry:
    """Return the ledger entry of a finished item.

    `passed` are digests of bytes that were read on the way, `sums` CRC-32s of written files.
    """
    if task.in_place:
        tags = tags_of(task) if task.by_tags else ""
        key = key_of(task, source_stamp(task.item))
        return LedgerEntry(task.item.name, key, outcome, tags=tags, kind=task.item.kind)
    output = task.item.output
    there = tree_at(output).output(summed=True, digests=task.digests, known=sums)
    sent = {url[len(output) :].lstrip("/"): each for url, each in passed.sent.items()}
    digests, of_source = there.digests or sent, dict[str, str]()
    if task.digests:
        of_source = _source_digests(task.item, passed)
    if len(digests) + len(of_source) > _MOST_DIGESTS:
        digests, of_source = {}, {}
    return LedgerEntry(
        *(task.item.name, key, outcome, there.nbytes, there.stamp, there.crc32),
        digests=digests,
        source_digests=of_source,
        kind=task.item.kind,
        format=task.item.format,
    )


def _source_digests(item: Item, passed: PassingDigests) -> dict[str, str]:
    """Return the SHA-256 of each file of an item, by its name in the tree."""
    base, name, found = item.path, item.name, dict[str, str]()
    files = [each.path for each in tree_at(base).files()]
    if item.kind == "index":
        base, name, files = place_of(base).parent.path, name.rpartition("/")[0], list(item.files)
    for path in files:
        with place_of(path).open() as source:
            within = name + path[len(base) :].replace(os.sep, "/")
            found[within.lstrip("/")] = passed.of_source(source)
    return found


def _result(item: Item, made: ItemOutcome) -> Result:
    """Return the result of an item whose verb returned."""
    output = item.output or None
    result = result_of(item, DONE, output=output, bytes_written=made.bytes_written)
    result = result._replace(report=made.report, copied=made.copied)
    if made.ok:
        return result
    return result._replace(outcome=FAILED, reason=made.reason, hint=made.hint)
