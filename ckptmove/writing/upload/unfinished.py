"""Record uploads in parts, so that those of killed processes are aborted later.

    ROOT/.ckptmove-batch/uploads/ID.json      {"key": …, "upload": …, "machine": …, "pid": …, …}

An upload is recorded when it is begun, and the record removed when it is completed or aborted. Who
uploads writes the record again every minute. So an upload is dead if its process is gone, which is
known on its own machine, or if its record is a quarter of an hour old by the store's own clock. A
process that is killed between the two requests of a beginning leaves an upload without record: the
bucket's lifecycle rule `AbortIncompleteMultipartUpload` is for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple

from ...errors import CkptmoveError, RefusedError
from ...sources.filesystem import Missing, StorePath, is_s3, open_store
from ...sources.place import FolderEntry
from ...sources.remote_place import RemotePlace
from ...system import WINDOWS
from .errors import is_gone, with_write_retries

_RENEWED = 60.0  # seconds
_SILENT = 900.0  # seconds after which nobody is uploading any more
_LONGEST = 1 << 13  # bytes of a record
_RECORDS = ".ckptmove-batch/uploads"  # below the destination of a batch
_ROOT: ContextVar[str] = ContextVar("_ROOT", default="")


@contextlib.contextmanager
def recording_uploads(root: str) -> Iterator[None]:
    """Record what is uploaded in parts meanwhile below a destination."""
    token = _ROOT.set(root)
    try:
        yield
    finally:
        _ROOT.reset(token)


class UploadRecord:
    """The record of one upload; it does nothing where none is wanted. Threads may share it."""

    def __init__(self) -> None:
        self._root = _ROOT.get()
        self._place: StorePath | None = None
        self._data = b""
        self._next = 0.0
        self._guard = threading.Lock()

    def begin(self, key: str, upload: str) -> None:
        """Write it. Raises as `with_write_retries`."""
        if not self._root:
            return
        name = hashlib.sha256(f"{key} {upload}".encode()).hexdigest()[:32]
        self._place = open_store(RemotePlace(self._root).child(f"{_RECORDS}/{name}.json").path)
        pid = os.getpid()
        said = {"key": key, "upload": upload, "machine": _machine(), "pid": pid}
        self._data = json.dumps({**said, "started": _start_of(pid)}).encode()
        self._write()

    def renew(self) -> None:
        """Write it again if it is a minute old; if that fails, the next time will do."""
        with self._guard:
            if self._place is None or time.monotonic() < self._next:
                return
            with contextlib.suppress(CkptmoveError):
                self._write()

    def _write(self) -> None:
        place = self._place
        assert place is not None
        with_write_retries(lambda: place.fs.pipe_file(place.path, self._data), place.url)
        self._next = time.monotonic() + _RENEWED

    def remove(self) -> None:
        """Remove it; if that fails, who looks later finds that there is no such upload."""
        place, self._place = self._place, None
        if place is not None:
            with contextlib.suppress(Exception):
                place.fs.rm_file(place.path)


class Unfinished(NamedTuple):
    """An upload that was recorded."""

    url: str  #: of the object that it would have made
    aborted: bool  #: whether it is gone; or a process is at it


def abort_dead(root: str) -> list[Unfinished]:
    """Abort what dead processes have begun to upload, and recorded, below a destination.

    Raises InputError if the records can't be read, RefusedError or WriteError if an upload can't be
    aborted.
    """
    store = open_store(root)
    if not is_s3(store.fs):
        return []
    try:
        records = RemotePlace(root).child(_RECORDS).files_below()
    except Missing:
        return []
    return [each for record in records for each in _ended(record, store)]


def _ended(record: FolderEntry, store: StorePath) -> Iterator[Unfinished]:
    try:
        said: Any = json.loads(RemotePlace(record.path).read_small(_LONGEST))
        key, upload = str(said["key"]), str(said["upload"])
        machine, pid, started = str(said["machine"]), int(said["pid"]), str(said["started"])
    except Missing:
        return  # it has ended just now
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return  # it is no record of ours
    bucket, prefix, _ = store.fs.split_path(store.path)
    prefix = prefix.strip("/")
    if prefix and not key.startswith(f"{prefix}/"):
        return
    url = f"{store.url.rstrip('/')}/{key[len(prefix) :].lstrip('/')}"
    if machine == _machine() and _start_of(pid) == started:
        yield Unfinished(url, aborted=False)
        return
    if machine != _machine() and _time_in(store) - record.mtime < _SILENT:
        yield Unfinished(url, aborted=False)
        return
    about = {"Bucket": bucket, "Key": key, "UploadId": upload}
    try:
        with_write_retries(lambda: store.fs.call_s3("abort_multipart_upload", **about), url)
    except RefusedError as error:
        if not is_gone(error):  # it was completed, or aborted
            raise
    place = open_store(record.path)
    with contextlib.suppress(Exception):
        place.fs.rm_file(place.path)
    yield Unfinished(url, aborted=True)


def _time_in(store: StorePath) -> float:
    """The time by the clock of the store, which dates its records too; ours may be hours ahead."""
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
    """A name of this machine since it was started, and of its space of process numbers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(parts)


def _start_of(pid: int) -> str:
    """When a process was started; `gone` if it is none, or a dead one that nobody asked about."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
        return "gone" if state in "ZX" else rest[18]  # the fields 3 and 22 of proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        pass
    try:  # on a system without
        if not WINDOWS:  # where this would be Ctrl-C
            os.kill(pid, 0)
    except (OSError, OverflowError):
        return "gone"
    return "running"
