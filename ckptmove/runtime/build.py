"""Build real objects from a graph of inert nodes, without running anything that the file names.

Only functions of three short lists are called: torch's rebuild functions (`rebuild`), constructors
of plain data (`plain`) and numpy arrays (`arrays`). A name becomes a value only if torch's
weights_only unpickler accepts it (torch/_weights_only_unpickler.py), or if it is a plain type of
Python. Everything else becomes an `Opaque`. As in unpickling, an object is made from its arguments
first, and filled afterwards.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ..errors import CkptmoveError, CorruptError, UnsupportedError
from ..graph.plain_tensors import V2, V3, is_plain, is_untouched
from ..manifest.dtypes import STORAGE_CLASSES
from ..pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    Items,
    List,
    Node,
    Persistent,
    Set,
    Tuple,
    without_source_text,
)
from ..pickles.opcodes.copies import Copies
from ..sources.budget import Budget
from . import arrays, plain, rebuild
from .opaque import Opaque, printable_name
from .storages import WHOLE

_PLAIN = {V2: 6, V3: 7}  # arguments of a tensor without metadata
_SHORT = 64  # characters of a string that may be copied

_Step = tuple[Callable[[Any], None], Node]


def build_object(
    root: Node,
    storage_of: Callable[[Persistent], torch.UntypedStorage],
    *,
    strict: bool = False,
    made: Mapping[int, object] | None = None,
    before_values: Callable[[], None] = lambda: None,
) -> object:
    """Build the object of a graph; each node becomes one object.

    `storage_of` returns the storage of a persistent id; `made` has existing objects, by the `id()`
    of their nodes. `before_values` is called before a function that may read the values of its
    tensors. Raises CorruptError if the graph is not valid, UnsupportedError if this build of
    torch can't make a part, or if `strict` would need an `Opaque`.
    """
    builder = _Builder(storage_of, strict, before_values)
    if made:
        builder.made.update(made)
        builder.met.update(made)
    return builder.build(root)


class _Builder:
    """Makes each node once. Objects in a cycle are filled at the end."""

    def __init__(
        self,
        storage_of: Callable[[Persistent], torch.UntypedStorage],
        strict: bool,
        before_values: Callable[[], None],
    ) -> None:
        self.storage_of = storage_of
        self.strict = strict
        self.before_values = before_values
        self.made: dict[int, object] = {}
        self.met: set[int] = set()
        self.waiting: dict[int, Node] = {}  # nodes that are made, but not filled
        self.todo: list[_Step] = []
        self.names: dict[str, object] = {}
        self.storages: dict[tuple[int, str], torch.TypedStorage] = {}
        self.copies = Copies()
        self.room = 2 * Budget().room  # for copies of arguments that calls share
        self.fake = torch._guards.detect_fake_mode(None) is not None

    def build(self, root: Node) -> object:
        self.todo.append((self.visit, root))
        while self.todo:
            step, node = self.todo.pop()
            step(node)
        waiting, self.waiting = self.waiting, {}
        for node in waiting.values():
            self.put(node)
        return self.value(root)

    def value(self, node: Node) -> object:
        """The object made from a node; CorruptError if a part needs its unfinished whole."""
        if node is None or type(node) in (bool, int, float, bytes):
            return node
        if isinstance(node, str):
            return self.text(node)
        if id(node) not in self.made:
            raise CorruptError("a tuple, or the argument of a call, holds itself")
        return self.made[id(node)]

    def text(self, node: str) -> str:
        """A string; a long one with many uses stays one string."""
        if len(node) <= _SHORT:
            return str(node)
        if id(node) not in self.made:
            self.made[id(node)] = str(node)
        return str(self.made[id(node)])

    # -- the walk: children first, as far as there is no cycle -------------------------------------

    def visit(self, node: Node) -> None:
        if node is None or isinstance(node, (str, bytes, int, float)) or id(node) in self.met:
            return
        self.met.add(id(node))
        if isinstance(node, (Tuple, Set)) and not (isinstance(node, Set) and not node.frozen):
            self.todo.append((self.make, node))
            self.later(node.items)
        elif isinstance(node, (List, Dict, Set)):
            self.make(node)
            self.todo.append((self.fill, node))
            self.later(_contents(node))
        elif isinstance(node, Call):
            tensor = self.plain_tensor(node)
            if tensor is not None:
                self.made[id(node)] = tensor
                return
            self.todo.append((self.fill, node))
            self.later(_contents(node))
            self.todo.append((self.make, node))
            self.later([None if node.qualname else node.function, node.args, node.kwargs])
        elif isinstance(node, Persistent) and _makes_itself(node):
            self.todo.append((self.make, node))
            self.later([node.pid])
        else:
            self.make(node)

    def plain_tensor(self, node: Call) -> object:
        """A shortcut for ordinary tensors, nearly all there are; None for others."""
        if self.fake or not is_plain(node) or not isinstance(node.args, Tuple):
            return None
        assert isinstance(node.function, Global)
        items = node.args.items
        storage = items[0] if len(items) == _PLAIN[node.function.name] else None
        if not isinstance(storage, Persistent):
            return None
        _, offset, shape, stride, grad, _, *dtype = items
        pid = storage.pid.items if isinstance(storage.pid, Tuple) else []
        kind = dtype[0] if dtype else pid[1] if len(pid) == 5 else None
        if not isinstance(kind, Global) or not isinstance(grad, bool) or not is_untouched(node):
            return None
        name = kind.name if dtype else STORAGE_CLASSES.get(kind.name)
        if name not in WHOLE or (dtype and kind.module != "torch"):
            return None
        if not isinstance(shape, Tuple) or not isinstance(stride, Tuple):
            return None
        return rebuild.plain_tensor(
            self.storage_of(storage), name, offset, shape.items, stride.items, grad
        )

    def later(self, nodes: Items) -> None:
        for node in reversed(nodes):
            if not (node is None or isinstance(node, (str, bytes, int, float))):
                self.todo.append((self.visit, node))

    def make(self, node: Node) -> None:
        self.made[id(node)] = self.object_of(node)

    def fill(self, node: Node) -> None:
        """Fill an object, or postpone it until its contents are made and filled."""
        if not isinstance(node, (List, Dict, Set, Call)):
            return
        children = _contents(node)
        pending = any(self.is_pending(child) for child in children)
        if pending:
            self.waiting[id(node)] = node
        else:
            self.put(node)

    def is_pending(self, node: Node) -> bool:
        if node is None or isinstance(node, (str, bytes, int, float)):
            return False
        return id(node) not in self.made or id(node) in self.waiting

    # -- making ------------------------------------------------------------------------------------

    def object_of(self, node: Node) -> object:
        if isinstance(node, Tuple):
            return tuple([self.value(each) for each in node.items])
        if isinstance(node, List):
            return []
        if isinstance(node, Dict):
            return {}
        if isinstance(node, Set):
            items = [self.value(each) for each in node.items] if node.frozen else []
            return frozenset(plain.keys_of(items)) if node.frozen else set()
        if isinstance(node, Blob):
            if node.content is None:
                raise UnsupportedError(f"{node} in the pickle are too many to read")
            return node.content
        if isinstance(node, Call):
            return self.called(node)
        target = without_source_text(node)
        if isinstance(target, Global):
            return self.global_object(target)
        assert isinstance(node, Persistent)
        if _makes_itself(node):
            return self.made_outside(self.value(node.pid))
        return self.storage(node)

    def made_outside(self, pid: Any) -> Opaque:
        """A stand-in for an object that a class outside a package builds."""
        function = pid[-2] if isinstance(pid, tuple) and len(pid) in (3, 4) else None
        if not isinstance(function, Opaque):
            raise CorruptError("an object of the package is malformed")
        return self.opaque(function.qualname, pid[-1], module=function.module)

    def global_object(self, node: Global) -> object:
        allowed = _get_allowed_globals()
        if node.qualname in allowed:
            return allowed[node.qualname]
        if node.qualname in plain.TYPES:
            return plain.TYPES[node.qualname]
        if node.qualname == "numpy.ndarray":
            return arrays.ndarray()
        if node.qualname not in self.names:
            self.names[node.qualname] = self.opaque(node.qualname, module=node.module)
        return self.names[node.qualname]

    def opaque(
        self,
        qualname: str,
        args: object = None,
        kwargs: object = None,
        function: object = None,
        *,
        module: str | None,
        how: str = "REDUCE",
    ) -> Opaque:
        if self.strict:
            raise UnsupportedError(
                f"{printable_name(qualname)} is not known to be plain data, and strict allows "
                "only plain data",
                hint="without strict, load returns a placeholder for it",
            )
        return Opaque(qualname, args, kwargs, function, module, how)

    def storage(self, node: Persistent) -> torch.TypedStorage:
        """A storage, typed as torch.load types it."""
        items = node.pid.items if isinstance(node.pid, Tuple) else []
        if len(items) < 5 or items[0] != "storage" or not isinstance(items[1], Global):
            raise CorruptError(
                "the pickle refers to something outside the file that is not a storage"
            )
        name = STORAGE_CLASSES.get(items[1].name)
        if name is None and items[1].name != "UntypedStorage":
            raise UnsupportedError(f"the storage class {items[1].qualname} is not known")
        untyped = self.storage_of(node)
        key = untyped._cdata, name or "uint8"
        if key not in self.storages:
            dtype = getattr(torch, key[1])
            typed = torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
            self.storages[key] = typed
        return self.storages[key]

    def called(self, node: Call) -> object:
        """Return the result of a listed call, or an `Opaque` for it."""
        name, args, kwargs = node.qualname or "", self.value(node.args), self.value(node.kwargs)
        if not kwargs and isinstance(args, tuple):
            if name in rebuild.REBUILD and not rebuild.is_foreign(name, args):
                self.charge(self.copies.price(node))
                if name not in rebuild.READING_NO_VALUES:
                    self.before_values()
                return rebuild.rebuild(name, args)
            make = arrays.ARRAYS.get(name) if arrays.is_plain(node) else plain.PLAIN.get(name)
            if make is not None:
                self.charge(self.copies.price(node, zeros=False))
                try:
                    return make(*args)
                except (CkptmoveError, MemoryError):
                    raise
                except Exception:  # not the saved form of such objects: an ordinary call
                    pass
        function = without_source_text(node.function)
        return self.opaque(
            name,
            args,
            kwargs,
            None if name else self.value(node.function),
            module=function.module if isinstance(function, Global) else None,
            how=node.opcode,
        )

    def charge(self, nbytes: int) -> None:
        """Limit the total size that calls copy of shared arguments."""
        self.room -= nbytes
        if self.room < 0:
            raise CorruptError("the pickle would take too much memory")

    # -- filling -----------------------------------------------------------------------------------

    def put(self, node: Node) -> None:
        made: Any = self.made[id(node)]
        if isinstance(node, (List, Set)):
            items = [self.value(each) for each in node.items]
            self.add(made, items)
        elif isinstance(node, Dict):
            self.set_pairs(made, node)
        elif isinstance(node, Call):
            self.add(made, [self.value(each) for each in node.items])
            self.set_pairs(made, node)
            if node.built:
                self.give_state(made, node.state)

    def add(self, made: Any, items: list[object]) -> None:
        if type(made) in (list, deque):
            made.extend(items)
        elif type(made) is set:
            made.update(plain.keys_of(items))
        elif isinstance(made, Opaque):
            made.items.extend(items)
        elif items:
            raise CorruptError(f"the pickle appends to something that is no list ({_kind(made)})")

    def set_pairs(self, made: Any, node: Dict | Call) -> None:
        pairs = [(self.value(key), self.value(value)) for key, value in node.pairs]
        if type(made) in (dict, OrderedDict, Counter, defaultdict):
            try:
                keys = plain.keys_of(key for key, _ in pairs)
                for key, (_, value) in zip(keys, pairs, strict=True):
                    made[key] = value
            except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
                raise CorruptError("keys that can't be compared") from error
        elif isinstance(made, Opaque):
            made.pairs.extend(pairs)
        elif pairs:
            raise CorruptError(f"the pickle sets items of something that has none ({_kind(made)})")

    def give_state(self, made: Any, node: Node) -> None:
        state = self.value(node)
        if isinstance(made, Opaque):
            made.state = state
            return
        give = arrays.give_state if type(made).__module__.startswith("numpy") else plain.give_state
        self.charge(self.copies.price_of_state(node))
        try:
            give(made, state)
        except Exception as error:
            raise CorruptError(f"the pickle gives {_kind(made)} a state it can't have") from error


def _makes_itself(node: Persistent) -> bool:
    items = node.pid.items if isinstance(node.pid, Tuple) else []
    return bool(items) and items[0] == "reduce_package"


def _kind(made: object) -> str:
    return type(made).__name__


def _contents(node: List | Dict | Set | Call) -> Items:
    """The contents that fill an object after it was made."""
    if isinstance(node, (List, Set)):
        return node.items
    pairs: list[Node] = [each for pair in node.pairs for each in pair]
    return [*node.items, *pairs, node.state] if isinstance(node, Call) else pairs
