"""Implements `ckptmove.save`: write an object in memory as a checkpoint of any format."""

from __future__ import annotations

from itertools import repeat
from typing import Annotated, TypeGuard

from ..errors import RefusedError, StrPath
from ..graph.canonical import canonical
from ..graph.draft import CheckpointGraph, StorageBytes
from ..graph.edit.callables import CallablePlace, Judge, places_of
from ..graph.traversal import Composite, nodes_of
from ..pickles.nodes import Call, Global, Items, List, Node, Set, Tuple
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.opcodes.pairs import change_each, with_each_changed
from ..pickles.walk import walk
from ..runtime.opaque import STAND_IN
from ..sources.budget import Boundless
from ..torch_pickle.values.persistent_ids import storage_ids, storages_of
from ..writing.in_place import recover_if_interrupted
from ..writing.verify import Progress
from .conversion.target import PlannedPart, Target, target_of
from .conversion.trust import judge, refuse_places
from .options import BARE, Format, MaxShardSize, Metadata, Option, Shared, declare_options

_HINT = "trust_objects=True writes what they stand for"
_NAME = 2  # the prefix of stand-in names


@declare_options
def save(
    obj: object,
    path: StrPath,
    *,
    format: Format = None,
    shared: Shared = "keep",
    bare: Annotated[bool, BARE] = False,
    metadata: Metadata = None,
    max_shard_size: MaxShardSize = None,
    trust_objects: Annotated[
        bool,
        Option(
            "Allow the pickle to call what an `Opaque` stands for, even if that is not known to be "
            "harmless. Your own objects need no permission."
        ),
    ] = False,
    force: Annotated[bool, Option("Replace an existing destination.")] = False,
    progress: Progress | None = None,
) -> None:
    """Write an object as a checkpoint that appears complete and verified, or not at all.

    The object is pickled as `torch.save` does it. The bytes of tensors go directly from memory to
    the file; do not write to the tensors meanwhile. An `Opaque` from `load()` is written as the
    object that it stands for.

    Args:
        obj: the object; anything that `torch.save` takes.
        path: the file or folder to write, as `dst` of `convert`.
        progress: as for `convert`.

    Raises:
        UsageError: the options make no sense.
        UnsupportedError: the object cannot be pickled, or the format cannot store it.
        RefusedError: the destination exists, something would be lost, bytes are shared and `shared`
            is `error`, or an `Opaque` stands for something not known to be harmless.
        WriteError: writing or verifying failed.
    """
    target = target_of(path, format, max_shard_size=max_shard_size)
    options = target.write_options(shared, metadata, bare=bare)
    if not target.is_folder:
        recover_if_interrupted(target.path)
    draft, places = _draft_of(obj, target)
    for loss in target.format.losses(draft, options):
        raise RefusedError(f"would lose {loss.name}, which {loss.why}", path=target.path)
    writing = target.format.plan_write(draft, options)
    if writing.pickle and not trust_objects:
        refuse_places([*places, *writing.places], hint=_HINT)
    part = PlannedPart(writing, [], {name: name for name in writing.files})
    target.write([part], force=force, progress=progress)


class _StandIns:
    """Replaces the stand-ins in a graph with the names and calls that each `Opaque` records."""

    def __init__(self, root: Node) -> None:
        self._opaque: set[int] = set()  # `id()` of names, and of calls
        self._names: dict[int, Global] = {}  # by the `id()` of their stand-ins
        self._kept: list[Node] = []  # kept alive so that no other node gets the same `id()`
        self.root = self._replace(root)
        for _ in nodes_of(self.root, self._enter):
            pass  # each was entered

    def judge(self, path: str) -> Judge:
        """Return a judge of unknown callables that considers only nodes from an `Opaque`."""
        judged = judge(path)
        return lambda node: judged(node) if id(node) in self._opaque else None

    def _enter(self, node: Composite) -> None:
        if isinstance(node, Call):
            self._fill(node)
            node.function, node.args = self._replace(node.function), self._replace(node.args)
            node.kwargs, node.state = self._replace(node.kwargs), self._replace(node.state)
        if isinstance(node, MappingNode):
            node.pairs = with_each_changed(node.pairs, self._replace)
        if isinstance(node, (Tuple, List, Set, Call)):
            change_each(node.items, self._replace)

    def _replace(self, node: Node) -> Node:
        """Return the name that a call stands in for; return any other node itself."""
        if not _is_stand_in(node) or len(_parts(node)) != _NAME:
            return node
        if id(node) not in self._names:
            module, name = map(str, _parts(node))
            self._names[id(node)] = self._global(module, name)
            self._kept.append(node)
        return self._names[id(node)]

    def _global(self, module: str, name: str) -> Global:
        made = Global(module, name, 0)
        self._opaque.add(id(made))
        self._kept.append(made)
        return made

    def _fill(self, node: Call) -> None:
        """Turn a stand-in call into the call that it stands for."""
        if not _is_stand_in(node):
            return
        module, name, function, args, kwargs, how = _parts(node)
        node.function = self._global(str(module), str(name)) if module or name else function
        node.args, node.kwargs, node.opcode = args, kwargs, str(how)
        node.built = node.state is not None
        self._opaque.add(id(node))


def _is_stand_in(node: Node) -> TypeGuard[Call]:
    return isinstance(node, Call) and node.qualname == STAND_IN


def _parts(node: Call) -> Items:
    assert isinstance(node.args, Tuple)
    return node.args.items


def _draft_of(obj: object, target: Target) -> tuple[CheckpointGraph, list[CallablePlace]]:
    """Return the graph of an object, and the places of unknown callables in it."""
    from ..runtime.pickling import pickle_object

    made = pickle_object(obj)
    found = walk(made.data, budget=Boundless())
    ids = storage_ids(found.persistents, "")
    storages = storages_of(ids.values(), lambda found: repeat(None, len(found)))
    restored = _StandIns(found.root)
    places = list(places_of(restored.root, restored.judge(target.path)))
    graph = canonical(restored.root, ids, {}, storages)
    draft = CheckpointGraph(
        path=target.path,
        format="object",
        graph=graph,
        stored={
            key: StorageBytes(
                key,
                storages[key].location,
                storages[key].dtype,
                storages[key].nbytes,
                content=made.storages[key],
            )
            for key in graph.storages
        },
        sources=[],
    )
    return draft, places
