"""The files of a DeepSpeed checkpoint, recognized by their names.

    mp_rank_00_model_states.pt                          the model; with stage 0 all there is
    zero_pp_rank_R_mp_rank_00_optim_states.pt           what rank R has of the weights and optimizer
    bf16_zero_pp_rank_R_…, fp16_zero_pp_rank_R_…        the same
    zero_pp_rank_R_mp_rank_00_model_states.pt           the model, with stage 3: of each rank
    mp_rank_01_…                                        a part of the model: of tensor parallelism,
                                                        or a stage of a pipeline
    layer_03-model_states.pt                            a layer of a pipeline; its part 1 of tensor
    layer_03-model_01-model_states.pt                   parallelism
    layer_0_expert_2_mp_rank_00_model_states.pt         an expert, and
    expp_rank_0_mp_rank_00_optim_states.pt              its optimizer

Source: deepspeed/runtime/engine.py, `_get_ckpt_name` and those around it (DeepSpeed 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....display.phrases import join_names
from ....errors import CorruptError, UnsupportedError
from ...folders.parts import ALL_RANKS, IncompleteError

_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{1,9})_model_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,9})-model_(?:(\d{1,9})-model_)?states\.pt")
_EXPERT = re.compile(r"layer_-?\d+_expert_.+_states\.pt|expp_rank_\d+_.+_states\.pt")
_MOST_NAMED = 5
#: The hint when files of ranks are missing.


def is_of_rank(name: str) -> bool:
    """Whether the name is that of a file of a DeepSpeed checkpoint; it may have `/`."""
    own = name.rpartition("/")[2]
    return any(each.fullmatch(own) for each in (_OF_RANK, _MODEL_OF_RANK, _MODEL, _LAYER, _EXPERT))


@dataclass
class PartFiles:
    """The files of one part of a model, by rank."""

    #: if there is only one file for all ranks, it has rank 0
    model: dict[int, str] = field(default_factory=dict)
    optimizer: dict[int, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [files[rank] for files in (self.model, self.optimizer) for rank in sorted(files)]


@dataclass
class RankFiles:
    """The files of one checkpoint."""

    #: the files of each part of the model, by the number of the part
    parts: dict[int, PartFiles] = field(default_factory=dict)
    #: whether each rank has a file of the model
    is_divided: bool = False
    #: the files of a pipeline, by the number of the layer
    layers: dict[int, str] = field(default_factory=dict)
    #: files with a part of a layer
    cut_layers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    #: additional files where only one is expected
    doubled: list[str] = field(default_factory=list)

    @classmethod
    def among(cls, names: Collection[str]) -> RankFiles:
        """The rank files among the names of a folder."""
        found = cls()
        whole: dict[int, str] = {}
        for name in sorted(names):
            if match := _OF_RANK.fullmatch(name):
                found._add(found.part(int(match[2])).optimizer, int(match[1]), name)
            elif match := _MODEL_OF_RANK.fullmatch(name):
                found.is_divided = True
                found._add(found.part(int(match[2])).model, int(match[1]), name)
            elif match := _MODEL.fullmatch(name):
                found._add(whole, int(match[1]), name)
                found.part(int(match[1]))
            elif match := _LAYER.fullmatch(name):
                if int(match[2] or 0):
                    found.cut_layers.append(name)
                else:
                    found._add(found.layers, int(match[1]), name)
            elif _EXPERT.fullmatch(name):
                found.experts.append(name)
        for number, name in whole.items():
            found._add(found.part(number).model, 0, name)
            if found.is_divided:
                found.doubled.append(name)
        return found

    def part(self, number: int) -> PartFiles:
        """The part with this number."""
        return self.parts.setdefault(number, PartFiles())

    def _add(self, files: dict[int, str], number: int, name: str) -> None:
        if files.setdefault(number, name) != name:
            self.doubled.append(name)

    @property
    def model(self) -> dict[int, str]:
        """The files of the first part that hold the model, by rank."""
        return self.parts[0].model if 0 in self.parts else {}

    @property
    def optimizer(self) -> dict[int, str]:
        """The files of the first part that hold the optimizer, by rank."""
        return self.parts[0].optimizer if 0 in self.parts else {}

    @property
    def are_there(self) -> bool:
        """Whether there are more files than a single one with the whole model."""
        several = self.optimizer or self.is_divided or self.layers or self.cut_layers
        return bool(several or self.experts) or len(self.parts) > 1

    @property
    def names(self) -> list[str]:
        """The names of the files of all parts, by rank, and of the layers."""
        own = [name for number in sorted(self.parts) for name in self.parts[number].names]
        return own + [self.layers[number] for number in sorted(self.layers)]

    def check_kind(self) -> None:
        """Raises InputError if the files are of two saves, or can't be merged."""
        if self.doubled:
            raise CorruptError(f"has {self.doubled[0]} beside another such file: of two saves")
        if self.experts:
            raise UnsupportedError(
                f"holds experts of a mixture (such as {self.experts[0]}), which are not merged: "
                "each rank's part of them has a layout of its own"
            )
        if self.cut_layers or (len(self.parts) > 1 and not self.layers):
            some = self.cut_layers[:1] or [f"{len(self.parts):,} parts, mp_rank_00 and more"]
            raise UnsupportedError(
                f"holds parts of a model ({some[0]}): how tensor parallelism divided each weight "
                "is known to the model's code alone"
            )
        if self.layers and (self.is_divided or not self.optimizer):
            raise UnsupportedError(
                f"holds a pipeline (such as {self.layers[min(self.layers)]}) that was saved "
                "without ZeRO 1 or 2, whose stages are not merged"
            )

    def check_ranks(self, world: int, number: int = 0) -> None:
        """Raises InputError unless a part has exactly one file for each of `world` ranks."""
        part = self.parts.get(number, PartFiles())
        for files in (part.model, part.optimizer) if self.is_divided else (part.optimizer,):
            _check_ranks(files, world)
        if not part.model:
            name = f"mp_rank_{number:02}_model_states.pt"
            raise IncompleteError(f"its file {name!r} is missing", hint=ALL_RANKS)


def _check_ranks(files: Mapping[int, str], world: int) -> None:
    beyond = [rank for rank in files if rank >= world]
    if beyond:
        raise CorruptError(
            f"has a file of rank {beyond[0]}, but was saved by {world:,} ranks: of two saves"
        )
    if len(files) < world:
        missing = [str(rank) for rank in range(min(world, 2 * len(files) + 8)) if rank not in files]
        some = next(iter(files.values()), "zero_pp_rank_…_optim_states.pt")
        kind = "model" if some.endswith("_model_states.pt") else "optim"
        count = world - len(files)
        raise IncompleteError(
            f"the {kind} states of {count:,} of its {world:,} ranks are missing: rank "
            f"{join_names(missing, _MOST_NAMED)}",
            hint=ALL_RANKS,
        )
