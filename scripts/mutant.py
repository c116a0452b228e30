"""One fault to be planted."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: what is wrong.
        file: relative to the package.
        old, new: the text that is replaced.
        tests: files or names of the tests that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
