"""Refuse TorchScript programs that might do more than compute, and load the others.

libtorch runs code of the archive while it loads it, if a class has a `__setstate__`. Its operators
may write files (`aten::save`, `aten::from_file`) and talk to other processes. After compiling,
libtorch tells which operators the code calls. For code that runs before that, each word of the text
is checked: to call something, the code must name it.

Sources: torch/csrc/jit/serialization/{import,import_source,unpickler}.cpp.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ... import formats
from ...errors import StrPath, UnsupportedError
from ...sources.file import File
from ...zips.archive import Archive
from .exported_graphs import FILES, NAMESPACES

_MADE_BY = "__setstate__"
_HINT = "trust the file with --trust-pickle"
#: Classes in C++ that hold tensors, by namespace.
_CLASSES = frozenset(("mkldnn", "quantized", "rnn", "sparse", "xnnpack"))
_OF_CLASSES = "__torch__.torch.classes."
_SPACES = NAMESPACES | {"mkldnn_prepacked", "prepacked", "prim", "profiler", "rnn", "torchvision"}
#: Operators of these namespaces that call other processes, run Python, or write files.
_OTHER = FILES | {
    *("rpc_async", "rpc_remote", "rpc_sync", "PythonOp", "read_file", "write_file"),
    *("decode_gif", "decode_image", "decode_jpeg", "decode_png"),
}
_WORD = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\([0-7]{1,3})|\\x([0-9a-fA-F]{1,2})")
_STRICT = re.compile(
    rf"\bops\.({'|'.join(sorted(_SPACES))})\.|\btorch\.classes\.({'|'.join(sorted(_CLASSES))})\."
)


def makes_itself(path: StrPath) -> bool:
    """Whether a TorchScript file has code of its own that makes what it holds.

    Raises:
        InputError: it can't be read.
    """
    return any(_MADE_BY in _unescaped(text) for _, text in _code(path))


def danger(path: StrPath) -> str | None:
    """What libtorch might run while it merely loads the file: a clause, or None.

    Raises:
        InputError: it can't be read.
    """
    with formats.open_checkpoint(path) as found:
        for container in found.container.everything():
            for stream in container.streams:
                for each in stream.pickle.globals:
                    if _is_foreign(each.qualname):
                        return f"it holds an object of {each.qualname[:80]!r}"
    if not makes_itself(path):
        return None
    for name, text in _code(path):
        plain = _unescaped(text)
        for found_word in _WORD.finditer(plain):
            word = found_word.group()
            if word in _OTHER:
                return f"code in {name[:80]!r} that runs during loading may call {word!r}"
            if word in ("ops", "classes") and not _is_strict(plain, found_word.start()):
                return f"code in {name[:80]!r} that runs during loading calls other libraries"
    return None


def _code(path: StrPath) -> Iterator[tuple[str, str]]:
    """Name and text of each record that may be code: torch looks them up without regard to case."""
    with File.open(path) as source:
        archive = Archive(source)
        for record in archive.records.values():
            if record.name.lower().endswith(".py"):
                yield record.name, archive.read_parsed(record).decode("utf-8", "replace")


def _unescaped(text: str) -> str:
    """The text with every character that it spells by number as that character."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8) if found[1] else int(found[2], 16)), text)


def _is_strict(text: str, at: int) -> bool:
    """Whether a word stands in the name of a known operator or class, as libtorch prints it."""
    return any(_STRICT.match(text, max(0, at - skipped)) for skipped in (0, len("torch.")))


def _is_foreign(name: str) -> bool:
    if not name.startswith(_OF_CLASSES):
        return False
    return name[len(_OF_CLASSES) :].partition(".")[0] not in _CLASSES


# -- loading ---------------------------------------------------------------------------------------


def loaded(path: StrPath, *, trust: bool) -> torch.nn.Module:
    """The module in a file, on the CPU.

    Args:
        path: the file.
        trust: whether it may call operators that do other things than computing.

    Raises:
        UnsupportedError: it calls one, and isn't trusted.
    """
    found = None if trust else danger(path)
    if found is None:
        native: Any = torch._C
        unit = native.CompilationUnit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit's own end
            # As torch.jit.load does, which keeps the compiled functions to itself.
            module = native.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)
            found = None if trust else _called(unit)
            if found is None:
                wrap: Any = torch.jit._recursive.wrap_cpp_module
                made: torch.nn.Module = wrap(module)
                return made
    raise UnsupportedError(f"the program might run code that is not visible: {found}", hint=_HINT)


def _called(unit: Any) -> str | None:
    """What code calls that doesn't only compute, of all that was compiled."""
    for function in unit.get_functions():
        for node in _nodes(function.graph):
            kind = node.kind()
            space, _, name = kind.partition("::")
            if space not in _SPACES or name in _OTHER:
                return f"{function.name[:40]!r} calls {kind!r}"
            if kind == "prim::CreateObject":
                made = str(next(node.outputs()).type())
                if _is_foreign(made):
                    return f"{function.name[:40]!r} makes an object of {made[:80]!r}"
    return None


def _nodes(graph: Any) -> Iterator[Any]:
    todo = [graph]
    while todo:
        for node in todo.pop().nodes():
            yield node
            todo += node.blocks()
            if node.hasAttribute("Subgraph"):
                todo.append(node.g("Subgraph"))
