"""Records of a run: operations by device and module, and notable events. Keeps no tensor alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..display.plain import Plain


class Site(NamedTuple):
    """A place in the code where an operation runs.

    Attributes:
        phase: `forward`, `backward` or `optimizer`; "" outside of these.
        module: the dotted name of the module that runs; "" for the model itself, or none.
        op: the operation, for example `aten.add.Tensor`; `call` for a call of the model.
        source: the first line outside of torch and ckptmove, `file.py:12`; in a backward pass, the
            line of the operation whose gradient is computed; "" if there is none.
    """

    phase: str
    module: str
    op: str
    source: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        where = where or (f" in {self.phase}" if self.phase else "")
        return f"{self.op}{where}{f' at {self.source}' if self.source else ''}"


class Operand(NamedTuple):
    """A tensor that an operation took as an argument.

    Attributes:
        name: its name in the model or at the caller; or what made it, and where.
        device: where it is.
        shape: its sizes.
        held: how the model holds it (`inventory.holdings.Ownership`), `input`, `made`, or "" if
            unknown.
        module: the module that holds it, or in which it was made.
        variable: the variable in the code that used it, or "".
        owner: the user's variable of the model that holds it, or its class; or "".
        source: what made the owner and where, or where it was called and gave this, or what left
            this where it is; or "".
    """

    name: str
    device: str
    shape: tuple[int, ...]
    held: str = ""
    module: str = ""
    variable: str = ""
    owner: str = ""
    source: str = ""

    def __str__(self) -> str:
        comma = "," if ", made by " in self.name else ""
        return f"{self.name}{comma} is on {self.device}"


@dataclass(frozen=True)
class Happening:
    """An event at one place in the code that is worth a look.

    Attributes:
        kind: `stray`: computed on another device than the model's; `created`: a tensor made on
            another device; `transfer`: copied between devices; `sync`: the host waits for a value;
            `mixed`: computed on the model's device, from tensors that are partly on others;
            `input`: the model was called with tensors on another device; `dropped`: copied to the
            model's device, but then the original was used and not the copy; `apart`: another model
            was called, whose parameters are on another device.
        site: where in the code.
        devices: the device; for a transfer, from and to.
        count: how often.
        nbytes: the bytes of the tensors that were copied or made.
        operands: the tensors on another device, or those copied, the first time.
        asked: whether the user's own code asked for it in training, and not a library.
        turns: in how many watched steps it happened; in how many calls if there are no steps.
    """

    kind: str
    site: Site
    devices: str
    count: int
    nbytes: int
    operands: tuple[Operand, ...] = ()
    asked: bool = False
    turns: int = 1

    def __str__(self) -> str:
        times = f", {self.count:,} times" if self.count > 1 else ""
        size = f", {self.nbytes:,} bytes" if self.nbytes else ""
        return f"{self.site} ({self.devices}{size}{times})"


class Usage(NamedTuple):
    """What ran on a device: the number of operations, and the bytes of their results."""

    operations: int
    nbytes: int


class Span(NamedTuple):
    """What ran at one line of one module, with nothing of another place in between.

    Attributes:
        phase, module, source: where in the code, as a `Site` has them.
        device: where its operations ran.
        operations: how many there were.
        nbytes: the bytes of their results.
        copied: from two devices (`cpu→cuda:0`) to the bytes that were copied between them.
        waits: how often the host waited for a value.
    """

    phase: str
    module: str
    source: str
    device: str
    operations: int
    nbytes: int
    copied: Mapping[str, int] = {}
    waits: int = 0


class Timeline(NamedTuple):
    """What a training step did, in order.

    Attributes:
        spans: what ran, where, one after the other.
        left_out: the number of operations that came after them, because there were too many spans.
        step: which step of the run it was, from 1; 0 if it was not finished.
    """

    spans: tuple[Span, ...] = ()
    left_out: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Trace(Plain):
    """What was recorded while a model ran.

    Attributes:
        device: where everything should run.
        operations: the number of operations by device, without those that take no tensor.
        phases: the number of operations by phase.
        modules: from the name of a module ("" for the model itself and outside of it) to usage by
            device.
        calls: how often the model was called.
        steps: the number of optimizer steps.
        watched: in how many of the steps the operations were watched. Everything that is counted by
            operation, and every event, is of these steps, and of what ran outside of steps.
        sites: the number of different sites.
        dropped: the number of events without a site of their own, because there were too many
            sites.
        happenings: events worth a look, the most frequent first.
        error: where an exception came out of an operation, or None.
        operands: the tensors that this operation took.
        said: the exception in one line, caught or not; or None.
        timeline: the last whole step; where none was finished, or an operation failed, what ran
            since.
    """

    device: str
    operations: Mapping[str, int]
    phases: Mapping[str, int]
    modules: Mapping[str, Mapping[str, Usage]] = field(default_factory=dict)
    calls: int = 0
    steps: int = 0
    watched: int = 0
    sites: int
    dropped: int
    happenings: Sequence[Happening]
    error: Site | None
    operands: tuple[Operand, ...] = ()
    said: str | None = None
    timeline: Timeline = field(default_factory=Timeline)

    def of(self, *kinds: str) -> list[Happening]:
        """Return the events of some kinds."""
        return [each for each in self.happenings if each.kind in kinds]
