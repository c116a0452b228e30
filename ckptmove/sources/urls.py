"""Tell URLs from paths, and hide the secrets in them."""

from __future__ import annotations

import os
import re

from ..errors import StrPath

_PROTOCOL = r"[A-Za-z][A-Za-z0-9+.-]+"  # two letters at least: one is a drive of Windows
_URL = re.compile(rf"(?:{_PROTOCOL}::)*{_PROTOCOL}://")
WEB = re.compile(r"https?://", re.IGNORECASE)
#: What in a URL lets whoever has it in.
_USER = re.compile(r"(://)[^/?#\s@]*:[^/?#\s]*@")
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId"
    r"|GoogleAccessId|sig|token|access_token|key|api_key|password)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


def is_url(path: StrPath) -> bool:
    """Whether this names an object in a store, as `s3://bucket/run.pt` does, not a path here."""
    return isinstance(path, str) and _URL.match(path) is not None


def looks_like_url(path: StrPath) -> bool:
    """Whether a path was a URL once, before `pathlib` made `s3:/bucket` of it."""
    return re.match(rf"{_PROTOCOL}:/", os.fspath(path)) is not None


def mask_secrets(text: str) -> str:
    """The text with secrets in URLs (passwords, signatures, tokens) replaced by `***`."""
    return _SIGNED.sub(r"\1***", _USER.sub(r"\1***@", text))
