"""Flatten the tree of a checkpoint like torch.distributed.checkpoint flattens a state dict.

Every dict is flattened, and every list that contains a tensor or a dict, also in nested lists.
Everything else is a value, with its contents. Keys become text. An empty dict would disappear; here
it is a value.

Source: torch/distributed/checkpoint/_traverse.py, _nested_dict.py (torch 2.4 to 2.13).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from ....display.phrases import plural
from ....errors import RefusedError
from ....graph.draft import CheckpointGraph, StorageBytes, View
from ....graph.plain_tensors import data_of, flags_of, is_plain, is_untouched
from ....graph.traversal import nodes_of
from ....manifest.dtypes import BITS
from ....pickles.nodes import Call, Dict, List, Node, Persistent, Tuple, are_plain
from ....pickles.nodes import Mapping as MappingNode
from ....pickles.terms import TooLong
from ....reports.convert import Loss
from ....torch_pickle.children import spell_key
from .metadata import Keys
from .tree import state_by_number

_DICTS = {f"collections.{name}" for name in ("OrderedDict", "defaultdict", "Counter")}
_NO_TENSORS = {"complex32", "qint8", "quint8", "qint32"}  # dtypes that DCP can't save as tensors
_HOOKS, _STATE = 2, 3  # arguments of the function that rebuilds a parameter
_MOST_LEAVES = 20_000_000
_HINT = "--exclude-tensors leaves one out, --rename gives it another name"


#: The entries of a dict or list, with keys as in DCP.
_Entries = Iterator[tuple[str | int, Node]]


class Leaf(NamedTuple):
    """A tensor or any other value, with its path."""

    name: str
    keys: Keys
    node: Node
    #: for a tensor: its storage, and its view of it
    stored: StorageBytes | None = None
    view: View | None = None
    requires_grad: bool = False


@dataclass
class FlatTree:
    """A flattened tree, and what flattening loses."""

    leaves: list[Leaf] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    #: types of dicts that become plain dicts → how many
    kinds: Counter[str] = field(default_factory=Counter)
    parameters: int = 0  #: how many parameters become tensors
    attributes: int = 0  #: how many parameters have attributes, which are lost
    #: names of values that hold tensors other than strided ones without hooks
    odd: list[str] = field(default_factory=list)

    def warnings(self) -> tuple[str, ...]:
        """Details that the format does not store and that hardly anybody misses."""
        found = [
            f"{plural(count, kind)} became {'a plain dict' if count == 1 else 'plain dicts'}, as "
            "the format stores no types of dicts"
            for kind, count in sorted(self.kinds.items())
        ]
        if self.parameters:
            lost = f", without the attributes of {self.attributes:,}" if self.attributes else ""
            found.append(f"{plural(self.parameters, 'parameter')} became tensors{lost}")
        if self.odd:
            more = f" and {len(self.odd) - 1:,} more" if len(self.odd) > 1 else ""
            found.append(f"{self.odd[0]}{more} is saved as a value: dcp.load can't reshard it")
        return tuple(found)


def flatten(draft: CheckpointGraph, most_leaves: int = _MOST_LEAVES) -> FlatTree:
    """Flatten the tree of a draft; RefusedError if it can't be stored in DCP, or has cycles.

    Raises TooLong if it has more leaves than `most_leaves`.
    """
    return _Flattening(draft, most_leaves).run()


class _Flattening:
    def __init__(self, draft: CheckpointGraph, most_leaves: int) -> None:
        self.draft = draft
        self.most = most_leaves
        self.recogniser = draft.graph.recogniser
        self.found = FlatTree()
        self.divided: dict[int, bool] = {}  # `id()` of a list → whether it is flattened
        # `id()` of dicts whose keys become numbers again when they are read
        self.numbered = set[int]()

    def run(self) -> FlatTree:
        root = self.draft.graph.root
        if not _is_dict(root):
            raise RefusedError(
                "its top is not a dict, which a distributed checkpoint needs",
                hint="--weights model writes the state dict in it, --root NAME an entry",
            )
        names = set[str]()
        keys: list[str | int] = []
        todo: list[_Entries] = [self.entries(root, keys)]
        above = [id(root)]  # the containers that are being flattened
        within = set(above)
        while todo:
            entry = next(todo[-1], None)
            if entry is None:
                todo.pop()
                within.remove(above.pop())
                if keys:
                    keys.pop()
                continue
            key, node = entry
            keys.append(key)
            if self.is_descended(node):
                if id(node) in within:
                    raise RefusedError(f"{_named(keys):.100} holds itself, which has no form here")
                todo.append(self.entries(node, keys))
                above.append(id(node))
                within.add(id(node))
                continue
            leaf = self.leaf(tuple(keys), node)
            if leaf.name in names:
                raise RefusedError(f"two entries would be called {leaf.name!r:.100}", hint=_HINT)
            names.add(leaf.name)
            self.found.leaves.append(leaf)
            if len(names) > self.most:
                raise TooLong
            keys.pop()
        return self.found

    def is_descended(self, node: Node) -> TypeGuard[List | MappingNode]:
        if isinstance(node, List):
            if id(node) not in self.divided:
                self.look_into(node)
            return self.divided[id(node)]
        return _is_dict(node) and bool(_pairs(node))

    def look_into(self, top: List) -> None:
        """Find out which of the lists within a list are flattened."""
        holders: dict[int, list[int]] = defaultdict(list)
        todo, met, direct = [top], {id(top)}, list[int]()
        while todo:
            node = todo.pop()
            items = [] if are_plain(node.items) else node.items
            for each in items:
                if isinstance(each, List):
                    holders[id(each)].append(id(node))
                    if id(each) not in met:
                        met.add(id(each))
                        todo.append(each)
            if any(_is_dict(each) or self.is_tensor(each) for each in items):
                direct.append(id(node))
        self.divided |= dict.fromkeys(met, False)
        while direct:
            known = direct.pop()
            if not self.divided[known]:
                self.divided[known] = True
                direct += holders[known]

    def is_tensor(self, node: Node) -> bool:
        data = data_of(node)
        return isinstance(data, Call) and self.recogniser.tensor(data) is not None

    def entries(self, node: List | MappingNode, keys: list[str | int]) -> _Entries:
        if isinstance(node, List):
            return iter(list(enumerate(node.items)))
        if isinstance(node, Call):
            self.found.kinds[str(node.qualname)] += 1
        pairs = _pairs(node)
        state = state_by_number(node)
        if state is not None:
            self.numbered.add(id(state))
        strange = [key for key, _ in pairs if not isinstance(key, str)]
        if strange and id(node) not in self.numbered:
            kind = "numbers" if all(isinstance(key, int) for key in strange) else "not text"
            name = _named(keys) or "(root)"
            self.found.losses.append(Loss(name, f"has keys that are {kind} and become text"))
        spelled: dict[str, Node] = {}
        odd = set[str]()
        for n, (key, value) in enumerate(pairs):
            text = str(key) if isinstance(key, str) else str(spell_key(key, n))
            if text in spelled and (not isinstance(key, str) or text in odd):
                raise RefusedError(f"{_named([*keys, text])!r:.100} would be there twice")
            if not isinstance(key, str):
                odd.add(text)
            spelled[text] = value
        return iter(list(spelled.items()))

    def leaf(self, keys: Keys, node: Node) -> Leaf:
        name = _named(keys)
        data = data_of(node)
        if isinstance(data, Call) and is_plain(data) and is_untouched(data):
            flags, tensor = flags_of(data), self.recogniser.tensor(data)
            if tensor is not None and tensor.storage is not None and flags is not None:
                stored = self.draft.stored[tensor.storage]
                divisible = _is_divisible(tensor.dtype) and stored.location != "meta"
                if divisible and not (data is not node and _argument(node, _HOOKS)):
                    view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset, **flags)
                    self.found.parameters += data is not node
                    self.found.attributes += data is not node and bool(_argument(node, _STATE))
                    grad = _flag(data, 4) or (data is not node and _flag(node, 1))
                    return Leaf(name, keys, node, stored, view, grad)
        if self.is_tensor(node) or any(isinstance(e, Persistent) for e in nodes_of(node)):
            self.found.odd.append(name)
        return Leaf(name, keys, node)


def _is_divisible(dtype: str) -> bool:
    """Whether DCP can save tensors of a dtype as tensors."""
    return BITS[dtype] >= 8 and not dtype.startswith("bits") and dtype not in _NO_TENSORS


def _flag(node: Node, n: int) -> bool:
    """Whether an argument of a call is True."""
    args = node.args.items if isinstance(node, Call) and isinstance(node.args, Tuple) else ()
    return len(args) > n and args[n] is True


def _argument(node: Node, n: int) -> Node:
    """An argument of a call, if it is not empty: a dict of hooks, or of attributes."""
    args = node.args.items if isinstance(node, Call) and isinstance(node.args, Tuple) else ()
    found = args[n] if len(args) > n else None
    if isinstance(found, MappingNode) and not found.pairs and not (_is_made_of(found)):
        return None
    return found


def _is_made_of(node: MappingNode) -> bool:
    """Whether a dict object was made from arguments, or has a state or items."""
    args = node.args if isinstance(node, Call) else None
    filled = isinstance(node, Call) and (node.built or bool(node.items))
    return filled or (isinstance(args, Tuple) and bool(args.items))


def _named(keys: Keys | list[str | int]) -> str:
    return ".".join(map(str, keys))


def _is_dict(node: Node) -> TypeGuard[MappingNode]:
    """Whether a node is a dict, or one of the dict classes of `collections`."""
    return isinstance(node, Dict) or (isinstance(node, Call) and _body(node) is not None)


def _body(node: Call) -> Sequence[tuple[Node, Node]] | None:
    """The pairs in the arguments of a dict class; None if the call is not known to make a dict."""
    args = node.args.items if isinstance(node.args, Tuple) else [None]
    if node.qualname not in _DICTS or len(args) > 1 or node.kwargs is not None:
        return None
    first = args[0] if args else Dict()
    if isinstance(first, Dict):
        return first.pairs
    return [] if node.qualname == "collections.defaultdict" else None


def _pairs(node: MappingNode) -> Sequence[tuple[Node, Node]]:
    return node.pairs if isinstance(node, Dict) else [*(_body(node) or ()), *node.pairs]  # type: ignore[arg-type]
