"""Tell URLs from paths, and split and join the names in them."""

from __future__ import annotations

import os
import re

from ..errors import StrPath

_PROTOCOL = r"[A-Za-z][A-Za-z0-9+.-]+"  # two letters at least: one is a drive of Windows
_URL = re.compile(rf"(?:{_PROTOCOL}::)*{_PROTOCOL}://")
_WEB = re.compile(r"https?://", re.IGNORECASE)
#: What in a URL lets whoever has it in.
_USER = re.compile(r"(://)[^/?#\s@]*:[^/?#\s]*@")
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId"
    r"|GoogleAccessId|sig|token|access_token|key|api_key|password)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


def is_url(path: StrPath) -> bool:
    """Whether this names something in a store, as `s3://bucket/run.pt` does, and no path here."""
    return isinstance(path, str) and _URL.match(path) is not None


def looks_like_url(path: StrPath) -> bool:
    """Whether a path was a URL once, before `pathlib` made `s3:/bucket` of it."""
    return re.match(rf"{_PROTOCOL}:/", os.fspath(path)) is not None


def joined(folder: StrPath, name: str) -> str:
    """What has a name in a folder."""
    if is_url(folder):
        from urllib.parse import quote  # here and below, since most paths are no URLs

        quoted = quote(name) if _WEB.match(str(folder)) else name
        return f"{str(folder).rstrip('/')}/{quoted}"
    return os.path.join(os.fspath(folder), name)


def folder_of(path: StrPath) -> str:
    """The folder that a file is in, without a slash at its end."""
    if is_url(path):
        return _bare(str(path)).rstrip("/").rpartition("/")[0]
    return os.path.dirname(os.fspath(path))


def name_of(path: StrPath) -> str:
    """The last part of a path or a URL."""
    if is_url(path):
        name = _bare(str(path)).rstrip("/").rpartition("/")[2]
        from urllib.parse import unquote

        return unquote(name) if _WEB.match(str(path)) else name
    return os.path.basename(os.fspath(path).rstrip("/"))


def _bare(url: str) -> str:
    """A URL of the web without what follows its path."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if _WEB.match(url) else url


def masked(text: str) -> str:
    """A text to be shown, without what is secret of the URLs in it."""
    return _SIGNED.sub(r"\1***", _USER.sub(r"\1***@", text))
