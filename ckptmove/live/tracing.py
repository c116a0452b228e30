"""What happens on devices while a model runs: every operation, by module and line of code.

A recorder stands between torch's Python and its kernels (`TorchDispatchMode`), on real tensors as
on fake ones, and learns from hooks which module is running. It adds up per site, a site being an
operation in a module at a line in a phase, and holds on to no tensor.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_SITES = 4096  # more are counted, and not told apart
_MOST_FRAMES = 64  # that are searched for the user's code

_OURS = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGES = tuple(str(Path(sysconfig.get_path(kind))) + os.sep for kind in ("purelib", "platlib"))
_STDLIB = str(Path(sysconfig.get_path("stdlib"))) + os.sep

#: What a program on the host must wait for: results whose shape or value it needs.
_SYNCS = frozenset(
    (
        *("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
        *("_unique", "_unique2", "unique_consecutive", "unique_dim"),
    )
)
_COPIES = frozenset(("_copy_from", "_to_copy", "copy", "copy_"))
#: What computes nothing: other names for a tensor.
_NAMES = frozenset(("alias", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy"))

#: What takes operands of one device and dtype alone.
_STRICT = frozenset(("addmm", "addmv", "baddbmm", "bmm", "convolution", "mm", "mv"))


class Site(NamedTuple):
    """Where something happens.

    Attributes:
        phase: `forward`, `backward` or `optimizer`; "" outside of all.
        module: the dotted name of the module that runs; "" for none, or the model itself.
        op: the operation, e.g. `aten.add.Tensor`.
        source: the first line outside of torch and ckptmove, `file.py:12`; "" if there is none.
    """

    phase: str
    module: str
    op: str
    source: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        where = where or (f" in {self.phase}" if self.phase else "")
        return f"{self.op}{where}{f' at {self.source}' if self.source else ''}"


@dataclass(frozen=True)
class Happening:
    """Something that happened at a site.

    Attributes:
        kind: `stray`: computed on another device than the model's; `created`: a tensor made on
            another device; `transfer`: copied between devices; `sync`: the host waits for a value;
            `mixed`: computed on the model's device, of tensors that are elsewhere too.
        site: where.
        devices: the device; of a transfer, from and to.
        count: how often.
        nbytes: of the tensors that were copied or made.
    """

    kind: str
    site: Site
    devices: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        times = f", {self.count:,} times" if self.count > 1 else ""
        size = f", {self.nbytes:,} bytes" if self.nbytes else ""
        return f"{self.site} ({self.devices}{size}{times})"


@dataclass(frozen=True)
class Trace:
    """What was recorded.

    Attributes:
        device: the model's.
        operations: how many, by device; those on no tensor at all count for none.
        phases: how many, by phase.
        sites: how many different ones.
        happenings: what is worth a look, the most frequent first.
        dropped: how many happenings are not told apart, for there were too many sites.
        error: where an exception came out of an operation, or None.
    """

    device: str
    operations: Mapping[str, int]
    phases: Mapping[str, int]
    sites: int
    happenings: Sequence[Happening]
    dropped: int
    error: Site | None

    def of(self, kind: str) -> list[Happening]:
        """What happened of a kind."""
        return [each for each in self.happenings if each.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": self.device,
            "operations": dict(self.operations),
            "phases": dict(self.phases),
            "sites": self.sites,
            "dropped": self.dropped,
            "happenings": [
                {**asdict(each), "site": each.site._asdict()} for each in self.happenings
            ],
            "error": None if self.error is None else self.error._asdict(),
        }


class Recorder(TorchDispatchMode):
    """Records every operation while it is entered.

    Attributes:
        error: where the last exception came out of an operation, or None.
        running: the names of the modules that run, the innermost last.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        *,
        call: Callable[[str], str] = str,
    ) -> None:
        """Args:
        module: the model, whose modules are told by name.
        device: where everything is meant to happen.
        call: what to call a device, where some only stand in for others.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(each): path for path, each in module.named_modules()}
        self._home = _indexed(device)
        self._call_it = call
        self._operations: dict[str, int] = {}
        self._phases: dict[str, int] = {}
        self._sites: set[Site] = set()
        self._happenings: dict[tuple[str, Site, str], list[int]] = {}
        self._dropped = 0
        self._phase = ""
        self._hooked: ExitStack | None = None
        self.error: Site | None = None
        self.running: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is recorded meanwhile is of a phase."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def trace(self) -> Trace:
        """What was recorded so far."""
        happenings = [
            Happening(kind, site, devices, count, nbytes)
            for (kind, site, devices), (count, nbytes) in self._happenings.items()
        ]
        happenings.sort(key=lambda each: -each.count)
        return Trace(
            self._call(self._home),
            dict(self._operations),
            dict(self._phases),
            len(self._sites),
            happenings,
            self._dropped,
            self.error,
        )

    # -- recording ---------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._hooked = ExitStack()
        before = hooks.register_module_forward_pre_hook(self._enter_module)
        after = hooks.register_module_forward_hook(self._leave_module, always_call=True)
        self._hooked.callback(before.remove)
        self._hooked.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hooked is not None:
            self._hooked.close()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self.running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.running:
            self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # what a tensor is asked about itself
            return func(*args, **kwargs)
        taken = [_Seen.of(each) for each in _tensors((args, kwargs))]
        site = self._site(func)
        try:
            _check_operands(func, args, kwargs)
            out = func(*args, **kwargs)
        except BaseException:
            if self.error is None:  # what comes after it comes of it
                self.error = site
            raise
        made = [_Seen.of(each) for each in _tensors(out)]
        self._record(site, func, taken, made)
        return out

    def _site(self, func: Any) -> Site:
        module = self.running[-1] if self.running else ""
        return Site(self._phase, module, str(func), user_line(sys._getframe(2).f_back))

    def _record(self, site: Site, func: Any, taken: list[_Seen], made: list[_Seen]) -> None:
        name = func._schema.name.rpartition("::")[2] if hasattr(func, "_schema") else str(func)
        if len(self._sites) < _MOST_SITES:
            self._sites.add(site)
        where = self._where(taken, made)
        if where is not None:
            called = self._call(where)
            self._operations[called] = self._operations.get(called, 0) + 1
        self._phases[site.phase] = self._phases.get(site.phase, 0) + 1
        if name in _NAMES:
            if name.startswith("lift"):  # what torch.tensor ends with
                for each in made:
                    self._created(site, each)
            return
        if name in _SYNCS and self._waits(site, (taken or made)[0].device):
            self._note("sync", site, self._call((taken or made)[0].device), 0)
        if name in _COPIES and taken and made:
            self._copied(site, taken, made[0])
            return
        if not taken:
            for each in made:
                self._created(site, each)
            return
        away = [each for each in made if each.is_big and each.device != self._home]
        if not made and name not in _SYNCS:
            away = [each for each in taken if each.is_big]
            away = away if all(each.device != self._home for each in away) else []
        if away:
            self._note("stray", site, self._call(away[0].device), 0)
        elif any(each.is_big and each.device != self._home for each in taken):
            others = sorted({self._call(each.device) for each in taken if each.is_big})
            self._note("mixed", site, " and ".join(others), 0)

    def _waits(self, site: Site, device: torch.device) -> bool:
        """Whether a value is not on the host, or wouldn't be if the model were elsewhere."""
        if device.type != "cpu":
            return True
        return self._home.type == "cpu" and site.phase != "optimizer"

    def _where(self, taken: list[_Seen], made: list[_Seen]) -> torch.device | None:
        """The device an operation runs on, as torch chooses it: that of what isn't a mere number,
        and what it makes before what it takes."""
        seen = [*made, *taken]
        return next((s.device for s in seen if s.is_big), seen[0].device if seen else None)

    def _copied(self, site: Site, taken: list[_Seen], made: _Seen) -> None:
        source = taken[-1] if site.op.startswith("aten.copy") and len(taken) > 1 else taken[0]
        if source.device != made.device:
            devices = f"{self._call(source.device)}→{self._call(made.device)}"
            self._note("transfer", site, devices, made.nbytes)

    def _created(self, site: Site, made: _Seen) -> None:
        if made.is_big and made.device != self._home:
            self._note("created", site, self._call(made.device), made.nbytes)

    def _note(self, kind: str, site: Site, devices: str, nbytes: int) -> None:
        key = kind, site, devices
        if key not in self._happenings and len(self._happenings) >= _MOST_SITES:
            self._dropped += 1
            return
        found = self._happenings.setdefault(key, [0, 0])
        found[0] += 1
        found[1] += nbytes

    def _call(self, device: torch.device) -> str:
        return self._call_it(str(device))


class _Seen(NamedTuple):
    """What is remembered of a tensor; big ones aren't mere numbers, which may be anywhere."""

    device: torch.device
    is_big: bool
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        nbytes = tensor.numel() * tensor.element_size()
        return cls(_indexed(tensor.device), tensor.dim() > 0, nbytes)


def _check_operands(func: Any, args: Any, kwargs: Any) -> None:
    """Raise what a kernel would that wants operands of one device and dtype.

    Fake tensors don't: those of a convolution take the device of its input, and no product of
    matrices compares dtypes.
    """
    if func.namespace != "aten" or func._schema.name.rpartition("::")[2] not in _STRICT:
        return
    taken = _tensors((args, kwargs))
    if not any(isinstance(each, FakeTensor) for each in taken):
        return
    devices = {str(each.device): None for each in taken}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found " + " and ".join(devices)
        )
    dtypes = {str(each.dtype): None for each in taken}
    if len(dtypes) > 1:
        raise RuntimeError("expected operands of the same dtype, but got " + " and ".join(dtypes))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _indexed(device: torch.device) -> torch.device:
    """`cuda` is `cuda:0` here: one rehearsal has one device of a kind."""
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return torch.device(device.type, 0)
    return device


# -- lines of code ---------------------------------------------------------------------------------


def user_line(frame: FrameType | None) -> str:
    """The innermost line of the model's or the user's code, from a frame on.

    "" if there is none: torch was called from here, as for a backward pass.
    """
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not frame.f_code.co_name.startswith("__torch_"):
            return ""
        if is_users(file):
            return f"{_spell(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def raised_at(error: BaseException) -> str:
    """The line outside of torch and ckptmove where an exception comes from; "" if none."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{_spell(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def raised_in(error: BaseException, module: torch.nn.Module) -> str:
    """The name of the innermost module whose code an exception comes through; "" if none."""
    names = {id(each): path for path, each in module.named_modules()}
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        running = traceback.tb_frame.f_locals.get("self")
        found = names.get(id(running), found) if running is not None else found
        traceback = traceback.tb_next
    return found


def is_users(file: str) -> bool:
    """Whether this is a file of the user's, or of a library that uses torch."""
    if file.startswith((_OURS, _TORCH, "<")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_STDLIB)


def _spell(file: str) -> str:
    for packages in _PACKAGES:
        if file.startswith(packages):
            return file.removeprefix(packages)
    here = str(Path.cwd()) + os.sep
    return file.removeprefix(here)
