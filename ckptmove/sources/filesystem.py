"""Open object stores with fsspec: retry failed requests, and turn their errors into ours.

Credentials and endpoints are those that fsspec and its implementations find: environment, `~/.aws`,
`~/.config/fsspec`.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from ..errors import CkptmoveError, InputError, UsageError
from ..reports.display.phrases import format_error
from .place import mask_secrets

_T = TypeVar("_T")
_PAUSES = (0.2, 0.6, 1.8, 5.4)  # seconds before it is asked again, or up to half as much more
#: Seconds in which something has to come: a connection, or the next bytes of an answer.
PATIENCE = 30.0
_CONNECTIONS = 32  # at once: S3 takes hundreds, and botocore makes ten
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
#: Of an OSError: what is wrong with the request, or with where it is sent.
_WRONG = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG, errno.EMSGSIZE} | {
    getattr(errno, "EREMCHG", errno.EINVAL)
}
#: Where exceptions that tell of a network come from; of all else, only OSErrors are tried again.
_NETWORKS = {
    *("aiohttp", "aiobotocore", "botocore", "requests", "urllib3", "httpx", "httpcore"),
    *("asyncio", "fsspec"),
}
#: Of these, what no second try will mend.
_HOPELESS = (
    *("NoCredentials", "PartialCredentials", "ProfileNotFound", "InvalidURL", "ParamValid"),
    *("ClientConnectorCertificate", "ClientConnectorSSL", "SSLError"),
)
_BUSY = {408, 425, 429}
#: What is to be installed for a protocol, as an extra of ours.
_EXTRAS = {
    **{"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"},
    **{"hf": "hf", "az": "azure", "abfs": "azure", "abfss": "azure"},
}
#: What of an entry changes with the content of an object, in one store or another, and is told by
#: listings too.
_TELLING = (
    *("size", "ETag", "etag", "generation", "md5Hash", "blob_id"),
    *("content_md5", "Content-MD5"),
)
_TIMES = (
    *("LastModified", "Last-Modified", "last_modified", "last_commit"),
    *("updated", "mtime", "created"),
)


class Missing(InputError):
    """There is no such object, or nothing that could hold it."""


class StorePath(NamedTuple):
    """Where a URL leads."""

    url: str  #: as it was given
    fs: Any  #: an fsspec file system
    path: str  #: as that has it


def open_store(url: str) -> StorePath:
    """Open the store that a URL names. Raises UsageError if its fsspec package is not installed."""
    protocol = url.partition(":")[0].lower()
    if protocol in ("file", "local"):
        raise UsageError(
            "is a URL of a local file", path=url, hint="give its path, without file://"
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _missing(protocol, url) from error
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **_options(protocol))
    except ImportError as error:
        raise _missing(protocol, url) from error
    except ValueError as error:
        raise UsageError(
            f"is not a URL that can be opened: {format_error(error)}", path=url
        ) from error
    except Exception as error:
        raise read_error(error, url) from error
    if is_s3(fs):
        # only `with_retries` tries again: s3fs would send a part from where it was read to
        fs.retries = 1
    return StorePath(url, fs, path)


def _options(protocol: str) -> dict[str, Any]:
    """Options of a file system: the user's, and our limits for S3."""
    if protocol not in ("s3", "s3a"):
        return {}
    from fsspec.config import conf

    ours = {
        "connect_timeout": PATIENCE,
        "read_timeout": PATIENCE,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": _CONNECTIONS,
    }
    return {"config_kwargs": ours | dict(conf.get(protocol, {}).get("config_kwargs", {}))}


def registered_filesystems() -> dict[str, str]:
    """The classes that fsspec opens protocols with here, as other processes find them."""
    registry = sys.modules.get("fsspec.registry")  # if it is not there yet, nothing was registered
    if registry is None:
        return {}
    found = {name: str(each["class"]) for name, each in registry.known_implementations.items()}
    for name, each in registry.registry.items():
        if each.__module__ != "__main__":  # which others cannot import
            found[name] = f"{each.__module__}.{each.__qualname__}"
    return found


def register_filesystems(given: Mapping[str, str]) -> None:
    """Register what `registered_filesystems` gave in another process, where it is not known."""
    if given:
        from fsspec.registry import known_implementations, register_implementation

        for name, path in given.items():
            if known_implementations.get(name, {}).get("class") != path:
                register_implementation(name, path, clobber=True)


def is_s3(fs: Any) -> bool:
    """Whether this is s3fs."""
    return "s3" in protocols_of(fs) and hasattr(fs, "_call_s3")


def is_web(fs: Any) -> bool:
    """Whether this is what fsspec has for HTTP."""
    return "http" in protocols_of(fs) and hasattr(fs, "encode_url")


def protocols_of(fs: Any) -> set[str]:
    """The protocols that URLs of a store begin with."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _missing(protocol: str, url: str) -> UsageError:
    extra = _EXTRAS.get(protocol)
    hint = f"pip install 'ckptmove[{extra}]'" if extra else "install its fsspec implementation"
    return UsageError(f"the package that opens {protocol}:// is not installed", path=url, hint=hint)


def with_retries(call: Callable[[], _T], url: str, stopped: threading.Event | None = None) -> _T:
    """Call a store; after a transient error, call it again after longer and longer pauses.

    Once `stopped` is set, it is not called again. Raises InputError.
    """
    stopped = stopped or threading.Event()
    for pause in (*_PAUSES, None):
        try:
            return call()
        except CkptmoveError:
            raise
        except Exception as error:
            why = _reason(error)
            if pause is None or not is_transient(why):
                refused = read_error(why, url)
                if pause is None:
                    refused.hint = f"ckptmove tried {len(_PAUSES) + 1} times"
                raise refused from why
            import random  # here, since little is asked twice

            if stopped.wait(pause * random.uniform(1.0, 1.5)):
                raise read_error(why, url) from why
    raise AssertionError


def _reason(error: Exception) -> Exception:
    """The cause of an error: fsspec says of every failure of the web that there is no such file."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_of_net(cause):
        return cause
    return error


def _is_of_net(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _NETWORKS


def is_transient(error: BaseException) -> bool:
    """Whether an error may be gone when it is tried again."""
    status = status_of(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, _FINAL) or type(error).__name__.startswith(_HOPELESS):
        return False
    if isinstance(error, OSError) and not _is_of_net(error):
        return error.errno not in _WRONG
    return isinstance(error, OSError) or _is_of_net(error)


def status_of(error: BaseException) -> int | None:
    """The status of HTTP that an error tells of, if it does."""
    answer = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if isinstance(answer, Mapping):  # as botocore has it
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if type(status) is int and status >= 400 else None


def read_error(error: BaseException, url: str) -> InputError:
    """The error of a store that was read, as one of ours."""
    status = status_of(error)
    strerror = getattr(error, "strerror", None)
    said = mask_secrets(strerror if strerror and type(error) is OSError else format_error(error))
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        what = "bucket" if "bucket does not exist" in said else "object"
        return Missing(f"can't be read: there is no such {what}", path=url)
    if isinstance(error, PermissionError) or status in (401, 403):
        return InputError(f"can't be read: access is denied ({said})", path=url)
    if "Credentials" in type(error).__name__:
        return InputError("can't be read: there are no credentials for it", path=url)
    return InputError(f"can't be read: {said}", path=url)


def info_of(place: StorePath) -> Mapping[str, Any]:
    """The store's entry of an object now, past all caches. Raises InputError."""

    def info() -> Mapping[str, Any]:
        place.fs.invalidate_cache()
        found: Mapping[str, Any] = place.fs.info(place.path)
        return found

    return with_retries(info, place.url)


def size_in(info: Mapping[str, Any]) -> int:
    """The size that an entry tells, or 0."""
    return max(0, int(info.get("size") or 0))


def mtime_of(info: Mapping[str, Any]) -> float:
    """When the object of an entry was last changed, in seconds since 1970; 0 if it isn't told."""
    for told in (info[key] for key in _TIMES if info.get(key) is not None):
        if isinstance(told, (int, float)):
            return float(told)
        if isinstance(told, str):
            with contextlib.suppress(ValueError):
                told = datetime.fromisoformat(told.replace("Z", "+00:00"))
        if hasattr(told, "timestamp"):
            return float(told.timestamp())
    return 0.0


def stamp_of(info: Mapping[str, Any]) -> str:
    """A text that changes if the object does, as far as its store tells."""
    telling = [f"{key}={_plain(info[key])}" for key in _TELLING if info.get(key) is not None]
    if len(telling) < 2:  # only its size
        telling += [f"{key}={_plain(info[key])}" for key in _TIMES if info.get(key) is not None]
    return " ".join(telling)


def _plain(value: Any) -> Any:
    """A value in one form, whether it comes from a listing or from a request for one object."""
    if hasattr(value, "timestamp"):
        return value.timestamp()
    return value.strip('"') if isinstance(value, str) else value
