"""The interface of a format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CorruptError
from ..pickles.reached_globals import names_reached
from ..torch_pickle.callables.uses import not_surely_harmless
from .checkpoint import Carries, Checkpoint

if TYPE_CHECKING:
    from ..graph.draft import CheckpointGraph
    from ..reports.convert import Loss
    from ..torch_pickle.streams import Container
    from .probe import Probe
    from .writing import WriteOptions, WritePlan


class Format(ABC):
    """A way in which checkpoints lie on disk: a file, an index with its files, or a folder."""

    name: str
    #: What its files are mostly named like.
    suffixes: tuple[str, ...] = ()
    #: Who writes it.
    summary: str
    #: What of it is refused, and why, in a few words.
    refused: str
    carries: Carries
    #: Whether what it recognizes may hold no tensors: any tar looks like a checkpoint of torch 0.1.
    vague = False
    #: Whether it is a folder whose files are parts of one checkpoint, none of them one of its own.
    in_parts = False
    #: Whether it is a folder with all in folders below it, but for checkpoints of their own.
    takes_folders = False

    @abstractmethod
    def sniff(self, probe: Probe) -> bool:
        """Whether it is of this format, by its content.

        CorruptError if it is, and would run something where it is loaded as another.
        """

    @abstractmethod
    def read(self, probe: Probe) -> Checkpoint:
        """Read everything but the tensors."""

    def files(self, probe: Probe) -> Sequence[str]:
        """The names of the files that belong to it, beside the one that was recognized."""
        return ()


def runs_nothing(probe: Probe) -> bool:
    """True, or CorruptError if a file that is of another format would run something if unpickled.

    `torch.load` unpickles whatever is no zip, from its first byte.
    """
    found = list(not_surely_harmless(names_reached(probe.source, probe.session.budget)))
    if found:
        raise CorruptError(
            f"if it were unpickled from its first byte, it would run {found[0]!r:.100}"
        )
    return True


class PickledFormat(Format):
    """A format of one file: it says how the file is opened, and the rest is here."""

    @abstractmethod
    def open(self, probe: Probe) -> Container:
        """Read everything but the tensors."""

    def read(self, probe: Probe) -> Checkpoint:
        return Checkpoint(self.name, self.open(probe), self.carries)


class WritableFormat(Format):
    """A format in which checkpoints can be written."""

    #: What its files are named like in a folder of a model.
    folder_stem: str
    #: Whether it can be several files.
    shards: bool
    #: Whether it has room for further text.
    annotates: bool
    #: Whether it is always a folder.
    is_folder = False
    #: Whether it is divided among as many ranks as one likes.
    of_ranks = False
    #: What it may have around what a rank has of a tensor, which makes no result too large.
    item_nbytes = 0

    @abstractmethod
    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """What of a draft has no place in it."""

    @abstractmethod
    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """How to write a draft."""


def bytes_behind(nbytes: int, what: str) -> str:
    """The warning that bytes follow what a checkpoint ends with; no reader of it minds them."""
    return f"{nbytes:,} bytes follow {what}, as where two ranks wrote one file"
