"""ckptmove: inspect, relocate and convert PyTorch checkpoints without unpickling them.

import ckptmove

print(ckptmove.inspect("in.pt").verdict)
ckptmove.relocate("in.pt", "out.pt", to="cuda:0")
ckptmove.convert("in.pt", "out.safetensors")
"""

# ruff: noqa: F405 -- they are imported when one is asked for, and before that by type checkers alone

from .version import __version__

TYPE_CHECKING = False  # typing has the same name; importing it takes a while
if TYPE_CHECKING:
    from .public import *  # noqa: F403

__all__ = [
    "Alias",
    "Batch",
    "BatchPlan",
    "BatchReport",
    "CheckFailed",
    "CkptmoveError",
    "ConvertReport",
    "CorruptError",
    "DeviceError",
    "Diagnosis",
    "Diff",
    "Difference",
    "Extent",
    "FileManifest",
    "Finding",
    "Happening",
    "InputError",
    "Kept",
    "Kind",
    "LiveManifest",
    "Loss",
    "Manifest",
    "MoveReport",
    "Moved",
    "NamedDevice",
    "Opaque",
    "Operand",
    "Progress",
    "RecoverReport",
    "Recovered",
    "RefusedError",
    "RelocateReport",
    "Result",
    "Role",
    "Section",
    "Site",
    "Storage",
    "TensorEntry",
    "Total",
    "Trace",
    "UnsupportedError",
    "UntrustedError",
    "Usage",
    "UsageError",
    "ValidationReport",
    "Values",
    "Verdict",
    "WriteError",
    "__version__",
    "batch",
    "convert",
    "diff",
    "doctor",
    "inspect",
    "load",
    "move",
    "prefetch",
    "recover",
    "relocate",
    "report",
    "save",
    "to_device",
    "trace",
    "validate",
]


def __getattr__(name: str) -> object:
    """A public name. Not before, since the command line first says what Ctrl-C shall do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    value = globals()[name] = getattr(public, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
