"""Check how a pickle uses the names in it: which callables are not known to be harmless.

Most names of the allow-list may be used in any way. Some are harmless only in one use, because an
argument decides what runs: these are checked call by call, against the calls that picklers write.
Any other use makes the name an unknown callable: arguments made by another call, a state set
afterwards, or the bare function as a value, which a later opcode or another callable may call.

Sources: CPython's Modules/_pickle.c and Lib/copyreg.py; torch/_tensor.py, torch/_utils.py,
torch/storage.py; numpy's multiarray (`array_scalar`, `arraydescr_setstate`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from ...pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    Items,
    List,
    Node,
    Set,
    Text,
    Tuple,
    without_source_text,
)
from ...pickles.opcodes.literals import may_be_checkpoint
from ...pickles.opcodes.plain_tensors import compact_form, is_compact
from ...pickles.walk import Pickle
from .allowlist import ACTIVATIONS, KNOWN, MODULES
from .reviewed_names import ENUMS, MADE_EMPTY

#: The function with which a plain pickle loads a storage from bytes.
LOADER = "torch.storage._load_from_bytes"
#: The function with which protocols up to 2 make bytes from text.
ENCODE = "_codecs.encode"
LATIN_1 = ("latin1", "latin-1", "latin_1", "iso-8859-1", "iso8859-1")
# looking up any other codec imports modules
_CODECS = frozenset((*LATIN_1, "ascii", "utf-8", "utf8"))
_PLAIN_BASES = frozenset(
    f"{module}.{name}"
    for module, names in {
        "builtins": "object bytearray bytes complex dict float frozenset int list set str tuple",
        "collections": "OrderedDict defaultdict deque",
    }.items()
    for name in names.split()
)
_FROM_TYPE = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
_REBUILDS = ("torch._utils._rebuild_", "torch.nested._internal.nested_tensor._rebuild_njt")
_SCALARS = tuple(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))
#: Objects to which picklers append items, or set them. For any other object, an unpickler calls its
#: attributes `append`, `extend` or `add`, and a file may set those.
_FILLED = frozenset(
    (
        *("builtins.dict", "builtins.list", "builtins.set", "collections.Counter"),
        *("collections.OrderedDict", "collections.defaultdict", "collections.deque"),
    )
)
_TENSORS = r"(torch\._utils|torch\._tensor|numpy)\..*|torch\.(.*\.)?(\w*Tensor|Parameter|Buffer)"
_NUMPY_NUMBER = re.compile(r"numpy\.u?(int|float)[0-9]+")


class Uses:
    """Finds misused names in one pickle or graph.

    `loaded` has the `id()` of the bytes that were read as a checkpoint, and of the calls that
    decode such bytes from text.
    """

    def __init__(self, loaded: Collection[int]) -> None:
        self.loaded = loaded

    def unknown(self, pickle: Pickle, is_known: Callable[[Global], bool]) -> Iterator[str]:
        """The names of callables that are not known to be harmless, with repetitions.

        `is_known` returns whether a name is harmless when it is used correctly.
        """
        for name in pickle.globals:
            if not is_known(name):
                yield name.qualname
        judged = set[int]()  # `id()` of functions that make plain tensors, all of them alike
        for call in pickle.calls:
            if compact_form(call) is not None:
                if id(call.function) in judged:
                    continue
                judged.add(id(call.function))
            misused = self.wrong(call)
            if misused is not None:
                yield misused
        if any(name.qualname in NEVER_BARE for name in pickle.globals):
            yield from self._bare(pickle)

    def wrong(self, call: Call) -> str | None:
        """The name that a call misuses; None if it misuses none."""
        function = without_source_text(call.function)
        # the function is the result of a call: it may be anything
        if not isinstance(function, Global):
            return _maker_of(function)
        return None if self._is_right(function.qualname, call) else function.qualname

    def _is_right(self, name: str, call: Call) -> bool:
        """Whether a call is a harmless one.

        True for unknown names, which are reported elsewhere.
        """
        if name not in KNOWN:
            return True  # it is reported already
        if compact_form(call) is None and not _calls_no_attribute(name, call):
            return False
        check = _CHECKS.get(name)
        if not (call.kwargs is None or (isinstance(call.kwargs, Dict) and not call.kwargs.pairs)):
            # Some torch types take memory addresses as keyword arguments.
            return check is None and not name.startswith(("torch.", "numpy."))
        if check is None:
            return _NUMPY_NUMBER.fullmatch(name) is None or _are_scalars(self, call)
        return check(self, call)

    def _bare(self, pickle: Pickle) -> Iterator[str]:
        """The names of functions that occur as values.

        Other code could call them with any arguments.
        """
        met = set[int]()
        todo: list[Node] = [pickle.root, *pickle.dropped]
        todo += (each.pid for each in pickle.persistents if not is_compact(each))
        for call in pickle.calls:
            if compact_form(call) is not None:
                continue
            todo += (call.args, call.kwargs, call.state, *call.items)
            todo += (each for pair in call.pairs for each in pair)
        while todo:
            node = todo.pop()
            if isinstance(node, Global):
                if node.qualname in NEVER_BARE:
                    yield node.qualname
            elif isinstance(node, (Tuple, List, Set, Dict)) and id(node) not in met:
                met.add(id(node))
                if isinstance(node, Dict):
                    todo += (each for pair in node.pairs for each in pair)
                else:
                    todo += node.items


def wrong_use(call: Call) -> str | None:
    """The name that a call in a graph misuses, or None; nested bytes count as not read."""
    return Uses(()).wrong(call)


def not_surely_harmless(names: Iterable[str]) -> Iterator[str]:
    """The names that may run something, when the rest of the pickle can't be read."""
    return (name for name in names if name not in KNOWN or name in _CHECKS)


def _maker_of(node: Node) -> str:
    """The name of the callable that made an object which is then called."""
    while isinstance(node, Call):
        node = without_source_text(node.function)
    return node.qualname if isinstance(node, Global) else "an object"


def _arguments(call: Call) -> Items | None:
    """The arguments of a call; None if another call makes them."""
    return call.args.items if isinstance(call.args, Tuple) else None


def _is_unchanged(call: Call) -> bool:
    return not (call.built or call.items or call.pairs)


def _calls_no_attribute(name: str, call: Call) -> bool:
    """Whether loading calls no attribute that the file has set on an object.

    An unpickler does this when it fills or builds an object. Many functions do it with their
    arguments: `dict` calls `keys`, and `Parameter` calls `detach`. If such an attribute is a
    module, its `forward` would run, which calls other attributes with any arguments.
    """
    if (call.items or call.pairs) and name not in _FILLED:
        return False
    if call.built and name.startswith(_REBUILDS + _FROM_TYPE):
        return False
    if _has_attributes(call.state):
        return False
    met = set[int]()
    todo = [call.args]
    while todo:
        node = todo.pop()
        if _has_attributes(node):
            return False
        if isinstance(node, Tuple) and id(node) not in met:
            met.add(id(node))
            todo += node.items
    return True


def _has_attributes(node: Node) -> bool:
    """Whether a node is an object, other than a tensor, with attributes that the file has set."""
    if not isinstance(node, Call) or not node.built:
        return False
    name = node.qualname or ""
    return name in KNOWN and re.fullmatch(_TENSORS, name) is None


# -- one check a name: whether a call of it is what picklers write ---------------------------------


def _loads_what_was_read(uses: Uses, call: Call) -> bool:
    """`_load_from_bytes` unpickles its bytes, whatever they are."""
    args = _arguments(call)
    right = call.opcode == "REDUCE" and _is_unchanged(call)
    return right and args is not None and len(args) == 1 and id(args[0]) in uses.loaded


def _encodes(uses: Uses, call: Call) -> bool:
    """`encode` imports the module of its codec."""
    args = _arguments(call)
    if args is None or not 1 <= len(args) <= 3 or not isinstance(args[0], (str, bytes, Blob)):
        return False
    return _is_unchanged(call) and _names_codec(args)


def _may_encode(uses: Uses, call: Call) -> bool:
    """`str`, `bytes` and `bytearray` also take a codec."""
    args = _arguments(call)
    if args is None:
        return False
    return len(args) < 2 or (len(args) <= 3 and _names_codec(args))


def _names_codec(args: Items) -> bool:
    codec = args[1] if len(args) > 1 else "utf-8"
    return (
        isinstance(codec, str)
        and codec in _CODECS
        and all(isinstance(each, str) for each in args[2:])
    )


def _reconstructs(uses: Uses, call: Call) -> bool:
    """`_reconstructor` calls the given base, to make and to fill an object."""
    args = _arguments(call)
    if args is None or len(args) != 3 or not isinstance(without_source_text(args[0]), Global):
        return False
    base = args[1].qualname if isinstance(args[1], Global) else LOADER
    return base in _PLAIN_BASES or base not in KNOWN


def _rebuilds(uses: Uses, call: Call) -> bool:
    """`_rebuild_from_type` calls the given function."""
    args = _arguments(call)
    if args is None or len(args) != 4:
        return False
    function, cls, inner, _ = args
    if not isinstance(function, Global) or not isinstance(without_source_text(cls), Global):
        return False
    if not isinstance(inner, Tuple):
        return False
    return function.qualname.startswith(_REBUILDS) or function.qualname not in KNOWN


def _is_plain_scalar(uses: Uses, call: Call) -> bool:
    """`scalar` with an object dtype returns its argument: a class, for example, to change later."""
    args = _arguments(call)
    dtype = args[0] if args else None
    if not isinstance(dtype, Call) or not (dtype.qualname or "").startswith("numpy."):
        return False
    if dtype.qualname != "numpy.dtype":
        return (dtype.qualname or "").startswith("numpy.dtypes.")
    from . import numpy_dtypes  # imported only here and below: few files have numpy's scalars

    kind = (_arguments(dtype) or [None])[0]
    return isinstance(kind, str) and numpy_dtypes.PLAIN.fullmatch(kind) is not None


def _are_scalars(uses: Uses, call: Call) -> bool:
    """Number types of numpy take any object, and read memory at any address that it gives."""
    args = _arguments(call)
    return args is not None and all(
        each is None or isinstance(each, (str, bytes, int, float)) for each in args
    )


def _makes_dtype(uses: Uses, call: Call) -> bool:
    from . import numpy_dtypes

    args = _arguments(call)
    return args is not None and numpy_dtypes.is_right(list(args), call)


def _is_plain_dtype(uses: Uses, call: Call) -> bool:
    """The classes of single dtypes are pickled without a state."""
    return _is_unchanged(call)


def _is_array_without_buffer(uses: Uses, call: Call) -> bool:
    """An array of objects over given bytes would treat them as references."""
    args = _arguments(call)
    return args is not None and len(args) <= 2


def _is_empty(uses: Uses, call: Call) -> bool:
    """Some are harmless only as pickle makes them: empty, and then given a state.

    A mesh that is called starts process groups; for the others, calls were not reviewed.
    """
    return _arguments(call) == [] and call.opcode != "REDUCE" and _has_plain_state(call)


def _makes_module(uses: Uses, call: Call) -> bool:
    """Modules must be made without `__init__`, which could allocate any amount of memory."""
    made = call.opcode == "NEWOBJ" and _arguments(call) == []
    return made and not (call.items or call.pairs) and _has_plain_state(call)


def _has_plain_state(call: Call) -> bool:
    """Whether a state is a dict: for other mappings, `dict.update` calls their own methods.

    A `ParameterDict`, for example, looks its keys up as attributes, and so returns its own methods.
    """
    return not call.built or isinstance(call.state, Dict)


def _takes_member(uses: Uses, call: Call) -> bool:
    """An enum that is called with one plain value returns a member, which is shared process-wide.

    With more arguments, it may make a new class; a state would change the shared member.
    """
    args = _arguments(call)
    if call.opcode != "REDUCE" or args is None or len(args) != 1 or not _is_unchanged(call):
        return False
    return isinstance(args[0], (str, int))


def _is_given_nothing(uses: Uses, call: Call) -> bool:
    """Python 3.13 also takes attributes as an argument."""
    return _arguments(call) == []


def _gives_none(uses: Uses, call: Call) -> bool:
    """The function for the backend of old modules takes nothing, and its result stays unchanged."""
    return _arguments(call) == [] and _is_unchanged(call)


def _is_never_called(uses: Uses, call: Call) -> bool:
    """An activation is only a value of a module.

    If it were called, its arguments decide what runs.
    """
    return False


_CHECKS: dict[str, Callable[[Uses, Call], bool]] = {
    LOADER: _loads_what_was_read,
    ENCODE: _encodes,
    **dict.fromkeys(("builtins.str", "builtins.bytes", "builtins.bytearray"), _may_encode),
    "copyreg._reconstructor": _reconstructs,
    **dict.fromkeys(_FROM_TYPE, _rebuilds),
    **dict.fromkeys(_SCALARS, _is_plain_scalar),
    "numpy.dtype": _makes_dtype,
    "numpy.ndarray": _is_array_without_buffer,
    **{name: _is_plain_dtype for name in KNOWN if name.startswith("numpy.dtypes.")},
    **dict.fromkeys(MODULES, _makes_module),
    **dict.fromkeys(ACTIVATIONS, _is_never_called),
    **dict.fromkeys(ENUMS, _takes_member),
    "torch.nn.backends.thnn._get_thnn_function_backend": _gives_none,
    "types.SimpleNamespace": _is_given_nothing,
    **dict.fromkeys(("torch.distributed.device_mesh.DeviceMesh", *MADE_EMPTY), _is_empty),
}
#: Functions that must not be values. Classes are values in many checkpoints, and harmless with any
#: arguments.
NEVER_BARE = frozenset((LOADER, ENCODE, "copyreg._reconstructor", *_FROM_TYPE, *_SCALARS))


def bytes_as_text(call: Call) -> Text | None:
    """The text in `_codecs.encode(text, 'latin1')`, with which protocols up to 2 spell bytes."""
    if call.qualname != ENCODE or not isinstance(call.args, Tuple):
        return None
    items = call.args.items
    if len(items) != 2 or not isinstance(items[0], Text) or items[1] not in LATIN_1:
        return None
    text = items[0]
    return text if may_be_checkpoint(text[:64].encode("latin-1", "replace")) else None


def latin_1(text: str) -> bytes | None:
    """The bytes of a text with one character per byte; None if a character is beyond 255."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None
