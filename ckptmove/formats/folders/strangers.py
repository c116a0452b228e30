"""Folders that are no checkpoints of ours: what they are, and what to do with them."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...errors import UnsupportedError
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..probe import Probe


class Stranger(NamedTuple):
    """A kind of folder that is not read."""

    pattern: str  #: matches the name of something in it
    what: str
    hint: str | None = None  #: what to do then; `DIR` is the folder
    #: whether its files are parts of one checkpoint, none of which is a checkpoint of its own
    is_one: bool = False


_STRANGERS: tuple[Stranger, ...] = (
    Stranger(
        r"\.metadata\.tmp|.*\.distcp",
        "a checkpoint of torch.distributed.checkpoint without .metadata: its save did not finish",
        "use an earlier checkpoint, or copy .metadata from the machine that wrote it",
        is_one=True,
    ),
    Stranger(r"mp_rank_\d+_model_states\.pt", "a checkpoint of DeepSpeed"),
    Stranger(
        r"mp_rank_(?!00(_000)?$)\d+(_\d+)?",
        "a checkpoint of Megatron-LM, whose parts of each rank (mp_rank_01) are not merged",
        is_one=True,
    ),
    Stranger(
        r"latest_checkpointed_iteration\.txt",
        "a run of Megatron-LM or verl",
        "give a checkpoint in it: a folder iter_… or global_step_…",
    ),
    Stranger(r"mp_rank_\d+.*", "a checkpoint of Megatron-LM"),
    Stranger(r"\.snapshot_metadata", "a snapshot of torchsnapshot", is_one=True),
    Stranger(r"_CHECKPOINT_METADATA|_METADATA", "a checkpoint of Orbax", is_one=True),
    Stranger(r"saved_model\.pb", "a SavedModel of TensorFlow"),
    Stranger(
        "snapshots", "a repository in the cache of the Hub", "name a folder within snapshots/"
    ),
    Stranger(
        r"data\.pkl",
        "an unpacked checkpoint of torch.save",
        "zip it again without compression",
    ),
)


def stranger_of(probe: Probe) -> Stranger | None:
    """What a folder is by the names in it, if it is of a kind that is not read."""
    for each in _STRANGERS:
        if any(re.fullmatch(each.pattern, name) for name in probe.entries):
            return each
    return None


def refuse_stranger(probe: Probe) -> None:
    """Raise UnsupportedError if a folder is of a kind that is not read."""
    found = stranger_of(probe)
    if found is not None:
        hint = found.hint and found.hint.replace("DIR", probe.path)
        raise UnsupportedError(f"is a directory: {found.what}", path=probe.path, hint=hint)


class StrangeFolder(Format):
    """A folder whose files are parts of one checkpoint that is not read.

    In a tree it is one item, which is refused: none of its files is taken for a checkpoint.
    """

    name = "strange-folder"
    summary = "frameworks whose checkpoints are not read"
    refused = "all of it"
    carries = Carries(False, False, False, False, dtypes="none")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        found = stranger_of(probe) if probe.is_folder else None
        return found is not None and found.is_one

    def read(self, probe: Probe) -> Checkpoint:
        refuse_stranger(probe)
        raise UnsupportedError("is a directory that changed while it was read", path=probe.path)
