"""model-folder: a folder with the weights of a model, found by the file names that libraries use.

    model.safetensors                 transformers, accelerate, huggingface_hub
    model.safetensors.index.json      … with the files that it names
    pytorch_model.bin, pytorch_model.bin.index.json      the same, before safetensors
    diffusion_pytorch_model.*         diffusers
    adapter_model.*                   peft

If there are several, the first in this order is read, like by transformers; the others are assumed
to be copies of the same weights. A folder without any of these is read if exactly one file in it
has the suffix of a checkpoint. Folders with other layouts are refused (`unread_formats`).

Source: transformers/modeling_utils.py (`_get_resolved_checkpoint_files`), utils/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import InputError, UnsupportedError
from ...sources import place_of
from ...sources.place import EntryKind, folders_above
from ..base import Format
from ..checkpoint import Carries, Checkpoint, Folder
from ..distributed.rank_groups import SHARD, divided_folders
from ..probe import Probe
from ..safetensors.header import LONGEST
from ..unread_formats import refuse_unread_folder
from .run_folders import LIKE_CHECKPOINTS, own_folders, own_folders_in, several_checkpoints
from .sharded import file_names, unnamed_shards
from .training_folder import TrainingFolder, holds_only, read_folder, unusual_checkpoints
from .weight_names import (
    FAMILIES,
    INDEX,
    INDEXES,
    NOT_COMPARED,
    SHARDED,
    WHOLE,
    shard_name,
    whole_of,
)

_WANTED = [each for family in FAMILIES for whole in family for each in (whole, whole + INDEX)]
#: Files that DeepSpeed writes; without ZeRO, one such file holds everything.
_ZERO = re.compile(r"(global_step\d+/)?\w*mp_rank_\d+_(model|optim)_states\.pt(\.safetensors)?")
_LIKE_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
#: The suffix of the files of torch.distributed.checkpoint.
_OF_DCP = ".distcp"
#: The file of training arguments that a Trainer saves beside the weights.
_ARGUMENTS = "training_args.bin"
_BESIDE = (_ARGUMENTS, "optimizer.", "optimizer_", "scheduler.", "rng_state", "scaler.")


class ModelFolder(Format):
    """The format of a folder in which weights have a usual name."""

    name = "model-folder"
    summary = "transformers, diffusers, peft, accelerate, huggingface_hub (`save_pretrained`)"
    refused = "links that lead out of it"
    carries = Carries(True, True, True, True, dtypes="those of its weights")

    def sniff(self, probe: Probe) -> bool:
        """Whether it has weights with a usual name."""
        return probe.is_folder and _usual(probe) is not None

    def read(self, probe: Probe) -> Checkpoint:
        """Read the weights."""
        found = _usual(probe)
        assert found is not None
        return _read(probe, found)


class OnlyFile(ModelFolder):
    """The last resort: a folder whose files may hold weights under any name."""

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a folder."""
        return probe.is_folder

    def read(self, probe: Probe) -> Checkpoint:
        zero0 = [name for name in _names_below(probe) if _ZERO.fullmatch(name)]
        unusual = _unusual(probe)
        found = zero0 if _is_all_of_deepspeed(zero0) else _may_hold_weights(probe, unusual)
        if len(found) == 1 and not unusual and not divided_folders(_names_below(probe)):
            checkpoint = _read(probe, found[0])
            if checkpoint.class_of_parts is not None:
                from ..distributed.part_of_rank import check_has_all_parts

                check_has_all_parts([checkpoint.container])
            return checkpoint
        return read_folder(probe, TrainingFolder())


def _unusual(probe: Probe) -> list[str]:
    """Like `unusual_checkpoints`; empty for a folder that is too large or unreadable."""
    try:
        return unusual_checkpoints(probe)
    except InputError:
        return []


def _names_below(probe: Probe) -> list[str]:
    """All names below a folder; empty for a folder that is too large or unreadable."""
    try:
        return probe.names_below()
    except InputError:
        return []


def _is_all_of_deepspeed(names: list[str]) -> bool:
    """Whether there is only one such file: it holds the model and its optimizer."""
    return len(names) == 1 and names[0].rpartition("/")[2].startswith("mp_rank_")


def _usual(probe: Probe) -> str | None:
    """The weights with a usual name, or their index."""
    names = set(_files(probe))
    return next((name for name in _WANTED if name in names), None)


def _files(probe: Probe) -> list[str]:
    return [name for name, each in probe.entries.items() if each.kind is EntryKind.FILE]


def _read(probe: Probe, found: str) -> Checkpoint:
    """Read the file that holds the weights in a folder; note other files that should hold them."""
    whole = whole_of(found)
    family = next((each for each in FAMILIES if whole in each), (whole,))
    checkpoint = probe.read(found)
    named = {found: file_names(checkpoint)}
    stray = unnamed_shards(_files(probe), lambda name: probe.content(name, LONGEST), named)
    others = [
        name
        for name in _files(probe)
        if name != found
        and whole_of(name) in family
        and name not in stray
        and not (found.endswith(INDEX) and shard_name(name) and whole_of(name) == whole)
    ]
    below = (name.rpartition("/") for name in (_names_below(probe) if whole == WHOLE else ()))
    if any(above == SHARDED and SHARD.fullmatch(own) for above, _, own in below):
        others.append(SHARDED)
    if others:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        probe.note(
            f"{found} is used as the weights; {others[0]}{more} should hold the same{NOT_COMPARED}"
        )
    stray = {name for name in stray if whole_of(name) in family}
    for name in sorted(stray):
        probe.note(f"{name} is not part of the checkpoint: no index names it")
    others += sorted(stray)
    checkpoint.folder = Folder(
        probe.path, whole.rpartition(".")[0] or whole, tuple(others), _is_all(probe, found)
    )
    return checkpoint


def checkpoints_beside(found: Checkpoint) -> list[str]:
    """Names like checkpoints beside the read weights of a folder; copies of the weights excluded.

    These are files, and folders of torch.distributed.checkpoint. The training arguments of a
    Trainer, which hold no tensors, and separate checkpoints in subfolders are left out. Raises the
    same errors as `Place.files_below`.
    """
    folder = found.folder
    if folder is None or folder.is_all:
        return list(found.left)
    start = f"{folder.path.rstrip('/')}/"
    known = {*folder.copies, *(each.path.removeprefix(start) for each in found.sources)}
    names = sorted(each.name for each in place_of(folder.path).files_below())
    apart = {*own_folders(names), *folder.copies}
    beside = [
        name
        for name in names
        if name.endswith((*LIKE_CHECKPOINTS, _OF_DCP))
        and name not in known
        and name.rpartition("/")[2] != _ARGUMENTS
        and apart.isdisjoint(folders_above(name))
    ]
    whole = ((name.rpartition("/")[0] if name.endswith(_OF_DCP) else "") or name for name in beside)
    return list(dict.fromkeys(whole))


def _is_all(probe: Probe, found: str) -> bool:
    """Whether a folder has only these weights; False if the folder is too large to tell."""
    try:
        return holds_only(probe, found)
    except InputError:
        return False


def _may_be_weights(name: str) -> bool:
    return name.endswith(_LIKE_WEIGHTS) and not name.startswith(_BESIDE)


def _may_hold_weights(probe: Probe, unusual: Sequence[str]) -> list[str]:
    """The files in a folder that may hold weights, when none has a usual name.

    UnsupportedError if the folder has no checkpoint, not even an `unusual` one.
    """
    names, path = _files(probe), probe.path
    own = own_folders_in(probe.entries.values())
    indexes = [name for name in names if name.endswith(INDEXES)]
    found = indexes or [name for name in names if _may_be_weights(name)]
    if own and not found:
        raise several_checkpoints(own, place_of(path))
    if not indexes:
        refuse_unread_folder(probe)
    if not (found or unusual) and not any(
        name.endswith(LIKE_CHECKPOINTS) for name in _names_below(probe)
    ):
        raise UnsupportedError(
            "is a directory without any file that usually holds weights",
            path=path,
            hint="give one file in it",
        )
    return found
