"""Translate names of Python 2 modules, which pickles of protocols 0 to 2 still use.

The tables are those of `Lib/_compat_pickle.py`. They map in both directions, but not one to one.
"""

from __future__ import annotations

from _compat_pickle import (
    IMPORT_MAPPING,
    NAME_MAPPING,
    REVERSE_IMPORT_MAPPING,
    REVERSE_NAME_MAPPING,
)

from ...errors import UnsupportedError


def from_python2(module: str, name: str) -> tuple[str, str]:
    """The current module and name that a pickle of protocol 0 to 2 means."""
    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def to_python2(module: str, name: str) -> tuple[str, str]:
    """The module and name to write in a pickle of protocol 0 to 2 for this module and name.

    UnsupportedError if everything that could be written would be read as another name.
    """
    for written in (
        REVERSE_NAME_MAPPING.get((module, name)),
        (REVERSE_IMPORT_MAPPING.get(module, module), name),
        (module, name),
    ):
        if written is not None and from_python2(*written) == (module, name):
            return written
    raise UnsupportedError(f"a pickle of protocol 2 can't name {f'{module}.{name}'!r:.200}")
