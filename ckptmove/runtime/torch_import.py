"""Import torch, or say why it can't be imported; and check whether memory suffices for numpy.

This module can be imported without torch.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from ..display.phrases import format_error
from ..sources.budget import NO_MEMORY
from ..system import memory

NOT_INSTALLED = "torch is not installed"
#: Reserves address space, then imports a module, and then the other modules if possible.
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
#: Bytes that may be allocated between the check and the import.
_MARGIN = 32 << 20
#: Why the import of torch failed; kept because a second import raises another error.
_failure: str | None = None


def why_no_torch() -> str | None:
    """Import torch, and return why it can't be imported; None if it is imported.

    If memory is limited, another process tries the import first: when memory runs out, C++ aborts
    the process (SIGABRT) or OpenBLAS exits, so Python can't handle the error.
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
    """Whether memory suffices to import numpy; if not, its OpenBLAS may exit the process."""
    return "numpy" in sys.modules or _fits("numpy")


@cache
def _fits(*modules: str) -> bool:
    """Whether memory is not limited, or another process that uses as much imports the modules."""
    if not memory.is_limited():
        return True
    taken = str(memory.address_space() + _MARGIN)
    command = [sys.executable, "-c", _IMPORT, taken, *modules]
    quiet = subprocess.DEVNULL
    return not subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode
