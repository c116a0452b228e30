"""Files of which each rank wrote one, by their names: FSDP's, and whatever is numbered so.

    model_world_size_4_rank_0.pt            verl: of rank 0, of 4; also optim_…, extra_state_…
    rank0.pt, rank_0.pt                     what `torch.save` on each rank is often called
    model_rank_0.pt                         the same, of several things
    pytorch_model_fsdp_0_rank0.bin          accelerate: LOCAL_STATE_DICT, or without DCP
    optimizer_0_rank0.bin

Sources: verl/utils/checkpoint/fsdp_checkpoint_manager.py, accelerate/utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

#: The folder in one of ranks in which verl has the configuration and the tokenizer of the model.
CONFIGURED = "huggingface"
_NAME = re.compile(
    r"(?:(?P<stem>.*?)[_.-])??(?:world_size_(?P<world>\d{1,6})_)?rank[_-]?(?P<rank>\d{1,6})"
    r"(?P<end>\.(?:pt|pth|bin|ckpt))"
)
#: What files are called that hold tensors, whatever they are.
_LIKE_TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp")


class RankGroup(NamedTuple):
    """The files of ranks that are called alike."""

    stem: str  #: what comes before the rank, or nothing
    world: int | None  #: how many ranks there were, if the names say it
    files: dict[int, str]  #: by rank

    @property
    def absent(self) -> list[int]:
        """The ranks of which the names tell that their files are missing."""
        world = max(self.files) + 1 if self.world is None else self.world
        most = min(world, 2 * len(self.files) + 8)
        return [rank for rank in range(most) if rank not in self.files]

    def name_of(self, rank: int) -> str:
        """What the file of another rank would be called."""
        known, name = next(iter(self.files.items()))
        start, _, end = name.rpartition(f"{known}.")
        return f"{start}{rank}.{end}"


def rank_groups(names: Iterable[str]) -> list[RankGroup]:
    """The groups among the names of a folder, each of two ranks or more, or of a known number."""
    found: dict[tuple[str, str, str], RankGroup] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        stem, world, rank, end = match.group("stem", "world", "rank", "end")
        key = stem or "", world or "", end
        group = found.setdefault(key, RankGroup(stem or "", int(world) if world else None, {}))
        group.files.setdefault(int(rank), name)
    return [each for each in found.values() if each.world is not None or len(each.files) > 1]


def files_of_ranks(names: Iterable[str]) -> set[str]:
    """The names of a folder that are in such groups."""
    return {name for group in rank_groups(names) for name in group.files.values()}


def are_of_ranks(names: Collection[str]) -> bool:
    """Whether all that may hold tensors in a folder is in such groups, and something is."""
    known = files_of_ranks(names)
    return bool(known) and not any(
        name.endswith(_LIKE_TENSORS) and name not in known for name in names
    )
