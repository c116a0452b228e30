"""Write a universal checkpoint of DeepSpeed, laid out like `ds_to_universal` does for ZeRO 1 and 2.

    global_step500_universal/zero/PARAMETER/fp32.pt         {'cat_dim': 0, 'param': the weight}
    global_step500_universal/zero/PARAMETER/exp_avg.pt, …   likewise; step.pt is a bare tensor
    global_step500_universal/zero/optimizer_state.pt        the groups, and what ZeRO saved besides
    global_step500_universal/mp_rank_00_model_states.pt     the model, and all else
    latest_universal                                        the name of the folder, written last

The loader asserts that the steps of a group are equal. It checks no checksums, casts nothing, and
requires `global_steps`, `skipped_steps`, `dp_world_size` and `mp_world_size`. It restores only
trained weights, neither buffers nor frozen weights; ZeRO 3 looks for another file.

Source: deepspeed/checkpoint/ds_to_universal.py, universal_checkpoint.py, runtime/engine.py
(`_load_checkpoint`), runtime/base_optimizer.py (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from ....display.phrases import join_names, plural
from ....errors import RefusedError, WriteError
from ....graph.canonical import Graph
from ....graph.draft import CheckpointGraph, Pieces
from ....graph.fill import fill
from ....manifest.dtypes import BITS
from ....pickles.emit import emit
from ....pickles.nodes import Call, Dict, Global, List, Node, Tuple
from ....pickles.nodes import Mapping as MappingNode
from ....reports.convert import Loss
from ....sources.source import Readable
from ....torch_pickle.values.strided import contiguous_stride
from ....zips.archive import Archive
from ....zips.local_headers import check_layout
from ...torch.zip import TorchZip
from ...writing import WriteOptions, WritePlan, assemble
from ..dcp.flattening import Leaf, flatten
from ..dcp.item_frame import ItemFrame, tensor_frame, value_item
from ..dcp.rank_file import ChunkBytes, RankFile, Sums
from .model_and_optimizer import PARAMS, RESERVED, ModelAndOptimizer, entry_of, find, is_key

LATEST = "latest_universal"
_MODEL, _OPTIMIZER = "mp_rank_00_model_states.pt", f"zero/{RESERVED}"
_SUFFIX = ".pt"
_WEIGHT, _STEP, _MOMENTS = "fp32", "step", ("exp_avg", "exp_avg_sq")
_STATE, _GROUPS, _NAMES = "state", "param_groups", "param_names"
# the keys under which our reader puts other data that ZeRO saved
_ZERO, _SCALER = "zero", "loss_scaler"
_VERSION = "0.19.8"  # the version whose loader was reviewed
_SCHEDULERS = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict")
_NUMBERS = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}
_MOST_NAMED = 3
_MOST_STEPS = 1 << 53


def losses_of(draft: CheckpointGraph) -> list[Loss]:
    """The parts of a draft that a universal checkpoint cannot store."""
    losses = list[Loss]()
    if draft.metadata:
        named = ", ".join(map(repr, sorted(draft.metadata)))
        losses.append(Loss("<metadata>", f"has no place in the files ({named:.200})"))
    zero = entry_of(draft.graph.root, _ZERO)
    scaler = entry_of(zero, _SCALER)
    if scaler is not None and not str(entry_of(scaler, "class")).endswith(".LossScaler"):
        name = f"{_ZERO}.{_SCALER}"
        losses.append(Loss(name, "is an object that only DeepSpeed's own classes can make"))
    return losses


def plan_write(draft: CheckpointGraph) -> WritePlan:
    """Plan to write a draft with one model, and one optimizer with the state of Adam."""
    fill(draft)
    found = find(draft)
    sums = Sums()
    trained = _ParameterFiles(draft, found, sums)
    tag = f"global_step{max(trained.steps)}_universal"
    plans = {f"{tag}/{file.name}": file.plan() for file in trained.files}
    checks = {f"{tag}/{name}": check for name, check in trained.checks.items()}
    roots = {
        _OPTIMIZER: _optimizer_states(draft, found),
        _MODEL: _model_states(draft, found, trained),
    }
    for name, root in roots.items():
        graph = copy.copy(draft.graph)
        graph.root = root
        stem = name.rpartition("/")[2].removesuffix(_SUFFIX)
        writing = TorchZip().plan_write(
            replace(draft, graph=graph, metadata={}), WriteOptions(stem)
        )
        plans[f"{tag}/{name}"], checks[f"{tag}/{name}"] = writing.files[""], writing.check
    checksums = tuple(sums.of_sources())
    if checksums:
        name, last = next(reversed(plans.items()))  # by then everything was read
        plans[name] = last._replace(source_checksums=(*last.source_checksums, *checksums))
    pieces = Pieces()
    pieces.write(0, tag.encode())
    plans[LATEST] = assemble(len(tag), pieces)
    checks[LATEST] = partial(_check_bytes, tag.encode())
    sources = draft.sources
    return WritePlan(
        plans,
        trained.count + len(found.module.pairs),
        {},
        (),
        lambda files: None,
        emit(List(list(roots.values()))),
        warnings=tuple(_warnings(draft, found, trained)),
        prove=lambda: sums.prove(sources),
        checks=checks,
    )


# -- the files of each parameter -------------------------------------------------------------------


class _ParameterFiles:
    """The files of each parameter."""

    def __init__(self, draft: CheckpointGraph, found: ModelAndOptimizer, sums: Sums) -> None:
        self.files: list[RankFile] = []
        self.checks: dict[str, Callable[[Mapping[str, Readable]], None]] = {}
        self.count = 0  #: the number of tensors
        self.cast: dict[str, int] = {}  #: dtype → how many weights had it before the cast
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.steps: list[int] = []  #: the step of each group
        self._draft, self._sums = draft, sums
        held = {str(key): value for key, value in found.module.pairs if isinstance(key, str)}
        state = found.optimizer.get(_STATE)
        states = {str(key): each for key, each in getattr(state, "pairs", ())}
        for names in found.names:
            steps = dict[str, float]()
            for name in names:
                leaves = self._leaves(name, held[name], states.get(name))
                steps[name] = self._add(name, leaves)
            if len(set(steps.values())) > 1:
                one, other = sorted(steps, key=steps.__getitem__)[:: len(steps) - 1]
                raise RefusedError(
                    f"{one!r:.80} was trained for {steps[one]:,g} steps and {other!r:.80} for "
                    f"{steps[other]:,g}: DeepSpeed has one step for all parameters of a group"
                )
            self.steps.append(int(next(iter(steps.values()), 0)))

    def _leaves(self, name: str, weight: Node, state: Node) -> dict[str, Leaf]:
        """The weight and the state of a parameter.

        RefusedError unless the state is that of Adam.
        """
        kinds = {str(key): node for key, node in getattr(state, "pairs", ())}
        missing = [kind for kind in (_STEP, *_MOMENTS) if kind not in kinds]
        others = sorted(kinds.keys() - {_STEP, *_MOMENTS})
        if missing or others:
            what = f"no {missing[0]}" if missing else f"{join_names(others, _MOST_NAMED)}"
            raise RefusedError(
                f"the optimizer has {what} of {name!r:.100}: universal checkpoints have the state "
                "of Adam (exp_avg, exp_avg_sq, step)"
            )
        graph = self._draft.graph
        root = Dict()
        root.pairs = [(graph.text(kind), kinds[kind]) for kind in (_STEP, *_MOMENTS)]
        root.pairs.append((graph.text(_WEIGHT), weight))
        own = copy.copy(graph)
        own.root = root
        leaves = {leaf.name: leaf for leaf in flatten(replace(self._draft, graph=own)).leaves}
        for kind, leaf in leaves.items():
            is_number = kind == _STEP and type(leaf.node) in (int, float)
            if leaf.view is None and not is_number:
                raise RefusedError(f"the {kind} of {name!r:.100} is no plain tensor")
        return leaves

    def _add(self, name: str, leaves: Mapping[str, Leaf]) -> float:
        """Add the files of a parameter; returns its step."""
        weight = leaves[_WEIGHT].view
        assert weight is not None
        self.shapes[name] = weight.shape
        for kind in (_WEIGHT, *_MOMENTS):
            chunk = self._chunk(name, kind, leaves[kind])
            if chunk.view.shape != weight.shape:
                raise RefusedError(f"the {kind} of {name!r:.100} has another shape than its weight")
            frame = _param_frame(kind, chunk.view.dtype, chunk.view.shape, chunk.nbytes)
            self._file(f"{_ZERO}/{name}/{kind}{_SUFFIX}", frame, chunk)
        step = leaves[_STEP]
        file = f"{_ZERO}/{name}/{_STEP}{_SUFFIX}"
        if step.view is None or step.stored is None:  # a number, as DeepSpeed's own Adam stores it
            number, item = step.node, value_item(emit(step.node), _STEP)
            self.files.append(RankFile(file, self._sums))
            self.files[-1].add_bytes(item)
            self.checks[file] = partial(_check_bytes, item)
            return _count(name, float(number) if isinstance(number, (int, float)) else -1)
        chunk = ChunkBytes(step.stored, step.view)
        frame = tensor_frame(chunk.view.dtype, chunk.view.shape, chunk.nbytes, _STEP)
        self._file(file, frame, chunk)
        return _count(name, self._number(name, chunk))

    def _chunk(self, name: str, kind: str, leaf: Leaf) -> ChunkBytes:
        """A weight or moment, in float32."""
        stored, view = leaf.stored, leaf.view
        assert stored is not None
        assert view is not None
        if view.dtype == "float32":
            return ChunkBytes(stored, view)
        if view.dtype not in ("bfloat16", "float16") or stored.cast_from is not None:
            raise RefusedError(f"the {kind} of {name!r:.100} is {view.dtype}, and must be float32")
        if kind == _WEIGHT:
            self.cast[view.dtype] = self.cast.get(view.dtype, 0) + 1
        nbytes = stored.nbytes * BITS["float32"] // BITS[view.dtype]
        wide = stored._replace(dtype="float32", cast_from=view.dtype, nbytes=nbytes)
        return ChunkBytes(wide, view._replace(dtype="float32"))

    def _file(self, name: str, frame: ItemFrame, chunk: ChunkBytes) -> None:
        file = RankFile(name, self._sums)
        file.add_tensor(frame, chunk)
        self.files.append(file)
        self.checks[name] = partial(_check, frame)
        self.count += 1

    def _number(self, name: str, chunk: ChunkBytes) -> float:
        """The value of a tensor with one element."""
        stored, view = chunk
        code = _NUMBERS.get(view.dtype)
        if code is None or chunk.nbytes != BITS[view.dtype] // 8 or stored.cast_from is not None:
            raise RefusedError(f"the step of {name!r:.100} is not one number")
        at = view.offset * chunk.nbytes
        source = self._draft.sources[stored.source]
        if stored.content is not None:
            data = bytes(stored.content[at : at + chunk.nbytes])
        else:
            data = bytes(source.read(stored.start + at, chunk.nbytes))
        (number,) = struct.unpack((">" if stored.big_endian else "<") + code, data)
        return float(number)


def _count(name: str, number: float) -> float:
    """A number of steps; RefusedError if it is invalid."""
    if not 0 <= number <= _MOST_STEPS or number != int(number):
        raise RefusedError(f"the step of {name!r:.100} is {number:g}, no count of steps")
    return number


@lru_cache(1024)
def _param_frame(kind: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> ItemFrame:
    """The frame of the file of a weight or moment."""
    graph = Graph(None)
    storage = graph.storage("0", dtype, nbytes, "cpu")
    tensor = graph.tensor(storage, dtype, shape, contiguous_stride(shape), 0)
    found = Dict()
    found.pairs = [(graph.text("cat_dim"), 0), (graph.text("param"), tensor)]
    return ItemFrame(emit(found), nbytes, kind)


def _check(frame: ItemFrame, files: Mapping[str, Readable]) -> None:
    """Raises WriteError unless a written file starts as planned and can be read."""
    file = files[""]
    if file.nbytes != frame.nbytes or file.read(0, len(frame.head)) != frame.head:
        raise WriteError("the written file has another pickle than planned")
    check_layout(Archive(file))


def _check_bytes(planned: bytes, files: Mapping[str, Readable]) -> None:
    file = files[""]
    if file.nbytes != len(planned) or file.read(0, file.nbytes) != planned:
        raise WriteError("the written file holds something else than planned")


# -- the files of the whole ------------------------------------------------------------------------


def _optimizer_states(draft: CheckpointGraph, found: ModelAndOptimizer) -> Dict:
    """The groups of the optimizer, and the other contents of ZeRO's file."""
    text, root, groups = draft.graph.text, Dict(), List([])
    first = 0
    for group, names in zip(found.groups, found.names, strict=True):
        about = Dict()
        told = [(k, v) for k, v in group.pairs if not (is_key(k, PARAMS) or is_key(k, _NAMES))]
        numbers = List(list(range(first, first + len(names))))
        about.pairs = [*told, (text(PARAMS), numbers)]
        groups.items.append(about)
        first += len(names)
    zero = found.rest.get(_ZERO)
    kept = zero.pairs if isinstance(zero, MappingNode) else []
    version = entry_of(zero, "ds_version") or found.rest.get("ds_version")
    version = version if isinstance(version, str) else text(_VERSION)
    apart = (_SCALER, _GROUPS, "ds_version")
    root.pairs = [(k, v) for k, v in kept if not any(is_key(k, each) for each in apart)]
    root.pairs += [(text("ds_version"), version), (text(_GROUPS), groups)]
    return root


def _model_states(
    draft: CheckpointGraph, found: ModelAndOptimizer, trained: _ParameterFiles
) -> Dict:
    """The model, and everything other than the model and the optimizer."""
    text, root = draft.graph.text, Dict()
    shapes = List([])
    for names in found.names:
        each = Call(Global("collections", "OrderedDict", 0), Tuple([], 0), "REDUCE", 0)
        each.pairs = [(text(name), _size(trained.shapes[name])) for name in names]
        shapes.items.append(each)
    made: dict[str, Node] = {
        "module": found.module,
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
    }
    kept = [(key, value) for key, value in found.rest.pairs if not is_key(key, _ZERO)]
    for key, value in kept:
        if str(key) in made and value is not None and str(key) != "frozen_param_shapes":
            raise RefusedError(
                f"its entry {str(key)!r} has a name that DeepSpeed uses for another entry",
                hint="--exclude-tensors leaves it out",
            )
    kept = [(key, value) for key, value in kept if str(key) not in made]
    schedulers = [(key, value) for key, value in kept if str(key) in _SCHEDULERS]
    kept = [pair for pair in kept if schedulers != [pair]]
    known = {str(key) for key, _ in kept}
    usual: dict[str, Node] = {
        "lr_scheduler": schedulers[0][1] if len(schedulers) == 1 else None,
        "skipped_steps": 0,
        "global_steps": max(trained.steps),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": text(_VERSION),
    }
    made |= {key: value for key, value in usual.items() if key not in known}
    root.pairs = [*((text(key), value) for key, value in made.items()), *kept]
    return root


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size", 0), Tuple([Tuple(list(shape), 0)], 0), "REDUCE", 0)


def _warnings(
    draft: CheckpointGraph, found: ModelAndOptimizer, trained: _ParameterFiles
) -> Iterator[str]:
    for dtype, count in trained.cast.items():
        yield (f"{plural(count, 'weight')} became float32 from {dtype}: it has no master weights")
    same = {id(value) for key, value in found.module.pairs if str(key) in trained.shapes}
    others = [str(key) for key, value in found.module.pairs if id(value) not in same]
    if others:
        yield (
            "DeepSpeed restores trained weights alone from a universal checkpoint: "
            f"{join_names(others, _MOST_NAMED)} can be loaded from 'module' in {_MODEL}"
        )
    if entry_of(found.rest.get(_ZERO), _SCALER) is not None:
        yield "the loss scaler starts as the configuration of DeepSpeed says"
    yield "ZeRO 1 and 2 load it; ZeRO 3 needs a universal checkpoint of its own kind"
