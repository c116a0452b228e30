"""deepspeed: a folder that DeepSpeed wrote with ZeRO 1, 2 or 3: `engine.save_checkpoint`.

    latest                  the name of the folder of the newest checkpoint
    global_step500/         a checkpoint: a file of each rank, see `rank_files`

Read are the weights, the optimizer and all that the user saved, as one file would have them that
was saved without ZeRO: `module`, by name; `optimizer`, with a number and a state for each parameter
as torch.optim has them; and the rest. Trained weights are those that the optimizer has, in float32;
those of the model are less exact copies of these (`ReadSession.weights`). The partitions are the
ranks' own and are not kept: see `zero`.

Source: deepspeed/runtime/engine.py, `save_checkpoint` (DeepSpeed 0.8 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ...errors import InputError, UnsupportedError
from ...graph.canonical import Graph
from ...graph.reach import nodes_of
from ...manifest.dtypes import nbytes_of
from ...manifest.manifest import Extent, Section, Storage, TensorEntry
from ...phrases import join_names, plural
from ...pickles.nodes import Call, Dict, List, Node, Persistent, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...plans.plan import Plan, Proof
from ...sources.joined import Joined
from ...sources.place import EntryKind
from ...sources.source import Memory, Source
from ...torch_pickle.streams import LocationEdits
from ...torch_pickle.values.strided import contiguous_stride
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..folders.layouts import is_several
from ..folders.parts import PartsContainer, number_files
from ..folders.weight_names import weights_among
from ..probe import Probe
from ..torch.zip import TorchZipContainer
from .flat import Elements, Whole, whole_of
from .rank_files import RankFiles
from .saved_file import SavedFile, by_name
from .zero import Value, Zero, world_of

_LATEST, _SCRIPT = BESIDE = "latest", "zero_to_fp32.py"
_STEP = re.compile(r"global_step\d+")
_LONGEST_TAG = 255
_MOST_NAMED = 5
#: What of the model's file is told by the tensors themselves, once they are whole.
_OF_PARTITIONS = ("param_shapes", "frozen_param_fragments")
_MODULE = "module"


class DeepSpeed(Format):
    """The format of DeepSpeed, where several files hold one checkpoint."""

    name = "deepspeed"
    summary = "DeepSpeed with ZeRO 1, 2 or 3: `engine.save_checkpoint`, transformers, accelerate"
    refused = (
        "folders that lack files of ranks; universal checkpoints; pipelines, tensor parallelism "
        "and experts, since only the model's code knows how to merge them"
    )
    carries = Carries(False, True, False, objects=True, dtypes="all of torch")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        """A folder with files of ranks, or of a run whose checkpoints are in folders."""
        if not probe.is_folder:
            return False
        ranks = RankFiles.among(probe.entries)
        return ranks.are_there or _is_universal(probe, ranks) or bool(_tags(probe))

    def read(self, probe: Probe) -> Checkpoint:
        """Read the files of all ranks; those of one checkpoint."""
        named = RankFiles.among(probe.entries)
        if _is_universal(probe, named):
            raise UnsupportedError(
                "is a universal checkpoint of DeepSpeed, whose files below zero/ are not merged",
                path=probe.path,
                hint="give the checkpoint that it was made of",
            )
        if not named.are_there:
            return _read_run(probe)
        files = checked_files(probe)
        _tell_others(probe, files.names)
        opened = dict[str, SavedFile]()
        for n, name in enumerate(files.names, 1):
            opened[name] = _open(probe, name, n)
        model = [opened[files.model[rank]] for rank in sorted(files.model)]
        ranks = [opened[files.optimizer[rank]] for rank in sorted(files.optimizer)]
        world = world_of(ranks[0])
        files.check_ranks(world)
        for rank in ranks:
            if world_of(rank) != world:
                raise rank.malformed(f"the number of ranks (other files say {world:,}): it")
        container = ZeroContainer(probe, model, ranks)
        _tell_devices(probe, opened.values())
        sources: list[Source] = [container.joined, *(each.source for each in opened.values())]
        return Checkpoint(self.name, container, self.carries, sources)


def _tell_devices(probe: Probe, files: Iterable[SavedFile]) -> None:
    """Tell what the files say of devices, which what is made of several of them can't."""
    stored = (each for file in files for each in file.container.storages.values())
    devices = sorted({str(each.location) for each in stored} - {"cpu"})
    if devices:
        told = join_names(devices, _MOST_NAMED)
        probe.note(f"its files are tagged {told}; the whole tensors made of them are shown without")


def _tell_others(probe: Probe, known: Iterable[str]) -> None:
    """Tell of what lies beside a checkpoint, and is not in what is made of it."""
    others = sorted(probe.entries.keys() - {*known, *BESIDE})
    if others:
        probe.note(f"{join_names(others, _MOST_NAMED)} in it was not looked at")


def _is_universal(probe: Probe, files: RankFiles) -> bool:
    """Whether each parameter has a folder of its own."""
    zero = probe.entries.get("zero")
    return bool(files.model) and zero is not None and zero.kind is EntryKind.FOLDER


def checked_files(probe: Probe) -> RankFiles:
    """The files of one checkpoint; raises InputError if they are known not to be all of it."""
    files = RankFiles.among(probe.entries)
    try:
        files.check_kind()
        files.check_ranks(max((*files.optimizer, *files.model), default=0) + 1)
    except InputError as error:
        error.about(probe.path)
        raise
    return files


def check_complete(probe: Probe) -> None:
    """Raises InputError if a folder lacks files of ranks, or has those of two saves.

    Those of kinds that are not merged are not counted.
    """
    files = RankFiles.among(probe.entries)
    if not files.optimizer or files.layers or files.experts or len(files.parts) > 1:
        return
    try:
        checked_files(probe)
        files.check_ranks(world_of(_open(probe, files.optimizer[min(files.optimizer)], 1)))
    except InputError as error:
        error.about(probe.path)
        raise


def _tags(probe: Probe) -> list[str]:
    """The folders of the checkpoints of a run, if this is one."""
    kinds = {name: each.kind for name, each in probe.entries.items()}
    if is_several(kinds) or weights_among(kinds):  # a trainer saved more beside
        return []
    folders = [name for name, kind in kinds.items() if kind is EntryKind.FOLDER]
    steps = [name for name in folders if _STEP.fullmatch(name)]
    named = kinds.get(_LATEST) is EntryKind.FILE and bool(steps or _SCRIPT in kinds)
    return folders if named else steps


def _read_run(probe: Probe) -> Checkpoint:
    """Read the newest checkpoint of a run."""
    tags = _tags(probe)
    tag = tags[0]
    if _LATEST in probe.entries:
        source = probe.open(_LATEST).file
        told = source.read(0, min(source.nbytes, _LONGEST_TAG + 1)).decode("utf-8", "replace")
        tag = told.strip()
        if tag not in tags:
            raise InputError(
                f"its file 'latest' names {tag!r:.100}, which is not a folder in it",
                path=probe.path,
            )
    elif len(tags) > 1:
        raise UnsupportedError(
            f"has {plural(len(tags), 'checkpoint')} and no file 'latest': "
            f"{join_names(tags, _MOST_NAMED)}",
            path=probe.path,
            hint="give one of them",
        )
    others = [name for name in tags if name != tag]
    if others:
        named = join_names(others, _MOST_NAMED)
        probe.note(f"only {tag} was looked at, the newest in it; not {named}")
    _tell_others(probe, tags)
    found = probe.open_folder(tag)
    if not any(name.endswith("_states.pt") for name in found.entries):
        raise UnsupportedError(
            f"is a directory of DeepSpeed, and its folder {tag} holds no checkpoint",
            path=probe.path,
        )
    return probe.read_from(found)


def _open(probe: Probe, name: str, number: int) -> SavedFile:
    probe.session.begin_file(name)
    found = probe.open(name)
    container = probe.read_from(found).container
    if not isinstance(container, TorchZipContainer):
        raise UnsupportedError("is not a file that torch.save wrote as a zip", path=found.path)
    return SavedFile(name, number, found.file, container)


class ZeroContainer(PartsContainer):
    """The files of all ranks."""

    def __init__(
        self, probe: Probe, model: Sequence[SavedFile], ranks: Sequence[SavedFile]
    ) -> None:
        files = [*model, *ranks]
        super().__init__(Memory(b"", probe.path), {each.name: each.container for each in files})
        self._zero = zero = Zero(model, ranks)
        self._model = model
        self.joined = Joined(probe.path)
        self._wholes: dict[str, Whole] = {}
        self._graph = Graph(None)
        self._known: dict[tuple[object, ...], Node] = {}
        probe.session.begin_file("")
        self._has_master = probe.session.weights != _MODULE
        probe.session.has_two_weights = True
        root = model[0].root
        module = root.get("module")
        if not isinstance(module, (Dict, Call)):
            raise model[0].malformed("its module")
        module.pairs = [(self._graph.text(key), node) for key, node in self._weights(module)]
        optimizer = self._optimizer(zero)
        pairs = [(key, node) for key, node in root.pairs if str(key) not in _OF_PARTITIONS]
        pairs = [(key, optimizer if key == "optimizer" else node) for key, node in pairs]
        if not any(key == "optimizer" for key, _ in pairs):
            pairs.append((self._graph.text("optimizer"), optimizer))
        rest = self._rest({str(key) for key, _ in pairs})
        if rest.pairs:
            pairs.append((self._graph.text("zero"), rest))
        root.pairs = pairs
        self.ids = self._graph.ids
        self.roots = [((), root)]
        self.section = Section.OTHER
        self.writer = "DeepSpeed"
        self._keep_what_is_used(files)
        for each in files:
            number_files(each.container, each.number)

    # -- the tree ------------------------------------------------------------------------------

    def _weights(self, module: MappingNode) -> Iterator[tuple[str, Node]]:
        """The weights and buffers by name, in the order of the model."""
        zero, file = self._zero, self._model[0]
        if not all(isinstance(key, str) for key, _ in module.pairs):
            raise file.malformed("a name in its module")
        saved = {str(key): node for key, node in module.pairs}
        told = file.root.get("shared_params")
        shared = {}
        for key, node in told.pairs if isinstance(told, Dict) else ():
            if not isinstance(node, str):
                raise file.malformed("its shared_params")
            shared[str(key)] = str(node)
        made: dict[str, Node] = {}
        rounded = dict[str, int]()
        for name, whole in zero.weights.items():
            own = file.elements(saved.get(name))
            if not self._has_master:
                if own is None or own.shape != whole.shape:
                    raise UnsupportedError(
                        "has no weights but those of the optimizer"
                        + (", as is usual with stage 3" if zero.is_stage_3 else ""),
                        hint="--weights master",
                    )
                whole = whole_of(own)
            elif own is not None and not zero.is_stage_3 and own.dtype != whole.dtype:
                rounded[own.dtype] = rounded.get(own.dtype, 0) + 1
            made[name] = self._tensor(f"module.{name}", whole)
        for name, whole in zero.frozen.items():
            made[name] = self._tensor(f"module.{name}", whole)
        self.warnings += [
            f"{plural(count, 'trained weight')} read as the optimizer has them; --weights module "
            f"gives their copies in {dtype}"
            for dtype, count in rounded.items()
        ]
        aliases = {name: owner for name, owner in shared.items() if owner in made}
        buffers = [name for name in saved if name not in made and name not in aliases]
        for name in buffers:
            node = saved[name]
            own = file.elements(node)
            if zero.is_stage_3 and own is not None and self._is_lost(name, own):
                raise UnsupportedError(f"has no partitions of the weight {name!r:.100}")
            plain = own is not None and own.numel
            made[name] = self._buffer(name, own) if own is not None and plain else node
        self._compare(buffers)
        for name in dict.fromkeys((*saved, *zero.weights, *zero.frozen, *aliases)):
            yield name, made[aliases.get(name, name)]

    def _is_lost(self, name: str, own: Elements) -> bool:
        """Whether stage 3 left nothing of what is no buffer."""
        buffers = self._model[0].root.get("buffer_names")
        listed = {str(each) for each in buffers.items} if isinstance(buffers, List) else set()
        return own.shape == (0,) and name not in listed

    def _compare(self, buffers: Sequence[str]) -> None:
        """Warn if buffers differ between ranks."""
        differ = set[str]()
        first = self._model[0]
        mine_by_name = by_name(first.root.get("module"))
        for other in self._model[1:]:
            theirs_by_name = by_name(other.root.get("module"))
            for name in buffers:
                mine = first.elements(mine_by_name.get(name))
                theirs = other.elements(theirs_by_name.get(name))
                proofs = [each.proof for each in (mine, theirs) if each is not None and each.proof]
                if len({proof[:2] for proof in proofs}) > 1:
                    differ.add(name)
        if differ:
            named = join_names(sorted(differ), _MOST_NAMED)
            self.warnings.append(f"ranks differ in buffers, those of rank 0 are read: {named}")

    def _optimizer(self, zero: Zero) -> Dict:
        """The optimizer, as torch.optim saves it."""
        graph, state, groups = self._graph, Dict(), List([])
        number = 0
        for group in zero.groups:
            about = Dict()
            first = number
            for name in group.names:
                held = zero.state[name]
                if held:
                    entry = Dict()
                    for key, value in held.items():
                        node = self._value(f"optimizer.state.{number}.{key}", value)
                        entry.pairs.append((graph.text(key), node))
                    state.pairs.append((number, entry))
                number += 1
            told = group.about.pairs if group.about is not None else ()
            about.pairs += [(key, node) for key, node in told if key != "params"]
            names = [graph.text(name) for name in group.names]
            about.pairs.append((graph.text("params"), List(list(range(first, number)))))
            about.pairs.append((graph.text("param_names"), List(list(names))))
            groups.items.append(about)
        optimizer = Dict()
        optimizer.pairs = [(graph.text("state"), state), (graph.text("param_groups"), groups)]
        return optimizer

    def _rest(self, known: set[str]) -> Dict:
        """What else is in the optimizer's file."""
        rest, met = Dict(), set[int]()
        for name, node in self._zero.rest():
            if name in known:
                continue
            if any(isinstance(each, Persistent) for each in nodes_of(node, met=met)):
                raise UnsupportedError(
                    f"has tensors under {name!r:.100} of the optimizer, of which nothing tells how "
                    "ranks divide them"
                )
            rest.pairs.append((self._graph.text(name), self._plain(node)))
        return rest

    def _plain(self, node: Node) -> Node:
        """An object of DeepSpeed as what it holds, so that the result can be loaded without it."""
        name = node.qualname if isinstance(node, Call) else None
        if not isinstance(node, Call) or name is None or not name.startswith("deepspeed."):
            return node
        if isinstance(node.state, Dict):
            kind = self._graph.text("class"), self._graph.text(name)
            node.state.pairs = [kind, *node.state.pairs]
            return node.state
        args = node.args.items if isinstance(node.args, Tuple) else []
        return args[0] if len(args) == 1 and type(args[0]) in (int, str) else node

    def _value(self, name: str, value: Value) -> Node:
        if isinstance(value, Elements):
            return self._tensor(name, whole_of(value))
        return self._tensor(name, value) if isinstance(value, Whole) else value

    def _buffer(self, name: str, own: Elements) -> Node:
        """A tensor of the model's file; two names of one stay two names of one."""
        key = own.at, own.dtype, own.shape
        if key not in self._known:
            self._known[key] = self._tensor(f"module.{name}", whole_of(own))
        return self._known[key]

    def _tensor(self, name: str, whole: Whole) -> Node:
        """A tensor, which is put together when it is read."""
        nbytes = nbytes_of(whole.numel, whole.dtype)
        at = self.joined.add(nbytes, whole.strips)
        self._wholes[name] = whole
        self.storages[name] = Storage(name, "cpu", nbytes, whole.dtype, Extent(at, nbytes))
        node = self._graph.storage(name, whole.dtype, nbytes, "cpu")
        return self._graph.tensor(node, whole.dtype, whole.shape, contiguous_stride(whole.shape), 0)

    def _keep_what_is_used(self, files: Sequence[SavedFile]) -> None:
        """Forget the partitions: nothing in the tree refers to them."""
        met = {id(node) for node in nodes_of(self.roots[0][1]) if isinstance(node, Persistent)}
        for file in files:
            ids = file.container.ids
            used = {each.id for known, each in ids.items() if known in met}
            container = file.container
            container.storages = {k: v for k, v in container.storages.items() if k in used}

    # -- the bytes -----------------------------------------------------------------------------

    def proofs(self, storage: str) -> Sequence[Proof]:
        """The checksums of the records in which its elements lie."""
        found = list[Proof]()
        whole = self._wholes[storage]
        for flat, strip in zip(whole.flats(), whole.strips(), strict=True):
            if flat.proof is not None:
                is_all = (strip.source_at, strip.run) == (flat.proof.source_at, flat.proof.nbytes)
                at = strip.at if is_all else None
                found.append(flat.proof._replace(at=at))
        return found

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        return {
            each.name: _division(self._wholes[each.storage])
            for each in tensors
            if each.storage in self._wholes
        }

    @property
    def described_nbytes(self) -> int:
        """The length of the pickles."""
        return sum(part.described_nbytes for part in self.parts.values())

    def inner(self) -> Iterator[tuple[str, TorchZipContainer]]:
        """None: what is beside the objects in the files is but the frame."""
        return iter(())

    def plan(self, spelling: LocationEdits) -> Plan:
        raise UnsupportedError(
            "is put together of the files of ranks",
            hint="relocate the folder with these files by itself",
        )


def _division(whole: Whole) -> str:
    """How a tensor is divided, in a few characters."""
    pieces = whole.pieces()
    return f"flat/{pieces:,}" if pieces > 1 else "one copy"
