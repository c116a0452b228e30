"""Tell what libtorch runs of TorchScript code while it merely loads a file.

libtorch runs code of the archive while it loads it, if a class has a `__setstate__`. Its operators
may write files (`aten::save`, `aten::from_file`) and talk to other processes. Each word of the text
is checked: to call something, the code must name it.

Sources: torch/csrc/jit/serialization/{import,import_source,unpickler}.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...graph.traversal import held_by, nodes_of
from ...pickles.nodes import Node

#: Namespaces of operators that compute, and do nothing else. Not among them: those that write
#: files, talk to other processes, or take addresses.
NAMESPACES = frozenset(
    (
        *("aten", "prims", "quantized", "_quantized", "quantized_decomposed", "sparse"),
        *("mkldnn", "mkldnn_prepacked", "mkl", "onednn", "quantization"),
    )
)
#: Operators in them that read or write files.
FILES = frozenset(("from_file", "save"))
#: Namespaces of operators that TorchScript code may call.
SPACES = NAMESPACES | {"mkldnn_prepacked", "prepacked", "prim", "profiler", "rnn", "torchvision"}
#: Operators of these namespaces that call other processes, run Python, or write files.
OTHER = FILES | {
    *("rpc_async", "rpc_remote", "rpc_sync", "PythonOp", "read_file", "write_file"),
    *("decode_gif", "decode_image", "decode_jpeg", "decode_png"),
}
_MADE_BY = "__setstate__"
#: Classes in C++ that hold tensors, by namespace.
_CLASSES = frozenset(("mkldnn", "quantized", "rnn", "sparse", "xnnpack"))
_OF_CLASSES = "__torch__.torch.classes."
_CLASS = re.compile(rf"{re.escape(_OF_CLASSES)}[\w.]*")
_WORD = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\([0-7]{1,3})|\\x([0-9a-fA-F]{1,2})")
_STRICT = re.compile(
    rf"\bops\.({'|'.join(sorted(SPACES))})\.|\btorch\.classes\.({'|'.join(sorted(_CLASSES))})\."
)


def makes_itself(code: Mapping[str, str]) -> bool:
    """Whether code, by the names of its records, makes what the file holds."""
    return any(_MADE_BY in _unescaped(text) for text in code.values())


def called_while_loading(code: Mapping[str, str]) -> tuple[str, str] | None:
    """A record of code that runs during loading, and what that names besides computing."""
    if not makes_itself(code):
        return None
    for name, text in code.items():
        plain = _unescaped(text)
        for found_word in _WORD.finditer(plain):
            word = found_word.group()
            if word in OTHER:
                return name, word
            if word in ("ops", "classes") and not _is_strict(plain, found_word.start()):
                return name, "other libraries"
    return None


def called_by_bytecode(root: Node) -> str | None:
    """What compiled code that runs during loading names besides computing; None if nothing.

    The interpreter for phones finds a `__setstate__` by the name of a function. Its functions name
    operators and classes as text.
    """
    held = (each for node in nodes_of(root) for each in held_by(node))
    texts = sorted({str(each) for each in held if isinstance(each, str)})
    if not any(_MADE_BY in text for text in texts):
        return None
    for text in texts:
        space, colons, operator = text.partition("::")
        if colons and operator.partition(".")[0] in OTHER:
            return text
        if (colons and space not in SPACES) or any(map(is_foreign, _CLASS.findall(text))):
            return "other libraries"
    return None


def is_foreign(name: str) -> bool:
    """Whether an object of such a class is made by code in C++ that is not known."""
    if not name.startswith(_OF_CLASSES):
        return False
    return name[len(_OF_CLASSES) :].partition(".")[0] not in _CLASSES


def _unescaped(text: str) -> str:
    """The text with every character that it spells by number as that character."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8) if found[1] else int(found[2], 16)), text)


def _is_strict(text: str, at: int) -> bool:
    """Whether a word stands in the name of a known operator or class, as libtorch prints it."""
    return any(_STRICT.match(text, max(0, at - skipped)) for skipped in (0, len("torch.")))
