"""Files that are missing in a folder, judged by the names of the other files.

    rng_state_0.pth … rng_state_7.pth              one of each process, from 0 on
    random_states_0.pkl …                          the same, of accelerate
    zero_pp_rank_3_mp_rank_00_optim_states.pt      DeepSpeed: data-parallel and tensor-parallel rank
    mp_rank_00_model_states.pt                     DeepSpeed: the model, of a tensor-parallel rank
    __3_0.distcp                                   torch.distributed.checkpoint: of process 3
    optimizer.bin, optimizer_1.bin, …              accelerate: one of each, the first has no number
    consolidated.00.pth …                          Meta: one of each tensor-parallel rank
    model_world_size_4_rank_0.pt, rank0.pt …       one of each rank: see `rank_groups`
    scheduler.pt                                   Trainer: else it loads no optimizer.pt either
    adapter_model.safetensors                      peft: with adapter_config.json; see `_WITNESSES`
    model-00002-of-00003.safetensors               with all others of three, and their index

In other cases no name says how many processes there were: there were at least as many as the
highest number in a name shows.

Sources: transformers/trainer.py (`_save_rng_state`), accelerate/checkpointing.py, deepspeed's
runtime/engine.py (`_get_zero_ckpt_name`, `_get_ckpt_name`), torch/distributed/checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ...display.phrases import plural
from ..distributed.rank_groups import SHARD, rank_groups
from .weight_names import INDEX, shard_name

#: Files that each process writes, and the name of the first if there is only one process.
_OF_PROCESS = re.compile(r"(rng_state_|random_states_)(\d{1,6})(\.pth|\.pkl)")
_OF_ONE = {"rng_state.pth": ("rng_state_", ".pth")}
#: Files that show the number of the process that wrote them.
_WRITTEN_BY = re.compile(
    r"(?:.*/)?(?:__(\d{1,6})_\d+\.distcp|\w*_rank(\d{1,6})\.bin"
    r"|(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_\d+_\w+_states\.pt)"
)
_ZERO = re.compile(
    r"((?:.*/)?)((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,6})(_mp_rank_)(\d{1,6})"
    r"(_(?:optim|model)_states\.pt)"
)
_MODEL_STATES = "mp_rank_{:02}_model_states.pt"
#: Files that accelerate writes one of for each prepared model or optimizer.
_COUNTED = re.compile(
    r"((?:pytorch_)?model|optimizer|scheduler|sampler|dl_state_dict)(?:_(\d{1,6}))?"
    r"(\.safetensors|\.bin)"
)
#: A file → the file written with it, without which the library does not load the folder.
_WITNESSES = tuple(
    (re.compile(pattern), wanted)
    for pattern, wanted in (
        (r"((?:.*/)?)adapter_model\.(?:safetensors|bin)", r"\1adapter_config.json"),
        (r"open_clip_(?:model\.safetensors|pytorch_model\.bin)", "open_clip_config.json"),
        (r"scheduler/scheduler_config\.json", "model_index.json"),
        (r"config_sentence_transformers\.json|\d+_Pooling/config\.json", "modules.json"),
        (r"((?:.*/)?)sentence_bert_config\.json", r"\1config.json"),
        (r"((?:.*/)?)generation_config\.json", r"\1config.json"),
        (r"training_args\.bin", "trainer_state.json"),
    )
)
#: Files that only a Trainer's checkpoint folder has; the arguments are in the run's folder too.
_OF_TRAINER = re.compile(r"(optimizer|scheduler)\.pt|rng_state\S*\.pth")
_OF_META = re.compile(r"(consolidated\.)(\d\d)(\.pth)")
#: A whole model: torchtune numbers the file even if it is the only one, and writes no index.
_OF_TORCHTUNE = re.compile(
    r"(?:.+/)?model-00001-of-00001\.bin|epoch_\d+/model-00001-of-00001\.safetensors", re.DOTALL
)
_MOST = 1_000  # the most names that are returned


class MissingFile(NamedTuple):
    """A file that should be in a folder but is missing."""

    name: str
    because: str  #: why it should exist
    is_of_rank: bool = False  #: whether it holds one rank's part of the tensors


def missing_files(names: Iterable[str]) -> list[MissingFile]:
    """The missing files of a folder that has files of these names in it and below it."""
    known = set(names)
    found = [
        *_of_processes(known),
        *_of_zero(known),
        *_gaps_of_accelerate(known),
        *_of_meta(known),
        *_of_ranks(known),
        *_shards(known),
        *_by_witness(known),
    ]
    return list(dict.fromkeys(found))[:_MOST]


def _of_processes(names: Collection[str]) -> Iterator[MissingFile]:
    """The missing RNG states of processes that wrote other files."""
    there: dict[tuple[str, str], set[int]] = {}
    last = -1
    witness = ""
    for name in sorted(names):
        own = _OF_PROCESS.fullmatch(name)
        by = _WRITTEN_BY.fullmatch(name)
        number = -1
        if own is not None:
            number = int(own[2])
            there.setdefault((own[1], own[3]), set()).add(number)
        elif by is not None:
            number = int(next(each for each in by.groups() if each is not None))
        if number > last:
            last, witness = number, name
    for name, kind in _OF_ONE.items():
        if name in names and last > 0:
            there.setdefault(kind, set())
    for (start, end), numbers in there.items():
        for n in _absent(numbers, last):
            yield MissingFile(f"{start}{n}{end}", _processes(witness, last))


def _processes(witness: str, last: int) -> str:
    return f"{witness} is of process {last}, so there were {last + 1:,} of them or more"


def _of_zero(names: Collection[str]) -> Iterator[MissingFile]:
    """Missing DeepSpeed files: each data-parallel rank has a file per tensor-parallel rank."""
    kinds: dict[tuple[str, str, str, str], set[tuple[int, int]]] = {}
    for name in names:
        match = _ZERO.fullmatch(name)
        if match is not None:
            folder, start, data, middle, tensor, end = match.groups()
            kinds.setdefault((folder, start, middle, end), set()).add((int(data), int(tensor)))
    processes = 1 + max(
        (int(match[2]) for match in map(_OF_PROCESS.fullmatch, names) if match), default=-1
    )
    for (folder, start, middle, end), ranks in sorted(kinds.items()):
        data = 1 + max(each for each, _ in ranks)
        tensor = 1 + max(each for _, each in ranks)
        if tensor == 1:
            data = max(data, processes)
        if data * tensor > _MOST:
            continue
        because = f"there are those of {plural(len(ranks), 'rank')}, of {data * tensor:,}"
        for n in range(data):
            for m in range(tensor):
                if (n, m) not in ranks:
                    name = f"{folder}{start}{n}{middle}{m:02}{end}"
                    yield MissingFile(name, because, is_of_rank=True)
        by_rank = any(key[0] == folder and key[3] == "_model_states.pt" for key in kinds)
        for m in range(tensor):
            name = folder + _MODEL_STATES.format(m)
            if not by_rank and name not in names:
                yield MissingFile(name, "the states of the optimizer are there", is_of_rank=True)


def _gaps_of_accelerate(names: Collection[str]) -> Iterator[MissingFile]:
    """Gaps in the numbers of accelerate's files; the first has no number."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _COUNTED.fullmatch(name.removesuffix(INDEX))
        if match is not None:
            kinds.setdefault((match[1], match[3]), {})[int(match[2] or 0)] = name
    for (stem, end), numbers in sorted(kinds.items()):
        last = max(numbers)
        for n in _absent(numbers, last):
            yield MissingFile(f"{stem}_{n}{end}" if n else stem + end, f"{numbers[last]} is there")


def _of_meta(names: Collection[str]) -> Iterator[MissingFile]:
    numbers = {int(match[2]) for match in map(_OF_META.fullmatch, names) if match}
    last = max(numbers, default=-1)
    for n in _absent(numbers, last):
        because = f"consolidated.{last:02}.pth is there"
        yield MissingFile(f"consolidated.{n:02}.pth", because, is_of_rank=True)


def _of_ranks(names: Collection[str]) -> Iterator[MissingFile]:
    """Missing files of groups in which each rank wrote one file."""
    below: dict[str, list[str]] = {}
    for name in names:
        folder, slash, own = name.rpartition("/")
        below.setdefault(folder + slash, []).append(own)
    for folder, inside in sorted(below.items()):
        for group in rank_groups(inside):
            world = max(group.files) + 1 if group.world is None else group.world
            because = f"there are those of {plural(len(group.files), 'rank')}, of {world:,}"
            for rank in group.absent:
                yield MissingFile(folder + group.name_of(rank), because, is_of_rank=True)


def _shards(names: Collection[str]) -> Iterator[MissingFile]:
    """The missing index, and missing files, of files whose names say how many there are."""
    for name in sorted(names):
        shard = shard_name(name)
        own = name.rpartition("/")[2]
        if shard is None or _OF_TORCHTUNE.fullmatch(name) or SHARD.fullmatch(own):
            continue
        if any(each in names for each in shard.indexes):
            continue
        yield MissingFile(shard.indexes[0], "it says which tensors are in which file")
        for n in range(1, 1 + min(shard.total, _MOST)):
            if shard.file_name(n) not in names:
                yield MissingFile(shard.file_name(n), f"{name} says so")


def _by_witness(names: Collection[str]) -> Iterator[MissingFile]:
    """Missing files that are always written together with a file that is there."""
    for name in sorted(names):
        for pattern, wanted in _WITNESSES:
            match = pattern.fullmatch(name)
            if match is None or match.expand(wanted) in names:
                continue
            if wanted != "trainer_state.json" or any(map(_OF_TRAINER.fullmatch, names)):
                yield MissingFile(match.expand(wanted), f"{name} is there")
    if {"trainer_state.json", "optimizer.pt"} <= set(names) and "scheduler.pt" not in names:
        yield MissingFile("scheduler.pt", "without it, the Trainer does not load optimizer.pt")


def _absent(numbers: Collection[int], last: int) -> Iterator[int]:
    """The missing numbers up to and including the last."""
    return (n for n in range(min(last + 1, _MOST)) if n not in numbers)
