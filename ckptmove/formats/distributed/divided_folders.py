"""Find the folders within a folder whose files are parts of one checkpoint, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .deepspeed.rank_files import RankFiles
from .rank_groups import is_of_ranks

_METADATA = ".metadata"
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def divided_folders(names: Iterable[str], *, of_ranks: bool = True) -> set[str]:
    """The folders that ranks wrote together, of those that files lie in; `names` have `/`.

    That are those of torch.distributed.checkpoint, in both forms, and files of ranks (`of_ranks`).
    """
    inside: dict[str, list[str]] = {}
    for name in names:
        folder, slash, own = name.rpartition("/")
        if slash and own:
            inside.setdefault(folder, []).append(own)
    return {
        folder
        for folder, own in inside.items()
        if _METADATA in own
        or any(map(_SHARD.fullmatch, own))
        or (of_ranks and (RankFiles.among(own).are_there or is_of_ranks(own)))
    }
