"""Record multipart uploads, so that uploads of killed processes can be aborted later.

    ROOT/.ckptmove-batch/uploads/ID.json      {"key": …, "upload": …, "machine": …, "pid": …, …}

An upload is recorded before it is begun, and the record removed when it is completed or aborted.
The uploading process writes the record again every minute, then with the upload ID of the store. So
an upload is dead if its process is gone, which is known on its own machine, or if its record is a
quarter of an hour old by the store's clock. If a dead record has no upload ID, the uploads of its
object that were begun just after it was written are dead, unless a live process has recorded them.
If the store does not allow finding or aborting them, the record is kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple

from ...display.phrases import format_error
from ...errors import CkptmoveError, RefusedError
from ...sources.filesystem import Missing, StorePath, is_s3, open_store
from ...sources.remote_place import RemotePlace
from ...system import WINDOWS
from .errors import is_gone, with_write_retries

_RENEWED = 60.0  # seconds
_SILENT = 900.0  # seconds after which an upload counts as dead
# An upload is begun after its record is written. Both times are by the store's clock.
_ROUNDING = 2.0  # seconds that it may seem to be begun earlier: a listing rounds to seconds
_BEGINNING = 240.0  # seconds in which it is begun: all retries without an answer, and their pauses
#: The permission that each request needs.
_PERMISSIONS = {
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}
_LONGEST = 1 << 13  # bytes of a record
_RECORDS = ".ckptmove-batch/uploads"  # below the destination of a batch
_Begun = Sequence[tuple[str, float]]  # upload IDs, and when the uploads were begun
_ROOT: ContextVar[str] = ContextVar("_ROOT", default="")


@contextlib.contextmanager
def recording_uploads(root: str) -> Iterator[None]:
    """Record multipart uploads below a destination that are begun in this context."""
    token = _ROOT.set(root)
    try:
        yield
    finally:
        _ROOT.reset(token)


class UploadRecord:
    """The record of one upload; does nothing if no record is wanted. Threads may share it."""

    def __init__(self) -> None:
        self._root = _ROOT.get()
        self._place: StorePath | None = None
        self._said = dict[str, str | int]()
        self._next = 0.0
        self._guard = threading.Lock()

    def announce(self, key: str) -> None:
        """Write the record before the upload begins. Raises as `with_write_retries`."""
        if not self._root:
            return
        name = f"{_RECORDS}/{os.urandom(16).hex()}.json"
        self._place = open_store(RemotePlace(self._root).child(name).path)
        self._said = {"key": key, "machine": _machine(), "pid": os.getpid()}
        self._said["started"] = _start_of(os.getpid())
        self._write()

    def begin(self, upload: str) -> None:
        """Note the upload ID; the next renewal writes it."""
        self._said["upload"] = upload

    def renew(self) -> None:
        """Write the record again if it is a minute old; a failure is left to the next renewal."""
        with self._guard:
            if self._place is None or time.monotonic() < self._next:
                return
            with contextlib.suppress(CkptmoveError):
                self._write()

    def _write(self) -> None:
        place, data = self._place, json.dumps(self._said).encode()
        assert place is not None
        with_write_retries(lambda: place.fs.pipe_file(place.path, data), place.url)
        self._next = time.monotonic() + _RENEWED

    def remove(self) -> None:
        """Remove the record; if that fails, a later check finds that the upload does not exist."""
        place, self._place = self._place, None
        if place is not None:
            with contextlib.suppress(Exception):
                place.fs.rm_file(place.path)


class UnfinishedUpload(NamedTuple):
    """An upload that was recorded."""

    url: str  #: URL of the object that it would have made
    aborted: bool  #: whether it was removed; or whether a process still uploads
    refusal: RefusedError | None = None  #: why it remains although no process uploads


def abort_dead(root: str) -> list[UnfinishedUpload]:
    """Abort the recorded uploads of dead processes below a destination.

    Raises InputError if the records can't be read, RefusedError or WriteError if the store fails.
    """
    store = open_store(root)
    if not is_s3(store.fs):
        return []
    ended, dead = list[UnfinishedUpload](), list[_UploadRecord]()
    for each in _records(root, store):
        if _is_alive(each, store):  # read once: uploads that die later are left to the next run
            ended.append(UnfinishedUpload(_url_of(each, store), aborted=False))
        else:
            dead.append(each)
    unnamed = {each.key: each for each in dead if not each.upload}
    begun = {key: _uploads_of(each, store) for key, each in unnamed.items()}
    busy = {each.key for each in _records(root, store) if _is_alive(each, store)} if unnamed else ()
    for each in dead:
        ended += _end(each, store, begun.get(each.key, ()), busy)
    return ended


class _UploadRecord(NamedTuple):
    """The content of a record."""

    path: str
    mtime: float
    key: str
    upload: str  #: its upload ID; empty if it was not begun, or only just begun
    machine: str
    pid: int
    started: str


def _records(root: str, store: StorePath) -> Iterator[_UploadRecord]:
    """The records of uploads below a destination."""
    prefix = store.fs.split_path(store.path)[1].strip("/")
    try:
        found = RemotePlace(root).child(_RECORDS).files_below()
    except Missing:
        return
    for each in found:
        try:
            said: Any = json.loads(RemotePlace(each.path).read_small(_LONGEST))
            key, upload = str(said["key"]), str(said.get("upload", ""))
            machine, pid, started = str(said["machine"]), int(said["pid"]), str(said["started"])
        except Missing:
            continue  # it has just ended
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
            continue  # it is not one of our records
        if not prefix or key.startswith(f"{prefix}/"):
            yield _UploadRecord(each.path, each.mtime, key, upload, machine, pid, started)


def _is_alive(record: _UploadRecord, store: StorePath) -> bool:
    """Whether a live process may be uploading."""
    if record.machine == _machine():
        return _start_of(record.pid) == record.started
    return _time_in(store) - record.mtime < _SILENT


def _url_of(record: _UploadRecord, store: StorePath) -> str:
    """The URL of the object that an upload would have made."""
    prefix = store.fs.split_path(store.path)[1].strip("/")
    return f"{store.url.rstrip('/')}/{record.key[len(prefix) :].lstrip('/')}"


def _uploads_of(record: _UploadRecord, store: StorePath) -> _Begun | RefusedError:
    """Return all unfinished uploads of an object, or why they can't be listed."""
    try:
        answer = _ask("list_multipart_uploads", record, store, Prefix=record.key)
    except RefusedError as error:
        return error
    return [
        (str(each["UploadId"]), each["Initiated"].timestamp())
        for each in answer.get("Uploads", ())
        if each["Key"] == record.key
    ]


def _end(
    record: _UploadRecord, store: StorePath, begun: _Begun | RefusedError, busy: Collection[str]
) -> Iterator[UnfinishedUpload]:
    """Abort the upload of a dead record, or the uploads of its object that it may refer to."""
    url = _url_of(record, store)
    uploads = [record.upload]
    if not record.upload:
        if record.key in busy:
            yield UnfinishedUpload(url, aborted=False)
            return
        if isinstance(begun, RefusedError):
            yield UnfinishedUpload(url, aborted=False, refusal=begun)
            return
        since = ((upload, at - record.mtime) for upload, at in begun)
        uploads = [upload for upload, after in since if -_ROUNDING <= after <= _BEGINNING]
    for upload in uploads:
        try:
            _ask("abort_multipart_upload", record, store, Key=record.key, UploadId=upload)
        except RefusedError as error:
            if not is_gone(error):  # it was completed, or aborted
                yield UnfinishedUpload(url, aborted=False, refusal=error)
                return
        yield UnfinishedUpload(url, aborted=True)
    place = open_store(record.path)
    with contextlib.suppress(Exception):
        place.fs.rm_file(place.path)


def _ask(method: str, record: _UploadRecord, store: StorePath, **given: str) -> Mapping[str, Any]:
    """Make a request about uploads. Raises RefusedError if the store forbids or lacks it."""
    url, bucket = _url_of(record, store), store.fs.split_path(store.path)[0]
    try:
        return with_write_retries(lambda: store.fs.call_s3(method, Bucket=bucket, **given), url)
    except CkptmoveError as error:
        cause, hint = error.__cause__, None
        if isinstance(cause, PermissionError):
            hint = f"allow {_PERMISSIONS[method]}"
        elif not isinstance(cause, OSError) or cause.errno != errno.ENOSYS:
            raise
        verb = "found" if method.startswith("list") else "aborted"
        raise RefusedError(
            f"what a killed process had uploaded of it can't be {verb}: {format_error(cause)}",
            path=url,
            hint=hint,
        ) from cause


def _time_in(store: StorePath) -> float:
    """Return the time of the store's clock, which dates the records; ours may be hours ahead."""
    bucket, prefix, _ = store.fs.split_path(store.path)
    asked = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": 1}
    answer = with_write_retries(lambda: store.fs.call_s3("list_objects_v2", **asked), store.url)
    try:
        said = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return parsedate_to_datetime(said).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


@cache
def _machine() -> str:
    """Return an identifier of this machine since its start, and of its process ID namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(parts)


def _start_of(pid: int) -> str:
    """Return when a process was started; `gone` if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
        return "gone" if state in "ZX" else rest[18]  # the fields 3 and 22 of proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        pass
    try:  # on a system without /proc
        if not WINDOWS:  # where this would be Ctrl-C
            os.kill(pid, 0)
    except (OSError, OverflowError):
        return "gone"
    return "running"
