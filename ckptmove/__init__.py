"""ckptmove: inspect, relocate and convert PyTorch checkpoints without unpickling them.

import ckptmove

print(ckptmove.inspect("in.pt").verdict)
ckptmove.relocate("in.pt", "out.pt", to="cuda:0")
ckptmove.convert("in.pt", "out.safetensors")
"""

import _signal  # type: ignore[import-not-found, unused-ignore]
import sys

if (  # we are the command: until it handles Ctrl-C, that ends the process without a word
    sys.argv[:1] in (["-m"], sys.orig_argv[-len(sys.argv) :][:1])
    and "".join(sys.orig_argv[-len(sys.argv) :][:1]).rpartition("/")[2]
    in ("ckptmove", "-mckptmove")
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from importlib import import_module

from .version import __version__

TYPE_CHECKING = False  # typing has the same name; importing it takes a while
if TYPE_CHECKING:
    from .api.convert import convert
    from .api.diff import diff
    from .api.doctor import doctor
    from .api.in_memory import move, prefetch, report, to_device, trace
    from .api.inspect import inspect
    from .api.load import load
    from .api.recover import recover
    from .api.relocate import relocate
    from .api.salvage import salvage
    from .api.save import save
    from .api.validate import validate
    from .batches.batch import batch
    from .batches.running import Batch
    from .errors import (
        CheckFailed,
        CkptmoveError,
        CorruptError,
        DeviceError,
        InputError,
        RefusedError,
        UnsupportedError,
        UntrustedError,
        UsageError,
        WriteError,
    )
    from .manifest.manifest import Extent, Manifest, Role, Section, Storage, TensorEntry, Total
    from .manifest.other_records import Alias, NamedDevice
    from .placement.move_totals import Kept, Moved
    from .reports.batch.items import Result
    from .reports.batch.log import LogLine
    from .reports.batch.report import BatchPlan, BatchReport
    from .reports.convert import ConvertReport, Loss
    from .reports.diff import Diff
    from .reports.difference import Difference, Kind, Values
    from .reports.doctor import Diagnosis, Verdict
    from .reports.events import Happening, Operand, Site, Span, Timeline, Trace, Usage
    from .reports.inspect import FileManifest
    from .reports.live import LiveManifest
    from .reports.move import MoveReport
    from .reports.recover import Recovered, RecoverReport
    from .reports.relocate import RelocateReport
    from .reports.salvage import Fate, SalvagedTensor, SalvageReport
    from .reports.validate import Finding, ValidationReport
    from .runtime.opaque import Opaque
    from .writing.verify import Progress

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
    "Fate",
    "FileManifest",
    "Finding",
    "Happening",
    "InputError",
    "Kept",
    "Kind",
    "LiveManifest",
    "LogLine",
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
    "SalvageReport",
    "SalvagedTensor",
    "Section",
    "Site",
    "Span",
    "Storage",
    "TensorEntry",
    "Timeline",
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
    "salvage",
    "save",
    "to_device",
    "trace",
    "validate",
]


#: Which module gives which names; it is imported when one of them is asked for. Not before, since
#: the command line first says what Ctrl-C shall do, and since most callers want few.
_GIVES: dict[str, tuple[str, ...]] = {
    "ckptmove.api.convert": ("convert",),
    "ckptmove.api.diff": ("diff",),
    "ckptmove.api.doctor": ("doctor",),
    "ckptmove.api.in_memory": ("move", "prefetch", "report", "to_device", "trace"),
    "ckptmove.api.inspect": ("inspect",),
    "ckptmove.api.load": ("load",),
    "ckptmove.api.recover": ("recover",),
    "ckptmove.api.relocate": ("relocate",),
    "ckptmove.api.salvage": ("salvage",),
    "ckptmove.api.save": ("save",),
    "ckptmove.api.validate": ("validate",),
    "ckptmove.batches.batch": ("batch",),
    "ckptmove.batches.running": ("Batch",),
    "ckptmove.errors": (
        "CheckFailed",
        "CkptmoveError",
        "CorruptError",
        "DeviceError",
        "InputError",
        "RefusedError",
        "UnsupportedError",
        "UntrustedError",
        "UsageError",
        "WriteError",
    ),
    "ckptmove.manifest.manifest": (
        "Extent",
        "Manifest",
        "Role",
        "Section",
        "Storage",
        "TensorEntry",
        "Total",
    ),
    "ckptmove.manifest.other_records": ("Alias", "NamedDevice"),
    "ckptmove.placement.move_totals": ("Kept", "Moved"),
    "ckptmove.reports.batch.report": ("BatchPlan", "BatchReport"),
    "ckptmove.reports.batch.items": ("Result",),
    "ckptmove.reports.batch.log": ("LogLine",),
    "ckptmove.reports.convert": ("ConvertReport", "Loss"),
    "ckptmove.reports.diff": ("Diff",),
    "ckptmove.reports.difference": ("Difference", "Kind", "Values"),
    "ckptmove.reports.doctor": ("Diagnosis", "Verdict"),
    "ckptmove.reports.events": (
        "Happening",
        "Operand",
        "Site",
        "Span",
        "Timeline",
        "Trace",
        "Usage",
    ),
    "ckptmove.reports.inspect": ("FileManifest",),
    "ckptmove.reports.live": ("LiveManifest",),
    "ckptmove.reports.move": ("MoveReport",),
    "ckptmove.reports.recover": ("Recovered", "RecoverReport"),
    "ckptmove.reports.relocate": ("RelocateReport",),
    "ckptmove.reports.salvage": ("Fate", "SalvageReport", "SalvagedTensor"),
    "ckptmove.reports.validate": ("Finding", "ValidationReport"),
    "ckptmove.runtime.opaque": ("Opaque",),
    "ckptmove.writing.verify": ("Progress",),
}
_MODULES = {name: module for module, names in _GIVES.items() for name in names}


if not TYPE_CHECKING:  # which would take every name for a public one

    def __getattr__(name: str) -> object:
        """A public name, from the module that gives it."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
