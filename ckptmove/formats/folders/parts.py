"""Several files that form one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import Role, Section, TensorEntry
from ...manifest.other_records import Chunk
from ...manifest.paths import Path
from ...plans.plan import Plan
from ...sources.source import Readable
from ...torch_pickle.streams import Container, LocationEdits

#: What to do if the files of some ranks are missing.
ALL_RANKS = "copy the files of all ranks into one folder"


class IncompleteError(CorruptError):
    """A file of a checkpoint is missing, or shorter than another file says."""


class PartsContainer(Container):
    """The containers of several files; its creator fills `roots` with the contents of the files."""

    def __init__(self, source: Readable, parts: Mapping[str, Container]) -> None:
        """`source` is their index or folder.

        The keys of `parts` are file names: see `number_files`.
        """
        super().__init__(source)
        self.parts = parts
        #: path of a root → the section that the name of its file gives
        self.sections: dict[Path, Section] = {}
        #: the roots of files that store no devices
        self.untagged: set[Path] = set()

    def section_at(self, path: Path) -> Section:
        return self.sections.get(path, self.section)

    def role_at(self, path: Path) -> Role | None:
        return Role.UNTAGGED if path in self.untagged else None

    @property
    def nbytes(self) -> int:
        """The size of all files together."""
        return self.source.nbytes + sum(part.nbytes for part in self.parts.values())

    @property
    def described_nbytes(self) -> int:
        """The size of the index."""
        return self.source.nbytes

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        found = dict[str, str]()
        for part in self.parts.values():
            found |= part.divisions(tensors)
        return found

    def chunks(self, tensors: Sequence[TensorEntry]) -> Iterator[Chunk]:
        for part in self.parts.values():
            yield from part.chunks(tensors)

    def everything(self) -> Iterator[Container]:
        """This container and all containers in its files, at any depth."""
        yield self
        for part in self.parts.values():
            yield from part.everything()

    def inner(self) -> Iterator[tuple[str, Container]]:
        return iter(self.parts.items())

    def plan(self, spelling: LocationEdits) -> Plan:
        raise UnsupportedError("consists of several files", hint="relocate each file separately")


def number_files(part: Container, first: int) -> None:
    """Renumber the file of each storage of a part.

    `first` is the number of the part's first file.
    """
    for each in part.everything():
        for key, storage in each.storages.items():
            if storage.extent is not None:
                extent = storage.extent._replace(source=first + storage.extent.source)
                each.storages[key] = storage._replace(extent=extent)
