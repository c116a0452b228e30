"""The public names, all of them; `ckptmove` itself gives them when one is asked for."""

# ruff: noqa: I001 -- several of a module stand together

from .batches.batch import batch as batch
from .batches.items import Result as Result
from .batches.planning import BatchPlan as BatchPlan
from .batches.running import Batch as Batch, BatchReport as BatchReport
from .drafts.differing import Difference as Difference, Kind as Kind, Values as Values
from .drafts.draft import Loss as Loss
from .errors import (
    CheckFailed as CheckFailed,
    CkptmoveError as CkptmoveError,
    CorruptError as CorruptError,
    DeviceError as DeviceError,
    InputError as InputError,
    RefusedError as RefusedError,
    UnsupportedError as UnsupportedError,
    UntrustedError as UntrustedError,
    UsageError as UsageError,
    WriteError as WriteError,
)
from .in_place import Recovered as Recovered
from .live.diagnosis import Diagnosis as Diagnosis
from .live.happenings import (
    Happening as Happening,
    Operand as Operand,
    Site as Site,
    Trace as Trace,
    Usage as Usage,
)
from .manifest import (
    Alias as Alias,
    Extent as Extent,
    Manifest as Manifest,
    NamedDevice as NamedDevice,
    Role as Role,
    Section as Section,
    Storage as Storage,
    TensorEntry as TensorEntry,
    Total as Total,
)
from .opaque import Opaque as Opaque
from .placement import Kept as Kept, Moved as Moved
from .rehearsal.findings import Finding as Finding
from .render.move import MoveReport as MoveReport
from .render.shown import FileManifest as FileManifest, LiveManifest as LiveManifest
from .verbs.convert import ConvertReport as ConvertReport, convert as convert
from .verbs.diff import Diff as Diff, diff as diff
from .verbs.doctor import doctor as doctor
from .verbs.inspect import inspect as inspect
from .verbs.load import load as load
from .verbs.move import move as move
from .verbs.prefetch import prefetch as prefetch
from .verbs.recover import RecoverReport as RecoverReport, recover as recover
from .verbs.relocate import RelocateReport as RelocateReport, relocate as relocate
from .verbs.report import report as report
from .verbs.save import save as save
from .verbs.to_device import to_device as to_device
from .verbs.trace import trace as trace
from .verbs.validate import ValidationReport as ValidationReport, validate as validate
from .verdicts import Verdict as Verdict
from .verifier import Progress as Progress
