"""Join the stages of a DeepSpeed pipeline, whose layers were divided among ranks.

    layer_03-model_states.pt            the weights and buffers of layer 3: `weight`, `bias`
    mp_rank_01_model_states.pt          of stage 1; `param_shapes` says the layer: `3.weight`
    zero_pp_rank_R_mp_rank_01_…         of its rank R: weights and optimizer state, as `zero` says

A stage has whole layers, so in each group of parameters the stages are concatenated. If layers of
several stages share a weight, only the model's code knows it.

Source: deepspeed/runtime/pipe/module.py, `save_state_dict` (DeepSpeed 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ....errors import CorruptError, InputError, UnsupportedError
from ....pickles.nodes import Mapping as MappingNode
from ....pickles.nodes import Node
from ....torch_pickle.values.persistent_ids import is_size
from ...folders.parts import ALL_RANKS
from ..saved_file import SavedFile
from .trained import Module, ParameterGroup, TrainedState
from .zero import Zero

_STAGES = "mp_world_size"
_TIED = "tied_modules."


class PipelineStage(NamedTuple):
    """The files of one stage of a pipeline, or of the whole model."""

    model: Sequence[SavedFile]
    ranks: Sequence[SavedFile]


def join_stages(stages: Sequence[PipelineStage], layers: Mapping[int, SavedFile]) -> TrainedState:
    """The merged state of all stages.

    InputError if a stage is missing, or a layer that they name.
    """
    count = stages[0].model[0].root.get(_STAGES)
    if count != len(stages):
        told = f"{count:,}" if is_size(count) else "an unknown number"
        raise InputError(
            f"has the files of {len(stages):,} stages of a pipeline, of {told}",
            hint=ALL_RANKS,
        )
    joined = TrainedState()
    for stage in stages:
        zero = Zero(*stage)
        if joined.groups and len(joined.groups) != len(zero.groups):
            raise CorruptError("stages have different numbers of groups: of two saves")
        for name in (*zero.weights, *zero.frozen):
            _check_name(name, joined, layers)
        joined.weights |= zero.weights
        joined.state |= zero.state
        joined.frozen |= zero.frozen
        before = joined.groups or [ParameterGroup([], each.about) for each in zero.groups]
        joined.groups = [
            ParameterGroup([*a.names, *b.names], a.about)
            for a, b in zip(before, zero.groups, strict=True)
        ]
        joined.rest = joined.rest or zero.rest
    return joined


def _check_name(name: str, joined: TrainedState, layers: Mapping[int, SavedFile]) -> None:
    """Raises InputError unless a weight belongs to an existing layer and to only one stage."""
    if name.startswith(_TIED) or name in joined.weights or name in joined.frozen:
        raise UnsupportedError(
            f"holds a pipeline whose layers share a weight ({name!r:.80}), which are not merged"
        )
    number = name.partition(".")[0]
    known = number.isascii() and number.isdigit() and len(number) < 10
    if not known:
        raise UnsupportedError(f"holds a pipeline whose weight {name!r:.80} is of no layer")
    if int(number) not in layers:
        missing = f"layer_{int(number):02}-model_states.pt"
        raise InputError(f"its file {missing!r} is missing", hint=ALL_RANKS)


def module_of(layers: Mapping[int, SavedFile]) -> Module:
    """The tensors in the files of the layers, by their names in the model."""
    module = dict[str, tuple[SavedFile, Node]]()
    for number in sorted(layers):
        file = layers[number]
        if not isinstance(file.top, MappingNode):
            raise file.malformed_error("its layer")
        for key, node in file.top.pairs:
            if not isinstance(key, str):
                raise file.malformed_error("a name in it")
            module[f"{number}.{key}"] = file, node
    return module
