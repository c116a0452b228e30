"""Execute a plan so that an object appears complete and verified in a store, or not at all.

Parts are assembled one by one, sent several at a time, and never written to the local disk. The
object is invisible until it is committed; otherwise, its parts are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from ...errors import CkptmoveError, InputError, RefusedError, StrPath, WriteError
from ...plans.plan import Plan
from ...sources.filesystem import StorePath, is_s3, open_store
from ...sources.known_objects import known_objects, look, look_now
from ...sources.passing_digests import digest_parts, wanted_digests
from ...sources.remote_object import RemoteObject
from ...sources.source import Source
from ..execute import ProgressCounter
from ..final_name import announce_commit, exists_error
from ..verify import Progress
from .errors import failure, uninterruptible, with_write_retries
from .fsspec import TransactedUpload, check_writable
from .parts import PART_NBYTES, NotCopiedError, Upload, send
from .s3 import MultipartUpload, SingleUpload
from .server_copy import StoreCopy, UploadPart, divide, parts_of
from .stream_plan import PlanSource

_Self = TypeVar("_Self", bound="StagedUpload")


class MemoryAllowance:
    """The memory that all small objects together may use, in bytes."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes  #: the free bytes


class StagedUpload:
    """An object being uploaded. The end of its context does not end the upload."""

    def __init__(
        self, place: StorePath, sources: Sequence[Source], room: MemoryAllowance, *, force: bool
    ) -> None:
        """Make no request yet; `room` is for small objects that wait for `complete`."""
        self.path = place.url
        self.place = place
        self.sources = sources
        self.force = force
        self._room = room
        self._upload: Upload | None = None
        self._assembled: PlanSource | None = None

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Do nothing: the upload continues."""

    def write(self, plan: Plan, progress: Progress | None = None) -> str:
        """Upload the output of the plan, verified but not complete; return `upload`.

        Returns `store` if the store copied some of it from the source, verified as described in
        `server_copy`. `progress` is called with the bytes that have arrived. Raises CorruptError if
        a source is damaged or was changed.
        """
        report = ProgressCounter(progress)
        assembled = PlanSource(plan, self.sources, self.path)
        self._upload = upload = self._upload_of(plan.nbytes)
        whole = parts_of(plan.nbytes, upload.part_nbytes)
        divided = None
        if isinstance(upload, MultipartUpload) and wanted_digests() is None:
            divided = divide(plan, self.sources, self.place, upload.part_nbytes)
        for _ in range(3):
            uninterruptible(upload.begin)
            try:
                send(upload, _made(assembled, divided or whole, self.path), report)
            except NotCopiedError:
                self.abort()
                self._upload, divided = self._upload_of(plan.nbytes), None
                upload = self._upload
            else:
                if assembled.settled:  # otherwise again: the plan's seal lies before its measures
                    break
            report = ProgressCounter(None)
        assembled.check_unchanged()
        self._assembled = assembled
        return "upload" if divided is None else "store"

    def _upload_of(self, nbytes: int) -> Upload:
        if not is_s3(self.place.fs):
            return TransactedUpload(self.place, nbytes, exclusive=not self.force)
        if nbytes <= self._room.left or not nbytes:
            self._room.left -= nbytes
            return SingleUpload(self.place, nbytes)
        return MultipartUpload(self.place, nbytes)

    def open_written(self) -> Source:
        """Return the uploaded object as a source, which assembles the ranges that are read."""
        assert self._assembled is not None
        return self._assembled

    def complete(self) -> None:
        """Make an object of the parts. Raises RefusedError if the name is taken."""
        upload = self._upload
        assert upload is not None
        if not self.force and kind_at(self.place) is not None:
            raise exists_error(self.path)
        announce_commit()
        known = known_objects()
        if known is not None:  # if it may exist, only the store can tell
            known.forget(self.path)
        about = uninterruptible(lambda: upload.complete(exclusive=not self.force))
        self._upload = None
        if known is not None:
            known.put(self.path, about)

    def abort(self, error: BaseException | None = None) -> None:
        """Remove the parts, unless completed. A failure is raised, or added to `error`."""
        upload, self._upload = self._upload, None
        if upload is None:
            return
        try:
            uninterruptible(upload.abort)
        except CkptmoveError as failed:
            said = f"invisible parts of it are left in the store: {failed}"
            if isinstance(error, CkptmoveError):
                error.hint = said if error.hint is None else f"{error.hint}; {said}"
            elif error is None:
                raise WriteError(said, path=self.path) from failed


def _made(
    assembled: PlanSource, parts: Sequence[UploadPart], path: str
) -> Iterator[BytesIO | StoreCopy]:
    """Yield the parts of an object: bytes to send, and ranges for the store to copy."""
    sent = [(part.start, part.end) for part in parts if part.copy is None]
    made = digest_parts(path, assembled.parts(sent))
    for part in parts:
        yield next(made) if part.copy is None else part.copy
    yield from made  # checked at its end


class StagedObject(StagedUpload):
    """An object that is being written. As a context manager, it is removed unless committed."""

    def __init__(self, destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
        """Raises RefusedError as `check_object` does."""
        place = check_object(str(destination), sources, force=force)
        super().__init__(place, sources, MemoryAllowance(PART_NBYTES), force=force)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.abort(error)

    def commit(self) -> None:
        """Make the object visible, in one step and finally. Raises as `complete`."""
        self.complete()


# -- before anything is written --------------------------------------------------------------------


def open_to_write(url: str) -> StorePath:
    """Open the store that a destination is in. Raises RefusedError if it can't be reached."""
    try:
        return open_store(url)
    except InputError as error:
        raise failure(error.__cause__ or error, url) from error


def kind_at(place: StorePath) -> str | None:
    """Return the kind of entry at a place: `file`, `directory`, or None."""

    def ask() -> Mapping[str, Any] | None:
        try:
            return look_now(place)
        except FileNotFoundError:
            return None

    about = look(place, lambda: with_write_retries(ask, place.url))
    return None if about is None else str(about.get("type") or "file")


def check_object(url: str, sources: Sequence[Source], *, force: bool) -> StorePath:
    """Return the place of an object; raises RefusedError if it must not be written."""
    place = open_to_write(url)
    check_writable(place)
    is_bucket = "/" not in place.path.strip("/") and is_s3(place.fs)
    if url.endswith("/") or is_bucket:
        raise RefusedError("the destination is a directory", path=url)
    if "?versionId=" in url:
        raise RefusedError("names a version of an object; versions can't be changed", path=url)
    remote = [source for source in sources if isinstance(source, RemoteObject)]
    if any(source.place[1:] == place[1:] for source in remote):
        raise RefusedError("the destination is the source itself", path=url)
    found = kind_at(place)
    if found == "directory":
        raise RefusedError("the destination is a directory", path=url)
    if found is not None and not force:
        raise exists_error(url)
    return place
