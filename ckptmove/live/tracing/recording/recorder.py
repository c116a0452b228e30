"""Record what happens on devices while a model runs: every operation, by module and line.

The recorder sits between torch's Python code and its kernels (`TorchDispatchMode`), for real and
fake tensors. Hooks tell it which module runs and when an optimizer steps. It keeps totals per site
(an operation in a module at a line in a phase), and keeps no tensor alive.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.optim import optimizer as steps
from torch.utils._python_dispatch import TorchDispatchMode

from ....display.phrases import format_error
from ....errors import UsageError
from ....reports.events import Operand, Site, Trace
from ..program.source_lines import (
    CALLED,
    comes_from,
    frame_outside,
    is_asked,
    locals_of,
    made_site,
    user_frame,
    user_line,
)
from .call_sites import CallSites
from .cut_gradients import GradientCuts
from .device_choice import Callers
from .history import History, own_lines
from .host_copies import HostCopies
from .model_calls import ModelCalls
from .operand_code import codes_of, discarded, given_at
from .operations import (
    COPIES,
    COPY,
    KINDS,
    NAMES,
    SYNCS,
    TensorFacts,
    are_all_on,
    bytes_of,
    indexed,
    is_big,
    kind_of_operation,
    must_wait,
    operands_of,
    runs_for,
    tensors_of,
)
from .remembered import key_of
from .sampling import FIRST, Sampling, TorchCalls
from .stale_copies import StaleCopies
from .tally import EventCount, SiteCount, Tally, happened
from .tensor_names import TensorNames
from .unused_copies import UnusedCopies, UnusedCopy
from .updates import Updates


class Recorder(TorchDispatchMode):
    """Records every operation while it is entered."""

    def __init__(
        self,
        module: torch.nn.Module | None,
        device: torch.device,
        *,
        call: Callable[[str], str] = str,
        turn: Callable[[Recorder], None] | None = None,
        every: int = 1,
        history: History | None = None,
    ) -> None:
        """Without a module, every called model is recorded.

        `call` returns the displayed name of a device. `turn` is called before each model call and
        after each step; an exception from it ends the run. After the first steps, one step in
        `every` is watched.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.history = history or History()  #: the lines that made the program's objects
        self.names = TensorNames(self.history)  #: the names of tensors, models and optimizers
        if module is not None:
            self.names.know(module)
        self.home = indexed(device)  #: the target device, where everything should be
        self.call_it = call  #: returns the displayed name of a device
        self._called_home = call(str(self.home))
        self._turn = turn
        self._tally = Tally()
        self._thread = 0
        self._places = CallSites(self._tally)
        self._copies = UnusedCopies()
        self.cuts = GradientCuts(self.names.optimizers.fed)  #: on the way to another device
        self.stale = StaleCopies()  #: copies whose sources change
        self.updates = Updates(self.line_of_node)  #: changes of trained tensors
        self.sampling = Sampling(every, self)  #: which steps are watched
        self.callers = Callers(self.history)  #: of models on another device
        known = self.names, self.callers, self._tally, self.home, call, self._note
        self.models = ModelCalls(*known)  #: the calls of models
        self.host = HostCopies(self.names)  #: copies from and to the host
        self.pending = self.host.pending
        self._stepping = False
        self._hooked: ExitStack | None = None
        #: The site of the last operation that failed, or None.
        self.error: Site | None = None
        self.operands: tuple[Operand, ...] = ()  #: the operands of that operation
        self.called_at = ""  #: the user's lines that called the function that failed
        self.given_at = ""  #: the line that gave that function a tensor on another device
        self.said: str | None = None  #: the exception, in one line
        self._raised = 0, ""  # id and text of that exception, which must not be kept
        self.running: list[str] = []  #: the names of the running modules, the innermost last
        self.steps = 0  #: the number of optimizer steps
        self.backwards = 0  #: the number of backward passes
        #: Whether a model ran without gradients after a step.
        self.evaluated = self._is_backward = False

    def trace(self, ended_by: BaseException | None = None) -> Trace:
        """The recording so far, without caught failures that did not cause `ended_by`."""
        told_of = ended_by is None or comes_from(ended_by, self._raised)
        noted = self._copies.noted(self._tally.happenings, self.names)
        return Trace(
            device=self._call(self.home),
            operations=dict(self._tally.operations),
            phases=dict(self._tally.phases),
            modules=self._tally.modules,
            calls=self.models.count,
            steps=self.steps,
            watched=self.sampling.watched,
            sites=self._tally.sites,
            happenings=sorted(happened(noted), key=lambda each: -each.count),
            dropped=self._tally.dropped,
            error=self.error if told_of else None,
            operands=self.operands if told_of else (),
            said=self.said if told_of else None,
            timeline=self._tally.timeline(unfinished=bool(told_of and self.error)),
        )

    # -- events of the run -------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._hooked is not None:
            raise UsageError("this block is already recorded")
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
                steps.register_optimizer_step_pre_hook(self._enter_step),
                steps.register_optimizer_step_post_hook(self._leave_step),
            ):
                stack.callback(handle.remove)
            known = self.names, self.history, self.updates, self.home, self._where
            calls = TorchCalls(self.failed, self.sampling, self.pending, *known)
            stack.enter_context(calls)
            self.sampling.begin(calls)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._hooked = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.sampling.paused:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self._hooked is not None:
            self._hooked.close()
            self._hooked = None
        self.running.clear()
        self._stepping = False

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if not runs_for(self._thread):
            return
        if not self.running:
            if self._turn is not None:
                self._turn(self)
            self.names.know(module)
            # Global hooks don't receive keyword arguments; the frame that calls them has them.
            kwargs = locals_of(sys._getframe(1)).get("kwargs")
            frame = user_frame(sys._getframe(1))
            named = kwargs if isinstance(kwargs, dict) else {}
            given = self.models.note_call(module, args, named, frame)
            self.evaluated |= bool(self.steps) and not torch.is_grad_enabled()
            self._copies.use(given, moved=False)
            if not self.sampling.paused:
                self.models.note_place(module, frame, once=not self.steps)
        self.running.append(self.names.of_module(module))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.running and runs_for(self._thread):
            self.running.pop()
            if not self.running:
                self.models.note_result(module, output, user_frame(sys._getframe(1)))

    def _enter_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if runs_for(self._thread):
            frame = user_frame(sys._getframe(1))
            self.names.optimizers.know(optimizer, self.names.models, frame)
            self._stepping = True
            self.sampling.enter_optimizer()

    def _leave_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not runs_for(self._thread):
            return
        self._stepping = False
        self.steps += 1
        if self.steps <= FIRST:
            self.cuts.watch(optimizer)
        if not self.sampling.paused:
            self._tally.finish_step(self.steps)
        self.sampling.finish_step(self.steps)
        if self.sampling.paused:
            self._copies.forget()  # their use would not be seen
            self.pending.waited()
        if self._turn is not None:
            self._turn(self)

    def line_of_node(self, number: int) -> str:
        """The line of the operation behind a node of autograd, or ""."""
        return self._places.lines.get(number, ("", ""))[1]

    @property
    def is_idle(self) -> bool:
        """Whether gradients were computed, and changed nothing that was watched."""
        return self.backwards > 0 and not (self.steps or self.updates.found)

    @property
    def _repeats(self) -> int:
        """How often the program's loop ran: the optimizer steps, else the calls of models."""
        return self.steps if self.names.optimizers.known else self.models.count

    def _phase(self) -> str:
        if torch._C._current_autograd_node() is not None:
            return "backward"
        if self.running:
            return "forward"
        return "optimizer" if self._stepping else ""

    def _where(self) -> tuple[str, str]:
        return self._phase(), self.running[-1] if self.running else ""

    def failed(self, error: BaseException, op: str, values: Any, site: Site | None = None) -> None:
        """Record a failed operation and its operands, unless its exception is recorded already."""
        if comes_from(error, self._raised):
            return
        self._raised = id(error), format_error(error)  # ids are reused
        if site is None:
            site = Site(*self._where(), op, user_line(sys._getframe(2)))
        self.error = site
        taken, frame = tensors_of(values), user_frame(frame_outside(__file__))
        self.operands = self._operands(taken, codes_of(frame, taken))
        self.called_at = own_lines(frame).partition(CALLED)[2]
        away = [each for each in taken if indexed(each.device) != self.home] or taken
        self.given_at = next(filter(None, (given_at(frame, each) for each in away)), "")
        self.models.note_loop(frame)
        self.callers.note_library(frame_outside(__file__))
        self.said = self.call_it(format_error(error))

    # -- recording ---------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shields this from `torch.compile`, which takes two more calls each time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = KINDS.get(id(func)) or kind_of_operation(func)
        if kind.asks:
            return func(*args, **kwargs)
        taken = operands_of(args, kwargs)
        home = self.home
        # Most operations take tensors on the target device, and make tensors there.
        plain = kind.is_plain and bool(taken) and are_all_on(home, taken)
        seen = [] if plain else [TensorFacts.of(each) for each in taken]
        place = self._place(func, kind.text)
        if self.cuts.is_watching:
            self.cuts.look(kind.text, taken, place.site)
        if not (self.steps or self.updates.found):
            trained = self.backwards > 0 and not self._is_backward
            self.updates.look(kind.name, taken, trained=trained)
        try:
            out = func(*args, **kwargs)
        except BaseException as error:
            self.failed(error, kind.text, taken, place.site)
            raise
        made = [out] if isinstance(out, torch.Tensor) else tensors_of(out)
        if self.backwards and not (self.steps or self.updates.found):
            within = self._is_backward
            self.updates.compute(kind.name, taken, made, self.backwards, within=within)
        place.count += 1
        if plain and are_all_on(home, made):
            if self._copies.watched:
                self._copies.use(taken, moved=False)
            if self.stale.is_watching:
                self.stale.use(taken, self._repeats, place.site.source)
            self._tally.use(place, self._called_home, bytes_of(made))
        else:
            kwargs = {"non_blocking": True} if kind.name == "copy_" and args[2:] else kwargs
            self._record(
                place, kind.name, taken, seen or list(map(TensorFacts.of, taken)), made, kwargs
            )
        return out

    def _place(self, func: Any, text: str) -> SiteCount:
        """Where an operation runs: its module, line and phase."""
        frame = sys._getframe(1).f_back
        node = torch._C._current_autograd_node()
        if node is not None:
            self.backwards += not self._is_backward
            self._is_backward = True
            return self._places.of_node(node, text, frame)
        self._is_backward = False
        return self._places.of(func, text, *self._where(), frame)

    def _record(
        self,
        place: SiteCount,
        name: str,
        taken: list[torch.Tensor],
        seen: list[TensorFacts],
        out: list[torch.Tensor],
        kwargs: Any,
    ) -> None:
        site, made = place.site, [TensorFacts.of(each) for each in out]
        self._count(place, seen, made)
        if name in NAMES:
            if name.startswith("lift"):  # the last operation of torch.tensor
                self._created(site, out, made)
            return
        is_copy = name in COPIES and bool(taken) and bool(made)
        if name.endswith("_") and taken:
            self.stale.changed(taken[0], self._repeats, site.source)
        self._copies.use(taken, moved=is_copy)
        if name in SYNCS and must_wait((seen or made)[0].device, self.home, site.phase):
            self._note("sync", site, self._call((seen or made)[0].device), 0, taken[:1])
            self.pending.waited()
        if self.pending.is_pending and len({each.device for each in (*seen, *made)}) == 1:
            changed = taken[0] if name.endswith("_") and taken else kwargs.get("out")
            self.pending.use(taken, out, changed, site.source)
        if is_copy:
            self._copied(site, taken, out[0], is_blocking=not kwargs.get("non_blocking"))
            return
        away = [n for n, each in enumerate(made) if each.is_big and each.device != self.home]
        others = [n for n, each in enumerate(seen) if each.is_big and each.device != self.home]
        like = name.startswith("new_") or name.endswith("_like")
        if not taken or (like and away and not others):
            self._created(site, out, made)
            return
        if away and others:
            self.names.derived([out[n] for n in away], taken[others[0]], site)
            if name == "clone" and self.history.holds_parameter(taken[0]):
                self.names.cloned(out[0], own_lines(frame_outside(__file__)))
        home = any(each.is_big and each.device == self.home for each in (*seen, *made))
        if away or (others and not home and name not in SYNCS):
            where = made[away[0]].device if away else seen[others[0]].device
            self._note("stray", site, self._call(where), 0, [taken[n] for n in others])
        elif others and home:
            devices = sorted({self._call(each.device) for each in seen if each.is_big})
            self._note("mixed", site, " and ".join(devices), 0, [taken[n] for n in others])

    def _count(self, place: SiteCount, seen: list[TensorFacts], made: list[TensorFacts]) -> None:
        both = [*made, *seen]  # the device of results counts first, of numbers last
        where = next(
            (each.device for each in both if each.is_big), both[0].device if both else None
        )
        if where and (place.site.phase or where == self.home):  # else it prepares data
            self._tally.use(place, self._call(where), sum(each.nbytes for each in made))

    def _copied(
        self, site: Site, taken: list[torch.Tensor], made: torch.Tensor, *, is_blocking: bool
    ) -> None:
        source = taken[-1] if site.op.startswith("aten.copy") and len(taken) > 1 else taken[0]
        here, there = indexed(source.device), indexed(made.device)
        if here == there:
            known = site.op.startswith("aten.copy_") and self.names.origin(made)
            if here != self.home and key_of(made) != key_of(source) and not known:
                self.names.derived([made], source, site)
            return
        nbytes = bytes_of([made])
        devices = f"{self._call(here)}→{self._call(there)}"
        self._note("transfer", site, devices, nbytes, [source])
        if source.requires_grad and source.is_leaf and torch.is_grad_enabled():
            self.history.note_copied(source, self.steps, frame_outside(__file__))
        if is_blocking and there.type == "cpu":
            self._note("sync", site, self._call(here), 0, [source])
        if self.home in (here, there):
            frame = user_frame(frame_outside(__file__))
            self.host.copied(source, made, site, self.steps, frame, is_blocking=is_blocking)
        if here == self.home and is_big(made):
            self.names.made(made, site._replace(op=COPY))
        if there == self.home and is_big(made):
            line = site.source or own_lines(frame_outside(__file__), most=1)
            self.stale.copied(source, made, line)
            line, code = discarded(frame_outside(__file__))
            site = site._replace(source=line or site.source)
            copied = self._operands([source], [code])[0], key_of(source)
            self._copies.watch(made, source, UnusedCopy(site, devices, nbytes, *copied, bool(line)))

    def _created(self, site: Site, out: list[torch.Tensor], made: list[TensorFacts]) -> None:
        for tensor, each in zip(out, made, strict=True):
            if each.device != self.home:
                self.names.made(tensor, made_site(site, frame_outside(__file__)))
            if each.is_big and each.device != self.home:
                self._note("created", site, self._call(each.device), each.nbytes, [])

    def _note(
        self, kind: str, site: Site, devices: str, nbytes: int, of: Sequence[torch.Tensor]
    ) -> None:
        def new() -> EventCount:
            asking = kind in ("sync", "transfer") and site.phase != "backward"
            asked = asking and torch.is_grad_enabled() and is_asked(sys._getframe(2))
            return EventCount(operands=self._operands(of), asked=asked)

        turn = self.steps, 0 if self.steps else self.models.count
        self._tally.note((kind, site, devices), turn, nbytes, new)

    def _operands(
        self, tensors: Sequence[torch.Tensor], codes: Sequence[str] = ()
    ) -> tuple[Operand, ...]:
        frame = user_frame(frame_outside(__file__))
        codes = codes or [""] * len(tensors)
        return tuple(
            self.names.operand(each, self._call(indexed(each.device)), frame, code)
            for each, code in zip(tensors, codes, strict=True)
        )

    def _call(self, device: torch.device) -> str:
        return self.call_it(str(device))
