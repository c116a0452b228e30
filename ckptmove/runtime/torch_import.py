"""Import torch, or say why it can't be imported.

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
#: Imports torch with as much address space taken as its argument says.
_IMPORT_TORCH = """
import mmap, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
there = mmap.mmap(-1, int(sys.argv[1]))
try:
    import torch
except ModuleNotFoundError:
    sys.exit()
try:
    import numpy
    import safetensors.torch
except ImportError:
    pass
"""
#: Bytes that are taken between the question and the import.
_MARGIN = 32 << 20


def why_no_torch() -> str | None:
    """Import torch, and tell why it can't be imported; None if it is there.

    Where memory is limited, another process tries it first: it is not Python that is out of memory
    then, but C++, which ends the process (SIGABRT), or OpenBLAS, which exits.
    """
    if sys.modules.get("torch") is not None:
        return None
    if memory.is_limited() and not _torch_fits():
        return f"torch can't be imported: it {NO_MEMORY}"
    try:
        import torch
    except (ImportError, OSError, MemoryError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return NOT_INSTALLED
        return f"torch can't be imported: {format_error(error)}"
    del torch
    return None


@cache
def _torch_fits() -> bool:
    """Whether a process with our limits, in which as much is taken, imports torch."""
    command = [sys.executable, "-c", _IMPORT_TORCH, str(memory.address_space() + _MARGIN)]
    quiet = subprocess.DEVNULL
    return not subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode
