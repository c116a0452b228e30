"""What several files hold, as one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import Role, Section, TensorEntry
from ...manifest.other_records import Chunk
from ...manifest.paths import Path
from ...plans.plan import Plan
from ...sources.source import Readable
from ...torch_pickle.streams import Container, LocationEdits


class IncompleteError(CorruptError):
    """One of the files of a checkpoint is missing, or shorter than another says."""


class PartsContainer(Container):
    """Containers of several files; whoever makes it fills `roots` with what theirs hold."""

    def __init__(self, source: Readable, parts: Mapping[str, Container]) -> None:
        """`source` is their index or folder; `parts` go by file names: see `number_files`."""
        super().__init__(source)
        self.parts = parts
        #: the sections of roots, by their paths, where a name of a file tells them
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
        """The length of the index."""
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
        """Itself, and what is in the files, however deep."""
        yield self
        for part in self.parts.values():
            yield from part.everything()

    def inner(self) -> Iterator[tuple[str, Container]]:
        return iter(self.parts.items())

    def plan(self, spelling: LocationEdits) -> Plan:
        raise UnsupportedError("consists of several files", hint="relocate each file separately")


def number_files(part: Container, first: int) -> None:
    """Say of each storage of a part in which file of all it lies; `first` is the part's first."""
    for each in part.everything():
        for key, storage in each.storages.items():
            if storage.extent is not None:
                extent = storage.extent._replace(source=first + storage.extent.source)
                each.storages[key] = storage._replace(extent=extent)
