"""The names of the files in which libraries look for the weights of a model.

    model.safetensors                    transformers, accelerate, huggingface_hub, timm
    pytorch_model.bin                    the same, before safetensors
    model_1.safetensors, pytorch_model_1.bin      accelerate: the second model, and so on
    diffusion_pytorch_model.*            diffusers
    adapter_model.*                      peft
    open_clip_model.safetensors, open_clip_pytorch_model.bin      open_clip
    …model.fp16.safetensors              a variant
    …-00001-of-00002.safetensors, ….safetensors.index.json      several files, and their index

Sources: transformers/utils/__init__.py, accelerate/utils/constants.py,
diffusers/utils/constants.py, peft/utils/constants.py, open_clip/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

#: The suffix of an index of several files.
INDEX = ".index.json"
INDEXES = (f".safetensors{INDEX}", f".bin{INDEX}")
#: File stems of the weights as safetensors and as torch files, in the order of preference.
_STEMS = {
    "model": "pytorch_model",
    "diffusion_pytorch_model": "diffusion_pytorch_model",
    "adapter_model": "adapter_model",
    "open_clip_model": "open_clip_pytorch_model",
}
#: The weights as one file each, in the order of preference; one line holds the same weights.
FAMILIES = tuple((f"{safe}.safetensors", f"{torch}.bin") for safe, torch in _STEMS.items())
_SAFE = {**{torch: safe for safe, torch in _STEMS.items()}, **{each: each for each in _STEMS}}
_NAME = re.compile(
    rf"({'|'.join(sorted(_SAFE, key=len, reverse=True))})((?:_\d+)?(?:\.\w+?)?)"
    r"(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index(?:\.\w+)?\.json)?"
)
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)", re.DOTALL)


#: Meta's llama: the weights of a tensor-parallel rank; the file ends in `.pth`.
_OF_META = re.compile(r"consolidated\.\d\d")

#: The folder with the files of ranks. Beside it, HuggingFaceStorageWriter of
#: torch.distributed.checkpoint writes the consolidated weights:
#: torch/distributed/checkpoint/hf_storage.py.
SHARDED = "sharded"
#: The name of these weights; there may be an index of several such files.
WHOLE = "model.safetensors"
#: The end of a note that says that files should hold the same.
NOT_COMPARED = ", but they were not compared"


class ShardName(NamedTuple):
    """The parts of the name of a shard."""

    stem: str
    total: int  #: the number of files
    suffix: str

    @property
    def whole(self) -> str:
        """The name of a single file that would hold everything."""
        return self.stem + self.suffix

    @property
    def indexes(self) -> tuple[str, str]:
        """The possible names of their index.

        Torchtune uses the usual name for that of `model-….bin`.
        """
        folder, slash, stem = self.stem.rpartition("/")
        usual = stem_for(stem, is_safe=self.suffix == ".safetensors")
        return self.whole + INDEX, f"{folder}{slash}{usual}{self.suffix}{INDEX}"

    def file_name(self, number: int) -> str:
        """The name of the file of this number; the first is 1."""
        return f"{self.stem}-{number:05}-of-{self.total:05}{self.suffix}"


def shard_name(name: str) -> ShardName | None:
    """The parts of a file name, if it is the name of a shard."""
    match = _SHARD.fullmatch(name)
    return None if match is None else ShardName(match[1], int(match[3]), match[4])


def whole_of(name: str) -> str:
    """The name of a single file that would hold everything, for the name of a shard or an index."""
    shard = shard_name(name)
    return name.removesuffix(INDEX) if shard is None else shard.whole


class UsualName(NamedTuple):
    """The parts of a usual file name of weights."""

    stem: str  #: its stem as safetensors, the same for all forms of one model
    is_safe: bool
    is_index: bool
    is_shard: bool


def usual_name(name: str) -> UsualName | None:
    """The parts of a file name, if libraries look for weights under it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    stem, variant, shard, suffix, index = match.groups("")
    return UsualName(_SAFE[stem] + variant, suffix == "safetensors", bool(index), bool(shard))


def is_weights(name: str) -> bool:
    """Whether libraries use this file name for weights, a shard, or their index."""
    known = usual_name(name) is not None
    return known or shard_name(name) is not None or name.endswith(INDEXES)


def stem_for(stem: str, *, is_safe: bool) -> str:
    """The stem of weights as safetensors or as a torch file, given the stem of either."""
    said = usual_name(f"{stem}.bin")
    if said is None:
        return stem
    if is_safe:
        return said.stem
    known = next(
        each for each in sorted(_STEMS, key=len, reverse=True) if said.stem.startswith(each)
    )
    return _STEMS[known] + said.stem.removeprefix(known)


def torch_name(stem: str) -> str:
    """The name of a torch file with weights without a usual name, as their library expects it."""
    return f"{stem}.pth" if _OF_META.fullmatch(stem) else f"{stem}.pt"


def same_weights(name: str, other: str) -> bool:
    """Whether two files should hold the same weights in different forms, by their names."""
    return _model_of(name) == _model_of(other)


def _model_of(name: str) -> tuple[str, str]:
    """The folder that weights are in, and their stem, the same for all forms."""
    folder, _, own = name.rpartition("/")
    said = usual_name(own)
    whole = whole_of(own)
    return folder, said.stem if said is not None else whole.rpartition(".")[0] or whole


class FoundWeights(NamedTuple):
    """The weights of a model in a folder."""

    name: str  #: of the file or index that libraries prefer
    others: tuple[str, ...]  #: files that hold the same weights, or parts of them


def weights_among(names: Iterable[str]) -> list[FoundWeights]:
    """The weights of each model among files of these names in one folder."""
    models: dict[str, list[tuple[bool, bool, str]]] = {}
    shards: dict[str, list[str]] = {}
    for name in names:
        said = usual_name(name)
        if said is not None and said.is_shard:
            shards.setdefault(said.stem, []).append(name)
        elif said is not None:
            models.setdefault(said.stem, []).append((not said.is_safe, said.is_index, name))
    found = list[FoundWeights]()
    for stem, forms in models.items():
        first, *rest = (name for *_, name in sorted(forms))
        found.append(FoundWeights(first, tuple(sorted([*rest, *shards.get(stem, ())]))))
    return found
