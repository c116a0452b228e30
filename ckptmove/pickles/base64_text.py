"""Find pickles that a JSON text holds as base64, as stable-baselines3 writes them.

    "policy_class": {":type:": "<class 'abc.ABCMeta'>", ":serialized:": "gAWVOwAAAAAAAACM…"}

What is under `:serialized:` is given to `cloudpickle.loads` when the agent is loaded. Other texts
count where they begin as all pickles since protocol 2 do.
Source: stable_baselines3/common/save_util.py (`json_to_data`).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator

from ..errors import UnsupportedError
from ..sources.source import MAX_NBYTES, Readable

_CHUNK = 4096  # bytes that are searched at once for the first that is not white space
_SPACE = b" \t\n\r"  # JSON may start with these
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
_KEY = ":serialized:"
_LIKE_PICKLE = re.compile(r"gA[I-X]")  # base64 of PROTO and a number from 2 to 5


def pickles_in(source: Readable) -> Iterator[bytes]:
    """The pickles that a JSON text keeps as base64; none if it is not a JSON object or list.

    The text is not parsed into a tree, because it may be designed to take much memory.
    """
    if not _is_json_like(source):
        return
    if source.nbytes > MAX_NBYTES:
        raise UnsupportedError(f"a JSON text within it is longer than {MAX_NBYTES:,} bytes")
    key = ""
    for found in _STRING.finditer(source.read(0, source.nbytes)):
        value = _plain(found[1].decode("utf-8", "replace"))
        if found[2] is not None:
            key = value
        elif key == _KEY or _LIKE_PICKLE.match(value):
            content = _decoded(value)
            if content:
                yield content


def _is_json_like(source: Readable) -> bool:
    """Whether a text begins like a JSON object or list, after any amount of white space."""
    for at in range(0, source.nbytes, _CHUNK):
        start = source.read(at, min(_CHUNK, source.nbytes - at)).lstrip(_SPACE)
        if start:
            return start[:1] in (b"{", b"[")
    return False


def _plain(text: str) -> str:
    """A JSON string without its escapes."""
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii", "ignore"))
    except binascii.Error:
        return b""
