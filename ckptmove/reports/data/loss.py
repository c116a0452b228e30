"""A loss: something that the target format cannot store. Plain data."""

from __future__ import annotations

from typing import NamedTuple


class Loss(NamedTuple):
    """Something that the target format cannot store.

    Attributes:
        name: where it is; `--drop` matches this name.
        why: what it is, and why it cannot be stored.
    """

    name: str
    why: str
