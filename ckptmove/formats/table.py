"""A row of the table of formats: its name, what it lies in, and where its class is.

Most formats are never met by a process: a class is imported when something may be of its format, as
far as the kind of container shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .base import Format
    from .probe import Probe


class Row(NamedTuple):
    """A format that is known; its class is imported when it is asked for."""

    name: str
    lies_in: Callable[[Probe], bool]  #: whether a container is of the kind that the format is in
    place: str  #: of the class: its module, from this room, and its name
    nestable: bool = False  #: whether it may also lie within the bytes of a pickle

    @property
    def format(self) -> Format:
        """The format."""
        return _made(self.place)

    def sniff(self, probe: Probe) -> bool:
        """Whether something is of this format; raises as `Format.sniff`."""
        return self.lies_in(probe) and self.format.sniff(probe)


@cache
def _made(place: str) -> Format:
    module, _, name = place.rpartition(".")
    made: Format = getattr(import_module(module, __package__), name)()
    return made


def in_folder(probe: Probe) -> bool:
    """Any folder."""
    return probe.is_folder


def in_index(probe: Probe) -> bool:
    """JSON beside other files."""
    return probe.is_json and not probe.is_alone


def in_zip(probe: Probe) -> bool:
    """A zip file."""
    return probe.archive is not None


def in_tar(probe: Probe) -> bool:
    """A file that torch takes for a tar."""
    from .archives.tar_archive import starts_tar

    return starts_tar(probe.head)


def in_file(probe: Probe) -> bool:
    """Any file, or bytes within one."""
    return not probe.is_folder
