"""One family of payloads for each way to have an unpickler run something."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable

from tests.making.payloads import (
    CANARY,
    LEGACY,
    Family,
    called,
    content,
    given,
    items,
    legacy_of,
    listed,
    name,
    newobj,
    stacked,
    storage,
    text,
    zip_of,
)

_MKDIR = name("os", "mkdir")
_CANARY = text(CANARY)
_RUN = called(_MKDIR, _CANARY)
_CODE = f"__import__('os').mkdir({CANARY!r})"
_PARTIAL = called(name("functools", "partial"), _MKDIR, _CANARY)
_MAILBOX = called(name("functools", "partial"), name("mailbox", "Maildir"), _CANARY)
_REDUCE = called(name("functools", "partial"), name("functools", "reduce"), _MKDIR)
_OS = called(name("importlib", "import_module"), text("os"))
_PATH = called(name("pathlib", "Path"), _CANARY)
_NAMESPACE = called(name("argparse", "Namespace"))
_LOADER = name("torch.storage", "_load_from_bytes")
_MAP = newobj(name("builtins", "map"), _MKDIR, listed(_CANARY))
_OBJECTS = called(name("numpy", "dtype"), text("O"), b"\x89", b"\x88")
_TENSOR = name("torch", "Tensor")
_FUNCTION = called(
    name("types", "FunctionType"),
    called(name("marshal", "loads"), content(marshal.dumps(compile(_CODE, "payload", "eval")))),
    called(name("builtins", "dict")),
)
#: A pickle that runs it, and is long enough to be taken for one.
INNER = b"\x80\2" + text("a text that makes it long enough to be a checkpoint") + b"0" + _RUN + b"."

#: The same in protocol 0.
_TEXTUAL = b"V" + b"a" * 40 + b"\n0cos\nmkdir\n(V" + CANARY.encode() + b"\ntR."


def _latin(inner: bytes, codec: str) -> bytes:
    return called(name("_codecs", "encode"), text(inner.decode("latin-1")), text(codec))


def _loaders() -> dict[str, Family]:
    """Payloads that `_load_from_bytes` unpickles; all other names are known."""
    read = items(content(INNER))
    proper = {
        f"legacy {n}": legacy_of(n, Family(_RUN).instead_of(each)) for n, each in enumerate(LEGACY)
    }
    loaded = {
        "pickle": INNER,
        "zip": zip_of(Family(_RUN).beside(storage("0")), "0"),
        "protocol 0": _RUN.replace(_CANARY, b"V" + CANARY.encode() + b"\n") + b".",
        **proper,
    }
    add = given(_NAMESPACE, add=_LOADER)
    twice = called(name("torch._utils", "_rebuild_parameter_with_state"), _MADE, b"\x89", _HOOKS)
    return {
        **{
            f"loader of {what}": Family(called(_LOADER, content(each)))
            for what, each in loaded.items()
        },
        "loader of bytes as text": Family(called(_LOADER, _latin(INNER, "latin1"))),
        "loader of text in another codec": Family(called(_LOADER, _latin(_TEXTUAL, "utf-8"))),
        "loader of text in a rare codec": Family(called(_LOADER, _latin(INNER, "charmap"))),
        "loader of a bytearray": Family(
            called(_LOADER, b"\x96" + struct.pack("<Q", len(INNER)) + INNER), 5
        ),
        "loader of numbers": Family(
            called(_LOADER, called(name("builtins", "bytes"), listed(*map(_byte, INNER))))
        ),
        "loader of a tuple that a call makes": Family(
            _LOADER + called(name("builtins", "tuple"), listed(content(INNER))) + b"R"
        ),
        "loader by OBJ": Family(b"(" + _LOADER + content(INNER) + b"o"),
        "loader by INST": Family(b"(" + content(INNER) + b"itorch.storage\n_load_from_bytes\n"),
        "loader from the memo": Family(_LOADER + b"q\x070h\x07" + read + b"R"),
        "loader by its dotted name": Family(
            called(stacked("torch", "storage._load_from_bytes"), content(INNER)), 4
        ),
        "loader in a partial": Family(
            called(called(name("functools", "partial"), _LOADER, content(INNER)))
        ),
        "loader mapped": Family(
            called(
                name("builtins", "list"),
                newobj(name("builtins", "map"), _LOADER, listed(content(INNER))),
            )
        ),
        "loader that adds": Family(add + b"(" + content(INNER) + b"\x90", 4),
        "loader that appends": Family(given(_NAMESPACE, append=_LOADER) + content(INNER) + b"a"),
        "loader that rebuilds": Family(
            called(name("torch._tensor", "_rebuild_from_type_v2"), _LOADER, _TENSOR, read, b"N")
        ),
        "loader that rebuilds, of old": Family(
            called(name("torch._tensor", "_rebuild_from_type"), _LOADER, _TENSOR, read, b"}")
        ),
        "loader that rebuilds from a list": Family(
            called(
                name("torch._tensor", "_rebuild_from_type_v2"),
                _LOADER,
                _TENSOR,
                listed(content(INNER)),
                b"N",
            )
        ),
        "loader that sets a state": Family(
            given(_NAMESPACE, __setstate__=_LOADER) + content(INNER) + b"b"
        ),
        "loader that sets the state of a parameter": Family(
            twice[:-2] + b"}" + text("__setstate__") + _LOADER + b"stR" + content(INNER) + b"b"
        ),
    }


def _byte(value: int) -> bytes:
    return b"K" + bytes([value])


_HOOKS = called(name("collections", "OrderedDict"))
_MADE = called(
    name("torch._utils", "_rebuild_meta_tensor_no_storage"),
    name("torch", "float32"),
    b"K\1\x85",
    b"K\1\x85",
    b"\x89",
)


def _direct() -> dict[str, Family]:
    """Callables that are on no list, called with common opcodes."""
    return {
        "a function": Family(_RUN),
        "posix": Family(called(name("posix", "mkdir"), _CANARY)),
        "eval": Family(called(name("builtins", "eval"), text(_CODE))),
        "exec": Family(called(name("builtins", "exec"), text(_CODE))),
        "open": Family(called(name("io", "open"), _CANARY, text("w"))),
        "code of its own": Family(called(_FUNCTION)),
        "pathlib": Family(
            called(name("operator", "methodcaller"), text("mkdir")) + items(_PATH) + b"R"
        ),
        "a method's name": Family(called(stacked("pathlib", "Path.mkdir"), _PATH), 4),
        "a module within a module": Family(called(stacked("pathlib", "os.mkdir"), _CANARY), 4),
        "a module within torch": Family(called(stacked("torch", "os.mkdir"), _CANARY), 4),
        "a module within collections": Family(
            called(stacked("collections", "_sys.modules.get"), text("posix"))
            + b"0"
            + called(stacked("collections", "_sys.modules.copy"))
            + b"0"
            + called(stacked("copyreg", "__builtins__.get"), text("eval"))
            + items(text(_CODE))
            + b"R",
            4,
        ),
        "getattr": Family(called(called(name("builtins", "getattr"), _OS, text("mkdir")), _CANARY)),
        "attrgetter": Family(
            called(called(called(name("operator", "attrgetter"), text("mkdir")), _OS), _CANARY)
        ),
        "methodcaller": Family(
            called(called(name("operator", "methodcaller"), text("mkdir"), _CANARY), _OS)
        ),
        "operator.call": Family(called(name("operator", "call"), _MKDIR, _CANARY)),
        "a name resolved": Family(
            called(called(name("pkgutil", "resolve_name"), text("os:mkdir")), _CANARY)
        ),
        "a name located": Family(
            called(called(name("pydoc", "locate"), text("os.mkdir")), _CANARY)
        ),
        "a partial": Family(called(_PARTIAL)),
        "a partial made by NEWOBJ": Family(
            newobj(name("functools", "partial"), _MKDIR, _CANARY) + b")R"
        ),
        "a partial made by NEWOBJ_EX": Family(
            name("functools", "partial") + _MKDIR + b"\x85}" + text("path") + _CANARY + b"s\x92)R",
            4,
        ),
        "a partial made by copyreg": Family(
            called(name("copyreg", "__newobj__"), name("functools", "partial"), _MKDIR, _CANARY)
            + b")R"
        ),
        "a partial made by copyreg, with keywords": Family(
            called(
                name("copyreg", "__newobj_ex__"),
                name("functools", "partial"),
                items(_MKDIR, _CANARY),
                b"}",
            )
            + b")R"
        ),
        "a partial given its state": Family(
            called(name("functools", "partial"), name("builtins", "print"))
            + items(_MKDIR, _CANARY + b"\x85", b"}", b"N")
            + b"b)R"
        ),
        "a map": Family(called(name("builtins", "bytes"), _MAP)),
        "a map in a tuple": Family(called(name("builtins", "tuple"), _MAP)),
        "a map in a deque": Family(called(name("collections", "deque"), _MAP)),
        "a map as arguments": Family(
            name("builtins", "list") + called(name("builtins", "tuple"), _MAP) + b"R"
        ),
        "a filter": Family(
            called(
                name("builtins", "set"),
                newobj(name("builtins", "filter"), _MKDIR, listed(_CANARY)),
            )
        ),
        "a starmap": Family(
            called(
                name("collections", "Counter"),
                called(name("itertools", "starmap"), _MKDIR, listed(items(_CANARY))),
            )
        ),
        "a reduction": Family(
            called(name("functools", "reduce"), _MKDIR, listed(_CANARY, b"M\xff\1"))
        ),
        "a finalizer": Family(
            called(name("weakref", "finalize"), _NAMESPACE, _MKDIR, _CANARY) + b"0N"
        ),
        "a timer": Family(
            called(name("timeit", "timeit"), text(_CODE), b"N", b"K\1")[:-2].replace(
                b"NK\1", text("pass") + name("timeit", "default_timer") + b"K\1"
            )
            + b"tR"
        ),
        "a profiler": Family(called(name("cProfile", "run"), text(_CODE))),
        "a mailbox": Family(called(name("mailbox", "Maildir"), _CANARY)),
        "a file that logs": Family(called(name("logging", "FileHandler"), _CANARY)),
        "a database": Family(called(name("sqlite3", "connect"), _CANARY)),
        "a folder for a while": Family(
            called(name("tempfile", "mkdtemp"), text(""), text(CANARY), text("."))
        ),
        "torch.save": Family(called(name("torch", "save"), b"N", _CANARY)),
        "code of torch.fx": Family(
            called(
                name("torch.fx.graph_module", "_forward_from_src"),
                text(f"def forward():\n    pass\n{_CODE}\n"),
                b"}",
            )
        ),
        "code of numpy's tests": Family(
            called(name("numpy.testing._private.utils", "runstring"), text(_CODE), b"}")
        ),
    }


def _mechanical() -> dict[str, Family]:
    """Tricks with opcodes, the stack, the memo, names and states."""
    return {
        "OBJ": Family(b"(" + _MKDIR + _CANARY + b"o"),
        "INST": Family(b"(" + _CANARY + b"ios\nmkdir\n"),
        "INST without PROTO": Family(b"(V" + CANARY.encode() + b"\nios\nmkdir\n", None),
        "protocol 0": Family(b"cos\nmkdir\n(V" + CANARY.encode() + b"\ntR", None),
        "protocol 0, quoted": Family(b"cos\nmkdir\n(S'" + CANARY.encode() + b"'\ntR", None),
        "protocol 1": Family(_MKDIR + b"(U" + bytes([len(CANARY)]) + CANARY.encode() + b"tR", None),
        "STACK_GLOBAL": Family(called(stacked("os", "mkdir"), _CANARY), 4),
        "STACK_GLOBAL, protocol 2": Family(called(stacked("os", "mkdir"), _CANARY)),
        "STACK_GLOBAL of short text": Family(b"\x8c\2os\x8c\5mkdir\x93" + items(_CANARY) + b"R", 4),
        "STACK_GLOBAL of long text": Family(
            b"\x8d"
            + struct.pack("<Q", 2)
            + b"os"
            + text("mkdir")
            + b"\x93"
            + items(_CANARY)
            + b"R",
            4,
        ),
        "STACK_GLOBAL from the memo": Family(
            text("mkdir")
            + b"q\x05"
            + text("os")
            + b"q\x06"
            + b"00h\x06h\x05\x93"
            + items(_CANARY)
            + b"R",
            4,
        ),
        "STACK_GLOBAL of Python 2's strings": Family(b"U\2osU\5mkdir\x93" + items(_CANARY) + b"R"),
        "POP": Family(_RUN + b"0N"),
        "POP_MARK": Family(b"(" + _RUN + b"1N"),
        "POP of a mark": Family(b"(0" + _RUN),
        "DUP": Family(_MKDIR + b"20" + items(_CANARY) + b"R"),
        "BINPUT over another": Family(
            name("collections", "OrderedDict")
            + b"q\0"
            + b"0"
            + _MKDIR
            + b"q\0"
            + b"0h\0"
            + items(_CANARY)
            + b"R"
        ),
        "LONG_BINPUT": Family(
            _MKDIR + b"r\xff\xff\0\0" + b"0j\xff\xff\0\0" + items(_CANARY) + b"R"
        ),
        "PUT": Family(_MKDIR + b"p300\n" + b"0g300\n" + items(_CANARY) + b"R"),
        "MEMOIZE after a slot was taken": Family(
            name("builtins", "list")
            + b"q\1"
            + _MKDIR
            + b"\x94"
            + b"0h\1"
            + items(_CANARY)
            + b"R0N",
            4,
        ),
        "arguments from the memo": Family(items(_CANARY) + b"q\x090" + _MKDIR + b"h\x09R"),
        "a call within the arguments": Family(
            called(name("builtins", "dict"), listed(items(text("a"), _RUN)))
        ),
        "a call as a key": Family(b"}" + items(text("k"), _RUN) + b"Ns"),
        "a call within a state": Family(given(_NAMESPACE, a=_RUN)),
        "a call within a frozenset": Family(b"(" + _RUN + b"\x91", 4),
        "a set of calls": Family(b"\x8f(" + _RUN + b"\x90", 4),
        "EXT1": Family(b"\x82\x70" + items(_CANARY) + b"R"),
        "EXT2": Family(b"\x83\x34\x12" + items(_CANARY) + b"R"),
        "EXT4": Family(b"\x84\x56\x34\x12\0" + items(_CANARY) + b"R"),
        "Python 2: eval": Family(called(name("__builtin__", "eval"), text(_CODE))),
        "Python 2: reduce": Family(
            called(name("__builtin__", "reduce"), _MKDIR, listed(_CANARY, b"M\xff\1"))
        ),
        "Python 2: imap": Family(
            called(
                name("__builtin__", "list"),
                called(name("itertools", "imap"), _MKDIR, listed(_CANARY)),
            )
        ),
        "Python 2: reconstructor": Family(
            called(
                name("copy_reg", "_reconstructor"),
                name("logging", "FileHandler"),
                name("logging", "FileHandler"),
                _CANARY,
            )
        ),
        "reconstructor": Family(
            called(
                name("copyreg", "_reconstructor"),
                name("mailbox", "Maildir"),
                name("mailbox", "Maildir"),
                _CANARY,
            )
        ),
        "reconstructor of bytes": Family(
            called(
                name("copyreg", "_reconstructor"),
                name("builtins", "bytes"),
                name("builtins", "bytes"),
                _MAP,
            )
        ),
        "BUILD: a state setter": Family(given(_NAMESPACE, __setstate__=_MKDIR) + _CANARY + b"b"),
        "BUILD: a state setter of a class": Family(
            name("argparse", "Namespace")
            + b"N}"
            + text("__setstate__")
            + _MKDIR
            + b"s\x86b0"
            + _NAMESPACE
            + _CANARY
            + b"b"
        ),
        "BUILD: what appends": Family(given(_NAMESPACE, append=_MKDIR) + _CANARY + b"a"),
        "BUILD: what extends": Family(
            given(_NAMESPACE, extend=_REDUCE) + b"(" + _CANARY + b"M\xff\1e"
        ),
        "BUILD: what adds": Family(given(_NAMESPACE, add=_MKDIR) + b"(" + _CANARY + b"\x90", 4),
        "BUILD: of an exception": Family(
            given(called(name("builtins", "Exception")), append=_MKDIR) + _CANARY + b"a"
        ),
        "BUILD: slots": Family(
            _NAMESPACE + b"}}" + text("append") + _MKDIR + b"s\x86b" + _CANARY + b"a"
        ),
        "items: of a dict of the user's": Family(
            given(
                called(name("collections", "UserDict")),
                data=called(name("dbm.dumb", "open"), _CANARY, text("c")),
            )
            + text("a")
            + text("b")
            + b"s"
        ),
        "rebuild: from a type": Family(
            called(
                name("torch._tensor", "_rebuild_from_type_v2"),
                _MKDIR,
                _TENSOR,
                items(_CANARY),
                b"N",
            )
        ),
        "rebuild: a parameter": Family(
            called(
                name("torch._utils", "_rebuild_parameter"),
                given(_NAMESPACE, detach=_PARTIAL),
                b"\x89",
                _HOOKS,
            )
        ),
        "numpy: what makes an array": Family(
            called(name("numpy", "float64"), given(_NAMESPACE, __array__=_MAILBOX))
        ),
        "frames: one too short": Family(called(stacked("os", "mkdir"), _CANARY), 4, frame=-20),
        "frames: one as it should be": Family(called(stacked("os", "mkdir"), _CANARY), 4, frame=0),
        "a second pickle": Family(_RUN, behind=True),
        "a second pickle, of protocol 0": Family(
            b"cos\nmkdir\n(V" + CANARY.encode() + b"\ntR", None, behind=True
        ),
        "a pickle that fails afterwards": Family(_RUN + b"\xff"),
        "a second pickle that fails afterwards": Family(
            b"cos\nmkdir\n(V" + CANARY.encode() + b"\ntR\xff", None, behind=True
        ),
        "PROTO twice": Family(b"\x80\4" + called(stacked("os", "mkdir"), _CANARY)),
        "PROTO lowered": Family(b"\x80\0" + called(name("__builtin__", "eval"), text(_CODE)), 4),
        "bytes: pickle.loads": Family(called(name("_pickle", "loads"), content(INNER))),
        "bytes: pickle in Python": Family(called(name("pickle", "_loads"), content(INNER))),
        "bytes: within bytes": Family(
            called(
                name("pickle", "loads"),
                content(b"\x80\3" + called(name("pickle", "loads"), content(INNER)) + b"."),
            )
        ),
        "bytes: mapped": Family(
            called(
                name("builtins", "list"),
                newobj(name("builtins", "map"), name("pickle", "loads"), listed(content(INNER))),
            )
        ),
    }


_Made = Callable[[], dict[str, Family]]
_KINDS: tuple[_Made, ...] = (_direct, _mechanical, _loaders)
#: Old versions of numpy hand back what they are given as an object; new ones refuse to.
OF_OLD = {
    f"a scalar that is {what}": Family(
        called(called(name(f"numpy.{core}.multiarray", "scalar"), _OBJECTS, each), argument)
    )
    for core in ("core", "_core")
    for what, each, argument in (
        ("a function", _MKDIR, _CANARY),
        ("the loader", _LOADER, content(INNER)),
    )
}
FAMILIES: dict[str, Family] = {key: each for kind in _KINDS for key, each in kind().items()}
#: Those that change the process they run in.
LASTING = ("BUILD: a state setter of a class",)
