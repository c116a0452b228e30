"""Match names against the user's globs, for `--select` and similar options.

A glob matches a name and everything below it: `optimizer` matches the whole optimizer,
`model.*.bias` all biases. `*` matches dots too. The name of a section (`model`, `optimizer`, …)
also matches that section, whatever its key is. `model` matches the section of one model only, and a
key `model` only if it holds weights. If a section is all that the checkpoint holds, selecting it
selects everything.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..errors import RefusedError
from ..manifest.manifest import Section

_GLOB = frozenset("*?[")
_SECTIONS = frozenset(each.value for each in Section)


def covers(pattern: str, name: str) -> bool:
    """Whether a glob matches a name, or a name above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def no_match(pattern: str) -> RefusedError:
    """Return the error for a glob that matches nothing."""
    return RefusedError(f"no name in it matches {pattern!r}", hint="ckptmove inspect lists names")


def is_name(pattern: str) -> bool:
    """Whether a pattern can only be an exact name, not the name of a section."""
    return pattern not in _SECTIONS and not _GLOB & {*pattern}
