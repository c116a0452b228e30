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

from ..display.phrases import format_error
from ..errors import CkptmoveError, InputError, UsageError
from .place import mask_secrets

_T = TypeVar("_T")
_PAUSES = (0.2, 0.6, 1.8, 5.4)  # seconds before each retry, plus up to half of that
#: Time limit in seconds for a connection, and for the next bytes of an answer.
PATIENCE = 30.0
_CONNECTIONS = 32  # concurrent requests: S3 takes hundreds; the default of botocore is ten
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
#: Numbers of OSErrors that mean a wrong request or a wrong address.
_WRONG = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG, errno.EMSGSIZE} | {
    getattr(errno, "EREMCHG", errno.EINVAL)
}
#: Packages whose exceptions are network errors; from others, only OSErrors are retried.
_NETWORKS = {
    *("aiohttp", "aiobotocore", "botocore", "requests", "urllib3", "httpx", "httpcore"),
    *("asyncio", "fsspec"),
}
#: Names of their exceptions that no retry will fix.
_HOPELESS = (
    *("NoCredentials", "PartialCredentials", "ProfileNotFound", "InvalidURL", "ParamValid"),
    *("ClientConnectorCertificate", "ClientConnectorSSL", "SSLError"),
)
_BUSY = {408, 425, 429}
#: The extra of ckptmove to install for each protocol.
_EXTRAS = {
    **{"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"},
    **{"hf": "hf", "az": "azure", "abfs": "azure", "abfss": "azure"},
}
#: Keys of an entry that change with the content of an object, and that listings have too.
_TELLING = (
    *("size", "ETag", "etag", "generation", "md5Hash", "blob_id"),
    *("content_md5", "Content-MD5"),
)
_TIMES = (
    *("LastModified", "Last-Modified", "last_modified", "last_commit"),
    *("updated", "mtime", "created"),
)


class Missing(InputError):
    """Raised if the object, or its bucket, does not exist."""


class StorePath(NamedTuple):
    """The file system and the path of a URL."""

    url: str  #: as it was given
    fs: Any  #: an fsspec file system
    path: str  #: the path in that file system


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
        # only `with_retries` retries: s3fs would send a part from where it was read to
        fs.retries = 1
        if getattr(fs, "session", True) is None:  # it is not connected yet
            from .s3_session import concise_session  # imported only for S3

            fs.session = concise_session(fs.kwargs)
    return StorePath(url, fs, path)


def _options(protocol: str) -> dict[str, Any]:
    """Return the options of a file system: the user's, and our limits for S3."""
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


def reached_only_here(url: str) -> str:
    """Return why other processes can't open what a URL names; empty if they can."""
    protocol = url.partition(":")[0]
    if protocol == "memory":
        return "other processes cannot read memory: URLs"
    registry = sys.modules.get("fsspec.registry")  # else nothing was registered
    found = None if registry is None else registry.registry.get(protocol)
    if found is None or found.__module__ != "__main__":
        return ""
    return f"other processes cannot import {found.__name__} from your script"


def registered_filesystems() -> dict[str, str]:
    """Return fsspec's registered classes by protocol, in a form for other processes."""
    registry = sys.modules.get("fsspec.registry")  # else nothing was registered
    if registry is None:
        return {}
    found = {name: str(each["class"]) for name, each in registry.known_implementations.items()}
    for name, each in registry.registry.items():
        if each.__module__ != "__main__":  # `reached_only_here` says so
            found[name] = f"{each.__module__}.{each.__qualname__}"
    return found


def register_filesystems(given: Mapping[str, str]) -> None:
    """Register the result of `registered_filesystems` of another process."""
    if given:
        from fsspec.registry import known_implementations, register_implementation

        for name, path in given.items():
            if known_implementations.get(name, {}).get("class") != path:
                register_implementation(name, path, clobber=True)


def is_s3(fs: Any) -> bool:
    """Whether a file system is s3fs."""
    return "s3" in protocols_of(fs) and hasattr(fs, "_call_s3")


def is_web(fs: Any) -> bool:
    """Whether a file system is fsspec's HTTP."""
    return "http" in protocols_of(fs) and hasattr(fs, "encode_url")


def protocols_of(fs: Any) -> set[str]:
    """Return the protocols of a store's URLs."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _missing(protocol: str, url: str) -> UsageError:
    extra = _EXTRAS.get(protocol)
    hint = f"pip install 'ckptmove[{extra}]'" if extra else "install its fsspec implementation"
    return UsageError(f"the package that opens {protocol}:// is not installed", path=url, hint=hint)


def with_retries(call: Callable[[], _T], url: str, stopped: threading.Event | None = None) -> _T:
    """Call a store; after a transient error, retry with growing pauses.

    After `stopped` is set, it is not retried. Raises InputError.
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
            import random  # imported only here: retries are rare

            if stopped.wait(pause * random.uniform(1.0, 1.5)):
                raise read_error(why, url) from why
    raise AssertionError


def _reason(error: Exception) -> Exception:
    """Return the cause of an error: fsspec's HTTP reports every failure as a missing file."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_of_net(cause):
        return cause
    return error


def _is_of_net(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _NETWORKS


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed after an error."""
    status = status_of(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, _FINAL) or type(error).__name__.startswith(_HOPELESS):
        return False
    if isinstance(error, OSError) and not _is_of_net(error):
        return error.errno not in _WRONG
    return isinstance(error, OSError) or _is_of_net(error)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if it has one."""
    answer = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if isinstance(answer, Mapping):  # as in botocore
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if type(status) is int and status >= 400 else None


def read_error(error: BaseException, url: str) -> InputError:
    """Convert an error of a store while reading into one of ours."""
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
    """Return the store's present entry of an object, without caches. Raises InputError."""

    def info() -> Mapping[str, Any]:
        place.fs.invalidate_cache()
        found: Mapping[str, Any] = place.fs.info(place.path)
        return found

    return with_retries(info, place.url)


def size_in(info: Mapping[str, Any]) -> int:
    """Return the size in an entry, or 0."""
    return max(0, int(info.get("size") or 0))


def mtime_of(info: Mapping[str, Any]) -> float:
    """Return when an entry's object was last changed, in seconds since 1970; 0 if unknown."""
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
    """Return a text that changes if the object does, as far as its store tells."""
    telling = [f"{key}={_plain(info[key])}" for key in _TELLING if info.get(key) is not None]
    if len(telling) < 2:  # only the size is known
        telling += [f"{key}={_plain(info[key])}" for key in _TIMES if info.get(key) is not None]
    return " ".join(telling)


def _plain(value: Any) -> Any:
    """Return a value in one form, from a listing or from a request for one object."""
    if hasattr(value, "timestamp"):
        return value.timestamp()
    return value.strip('"') if isinstance(value, str) else value
