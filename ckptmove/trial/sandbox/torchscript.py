"""Refuse TorchScript programs that might do more than compute, and load the others.

After compiling, libtorch lists the operators that the code calls. Code that runs earlier, while the
file is loaded, is checked by its text: see `formats.programs.script_operators`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ... import formats
from ...errors import StrPath, UnsupportedError
from ...formats.programs import script_operators
from ...formats.programs.script_operators import OTHER, SPACES, is_foreign
from ...sources.file import File
from ...zips.archive import Archive

_HINT = "trust the file with --trust-pickle"


def makes_itself(path: StrPath) -> bool:
    """Whether a TorchScript file has code of its own that creates its content.

    Raises:
        InputError: the file can't be read.
    """
    return script_operators.makes_itself(_code(path))


def danger(path: StrPath) -> str | None:
    """A clause about code that libtorch might run while it loads the file, or None.

    Raises:
        InputError: the file can't be read.
    """
    with formats.open_checkpoint(path) as found:
        for container in found.container.everything():
            for stream in container.streams:
                for each in stream.pickle.globals:
                    if is_foreign(each.qualname):
                        return f"it holds an object of {each.qualname[:80]!r}"
    called = script_operators.called_while_loading(_code(path))
    if called is None:
        return None
    name, what = called
    return f"code in {name[:80]!r} that runs during loading may call {what!r}"


def _code(path: StrPath) -> dict[str, str]:
    """The text of each record that may be code: torch looks up records without regard to case."""
    with File.open(path) as source:
        archive = Archive(source)
        return {
            record.name: archive.read_parsed(record).decode("utf-8", "replace")
            for record in archive.records.values()
            if record.name.lower().endswith(".py")
        }


# -- loading ---------------------------------------------------------------------------------------


def load_module(path: StrPath, *, trust: bool) -> torch.nn.Module:
    """The module in a file, on the CPU.

    Args:
        path: the file.
        trust: whether it may call operators that do more than compute.

    Raises:
        UnsupportedError: it calls such an operator and is not trusted.
    """
    found = None if trust else danger(path)
    if found is None:
        native: Any = torch._C
        unit = native.CompilationUnit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings of torch.jit
            # Like torch.jit.load, which doesn't return the compiled functions.
            module = native.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)
            found = None if trust else _called(unit)
            if found is None:
                wrap: Any = torch.jit._recursive.wrap_cpp_module
                made: torch.nn.Module = wrap(module)
                return made
    raise UnsupportedError(f"the program might run code that is not visible: {found}", hint=_HINT)


def _called(unit: Any) -> str | None:
    """A clause about a call in the compiled code that does more than compute, or None."""
    for function in unit.get_functions():
        for node in _nodes(function.graph):
            kind = node.kind()
            space, _, name = kind.partition("::")
            if space not in SPACES or name in OTHER:
                return f"{function.name[:40]!r} calls {kind!r}"
            if kind == "prim::CreateObject":
                made = str(next(node.outputs()).type())
                if is_foreign(made):
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
