"""Upload objects through fsspec: written from start to end, in a transaction.

    file = fs.open(path, "wb")     in a transaction: not visible
    file.write, again and again
    file.close()                   sends what is left, and commits nothing
    file.commit(), or file.discard()

Such a file is never used as a context manager: its `__exit__` would commit a partial object. Files
of Azure are committed by closing them, so there closing comes last; Azure deletes blocks that were
never committed after a week.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from ...errors import InputError, RefusedError, WriteError
from ...sources.filesystem import StorePath, info_of, protocols_of
from ..final_name import exists_error
from .errors import failure, with_write_retries
from .parts import PART_NBYTES, NotCopiedError
from .server_copy import StoreCopy

_AZURE = {"abfs", "abfss", "az"}
#: Stores that make a file opened with `x` only if the name is free when it is committed.
_EXCLUSIVE = {*_AZURE, "gs", "gcs"}
#: Protocols that fsspec can read, but can't write, or only with a local copy.
_READ_ONLY = {
    *("http", "https", "hf", "data", "github", "git", "gist", "reference", "jupyter"),
    *("zip", "tar", "libarchive", "cached", "blockcache", "filecache", "simplecache"),
}


def check_writable(place: StorePath) -> None:
    """Raises RefusedError if a store of this kind is known not to be writable."""
    if protocols_of(place.fs) & _READ_ONLY:
        raise RefusedError(
            "can't be written there",
            path=place.url,
            hint="name a file here, or an object in a store such as s3://",
        )


class TransactedUpload:
    """An `Upload` to a store that has transactions."""

    part_nbytes = PART_NBYTES
    at_once = 1

    def __init__(self, place: StorePath, nbytes: int, *, exclusive: bool) -> None:
        self._nbytes = nbytes
        self._place = place
        self._mode = "xb" if exclusive and protocols_of(place.fs) & _EXCLUSIVE else "wb"
        self._file: Any = None
        self._fs: Any = None
        self._md5 = hashlib.md5(usedforsecurity=False)

    @property
    def _commits_by_closing(self) -> bool:
        return bool(protocols_of(self._place.fs) & _AZURE)

    def begin(self) -> None:
        """As `Upload.begin`."""
        self.abort()
        fs = self._place.fs
        self._md5 = hashlib.md5(usedforsecurity=False)
        try:  # its own instance: a transaction covers all writes of an instance
            self._fs = type(fs)(*fs.storage_args, skip_instance_cache=True, **fs.storage_options)
            self._fs.start_transaction()
            self._file = with_write_retries(
                lambda: self._fs.open(self._place.path, self._mode, block_size=PART_NBYTES),
                self._place.url,
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            raise failure(error, self._place.url) from error
        if not self._commits_by_closing and not _has_transactions(self._file):
            self._forget()
            raise RefusedError(
                "can't be written there: what is not complete would be seen", path=self._place.url
            )

    def put(self, number: int, data: BytesIO) -> None:
        """As `Upload.put`. It is not retried, because it is unknown how much arrived."""
        try:
            self._file.write(data.getvalue())
        except Exception as error:
            raise failure(error, self._place.url) from error
        self._md5.update(data.getbuffer())

    def copy(self, number: int, part: StoreCopy) -> None:
        """As `Upload.copy`, which is never called."""
        raise NotCopiedError

    def stop(self) -> None:
        """As `Upload.stop`: parts on their way still arrive."""

    def complete(self, *, exclusive: bool) -> Mapping[str, Any]:
        """As `Upload.complete`; `begin` asked the stores that can to write exclusively."""
        del exclusive
        place = self._place
        try:
            self._file.close()
            if not self._commits_by_closing:
                self._file.commit()
        except FileExistsError as error:
            raise exists_error(place.url) from error
        except Exception as error:
            raise failure(error, place.url) from error
        self._file = None
        return self._checked()

    def _checked(self) -> Mapping[str, Any]:
        """Raises WriteError unless the object is there, as far as the store tells."""
        try:
            about = info_of(self._place)
        except InputError as error:
            raise WriteError(
                f"it was written but can't be found: {error}", path=self._place.url
            ) from error
        md5 = about.get("md5Hash")  # of Google's
        if about.get("size") != self._nbytes:
            said = f"it has {about.get('size')} bytes, not {self._nbytes:,}"
        elif md5 is not None and md5 != base64.b64encode(self._md5.digest()).decode():
            said = "its MD5 is not that of what was sent"
        else:
            return about
        raise WriteError(f"{said}: remove it", path=self._place.url)

    def abort(self) -> None:
        """As `Upload.abort`."""
        file = self._file
        if file is None:
            return
        self._forget()
        try:
            if not self._commits_by_closing:
                with contextlib.suppress(Exception):
                    file.close()  # temporary files must be closed, and that commits nothing
                file.discard()
        except Exception as error:
            raise failure(error, self._place.url) from error

    def _forget(self) -> None:
        """Keep the file from committing itself when it is garbage-collected."""
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        self._file = None


def _has_transactions(file: Any) -> bool:
    """Whether committing and discarding a file does anything."""
    from fsspec.spec import AbstractBufferedFile

    if not hasattr(file, "commit") or not hasattr(file, "discard"):
        return False
    return (
        not isinstance(file, AbstractBufferedFile)
        or type(file).commit is not AbstractBufferedFile.commit
    )
