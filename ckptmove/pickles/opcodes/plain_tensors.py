"""The compact nodes of plain tensors: one node instead of thirty.

A `PlainTensor` is a `Call`, and its `StorageReference` a `Persistent`: their attributes return the
nodes that the opcodes would have made (`tensor_machine`).
"""

from typing import NamedTuple

from ..nodes import NOTHING, Call, Global, Node, Persistent, Text, Tuple


class StorageForm(NamedTuple):
    """The common data of many storages' persistent ids: everything except key and location."""

    word: Text
    storage_class: Global
    numel: int


class RecalledNames(NamedTuple):
    """The names that the opcodes of many tensors recall."""

    function: Global
    hooks: Global
    #: the empty tuple; a pickle has only one
    nothing: Tuple


class Form(NamedTuple):
    """The common data of many tensors: everything except the storage and memo slots."""

    names: RecalledNames
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class OpcodeOffsets(NamedTuple):
    """The offsets of opcodes in the sequence of a tensor, the same in many tensors."""

    key: int = 0
    location: int = 0
    id: int = 0
    call: int = 0


_NOWHERE = OpcodeOffsets()


class StorageReference(Persistent):
    """The persistent id of a storage; its tuple and texts are created at each access.

    Only a text that is used elsewhere is kept.
    """

    _pid: Node
    __slots__ = ("_pid", "form", "key", "places", "start", "tag")

    def __init__(
        self,
        form: StorageForm,
        key: str,
        tag: str,
        places: OpcodeOffsets = _NOWHERE,
        start: int = 0,
    ) -> None:
        """`start` is where the tensor's sequence starts in the pickle."""
        self.form = form
        #: the name and the device tag of the storage
        self.key, self.tag = key, tag
        self.places, self.start = places, start
        self._pid = None

    def respell(self, form: StorageForm, key: str, location: Text) -> None:
        """Turn it into the id of another storage, in compact form."""
        self.form, self.key, self.tag, self._pid = form, key, location, None

    @property
    def at(self) -> int:  # type: ignore[override] # it is computed
        """The offset of its opcode."""
        return self.start + self.places.id

    @property
    def key_text(self) -> Text:
        """The use of the string that is its name."""
        key = self.key
        return key if type(key) is Text else Text(key, self.start + self.places.key)

    @property
    def location(self) -> Text:
        """The use of the string that is its device tag."""
        tag = self.tag
        return tag if type(tag) is Text else Text(tag, self.start + self.places.location)

    @property
    def pid(self) -> Node:
        """The persistent id."""
        if self._pid is None:
            word, storage_class, numel = self.form
            items: list[Node] = [word, storage_class, self.key_text, self.location, numel]
            self._pid = Tuple(items, self.at)
        return self._pid

    @pid.setter
    def pid(self, pid: Node) -> None:
        """Replace the persistent id."""
        self._pid = pid


class PlainTensor(Call):
    """A call of `_rebuild_tensor_v2` with the usual arguments, created at the first access."""

    _args: Node
    __slots__ = ("_args", "form", "storage")

    def __init__(self, form: Form, storage: Persistent) -> None:
        self.pairs = self.items = NOTHING
        self.function = form.names.function
        self._args = self.kwargs = self.state = None
        self.opcode = "REDUCE"
        self.built = False
        self.form = form
        self.storage = storage

    def respell(self, form: Form, storage: Persistent) -> None:
        """Turn it into another tensor, in compact form."""
        self.form, self.storage, self._args = form, storage, None
        self.function = form.names.function

    @property
    def at(self) -> int:  # type: ignore[override] # it is computed
        """The offset of the opcode that made it; 0 if none did."""
        storage = self.storage
        return storage.start + storage.places.call if type(storage) is StorageReference else 0

    @property
    def args(self) -> Node:
        """The arguments."""
        if self._args is None:
            form, at = self.form, self.at
            nothing = form.names.nothing
            sizes = [Tuple(list(n), at) if n else nothing for n in (form.shape, form.stride)]
            hooks = Call(form.names.hooks, nothing, "REDUCE", at)
            items: list[Node] = [self.storage, form.offset, *sizes, form.requires_grad, hooks]
            self._args = Tuple(items, at)
        return self._args

    @args.setter
    def args(self, args: Node) -> None:
        """Replace the arguments."""
        self._args = args

    @property
    def hooks(self) -> Node:
        """Its hooks: the empty result of a call that is not listed among the calls."""
        return self.args.items[5] if isinstance(self.args, Tuple) else None


def kind_of(node: Node) -> type:
    """The type of a node; a compact node counts as Call or Persistent."""
    kind = type(node)
    return Call if kind is PlainTensor else Persistent if kind is StorageReference else kind


def is_compact(node: Node) -> bool:
    """Whether a tensor's arguments, or a storage's persistent id, were not yet created."""
    if type(node) is StorageReference:
        return node._pid is None
    return type(node) is PlainTensor and node._args is None


def compact_form(node: Node) -> Form | None:
    """The form of a plain tensor if the form and the storage describe it fully; else None."""
    if type(node) is not PlainTensor or node._args is not None:
        return None
    return None if node.built or node.pairs or node.items else node.form
