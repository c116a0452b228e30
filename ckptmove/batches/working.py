"""Do one item: this is what runs in other threads, processes, and on other machines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from ..destination import EXISTS_HINT, failure_of, syncing_later
from ..errors import (
    CkptmoveError,
    InputError,
    RefusedError,
    StrPath,
    UnsupportedError,
    UsageError,
)
from ..in_place import settle
from ..plan import Copy, Plan, Write
from ..sink import Staged
from ..source import Source
from ..verbs.convert import convert
from ..verbs.inspect import inspect
from ..verbs.relocate import relocate
from ..verbs.validate import validate
from ..verifier import Progress
from .items import BUSY, DONE, FAILED, REFUSED, SKIPPED, Item, Result, Task, result_of
from .ledger import Entry, Ledger
from .outputs import beside, files_of, is_taken, output_of, same, stamp_of

#: Who wants to know of progress within an item.
LISTENER: ContextVar[Progress | None] = ContextVar("LISTENER", default=None)
_REFUSALS = (RefusedError, UnsupportedError, UsageError)
_ANOTHER = "the destination exists, and is not what would be written"


class _Made(NamedTuple):
    """What a verb did."""

    report: Mapping[str, Any] | None
    bytes_written: int

    @property
    def ok(self) -> bool:
        """Whether it found nothing wrong."""
        return self.report is None or bool(self.report.get("ok", True))


def work(task: Task) -> Result:
    """Do an item, unless it is done; whatever is wrong with it is in the result."""
    started = time.monotonic()
    with syncing_later() as folders:
        result = _outcome_of(task)
        seconds = time.monotonic() - started
        return result._replace(seconds=seconds, folders=tuple(sorted(folders)))


def _outcome_of(task: Task) -> Result:
    item = task.item
    try:
        if not task.ledger:
            return _result(item, _made(task, item.output, force=False))
        ledger = _ledger(task.ledger, task.since)
        with ledger.held(item.name, patient=task.patient) as held:
            return _entered(task, ledger) if held else result_of(item, BUSY)
    except CkptmoveError as error:
        outcome = REFUSED if isinstance(error, _REFUSALS) else FAILED
        where = error.path
        of_itself = where is None or where in (item.path, item.output)
        reason = str(error) if of_itself else f"{where}: {error}"
        return result_of(item, outcome, reason, hint=error.hint)
    except MemoryError:
        return result_of(item, FAILED, "there is not enough memory")
    except Exception as error:  # the others must not suffer from it
        why = f"a bug in ckptmove: {type(error).__name__}: {error}"
        return result_of(item, FAILED, " ".join(why.split()))


@cache
def _ledger(path: str, since: int) -> Ledger:
    return Ledger(path, since)


def _entered(task: Task, ledger: Ledger) -> Result:
    """Do an item that nobody else is at, and enter it into the ledger."""
    item, notes = task.item, list[str]()
    in_place = bool(task.options.get("in_place"))
    by_tags = in_place and bool(task.options.get("map"))
    if in_place:
        notes += settle(item.path)
    known, source = ledger.of(item.name) or task.known, source_stamp(item)
    if known is not None and is_done(known, task, source):
        return result_of(item, SKIPPED, "done by another run", output=item.output)
    tags = _tags(item.path) if by_tags else ""
    if by_tags and known is not None and _was_changed(known, task, tags):
        made = None
    else:
        if by_tags:
            begun = Entry(item.name, task.fingerprint, "begun", _inode(item.path), tags=tags)
            _begin(ledger, begun)
        made = _made_or_there(task)
    if made is None or made.ok:
        try:
            ledger.add(_entry(task, source))
        except OSError as error:
            notes.append(f"it is done, but could not be entered as such: {error.strerror}")
    if made is None:
        how = "changed" if in_place else "there"
        return result_of(item, SKIPPED, f"it was {how} already", output=item.output)
    result = _result(item, made)
    if notes and result.report is not None:
        told = [*notes, *result.report.get("warnings", ())]
        result = result._replace(report={**result.report, "warnings": told})
    return result


def _begin(ledger: Ledger, begun: Entry) -> None:
    try:
        ledger.add(begun, synced=True)
    except OSError as error:
        raise failure_of(error, ledger.path) from error


def _entry(task: Task, source: str) -> Entry:
    """What the ledger is to know of an item that is done."""
    item, in_place = task.item, task.options.get("in_place")
    where = os.path.relpath(item.output, task.root)
    output = output_of(item.output, summed=not in_place)
    tags = ""
    if in_place and task.options.get("map"):
        source, tags = _inode(item.path), _tags(item.path)
    elif in_place:
        source = output.stamp
    return Entry(item.name, task.fingerprint, "done", source, where, *output, tags)


def source_stamp(item: Item) -> str:
    """The stamp of what an item is made of.

    Raises:
        InputError: a file is gone.
    """
    files = files_of(item.path) if item.kind == "folder" else item.files or (item.path,)
    try:
        return stamp_of(files, item.path)[1]
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", path=error.filename) from error


def is_done(entry: Entry, task: Task, source: str, *, verify: bool = False) -> bool:
    """Whether what the ledger says of an item holds still.

    Args:
        entry: what it says.
        task: the item, and how it is to be done.
        source: the stamp of the source.
        verify: whether to read the output even if nothing looks changed.
    """
    if entry.outcome != "done" or entry.options != task.fingerprint:
        return False
    if entry.tags:
        try:
            return _was_changed(entry, task, _tags(task.item.path))
        except InputError:
            return False
    if entry.source != source or os.path.relpath(task.item.output, task.root) != entry.output:
        return False
    try:
        there = output_of(task.item.output, summed=False)
        if there.nbytes == entry.nbytes and (there.stamp != entry.stamp or verify):
            if not entry.crc32:
                return there.stamp == entry.stamp
            return output_of(task.item.output, summed=True).crc32 == entry.crc32
    except OSError:
        return False
    return there.nbytes == entry.nbytes


def _was_changed(entry: Entry, task: Task, tags: str) -> bool:
    """Whether a change in place that was entered, if only as begun, has been made."""
    if entry.options != task.fingerprint or entry.source != _inode(task.item.path):
        return False
    return (entry.tags == tags) == (entry.outcome == "done")


def _inode(path: str) -> str:
    about = os.stat(path)
    return f"{about.st_ino}:{about.st_size}"


def _tags(path: str) -> str:
    """A digest of all that a change of devices can change."""
    import hashlib

    found = inspect(path)
    said = [
        [(each.id, each.location) for each in found.storages.values()],
        [(each.name, each.device) for each in found.tensors],
        [(each.name, each.value) for each in found.values_naming_devices],
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _made_or_there(task: Task) -> _Made | None:
    """Do it; gives None where the output is there already, and equal.

    That is how an item is found to be done that was not entered, be it that the run was killed in
    between, or that somebody else made it.
    """
    output = task.item.output
    ours = bool(task.options.get("in_place")) or task.verb == "validate"
    force = ours or bool(task.options.get("force"))
    if force or not is_taken(output):
        return _made(task, output, force=force)
    with beside(output) as other:
        try:
            _made(task, other, force=False)
        except CkptmoveError as error:
            if error.path is not None and error.path.startswith(other):
                error.path = output
            raise
        if not same(output, other):
            raise RefusedError(_ANOTHER, path=output, hint=EXISTS_HINT)
    return None


def _made(task: Task, output: str, *, force: bool) -> _Made:
    """Have the verb do it."""
    kind = task.item.kind
    if kind == "unreadable":
        raise _unreadable(task.item)
    if kind == "other" or (kind == "index" and task.verb == "relocate"):
        return _copied(task.item, output, force)
    return _VERBS[task.verb](task, output, force)


def _relocated(task: Task, output: str, force: bool) -> _Made:
    options = dict(task.options)
    if not options.get("in_place"):
        options |= {"dst": output, "force": force}
    report = relocate(task.item.path, progress=LISTENER.get(), **options)
    return _Made(report.to_json(), report.bytes_written)


def _converted(task: Task, output: str, force: bool) -> _Made:
    options = dict(task.options)
    as_folder = task.item.kind == "folder" or options.get("max_shard_size") is not None
    options["exclude"] = options.pop("exclude_tensors", ())
    options["force"] = force
    dst = f"{output}/" if as_folder else output
    report = convert(task.item.path, dst, progress=LISTENER.get(), **options)
    return _Made(report.to_json(), report.bytes_written)


def _validated(task: Task, output: str, force: bool) -> _Made:
    report = validate(task.item.path, progress=LISTENER.get(), **task.options).to_json()
    if output:
        text = (json.dumps(report, indent=2) + "\n").encode()
        _written(output, text, force=force)
    return _Made(report, 0)


_VERBS: Mapping[str, Callable[[Task, str, bool], _Made]] = {
    "relocate": _relocated,
    "convert": _converted,
    "validate": _validated,
}


def _unreadable(item: Item) -> InputError:
    """Why it can't be read."""
    try:
        os.listdir(item.path)
    except NotADirectoryError:
        try:
            with Source.open(item.path):
                pass
        except InputError as error:
            return error
    except OSError as error:
        return InputError(f"can't be read: {error.strerror}", path=item.path)
    return InputError("could not be read when the tree was looked through", path=item.path)


def _copied(item: Item, output: str, force: bool) -> _Made:
    """A file as it is."""
    with Source.open(item.path) as source:
        nbytes = source.nbytes
        copies = (Copy(0, nbytes, 0),) if nbytes else ()
        with Staged(output, [source], force=force) as staged:
            staged.write(Plan("clone", nbytes, copies, ()), LISTENER.get())
            staged.commit()
    return _Made(None, nbytes)


def _written(output: StrPath, data: bytes, *, force: bool) -> None:
    with Staged(output, [], force=force) as staged:
        staged.write(Plan("relay", len(data), (), (Write(0, data),)))
        staged.commit()


def _result(item: Item, made: _Made) -> Result:
    """What became of an item that a verb came to an end with."""
    output = item.output or None
    result = result_of(item, DONE, output=output, bytes_written=made.bytes_written)
    result = result._replace(report=made.report)
    if made.ok or made.report is None:
        return result
    checks = [each for each in made.report["checks"] if each["outcome"] == "failed"]
    told = "; ".join(f"{each['check']}: {each['title']}" for each in checks)
    return result._replace(outcome=FAILED, reason=told)
