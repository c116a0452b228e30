"""Upload objects to S3 and compatible stores: in parts, visible only when complete.

    create_multipart_upload        nothing is visible until the end
    upload_part, several at once   each with its MD5, which the server checks, and so do we
    upload_part_copy               of what another object has: see `server_copy`
    complete_multipart_upload      the object is there, complete; or
    abort_multipart_upload         its parts are removed

A process that is killed before either leaves invisible parts, which take space until the upload is
aborted. Uploads of a batch are recorded, and the next run aborts them (`unfinished`), also those
whose first answer was lost. A rule in the bucket's lifecycle, `AbortIncompleteMultipartUpload`,
aborts all.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from io import BytesIO
from typing import Any

from ...errors import CkptmoveError, CorruptError, InputError, RefusedError, WriteError
from ...sources.filesystem import StorePath, info_of
from ...sources.range_request import CHANGED
from ..final_name import exists_error
from .errors import is_gone, with_write_retries
from .parts import NotCopiedError, part_nbytes_for
from .server_copy import StoreCopy
from .unfinished import UploadRecord

_ABORTS = 3  # a part that was on its way may arrive after the abort
_KMS = ("aws:kms", "aws:kms:dsse")
#: Fields of further checksums of a part, which the user's configuration may ask for.
_CHECKSUMS = [f"Checksum{kind}" for kind in ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")]
_MD5 = re.compile(r"[0-9a-f]{32}")
_ETAG = re.compile(r"[0-9a-f]{32}(|-\d+)")  # an MD5; or an MD5 of MD5s, with their number


class MultipartUpload:
    """An `Upload` to S3."""

    at_once = 4

    def __init__(self, place: StorePath, nbytes: int) -> None:
        self.part_nbytes = part_nbytes_for(nbytes)
        self._nbytes = nbytes
        self._place = place
        bucket, key, _ = place.fs.split_path(place.path)
        self._where = {"Bucket": bucket, "Key": key}
        self._id: str | None = None
        self._parts = dict[int, Mapping[str, Any]]()  # in the form of the complete request
        self._plain = True  # whether the tags are MD5s
        self._guard = threading.Lock()
        self._running = set[Future[Any]]()
        self._stopped = False
        self._record = UploadRecord()

    def begin(self) -> None:
        """As `Upload.begin`. Parts keep their numbers, so that none need be forgotten."""
        if self._id is None:
            self._record.announce(self._where["Key"])
            try:
                self._id = str(self._ask("create_multipart_upload")["UploadId"])
            except RefusedError:
                self._record.remove()
                raise
            self._record.begin(self._id)

    def _ask(self, method: str, **given: Any) -> Mapping[str, Any]:
        return with_write_retries(
            lambda: self._place.fs.call_s3(method, **self._where, **given), self._place.url
        )

    # -- parts ---------------------------------------------------------------------------------

    def put(self, number: int, data: BytesIO) -> None:
        """As `Upload.put`."""
        md5 = hashlib.md5(data.getbuffer(), usedforsecurity=False)
        given = {
            **self._where,
            "PartNumber": number,
            "UploadId": self._id,
            "Body": data,
            "ContentMD5": base64.b64encode(md5.digest()).decode(),
        }

        def send() -> None:
            data.seek(0)
            with _digest_checked(number):
                answer = self._sent("upload_part", given)
            tag, plain = self._arrived(number, answer, _is_encrypted(answer))
            if plain and tag != md5.hexdigest():
                raise _otherwise(number)

        with_write_retries(send, self._place.url)

    def copy(self, number: int, part: StoreCopy) -> None:
        """As `Upload.copy`, only of the version that was read. Raises CorruptError for another."""
        bucket, key, version = part.source.place.fs.split_path(part.source.place.path)
        which = {"VersionId": version} if version else {}
        given = {
            **self._where,
            "PartNumber": number,
            "UploadId": self._id,
            "CopySource": {"Bucket": bucket, "Key": key, **which},
            "CopySourceRange": f"bytes={part.source_at}-{part.source_at + part.nbytes - 1}",
            "CopySourceIfMatch": part.source.etag,
        }

        def ask() -> None:
            answer = self._sent("upload_part_copy", given)
            self._arrived(number, answer["CopyPartResult"], _is_encrypted(answer))

        try:
            with_write_retries(ask, self._place.url)
        except CkptmoveError as error:
            if _is_refused_condition(error.__cause__):
                raise CorruptError(CHANGED, path=part.source.path) from error
            if self._stopped:
                raise
            raise NotCopiedError from error
        except KeyError as error:
            raise NotCopiedError from error

    def _arrived(
        self, number: int, answer: Mapping[str, Any], is_encrypted: bool
    ) -> tuple[str, bool]:
        """Note a part that has arrived; return its ETag, and whether that is its MD5."""
        tag = _tag_in(answer)
        plain = not is_encrypted and _MD5.fullmatch(tag) is not None
        with self._guard:
            self._parts[number] = {
                "PartNumber": number,
                "ETag": answer["ETag"],
                **{name: answer[name] for name in _CHECKSUMS if name in answer},
            }
            self._plain = self._plain and plain
        self._record.renew()
        return tag, plain

    def _sent(self, method: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a part, unless the upload was stopped."""
        with self._guard:
            if self._stopped:
                raise WriteError("the upload was stopped", path=self._place.url)
            fs = self._place.fs
            from asyncio import run_coroutine_threadsafe  # a while to import

            future = run_coroutine_threadsafe(fs._call_s3(method, **given), fs.loop)
            self._running.add(future)
        try:
            answer: Mapping[str, Any] = future.result()
        finally:
            with self._guard:
                self._running.discard(future)
        return answer

    def stop(self) -> None:
        """As `Upload.stop`."""
        with self._guard:
            self._stopped = True
            running = list(self._running)
        for future in running:
            future.cancel()

    # -- the end -------------------------------------------------------------------------------

    def complete(self, *, exclusive: bool) -> Mapping[str, Any]:
        """As `Upload.complete`."""
        parts = [self._parts[number] for number in sorted(self._parts)]
        tag = _tag_of([_tag_in(each) for each in parts])
        made = None
        try:
            answer = self._ask(
                "complete_multipart_upload",
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
                **_condition(exclusive),
            )
            made = _tag_in(answer)
        except CkptmoveError as error:
            if tag is None or _tag_there(self._place) != tag:  # otherwise only the answer was lost
                raise _refused(error, self._place.url) from error
        self._id = None
        self._record.remove()
        return check_arrived(self._place, self._nbytes, tag if self._plain else None, made)

    def abort(self) -> None:
        """As `Upload.abort`."""
        self.stop()
        for _ in range(_ABORTS):
            if self._id is None:
                return
            try:
                self._ask("abort_multipart_upload", UploadId=self._id)
            except RefusedError as error:
                if not is_gone(error):
                    raise
                self._id = None
                self._record.remove()
                return
            try:
                self._place.fs.call_s3("list_parts", **self._where, UploadId=self._id)
            except (FileNotFoundError, PermissionError):  # it is gone, or we may not ask
                self._id = None
                self._record.remove()
            except Exception:  # aborting it again also tells
                continue


class SingleUpload:
    """An `Upload` of an object small enough for one request; held in memory until then."""

    at_once = 1

    def __init__(self, place: StorePath, nbytes: int) -> None:
        self.part_nbytes = max(1, nbytes)
        self._place = place
        self._data = BytesIO()

    def begin(self) -> None:
        """As `Upload.begin`."""
        self._data = BytesIO()

    def put(self, number: int, data: BytesIO) -> None:
        """As `Upload.put`: there is only one part."""
        assert number == 1
        self._data = data

    def copy(self, number: int, part: StoreCopy) -> None:
        """As `Upload.copy`: a small part is sent instead."""
        raise NotCopiedError

    def stop(self) -> None:
        """As `Upload.stop`: nothing is on its way."""

    def complete(self, *, exclusive: bool) -> Mapping[str, Any]:
        """As `Upload.complete`. The store checks the MD5; if it returns it, that is the proof."""
        fs, url = self._place.fs, self._place.url
        bucket, key, _ = fs.split_path(self._place.path)
        md5 = hashlib.md5(self._data.getbuffer(), usedforsecurity=False)
        given = {
            "Bucket": bucket,
            "Key": key,
            "Body": self._data,
            "ContentMD5": base64.b64encode(md5.digest()).decode(),
            **_condition(exclusive),
        }
        tag, made, plain = md5.hexdigest(), None, True

        def send() -> Mapping[str, Any]:
            self._data.seek(0)
            with _digest_checked(1):
                answer: Mapping[str, Any] = fs.call_s3("put_object", **given)
            return answer

        try:
            answer = with_write_retries(send, url)
            made, plain = _tag_in(answer), not _is_encrypted(answer)
        except CkptmoveError as error:
            if _tag_there(self._place) != tag:  # otherwise only the answer was lost
                raise _refused(error, url) from error
        nbytes = self._data.getbuffer().nbytes
        if plain and made == tag:
            return {"type": "file", "size": nbytes, "ETag": tag}
        return check_arrived(self._place, nbytes, tag if plain else None, made)

    def abort(self) -> None:
        """As `Upload.abort`."""
        self._data = BytesIO()


# -- what a store says of it -----------------------------------------------------------------------


def check_arrived(
    place: StorePath, nbytes: int, tag: str | None, made: str | None
) -> Mapping[str, Any]:
    """Return the store's description of an object; WriteError if it differs from what was sent.

    Then the object is removed, if it is ours.

    `tag` is the expected ETag, if known; `made` is the ETag that the store gave it.
    """
    try:
        about = info_of(place)
    except InputError as error:
        raise WriteError(f"it was written but can't be found: {error}", path=place.url) from error
    there = _tag_in(about)
    if about.get("size") != nbytes:
        said = f"it has {about.get('size'):,} bytes, not {nbytes:,}"
    elif tag is not None and tag != there and _shape(tag) == _shape(there):
        said = "its ETag does not match the bytes that were sent"
    else:
        return about
    if made is None or made != there:
        raise WriteError(f"{said}: another object replaced it", path=place.url)
    try:
        with_write_retries(lambda: place.fs.rm_file(place.path), place.url)
    except CkptmoveError as error:
        raise WriteError(f"{said}, and it can't be removed: {error}", path=place.url) from error
    raise WriteError(f"{said}; it was removed", path=place.url)


@contextlib.contextmanager
def _digest_checked(number: int) -> Iterator[None]:
    """Turn the server's report of a wrong digest into an error that is retried."""
    try:
        yield
    except OSError as error:
        if _code(error) in (
            "BadDigest",
            "XAmzContentSHA256Mismatch",
            "XAmzContentChecksumMismatch",
        ):
            raise _otherwise(number) from error
        raise


def _otherwise(number: int) -> ConnectionError:
    return ConnectionError(f"part {number} did not arrive as it was sent")


def _refused(error: CkptmoveError, url: str) -> CkptmoveError:
    """Return why an object could not be made: the name may be taken."""
    return exists_error(url) if _is_refused_condition(error.__cause__) else error


def _is_refused_condition(error: BaseException | None) -> bool:
    return isinstance(error, FileExistsError) or _code(error) == "PreconditionFailed"


def _code(error: BaseException | None) -> str | None:
    """Return the code of an S3 error that s3fs has converted to a Python error."""
    response = getattr(getattr(error, "__cause__", None), "response", None)
    return response["Error"].get("Code") if isinstance(response, dict) else None


def _is_encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the content is encrypted in a way that makes ETags differ from MD5s."""
    return answer.get("ServerSideEncryption") in _KMS or "SSECustomerAlgorithm" in answer


def _condition(exclusive: bool) -> Mapping[str, str]:
    return {"IfNoneMatch": "*"} if exclusive else {}


def _tag_there(place: StorePath) -> str:
    """Return the ETag of the existing object, if there is one."""
    with contextlib.suppress(InputError):
        return _tag_in(info_of(place))
    return ""


def _tag_in(about: Mapping[str, Any]) -> str:
    return str(about.get("ETag") or "").strip('"')


def _tag_of(tags: Sequence[str]) -> str | None:
    """Return the ETag that S3 gives to an object of parts, if the ETags of the parts are MD5s."""
    if not all(_MD5.fullmatch(tag) for tag in tags):
        return None
    digest = hashlib.md5(bytes.fromhex("".join(tags)), usedforsecurity=False).hexdigest()
    return f"{digest}-{len(tags)}"


def _shape(tag: str) -> str:
    """Return the kind of an ETag; only ETags of the same kind can be compared."""
    found = _ETAG.fullmatch(tag)
    return "?" + tag if found is None else found[1]
