"""Strings in a pickle that may name a device.

A device tag is the string that torch writes as the location of a storage. The grammar is that of
torch's own readers (torch/serialization.py, `register_package`): `cpu` and `meta` have no index,
`mps` is written without one, the others are written with one.
"""

from __future__ import annotations

import re
from functools import lru_cache

#: Types of devices whose tags have no index.
PLAIN = ("cpu", "mps", "meta")
#: Types of devices whose tags may have one.
INDEXED = ("cuda", "xpu", "hpu", "mtia", "privateuseone")
#: Names that out-of-tree backends give `privateuseone`; their tags need that backend to load.
RENAMED = ("npu", "mlu", "musa", "gcu", "sdaa", "maca", "supa", "rbln", "tpu", "vacc", "openreg")
#: What a tag looks like: a type, and maybe an index.
TAG = re.compile(r"([a-z][a-z0-9_]*)(?::(0|[1-9][0-9]*))?")

_NAMES = frozenset((*PLAIN, *INDEXED, *RENAMED, "xla"))
_LONGEST_TAG = 64  # characters; no location of a storage is as long
_MOST_KNOWN = 1 << 10  # cached strings


def names_device(text: str) -> bool:
    """Whether a string of user data spells a device. `meta` alone is too common a word."""
    if len(text) > 20 or text == "meta":
        return False
    match = TAG.fullmatch(text)
    return match is not None and match[1] in _NAMES


def may_be_tag(text: str) -> bool:
    """Whether a string in a pickle may be the location of a storage, or name a device."""
    if len(text) > _LONGEST_TAG or not (":" in text or text in _NAMES):
        return False
    return _is_like_a_tag(text)


@lru_cache(_MOST_KNOWN)
def _is_like_a_tag(text: str) -> bool:
    match = TAG.fullmatch(text)
    return match is not None and (match[2] is not None or text == "meta" or names_device(text))
