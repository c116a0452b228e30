"""The interface of a format, and of a checkpoint that was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ..graph.draft import CheckpointGraph
from ..manifest.manifest import Manifest
from ..placement.place import Moves
from ..plans.plan import Plan
from ..reports.data.loss import Loss
from ..sources.source import Readable, Source
from ..torch_pickle.streams import Container
from ..zips.archive import Archive
from .opening import ReadSession
from .writing import WriteOptions, WritePlan


class Carries(NamedTuple):
    """What a format can hold. What it can't is a loss, to be named before anything is written.

    Attributes:
        devices: the device of each tensor.
        aliases: tensors that share storages, and objects that are one and the same.
        strides: tensors that are not contiguous.
        objects: anything besides tensors.
        dtypes: what dtypes, in words.
    """

    devices: bool
    aliases: bool
    strides: bool
    objects: bool
    dtypes: str


class Probe(NamedTuple):
    """What a format may look at to recognize itself: the content, never the name.

    Attributes:
        source: the file, or bytes within one.
        head: its first 512 bytes.
        archive: its zip directory, if it is a zip file.
        opening: numbers the pickles that are read, and opens what is nested in them.
    """

    source: Readable
    head: bytes
    archive: Archive | None
    opening: ReadSession


class Checkpoint(Protocol):
    """A checkpoint that was read: its manifest, and the way back into the file.

    Attributes:
        format: the name of its format.
    """

    format: str

    @property
    def manifest(self) -> Manifest:
        """What it holds."""

    def draft(
        self, sources: Sequence[Source], *, nested: bool = False, program: bool = False
    ) -> CheckpointGraph:
        """What it holds, to be written in another form; it is of no use afterwards.

        Args:
            sources: the files that it was read from.
            nested: whether to look into bytes that hold checkpoints, to compare these.
            program: whether to hold all that is saved of a program, not only its tensors.
        """

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        """What is wrong with its bytes by its own checksums, a sentence each.

        Args:
            report: called with how many bytes were read since the last call.
        """

    def plan_relocate(self, moves: Moves) -> Plan:
        """How to write it with other devices."""

    def check_relocated(self, other: Checkpoint, moves: Moves) -> None:
        """Raises WriteError unless `other` is this checkpoint but for the moves."""


class Format(Protocol):
    """A way in which checkpoints lie on disk.

    Attributes:
        name: what it is called.
        suffixes: what such files are mostly named like.
        summary: who writes it.
        refused: what of it is refused, and why, in a few words.
        carries: what it can hold.
    """

    name: str
    suffixes: tuple[str, ...]
    summary: str
    refused: str
    carries: Carries

    def sniff(self, glimpse: Probe) -> bool:
        """Whether the file is of this format, by its content."""

    def read(self, glimpse: Probe) -> Checkpoint:
        """Read everything but the tensors."""


class Nestable(Format, Protocol):
    """A format that may also lie within the bytes of a pickle."""

    def open(self, glimpse: Probe) -> Container:
        """Read everything but the tensors."""


class WritableFormat(Format, Protocol):
    """A format in which checkpoints can be written.

    Attributes:
        folder_stem: what its files are named like in a folder of a model.
        shards: whether it can be several files.
        annotates: whether it has room for further text.
    """

    folder_stem: str
    shards: bool
    annotates: bool

    def losses(self, draft: CheckpointGraph, manner: WriteOptions) -> list[Loss]:
        """What of a draft has no place in it."""

    def plan_write(self, draft: CheckpointGraph, manner: WriteOptions) -> WritePlan:
        """How to write a draft."""
