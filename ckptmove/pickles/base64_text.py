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

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
_KEY = ":serialized:"
_LIKE_PICKLE = re.compile(r"gA[I-X]")  # base64 of PROTO and a number from 2 to 5


def is_json_like(head: bytes) -> bool:
    """Whether a text begins like a JSON object or list."""
    return head.lstrip()[:1] in (b"{", b"[")


def pickles_in(text: bytes) -> Iterator[bytes]:
    """The pickles that a JSON text keeps as base64.

    No tree is made of the text: it may be written to take much memory.
    """
    key = ""
    for found in _STRING.finditer(text.decode("utf-8", "replace")):
        value = _plain(found[1])
        if found[2] is not None:
            key = value
        elif key == _KEY or _LIKE_PICKLE.match(value):
            content = _decoded(value)
            if content:
                yield content


def _plain(text: str) -> str:
    """A string of JSON without its escapes."""
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
