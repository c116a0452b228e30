"""Files that each rank wrote one of, recognized by their names: FSDP's, and other numbered files.

    model_world_size_4_rank_0.pt            verl: of rank 0, of 4; also optim_…, extra_state_…
    rank0.pt, rank_0.pt                     what `torch.save` on each rank is often called
    model_rank_0.pt                         the same, of several things
    pytorch_model_fsdp_0_rank0.bin          accelerate: LOCAL_STATE_DICT, or without DCP
    optimizer_0_rank0.bin

Also the files of torch.distributed.checkpoint, which have no groups, and folders of any of these.

Sources: verl/utils/checkpoint/fsdp_checkpoint_manager.py, accelerate/utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from ...manifest.manifest import Section
from ..folders.layouts import is_several, layout_of, says
from .deepspeed.rank_files import RankFiles

#: The subfolder in which verl stores the configuration and the tokenizer of the model.
CONFIGURED = "huggingface"
_OF_DCP = re.compile(r"\.metadata(\.tmp)?|__\d+(\.metadata|_\d+\.distcp)")
#: A file of DCP's writer for Hugging Face: the rank, the number of the file, and the number of
#: files.
SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_NAME = re.compile(
    r"(?:(?P<stem>.*?)[_.-])??(?:world_size_(?P<world>\d{1,6})_)?rank[_-]?(?P<rank>\d{1,6})"
    r"(?P<end>\.(?:pt|pth|bin|ckpt))"
)
#: Suffixes of files that may hold tensors.
_LIKE_TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp")
#: The stem of files of accelerate; one such file is enough to make a group.
_OF_FSDP = re.compile(r"pytorch_model_fsdp(_\d+)?|optimizer_\d+")
#: The meaning of a group's stem.
_SERVES = (
    (re.compile(r"(?:pytorch_)?model(?:_fsdp)?(_\d+)?"), "model", Section.MODEL),
    (re.compile(r"optim(?:izer)?(_\d+)?"), "optimizer", Section.OPTIMIZER),
)


class RankGroup(NamedTuple):
    """Files of ranks whose names differ only in the rank."""

    stem: str  #: the name before the rank, or empty
    world: int | None  #: how many ranks there were, if the names give it
    files: dict[int, str]  #: by rank

    @property
    def absent(self) -> list[int]:
        """The ranks whose files are missing according to the names."""
        world = max(self.files) + 1 if self.world is None else self.world
        most = min(world, 2 * len(self.files) + 8)
        return [rank for rank in range(most) if rank not in self.files]

    def name_of(self, rank: int) -> str:
        """The name that the file of another rank would have."""
        known, name = next(iter(self.files.items()))
        start, _, end = name.rpartition(f"{known}.")
        return f"{start}{rank}.{end}"


def rank_groups(names: Iterable[str], *, alone: bool = False) -> list[RankGroup]:
    """The groups in a folder: those with two or more ranks, a known number of ranks, or of FSDP.

    `alone`: also those of one file.
    """
    found: dict[tuple[str, str, str], RankGroup] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        stem, world, rank, end = match.group("stem", "world", "rank", "end")
        key = stem or "", world or "", end
        group = found.setdefault(key, RankGroup(stem or "", int(world) if world else None, {}))
        group.files.setdefault(int(rank), name)
    return [
        each
        for each in found.values()
        if alone or each.world is not None or len(each.files) > 1 or _OF_FSDP.fullmatch(each.stem)
    ]


def rank_of(path: str) -> int | None:
    """The rank in the name of a file; None if there is none."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    return int(match["rank"]) if match else None


def files_of_ranks(names: Iterable[str]) -> set[str]:
    """The names of a folder that are in such groups."""
    return {name for group in rank_groups(names) for name in group.files.values()}


def files_beside(names: Collection[str]) -> list[str]:
    """The files of a folder outside these groups that may hold tensors or training state."""
    ranks, layout = files_of_ranks(names), layout_of(names)
    return sorted(
        name
        for name in names
        if name not in ranks
        and (
            name.endswith(_LIKE_TENSORS) or (name.endswith(".pkl") and says(name, layout).is_known)
        )
    )


def serves(stem: str) -> tuple[str, Section] | None:
    """The key and section of a group, from its stem; `model_1` is the second model."""
    for pattern, key, section in _SERVES:
        match = pattern.fullmatch(stem)
        if match is not None:
            number = match[1] or ""
            return (key if number == "_0" else key + number), section
    return None


def is_of_ranks(names: Collection[str]) -> bool:
    """Whether a folder is one checkpoint of ranks, by the names directly in it.

    Files that a trainer saves only once, such as a scheduler, may be beside the ranks' models and
    optimizers.
    """
    ranks, layout = files_of_ranks(names), layout_of(names)
    if not ranks:
        return False
    said = {name: says(name, layout) for name in names if name not in ranks}
    if any(each.section in (Section.MODEL, Section.OPTIMIZER) for each in said.values()):
        return False
    beside = files_beside(names)
    if not beside:
        return not is_several(names)
    serving = any(serves(group.stem) for group in rank_groups(names))
    return serving and all(said[name].is_known for name in beside)


def is_of_dcp(name: str) -> bool:
    """Whether a file is named like those of torch.distributed.checkpoint."""
    return _OF_DCP.fullmatch(name) is not None


def divided_folders(names: Iterable[str], *, of_ranks: bool = True) -> set[str]:
    """The folders, of these files, that several ranks wrote together; `names` have `/`.

    These are folders of torch.distributed.checkpoint, in both forms, and of files of ranks
    (`of_ranks`).
    """
    inside: dict[str, list[str]] = {}
    for name in names:
        folder, slash, own = name.rpartition("/")
        if slash and own:
            inside.setdefault(folder, []).append(own)
    return {
        folder
        for folder, own in inside.items()
        if any(is_of_dcp(name) or SHARD.fullmatch(name) for name in own)
        or (of_ranks and (RankFiles.among(own).are_there or is_of_ranks(own)))
    }
