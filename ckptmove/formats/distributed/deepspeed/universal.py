"""universal: a universal checkpoint of DeepSpeed, which any number of ranks can load.

    latest_universal                        beside it: the name of the folder of the newest one
    global_step500_universal/               a checkpoint:
      mp_rank_00_model_states.pt            the model and what the user saved, as ranks saved it;
                                            or with stage 3 the files of all ranks, and of a
                                            pipeline or tensor parallelism those of its parts
      zero/optimizer_state.pt               the optimizer without its state: `param_groups`, …
      zero/PARAMETER/fp32.pt                {'param': the weight, 'cat_dim': 0, …}, whole
      zero/PARAMETER/exp_avg.pt, …          its state likewise; step.pt is a bare tensor
      zero/BUFFER/fp32.pt                   a copy in float32 of what the model's file has

With stage 3 each is a bare tensor, flat, and steps are in optimizer_state.pt.

Source: deepspeed/checkpoint/ds_to_universal.py, universal_checkpoint.py (DeepSpeed 0.14 to 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ....display.phrases import join_names
from ....errors import CorruptError, InputError, UnsupportedError
from ....graph.draft import CheckpointGraph
from ....pickles.nodes import Dict
from ....reports.convert import Loss
from ....sources import place_of
from ....sources.place import EntryKind
from ...base import WritableFormat
from ...checkpoint import Carries, Checkpoint
from ...folders.parts import ALL_RANKS
from ...probe import Probe
from ...writing import WriteOptions, WritePlan
from ..saved_file import SavedFile, by_number, check_names, shapes_in
from . import universal_writing
from .flat import Elements, Whole, whole_of
from .folder import open_file, tell_devices, tell_others
from .rank_files import RankFiles
from .trained import (
    INNER,
    Module,
    Shapes,
    TrainedState,
    Value,
    abouts_of,
    frozen_in,
    groups_of,
    rest_of,
)
from .zero import LAYOUT
from .zero_container import ZeroContainer

ZERO = "zero"
OPTIMIZER = "zero/optimizer_state.pt"
WEIGHT, STEP = "fp32", "step"
PARAM = "param"
_SUFFIX = ".pt"
_GROUPS = "param_groups"
_MOST_NAMED = 3
_MOST_KINDS = 16  # kinds of optimizer state of a parameter; Adam has four


class Universal(WritableFormat):
    """The format of DeepSpeed's `ds_to_universal`."""

    name = "universal"
    summary = "DeepSpeed's `ds_to_universal`: universal checkpoints"
    refused = "folders that lack files of a parameter; experts"
    carries = Carries(False, True, False, objects=True, dtypes="all of torch")
    in_parts = True
    folder_stem = ""
    shards = False
    annotates = False
    is_folder = True
    item_nbytes = 1 << 12

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a folder with a subfolder for each parameter."""
        if not probe.is_folder:
            return False
        zero = probe.entries.get(ZERO)
        if zero is None or zero.kind is not EntryKind.FOLDER:
            return False
        inside = place_of(probe.path).child(ZERO)
        return bool(RankFiles.among(probe.entries).parts) or any(
            f"{ZERO}/{each.name}" == OPTIMIZER for each in inside.entries()
        )

    def read(self, probe: Probe) -> Checkpoint:
        """Read the model's files, and those of each parameter."""
        named = RankFiles.among(probe.entries)
        if named.experts:
            raise UnsupportedError(
                f"holds experts of a mixture (such as {named.experts[0]}), which are not merged",
                path=probe.path,
            )
        own = [
            name for number in sorted(named.parts) for name in named.parts[number].model.values()
        ]
        if not named.model:
            missing = "mp_rank_00_model_states.pt"
            raise InputError(f"its file {missing!r} is missing", path=probe.path, hint=ALL_RANKS)
        below = [each.name for each in probe.entries_below if each.name.startswith(f"{ZERO}/")]
        if OPTIMIZER not in below:
            raise InputError(f"its file {OPTIMIZER!r} is missing", path=probe.path)
        tell_others(probe, [*own, ZERO])
        names = [*own, *below]
        files = {name: open_file(probe, name, n) for n, name in enumerate(names, 1)}
        model = [files[name] for name in own]
        trained = _MergedFiles(model, files, is_alone=len(named.parts) == 1)
        trained.is_divided = named.is_divided
        module: Module | None = None if model[0].root.get("module") is not None else {}
        check_names(files.values())
        tell_devices(probe, files.values())
        container = ZeroContainer(probe, files.values(), model, trained, module)
        trained.check_others(container.names)
        return container.checkpoint(self.name, self.carries)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """Metadata, and a loss scale that changes."""
        return universal_writing.losses_of(draft)

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """Plan a folder like `ds_to_universal` writes."""
        return universal_writing.plan_write(draft)


class _MergedFiles(TrainedState):
    """The merged files of each parameter."""

    def __init__(
        self, model: Sequence[SavedFile], files: Mapping[str, SavedFile], *, is_alone: bool
    ) -> None:
        """`is_alone`: whether the model has only one part, so its shapes are whole."""
        super().__init__()
        self._files = files
        self._is_alone = is_alone
        self._by_name: dict[str, dict[str, str]] = {}
        for name in files:
            folder, _, own = name.removeprefix(f"{ZERO}/").rpartition("/")
            if name.startswith(f"{ZERO}/") and folder and own.endswith(_SUFFIX):
                self._by_name.setdefault(folder, {})[own.removesuffix(_SUFFIX)] = name
        optimizer = files[OPTIMIZER]
        shapes = _shapes(model)
        steps = _steps(optimizer)
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            held = self._held(name, shape)
            if STEP not in held and steps is not None:
                held = {STEP: steps, **held}
            weight = held.pop(WEIGHT)
            assert isinstance(weight, Whole)
            self.weights[name], self.state[name] = weight, held
        for group in shapes:
            self._check_state(group)
        self.groups = groups_of(shapes, abouts_of(optimizer, optimizer.root, len(shapes)))
        if is_alone:
            self.frozen = frozen_in(model)
        self.rest = rest_of(optimizer, optimizer.root, {*LAYOUT, _GROUPS})

    def _check_state(self, group: Shapes) -> None:
        """Raises InputError if a parameter of a group lacks a state that another one has."""
        kinds = {kind for name in group for kind in self.state[name]}
        for name in group:
            missing = sorted(kinds - self.state[name].keys())
            if missing:
                raise InputError(
                    f"its file '{ZERO}/{name:.100}/{missing[0]}{_SUFFIX}' is missing, which others "
                    "of its group have"
                )

    def _held(self, name: str, shape: tuple[int, ...]) -> dict[str, Value]:
        """The state of a parameter, with its weight first."""
        kinds = self._by_name.get(name, {})
        if WEIGHT not in kinds:
            raise InputError(f"its file '{ZERO}/{name:.100}/{WEIGHT}{_SUFFIX}' is missing")
        if len(kinds) > _MOST_KINDS:
            raise UnsupportedError(f"its optimizer has {len(kinds):,} kinds of state of {name!r}")
        held = dict[str, Value]()
        named = [kind for kind in (WEIGHT, STEP) if kind in kinds]
        for kind in (*named, *sorted(kinds.keys() - {*named})):
            file = self._files[kinds[kind]]
            is_bare = not isinstance(file.top, Dict)
            # a number, from DeepSpeed's own Adam
            if kind == STEP and isinstance(file.top, (int, float)):
                held[kind] = file.top
                continue
            found = file.elements(file.top.get(PARAM) if isinstance(file.top, Dict) else file.top)
            if found is None or (kind == STEP and found.numel != 1):
                raise file.malformed_error("it")
            held[kind] = found if kind == STEP else self._whole(file, found, shape, is_bare)
        shapes = {each.shape for each in held.values() if isinstance(each, Whole)}
        if len(shapes) > 1:
            raise CorruptError(f"the files of {name!r:.100} have different shapes: of two saves")
        return held

    def _whole(
        self, file: SavedFile, found: Elements, shape: tuple[int, ...], is_flat: bool
    ) -> Whole:
        """A tensor of a parameter; CorruptError unless its size matches the model's file.

        If the model has several parts, each file gives the shape of only a part.
        """
        fits = found.numel == prod(shape) and (is_flat or found.shape == shape)
        if (self._is_alone or is_flat) and not fits:
            raise CorruptError(
                f"has {found.numel:,} elements, and its parameter {prod(shape):,}: of two saves?",
                path=file.source.path,
            )
        return whole_of(found._replace(shape=shape) if fits else found)

    def check_others(self, known: Sequence[str]) -> None:
        """Raises CorruptError if there are files of parameters that the model does not have."""
        others = sorted(self._by_name.keys() - set(known))
        if others:
            raise CorruptError(
                f"its folder {ZERO}/ has files of {join_names(others, _MOST_NAMED)}, which the "
                "model does not have"
            )


def _shapes(model: Sequence[SavedFile]) -> list[Shapes]:
    """The shapes of parameters by name in each group, from all parts of the model."""
    joined = list[dict[str, tuple[int, ...]]]()
    for file in model:
        shapes = shapes_in(file, "param_shapes", grouped=True)
        joined = joined or [{} for _ in shapes]
        if len(joined) != len(shapes):
            raise file.malformed_error("the number of its groups of parameters")
        for mine, other in zip(joined, shapes, strict=True):
            mine.update((name, size) for name, size in other.items() if name not in mine)
    return list(joined)


def _steps(optimizer: SavedFile) -> Elements | None:
    """The step of all parameters, which stage 3 saves in one file."""
    inner = optimizer.root.get(INNER)
    states = by_number(inner.get("state") if isinstance(inner, Dict) else None)
    first = states.get(0)
    step = first.get(STEP) if isinstance(first, Dict) else None
    return optimizer.elements(step)
