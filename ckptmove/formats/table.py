"""A row of the table of formats: name, kind of container, and where the class is.

A process needs only a few of the formats: a format's class is imported only when the kind of
container fits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .base import Format
    from .probe import Probe


class FormatRow(NamedTuple):
    """A known format; its class is imported on first use."""

    name: str
    #: whether a file or folder is the kind of container that the format uses
    lies_in: Callable[[Probe], bool]
    place: str  #: module and name of the class, relative to this package
    nestable: bool = False  #: whether it may also be nested in the bytes of a pickle

    @property
    def format(self) -> Format:
        """The format."""
        return _made(self.place)

    def sniff(self, probe: Probe) -> bool:
        """Whether a file or folder has this format; raises the same errors as `Format.sniff`."""
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
    """A JSON file beside other files."""
    return probe.is_json and not probe.is_alone


def in_zip(probe: Probe) -> bool:
    """A zip file."""
    return probe.archive is not None


def in_package(probe: Probe) -> bool:
    """A zip with the list of modules that a `torch.package` does not include."""
    from .archives.zip_container import prefix_of

    archive = probe.archive
    return archive is not None and f"{prefix_of(archive)}.data/extern_modules" in archive.records


def in_tar(probe: Probe) -> bool:
    """A file that torch takes for a tar."""
    from .archives.tar_archive import starts_tar

    return starts_tar(probe.head)


def in_pickle(probe: Probe) -> bool:
    """A file that starts as the pickle of a large integer does, which torch's magic number is."""
    return not probe.is_folder and probe.head[:1] in (b"\x80", b"L")


def in_file(probe: Probe) -> bool:
    """Any file, or bytes within a file."""
    return not probe.is_folder
