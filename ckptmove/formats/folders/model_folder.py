"""Find the weights in a model folder, by the file names that libraries use.

    model.safetensors                 transformers, accelerate, huggingface_hub
    model.safetensors.index.json      … with the files that it names
    pytorch_model.bin, pytorch_model.bin.index.json      the same, before safetensors
    diffusion_pytorch_model.*         diffusers
    adapter_model.*                   peft

If there are several, the first in this order is read, as transformers does; the others are taken
for copies of the same weights. A folder without any of these is read if exactly one file in it has
the suffix of a checkpoint. Folders with other layouts, such as that of
torch.distributed.checkpoint, are recognized and refused.

Source: transformers/modeling_utils.py (`_get_resolved_checkpoint_files`), utils/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ...errors import StrPath, UnsupportedError
from ...sources import place_of
from ...sources.place import EntryKind

_INDEX = ".index.json"
#: The weights as one file each, in order of preference: those of a line are the same weights.
_FAMILIES = (
    ("model.safetensors", "pytorch_model.bin"),
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    ("adapter_model.safetensors", "adapter_model.bin"),
)
_WANTED = [each for family in _FAMILIES for whole in family for each in (whole, whole + _INDEX)]
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(\.safetensors|\.bin)", re.DOTALL)
_INDEXED = (f".safetensors{_INDEX}", f".bin{_INDEX}")
_LIKE_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
#: What a Trainer saves beside the weights.
_BESIDE = ("training_args.bin", "optimizer.", "optimizer_", "scheduler.", "rng_state", "scaler.")

#: What else a folder may be, by the name of something in it, and what to do then.
_STRANGERS: tuple[tuple[str, str, str | None], ...] = (
    (
        r"\.metadata|.*\.distcp",
        "a checkpoint of torch.distributed.checkpoint",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR out.pt",
    ),
    (
        r"(bf16_|fp16_)?zero_pp_rank_\d+_.*|mp_rank_\d+_model_states\.pt|global_step\d+",
        "a checkpoint of DeepSpeed",
        "its script zero_to_fp32.py converts it to one file",
    ),
    (r"pytorch_model_fsdp_\d+", "a sharded checkpoint of FSDP", "accelerate merge-weights"),
    (r"latest_checkpointed_iteration\.txt|mp_rank_\d+", "a checkpoint of Megatron-LM", None),
    (r"\.snapshot_metadata", "a snapshot of torchsnapshot", None),
    (r"_CHECKPOINT_METADATA|_METADATA", "a checkpoint of Orbax", None),
    (r"saved_model\.pb", "a SavedModel of TensorFlow", None),
    (r"model_index\.json", "a pipeline of diffusers", "convert each of its folders separately"),
    (r"snapshots", "a repository in the cache of the Hub", "name a folder within snapshots/"),
    (r"data\.pkl", "an unpacked checkpoint of torch.save", "zip it again without compression"),
    (r"checkpoint-\d+", "a folder of checkpoints", "give one of them"),
)


class Weights(NamedTuple):
    """The weights in a folder.

    Attributes:
        path: of the file that holds them, or of their index.
        stem: what it is called, without what says the format.
        others: names of files that hold them once more.
        warnings: what the user should know.
    """

    path: str
    stem: str
    others: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def weights_of(folder: StrPath) -> Weights:
    """Find the weights in a folder.

    Raises:
        UnsupportedError: there are none, or it is not known which they are.
        InputError: it can't be read.
    """
    place = place_of(folder)
    entries = place.entries()
    names = [each.name for each in entries if each.kind is EntryKind.FILE]
    found = next((name for name in _WANTED if name in names), None)
    if found is None:
        found = _only_one(place.path, names, [each.name for each in entries])
    whole = _whole_of(found)
    family = next((each for each in _FAMILIES if whole in each), (whole,))
    others = [
        name
        for name in names
        if name != found
        and _whole_of(name) in family
        and not (found.endswith(_INDEX) and _SHARD.fullmatch(name) and _whole_of(name) == whole)
    ]
    warnings = []
    if others:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        warnings.append(
            f"{found} is used as the weights; {others[0]}{more} seems to hold the same weights"
        )
    stem = whole.rpartition(".")[0] or whole
    return Weights(place.child(found).path, stem, tuple(others), tuple(warnings))


def has_weights(names: Collection[str]) -> bool:
    """Whether a folder with files of these names is that of a model, as libraries save one."""
    return not {*_WANTED}.isdisjoint(names)


def is_weights(name: str) -> bool:
    """Whether a file is called as libraries call weights, a part of them, or their index."""
    usual = {whole for family in _FAMILIES for whole in family}
    return _whole_of(name) in usual or bool(_SHARD.fullmatch(name)) or name.endswith(_INDEXED)


def _whole_of(name: str) -> str:
    """The file that would hold all by itself, of one that holds a part, or of an index."""
    shard = _SHARD.fullmatch(name)
    return shard[1] + shard[2] if shard else name.removesuffix(_INDEX)


def _may_be_weights(name: str) -> bool:
    return name.endswith(_LIKE_WEIGHTS) and not name.startswith(_BESIDE)


def _only_one(path: str, names: list[str], inside: list[str]) -> str:
    """The one file in a folder that may hold weights, if none has a usual name.

    Args:
        path: the folder.
        names: of its files.
        inside: the names of all that is in it.

    Raises:
        UnsupportedError: there is none, or are several.
    """
    indexes = [name for name in names if name.endswith(_INDEXED)]
    found = indexes or [name for name in names if _may_be_weights(name)]
    if not indexes:
        for pattern, what, hint in _STRANGERS:
            if any(re.fullmatch(pattern, name) for name in inside):
                hint = hint and hint.replace("DIR", path)
                raise UnsupportedError(f"is a directory: {what}", path=path, hint=hint)
    if len(found) > 1:
        raise UnsupportedError(
            f"is a directory with {len(found):,} files that may be checkpoints",
            path=path,
            hint=f"give one of them, e.g. {found[0]}",
        )
    if not found:
        raise UnsupportedError(
            "is a directory without any file that usually holds weights",
            path=path,
            hint="give one file in it",
        )
    return found[0]
