"""The files of ranks as one checkpoint, in the form of a file that was saved without ZeRO."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ....display.phrases import join_names, plural
from ....errors import CorruptError, UnsupportedError
from ....graph.canonical import Graph
from ....graph.traversal import nodes_of
from ....manifest.dtypes import nbytes_of
from ....manifest.manifest import Extent, Section, Storage, TensorEntry
from ....pickles.nodes import Call, Dict, List, Node, Persistent, Tuple
from ....pickles.nodes import Mapping as MappingNode
from ....plans.plan import Proof
from ....sources.joined import JoinedFiles
from ....sources.source import Memory, Source
from ....torch_pickle.values.strided import contiguous_stride
from ...checkpoint import Carries, Checkpoint
from ...folders.parts import number_files
from ...probe import Probe
from ..saved_file import MergedContainer, SavedFile, by_name, keep_what_is_used
from .flat import Elements, Whole, whole_of
from .trained import Module, TrainedState, Value

_MOST_NAMED = 5
#: Entries of the model's file that are not needed once the tensors are whole.
_OF_PARTITIONS = ("param_shapes", "frozen_param_fragments")
_MODULE = "module"


class ZeroContainer(MergedContainer):
    """The files of all ranks."""

    def __init__(
        self,
        probe: Probe,
        files: Collection[SavedFile],
        model: Sequence[SavedFile],
        trained: TrainedState,
        module: Module | None = None,
    ) -> None:
        """`files`: all files.

        `model`: those of the model. `module`: the module, unless the first file has it.
        """
        super().__init__(Memory(b"", probe.path), {each.name: each.container for each in files})
        self._files = files
        self._trained = trained
        self._model = model
        self.joined = JoinedFiles(probe.path)
        self._wholes: dict[str, Whole] = {}
        self._graph = Graph(None)
        self._known: dict[tuple[object, ...], Node] = {}
        probe.session.begin_file("")
        self._has_master = probe.session.weights != _MODULE
        probe.session.has_two_weights = True
        root = model[0].root
        if module is None:
            module = self._own_module()
        whole = Dict()
        whole.pairs = [(self._graph.text(key), node) for key, node in self._weights(module)]
        self.names = [str(key) for key, _ in whole.pairs]
        optimizer = self._optimizer()
        made: dict[str, Node] = {_MODULE: whole, "optimizer": optimizer}
        pairs = [(key, node) for key, node in root.pairs if str(key) not in _OF_PARTITIONS]
        pairs = [(key, made.pop(str(key), node)) for key, node in pairs]
        pairs += [(self._graph.text(key), node) for key, node in made.items()]
        rest = self._rest({str(key) for key, _ in pairs})
        if rest.pairs:
            pairs.append((self._graph.text("zero"), rest))
        root.pairs = pairs
        self.ids = self._graph.ids
        self.roots = [((), root)]
        self.section = Section.OTHER
        self.writer = "DeepSpeed"
        keep_what_is_used([self.roots[0][1]], self._files)  # partitions are no longer needed
        for each in files:
            number_files(each.container, each.number)

    # -- the tree ------------------------------------------------------------------------------

    def _own_module(self) -> Module:
        """The contents of the module in the model's first file."""
        file = self._model[0]
        node = file.root.get(_MODULE)
        if not isinstance(node, MappingNode):
            raise file.malformed_error("its module")
        if not all(isinstance(key, str) for key, _ in node.pairs):
            raise file.malformed_error("a name in its module")
        return {str(key): (file, each) for key, each in node.pairs}

    def _shared(self) -> dict[str, str]:
        """The names of shared weights → the name under which each is stored."""
        shared = dict[str, str]()
        for file in self._model:
            told = file.root.get("shared_params")
            for key, node in told.pairs if isinstance(told, Dict) else ():
                if not isinstance(node, str):
                    raise file.malformed_error("its shared_params")
                shared[str(key)] = str(node)
        return shared

    def _weights(self, saved: Module) -> Iterator[tuple[str, Node]]:
        """The weights and buffers by name, in the order of the model."""
        trained, shared = self._trained, self._shared()
        made: dict[str, Node] = {}
        rounded = dict[str, int]()
        for name, whole in trained.weights.items():
            own = _elements(saved, name)
            if not self._has_master:
                if own is None or own.shape != whole.shape:
                    raise UnsupportedError(
                        "has only the weights of the optimizer"
                        + (", as is usual with stage 3" if trained.is_divided else ""),
                        hint="--weights master",
                    )
                whole = whole_of(own)
            elif own is not None and not trained.is_divided and own.dtype != whole.dtype:
                rounded[own.dtype] = rounded.get(own.dtype, 0) + 1
            made[name] = self._tensor(f"module.{name}", whole)
        for name, whole in trained.frozen.items():
            made[name] = self._tensor(f"module.{name}", whole)
        self.warnings += [
            f"{plural(count, 'trained weight')} read as the optimizer has them; --weights module "
            f"gives their copies in {dtype}"
            for dtype, count in rounded.items()
        ]
        aliases = {name: owner for name, owner in shared.items() if owner in made}
        gone = {name: owner for name, owner in shared.items() if owner not in {*made, *saved}}
        self._check_shared(gone, saved)
        buffers = [name for name in saved if name not in made and name not in aliases]
        for name in buffers:
            node, own = saved[name][1], _elements(saved, name)
            if trained.is_divided and own is not None and self._is_lost(name, own):
                raise UnsupportedError(f"has no partitions of the weight {name!r:.100}")
            plain = own is not None and own.numel
            made[name] = self._buffer(name, own) if own is not None and plain else node
        self._compare(buffers)
        for name in dict.fromkeys((*saved, *trained.weights, *trained.frozen, *aliases)):
            yield name, made[aliases.get(name, name)]

    def _check_shared(self, gone: Mapping[str, str], saved: Module) -> None:
        """Raises CorruptError if weights that others share are missing unintentionally.

        DeepSpeed can be told to leave out weights that were not trained; it then leaves out their
        shapes too.
        """
        file = self._model[0]
        if gone and file.root.get("frozen_param_shapes") is not None:
            name, owner = next(iter(gone.items()))
            raise CorruptError(
                f"{name!r:.80} shares the weight of {owner!r:.80}, which is not there",
                path=file.source.path,
            )
        names = [name for name in gone if name not in saved]
        if names:
            named = join_names(names, _MOST_NAMED)
            self.warnings.append(f"weights that were not trained were not saved: {named}")

    def _is_lost(self, name: str, own: Elements) -> bool:
        """Whether an empty tensor in the model's file is a weight that stage 3 did not save."""
        buffers = self._model[0].root.get("buffer_names")
        listed = {str(each) for each in buffers.items} if isinstance(buffers, List) else set[str]()
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

    def _optimizer(self) -> Dict:
        """The optimizer, in the form of torch.optim."""
        graph, state, groups = self._graph, Dict(), List([])
        number = 0
        for group in self._trained.groups:
            about = Dict()
            first = number
            for name in group.names:
                held = self._trained.state[name]
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
        """The other entries of the optimizer's file."""
        rest, met = Dict(), set[int]()
        for name, node in self._trained.rest:
            if name in known:
                continue
            if any(isinstance(each, Persistent) for each in nodes_of(node, met=met)):
                raise UnsupportedError(
                    f"has tensors under {name!r:.100} of the optimizer, and no file says how ranks "
                    "divide them"
                )
            rest.pairs.append((self._graph.text(name), self._plain(node)))
        return rest

    def _plain(self, node: Node) -> Node:
        """The contents of a DeepSpeed object, so that the result loads without DeepSpeed."""
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
        """A tensor of the model's file; two names of one tensor stay one tensor."""
        key = own.at, own.dtype, own.shape
        if key not in self._known:
            self._known[key] = self._tensor(f"module.{name}", whole_of(own))
        return self._known[key]

    def _tensor(self, name: str, whole: Whole) -> Node:
        """A tensor that is assembled when it is read."""
        nbytes = nbytes_of(whole.numel, whole.dtype)
        at = self.joined.add(nbytes, whole.strips)
        self._wholes[name] = whole
        self.storages[name] = Storage(name, "cpu", nbytes, whole.dtype, Extent(at, nbytes))
        node = self._graph.storage(name, whole.dtype, nbytes, "cpu")
        return self._graph.tensor(node, whole.dtype, whole.shape, contiguous_stride(whole.shape), 0)

    def checkpoint(self, format: str, carries: Carries) -> Checkpoint:
        """The container as a checkpoint of a format."""
        sources: list[Source] = [self.joined, *(each.source for each in self._files)]
        return Checkpoint(format, self, carries, sources)

    # -- the bytes -----------------------------------------------------------------------------

    def proofs(self, storage: str) -> Sequence[Proof]:
        """The checksums of the records that contain its elements."""
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


def _division(whole: Whole) -> str:
    """How a tensor is divided, in a few characters."""
    pieces = whole.pieces()
    return f"flat/{pieces:,}" if pieces > 1 else "one copy"


def _elements(saved: Module, name: str) -> Elements | None:
    """The elements of a tensor of the model, like `SavedFile.elements`."""
    if name not in saved:
        return None
    file, node = saved[name]
    return file.elements(node)
