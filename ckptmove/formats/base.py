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
    """A way to store checkpoints on disk: a file, an index with its files, or a folder."""

    name: str
    #: The usual suffixes of its files.
    suffixes: tuple[str, ...] = ()
    #: Which programs write it.
    summary: str
    #: What ckptmove refuses in this format, and why, in a few words.
    refused: str
    carries: Carries
    #: Whether a file of this format may hold no tensors: any tar looks like a torch 0.1 checkpoint.
    vague = False
    #: Whether it is a folder whose files are parts of one checkpoint, and not separate checkpoints.
    in_parts = False
    #: Whether subfolders belong to it, except those that are separate checkpoints.
    takes_folders = False

    @abstractmethod
    def sniff(self, probe: Probe) -> bool:
        """Whether a file or folder has this format, judged by its content.

        CorruptError if it does, but would run something if it were loaded as another format.
        """

    @abstractmethod
    def read(self, probe: Probe) -> Checkpoint:
        """Read everything but the tensors."""

    def files(self, probe: Probe) -> Sequence[str]:
        """The names of the files that belong to it, besides the recognized one."""
        return ()


def runs_nothing(probe: Probe) -> bool:
    """True; CorruptError if unpickling a file of another format would run something.

    `torch.load` unpickles every file that is not a zip, from its first byte.
    """
    found = list(not_surely_harmless(names_reached(probe.source, probe.session.budget)))
    if found:
        raise CorruptError(
            f"if it were unpickled from its first byte, it would run {found[0]!r:.100}"
        )
    return True


class PickledFormat(Format):
    """A format of one file: a subclass only says how the file is opened."""

    @abstractmethod
    def open(self, probe: Probe) -> Container:
        """Read everything but the tensors."""

    def read(self, probe: Probe) -> Checkpoint:
        return Checkpoint(self.name, self.open(probe), self.carries)


class WritableFormat(Format):
    """A format in which checkpoints can be written."""

    #: The usual name, without suffix, of its files in the folder of a model.
    folder_stem: str
    #: Whether one checkpoint can be divided into several files.
    shards: bool
    #: Whether it can store additional metadata strings.
    annotates: bool
    #: Whether the written checkpoint is always a folder.
    is_folder = False
    #: Whether the user chooses among how many ranks it is divided.
    of_ranks = False
    #: The most bytes that the format adds around a rank's part of a tensor; the limit of the total
    #: size allows for them.
    item_nbytes = 0

    @abstractmethod
    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """The parts of a draft that this format cannot store."""

    @abstractmethod
    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """How to write a draft."""


def bytes_behind(nbytes: int, what: str) -> str:
    """The warning that bytes follow the end of a checkpoint; no loader objects to them."""
    return f"{nbytes:,} bytes follow {what}, as where two ranks wrote one file"
