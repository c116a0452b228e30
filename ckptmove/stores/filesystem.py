"""The stores that URLs name, opened by fsspec: asked again when they falter, understood when they
refuse.

Credentials and endpoints are those that fsspec and its implementations find for themselves:
environment, `~/.aws`, `~/.config/fsspec`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import CkptmoveError, InputError, UsageError
from ..words import told

_T = TypeVar("_T")
_PAUSES = (0.2, 0.6, 1.8)  # seconds before it is asked again, or up to half as much more
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
#: Where exceptions that tell of a network come from; of all else, only OSErrors are tried again.
_NETWORKS = {"aiohttp", "aiobotocore", "botocore", "requests", "urllib3", "httpx", "httpcore"}
#: Of these, what no second try will mend.
_HOPELESS = ("NoCredentials", "PartialCredentials", "ProfileNotFound", "InvalidURL", "ParamValid")
_BUSY = {408, 425, 429}
#: What is to be installed for a protocol, as an extra of ours.
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "http": "http",
    "https": "http",
    "hf": "hf",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
#: What of an entry changes with the content of an object, in one store or another, and is told by
#: listings too.
_TELLING = ("size", "ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")


class Place(NamedTuple):
    """Where a URL leads.

    Attributes:
        url: as it was given.
        fs: an fsspec file system.
        path: as that has it.
    """

    url: str
    fs: Any
    path: str


def place_of(url: str) -> Place:
    """Open the store that a URL names.

    Raises:
        UsageError: nothing knows such URLs, or what does isn't installed.
        InputError: it can't be reached.
    """
    protocol = url.partition(":")[0].lower()
    if protocol in ("file", "local"):
        raise UsageError("names a file here", path=url, hint="write its path, without file://")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _missing(protocol, url) from error
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise _missing(protocol, url) from error
    except ValueError as error:
        raise UsageError(f"is no URL that can be opened: {told(error)}", path=url) from error
    except Exception as error:
        raise refusal(error, url) from error
    return Place(url, fs, path)


def _missing(protocol: str, url: str) -> UsageError:
    extra = _EXTRAS.get(protocol)
    hint = f"pip install 'ckptmove[{extra}]'" if extra else "install its fsspec implementation"
    return UsageError(f"what opens {protocol}:// isn't installed", path=url, hint=hint)


def asked(
    call: Callable[[], _T],
    url: str,
    said: Callable[[BaseException, str], CkptmoveError] | None = None,
) -> _T:
    """What a store answers; where it falters, it is asked again, at longer and longer intervals.

    Args:
        call: asks it.
        url: what it is asked about.
        said: makes an error of ours of what it says; `refusal` unless told otherwise.

    Raises:
        InputError: it refuses, or falters still.
    """
    for pause in (*_PAUSES, None):
        try:
            return call()
        except CkptmoveError:
            raise
        except Exception as error:
            if pause is None or not is_passing(error):
                raise (said or refusal)(error, url) from error
            time.sleep(pause * random.uniform(1.0, 1.5))
    raise AssertionError


def is_passing(error: BaseException) -> bool:
    """Whether an error may be gone when it is tried again."""
    status = _status(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, _FINAL) or type(error).__name__.startswith(_HOPELESS):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORKS


def _status(error: BaseException) -> int | None:
    """The status of HTTP that an error tells of."""
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None
    )
    return status if type(status) is int and status >= 400 else None


def refusal(error: BaseException, url: str) -> InputError:
    """What a store said, as an error of ours."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return InputError("can't be read: there is no such object", path=url)
    if isinstance(error, PermissionError) or status in (401, 403):
        return InputError(f"can't be read: access is denied ({told(error)})", path=url)
    if "Credentials" in type(error).__name__:
        return InputError("can't be read: there are no credentials for it", path=url)
    return InputError(f"can't be read: {told(error)}", path=url)


def info_of(place: Place) -> Mapping[str, Any]:
    """What the store says of an object now, past all caches.

    Raises:
        InputError: there is no such object, or it can't be told.
    """

    def info() -> Mapping[str, Any]:
        place.fs.invalidate_cache()
        found: Mapping[str, Any] = place.fs.info(place.path)
        return found

    return asked(info, place.url)


def stamp_of(info: Mapping[str, Any]) -> str:
    """A text that changes if the object does, as far as its store tells."""
    telling = [f"{key}={_plain(info[key])}" for key in _TELLING if info.get(key) is not None]
    if len(telling) < 2:  # only its size
        telling += [f"{key}={_plain(info[key])}" for key in _TIMES if info.get(key) is not None]
    return " ".join(telling)


def _plain(value: Any) -> Any:
    """The same, whether it was listed or asked for by itself."""
    if hasattr(value, "timestamp"):
        return value.timestamp()
    return value.strip('"') if isinstance(value, str) else value
