"""ckptmove: inspect, relocate and convert PyTorch checkpoints without unpickling them.

import ckptmove

print(ckptmove.inspect("in.pt").verdict)
ckptmove.relocate("in.pt", "out.pt", to="cuda:0")
ckptmove.convert("in.pt", "out.safetensors")
"""

from .batches.batch import batch
from .batches.items import Result
from .batches.planning import BatchPlan
from .batches.running import Batch, BatchReport
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
from .live.diagnosis import Diagnosis
from .live.happenings import Happening, Operand, Site, Trace, Usage
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
from .render.move import MoveReport
from .render.shown import FileManifest, LiveManifest
from .verbs.convert import ConvertReport, convert
from .verbs.diff import Diff, diff
from .verbs.doctor import doctor
from .verbs.inspect import inspect
from .verbs.load import load
from .verbs.move import move
from .verbs.prefetch import prefetch
from .verbs.recover import RecoverReport, recover
from .verbs.relocate import RelocateReport, relocate
from .verbs.report import report
from .verbs.save import save
from .verbs.to_device import to_device
from .verbs.trace import trace
from .verbs.validate import ValidationReport, validate
from .verdicts import Verdict
from .verifier import Progress
from .version import __version__

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
