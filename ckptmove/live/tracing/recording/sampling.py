"""Watch only some steps of a long run; the others run at nearly their usual speed.

In steps that are not watched, the recorder's mode is off the dispatcher's stack. Hooks and
`TorchCalls` stay: these steps are counted, and an operation that fails in one is reported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ....errors import UsageError
from ....reports.events import Site, Trace
from ..program.source_lines import frame_outside, line_of, made_site, user_frame
from .history import History
from .host_copies import HOST_READS, PendingCopies
from .operations import COPY, indexed, is_big, operands_of
from .tensor_names import TensorNames
from .updates import Updates

#: How many steps are watched before the first one is left out.
FIRST = 4
#: Of later steps, every seventh is watched: if two to six optimizers take turns, each is seen.
EVERY = 7
#: Methods that return the tensor itself if it is on the device already.
_MOVES = frozenset((torch.Tensor.to, torch.Tensor.cpu))
_COPIERS = frozenset(("to", "cpu", "cuda", "xpu", "npu", "copy_", "type", "type_as"))


def checked_every(every: object) -> int:
    """Check the number `every`: one in so many steps is watched.

    Raises:
        UsageError: `every` is not an integer above 0.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(
            f"every={every!r} is no number of steps", hint="every=1 watches each step of the block"
        )
    return every


def left_out(trace: Trace, every: int) -> Iterator[str]:
    """The note for the user if some steps were not watched."""
    if trace.watched < trace.steps:
        how = f"the first {FIRST} and each {every}th"
        yield (
            f"watched {trace.watched:,} of {trace.steps:,} steps, {how}: of the others only an "
            f"exception is told; ckptmove.trace(…, every=1) watches all"
        )


class Removable:
    """A mode that can be taken off its stack of modes, and put back in the same place.

    Attributes:
        is_off: whether the mode was entered, but is not on the stack now.
    """

    def __init__(self, mode: TorchDispatchMode | TorchFunctionMode) -> None:
        """The mode must be entered and left in this thread."""
        dispatches = isinstance(mode, TorchDispatchMode)
        self._mode: Any = mode
        self._kind: Any = TorchDispatchMode if dispatches else TorchFunctionMode
        own = torch._C
        height, at = own._len_torch_dispatch_stack, own._get_dispatch_stack_at
        if not dispatches:
            height, at = own._len_torch_function_stack, own._get_function_stack_at
        self._height, self._at = height, at
        self._under = 0  # the number of modes below it
        self.is_off = False

    def take_off(self) -> None:
        """Take the mode off the stack, unless another mode is above it."""
        height = self._height()
        if not self.is_off and height and self._at(height - 1) is self._mode:
            self._kind.__exit__(self._mode, None, None, None)
            self._under, self.is_off = height - 1, True

    def put_back(self) -> None:
        """Put the mode back, unless another mode was entered meanwhile: its exit pops the top."""
        if self.is_off and self._height() == self._under:
            self._kind.__enter__(self._mode)
            self.is_off = False


class Sampling:
    """Decides which steps of a run are watched.

    Attributes:
        watched: how many finished steps were watched.
    """

    def __init__(self, every: int, recorder: TorchDispatchMode) -> None:
        """After the first steps, one step in `every` is watched."""
        self._every = every
        self._recorder = Removable(recorder)
        self._calls: Removable | None = None
        self._thread = threading.get_ident()
        self.watched = 0

    def begin(self, calls: TorchCalls) -> None:
        """Start a run in this thread, which enters both modes."""
        self._thread = threading.get_ident()
        self._recorder.is_off = False
        self._calls = calls.place

    @property
    def paused(self) -> bool:
        """Whether operations that run now are not watched."""
        return self._recorder.is_off

    def is_due(self, step: int) -> bool:
        """Whether a step is watched; the first step is 1."""
        return step <= FIRST or step % self._every == 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which nothing is watched: `torch.jit.trace` can't record beside a mode."""
        paused = self.paused
        self._recorder.take_off()
        try:
            yield
        finally:
            if not paused:
                self._recorder.put_back()

    def enter_optimizer(self) -> None:
        """In a step that is not watched, ignore also the calls that the optimizer makes."""
        if self.paused and self._calls is not None and self._is_own():
            self._calls.take_off()

    def finish_step(self, steps: int) -> None:
        """Pause or resume after the optimizer has taken step number `steps`."""
        self.watched += not self.paused
        if not self._is_own():
            return
        if self._calls is not None:
            self._calls.put_back()
        if self.is_due(steps + 1):
            self._recorder.put_back()
        else:
            self._recorder.take_off()

    def _is_own(self) -> bool:
        """Whether this thread has the stacks of the run, not copies for a backward pass."""
        own = threading.get_ident() == self._thread
        return own and torch._C._current_autograd_node() is None


class TorchCalls(TorchFunctionMode):
    """Watches calls of torch's functions, also in steps that are not watched.

    It reports calls that fail before they reach an operation (an RNN first checks its operands). In
    steps that are not watched, it reports all calls that fail; to find their cause, it remembers
    there the tensors that are made, copied or computed on other devices than the target.
    """

    def __init__(
        self,
        tell: Callable[[BaseException, str, Any], None],
        sampling: Sampling,
        pending: PendingCopies,
        names: TensorNames,
        history: History,
        updates: Updates,
        home: torch.device,
        where: Callable[[], tuple[str, str]],
    ) -> None:
        """`tell` receives an exception, the function that raised it, and the arguments.

        `where` returns the phase and the module that runs.
        """
        super().__init__()
        self.place = Removable(self)
        self._tell = tell
        self._sampling = sampling
        self._pending = pending
        self._names = names
        self._history = history
        self._updates = updates
        self._home = home
        self._where = where

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self.place.is_off:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            self._tell(error, f"torch.{getattr(func, '__name__', func)}", (args, kwargs))
            raise
        if out is None and args:
            self._see_attribute(func, args[0], sys._getframe(1))
        if self._pending.is_pending and func in HOST_READS:
            line = line_of(user_frame(sys._getframe(1)))
            self._pending.read(args[0], str(getattr(func, "__name__", func)), line)
        if args and out is args[0] and func in _MOVES and out.device != self._home:
            to = args[1] if len(args) > 1 else (kwargs or {}).get("device")
            self._history.note_left(out, to, sys._getframe(1))
        if self._sampling.paused and isinstance(out, torch.Tensor) and out.device != self._home:
            self._remember(func, args, kwargs or {}, out)
        return out

    def _see_attribute(self, func: Any, tensor: torch.Tensor, frame: FrameType) -> None:
        """See a tensor's attribute that is set, or is None."""
        attribute, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        if attribute is torch.Tensor.grad and name == "__get__":
            self._updates.read_gradient(tensor, frame)
        elif attribute is torch._C.TensorBase.data and name == "__set__":
            self._updates.set_values(tensor, frame)
            self._history.note_values(tensor, frame)

    def _remember(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: torch.Tensor
    ) -> None:
        """Remember a tensor on another device, and the line that made it."""
        name = str(getattr(func, "__name__", func))
        if name.startswith("__") or not is_big(out):  # such as `__get__` of `x.data`
            return
        taken = operands_of(args, kwargs)
        source = line_of(user_frame(sys._getframe(2)))
        op = COPY if name in _COPIERS else f"aten.{name}.default"
        site = Site(*self._where(), op, source)
        others = [each for each in taken if is_big(each) and indexed(each.device) != self._home]
        if others:
            self._names.derived([out], others[0], site)
        else:
            self._names.made(out, made_site(site, frame_outside(__file__)))
