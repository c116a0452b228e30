"""TODO."""

from __future__ import annotations

from typing import NamedTuple


class Loss(NamedTuple):
    """What the target can't carry.

    Attributes:
        name: where it is, as `--drop` takes it.
        why: what it is, and why it can't be carried.
    """

    name: str
    why: str
