"""ckptmove: inspect, relocate and convert PyTorch checkpoints without unpickling them.

import ckptmove

print(ckptmove.inspect("in.pt").verdict)
ckptmove.relocate("in.pt", "out.pt", to="cuda:0")
ckptmove.convert("in.pt", "out.safetensors")
"""

from .drafts.differing import Difference, Kind, Values
from .drafts.draft import Loss
from .errors import (
    CheckFailed,
    CkptmoveError,
    CorruptError,
    DeviceError,
    InputError,
    RefusedError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from .in_place import Recovered
from .manifest import (
    Alias,
    Extent,
    Manifest,
    NamedDevice,
    Role,
    Section,
    Storage,
    TensorEntry,
    Total,
)
from .opaque import Opaque
from .placement import Kept, Moved
from .rehearsal.findings import Finding
from .verbs.convert import ConvertReport, convert
from .verbs.diff import Diff, diff
from .verbs.inspect import inspect
from .verbs.load import load
from .verbs.recover import RecoverReport, recover
from .verbs.relocate import RelocateReport, relocate
from .verbs.save import save
from .verbs.validate import ValidationReport, validate
from .verifier import Progress

__version__ = "0.1.0"

__all__ = [
    "Alias",
    "CheckFailed",
    "CkptmoveError",
    "ConvertReport",
    "CorruptError",
    "DeviceError",
    "Diff",
    "Difference",
    "Extent",
    "Finding",
    "InputError",
    "Kept",
    "Kind",
    "Loss",
    "Manifest",
    "Moved",
    "NamedDevice",
    "Opaque",
    "Progress",
    "RecoverReport",
    "Recovered",
    "RefusedError",
    "RelocateReport",
    "Role",
    "Section",
    "Storage",
    "TensorEntry",
    "Total",
    "UnsupportedError",
    "UsageError",
    "ValidationReport",
    "Values",
    "WriteError",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "load",
    "recover",
    "relocate",
    "save",
    "validate",
]
