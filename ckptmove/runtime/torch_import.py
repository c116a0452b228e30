"""Import torch, or say why it can't be imported; and tell whether numpy can be.

This module can be imported without torch.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from ..reports.display.phrases import format_error
from ..sources.budget import NO_MEMORY
from ..system import memory

NOT_INSTALLED = "torch is not installed"
#: Imports a module, and then others if they can be, with as much address space taken as asked.
_IMPORT = """
import importlib, mmap, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
there = mmap.mmap(-1, int(sys.argv[1]))
try:
    importlib.import_module(sys.argv[2])
except ModuleNotFoundError:
    sys.exit()
try:
    for name in sys.argv[3:]:
        importlib.import_module(name)
except ImportError:
    pass
"""
#: Bytes that are taken between the question and the import.
_MARGIN = 32 << 20
#: Why it could not be imported, once it failed half-way: a second import says something else.
_failure: str | None = None


def why_no_torch() -> str | None:
    """Import torch, and tell why it can't be imported; None if it is there.

    Where memory is limited, another process tries it first: it is not Python that is out of memory
    then, but C++, which ends the process (SIGABRT), or OpenBLAS, which exits.
    """
    global _failure
    if sys.modules.get("torch") is not None:
        return None
    if _failure is not None:
        return _failure
    if not _fits("torch", "numpy", "safetensors.torch"):
        return f"torch can't be imported: it {NO_MEMORY}"
    try:
        import torch
    except (ImportError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return NOT_INSTALLED
        _failure = f"torch can't be imported: {format_error(error)}"
        return _failure
    del torch
    return None


def has_room_for_numpy() -> bool:
    """Whether memory suffices to import numpy, whose OpenBLAS may exit where it does not."""
    return "numpy" in sys.modules or _fits("numpy")


@cache
def _fits(*modules: str) -> bool:
    """Whether memory is not limited, or another process with as much taken imports them."""
    if not memory.is_limited():
        return True
    taken = str(memory.address_space() + _MARGIN)
    command = [sys.executable, "-c", _IMPORT, taken, *modules]
    quiet = subprocess.DEVNULL
    return not subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode
