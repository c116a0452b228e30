"""Give tensors new storages, all of them or none; each tensor stays the same Python object.

First every storage is copied. Then every tensor becomes a view of a copy, like in `Module.to`: by
`tensor.data = new` if torch allows it, otherwise by `torch.utils.swap_tensors`.
"""

from __future__ import annotations

import copyreg
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...display.phrases import class_name, first_line
from ...errors import RefusedError
from .copy import view_like

#: The most uses of a base by a view: one for each direction of differentiation.
_USES_BY_VIEW = 2
_UNDONE = "nothing was moved; the memory of the copies is free again"


class TensorMove(NamedTuple):
    """A tensor that is to be moved to a device."""

    name: str  #: its name, for messages
    tensor: torch.Tensor
    device: torch.device  #: the target
    #: Its holder outside of Python, such as a TorchScript module, with a fix; or None.
    holder: tuple[str, str] | None = None


class _Ready(NamedTuple):
    going: TensorMove
    new: torch.Tensor
    is_set: bool  # by `.data`, not by a swap
    is_view: bool
    is_hidden: bool = False  # the base of a view, which has no name

    @property
    def is_swapped(self) -> bool:
        return not self.is_set and not self.is_hidden


class Exchange:
    """Copies storages, then gives tensors their copies; or leaves everything unchanged."""

    def __init__(self, *, non_blocking: bool = False, suspects: str = "") -> None:
        """`non_blocking` waits for copies only at the end of `prepare`.

        `suspects` names, for messages, tensors that may prevent the exchange of another one.
        """
        self._suspects = suspects
        self._non_blocking = non_blocking
        self._sources: list[torch.UntypedStorage] = []  # keeps their ids unique
        self._copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        self._ready: list[_Ready] = []
        self._holders: dict[int, torch.Tensor] = {}
        self._met: set[int] = set()  # ids of tensors that are moved
        self._undo: list[Callable[[], None]] = []
        self.nbytes = 0  #: the bytes that were copied so far

    def check(self, goings: Iterable[TensorMove], holders: Iterable[torch.Tensor] = ()) -> None:
        """Raise the RefusedError that `commit` would raise, as far as predictable; copy nothing."""
        found = {id(each.tensor): each for each in reversed(list(goings))}
        held = [each for each in holders if each.is_leaf and each.grad is not None]
        with torch.inference_mode(False), torch.no_grad(), _plainly():
            released: Counter[int] = Counter()  # uses that end before a tensor is exchanged
            for each in {id(each): each for each in held}.values():
                released[id(each.grad)] += 1
            looks: list[Any] = [each.tensor for each in found.values() if is_view(each.tensor)]
            seen = Counter(id(each._base) for each in looks)
            for each in looks:
                base: Any = each._base
                # A chain of conj() and imag may use its base, and the views in between, any number
                # of times: commit() checks again.
                chained = base.is_complex()
                released[id(base)] += base._use_count() if chained else _USES_BY_VIEW
                if chained and seen[id(base)] > 1:
                    released[id(each)] += each._use_count()
            for going in found.values():
                if not would_be_set(going.tensor, going.device):
                    try:
                        check_free(going.tensor, released[id(going.tensor)])
                    except RuntimeError as error:
                        raise _stuck(going, self._suspects) from error

    def prepare(self, goings: Iterable[TensorMove], holders: Iterable[torch.Tensor] = ()) -> None:
        """Copy every storage once, and make views of the copies like the tensors' own views.

        The first target of a tensor counts; `holders` are other tensors with gradients that may be
        moved. Raises RefusedError if there is too little memory, or if torch can't copy a tensor.
        """
        going: TensorMove | None = None
        try:
            with torch.inference_mode(False), torch.no_grad(), _plainly():
                self._holders = {id(each): each for each in holders if each.is_leaf}
                todo = list(goings)[::-1]
                while todo:
                    going = todo.pop()
                    if id(going.tensor) in self._met:
                        continue
                    self._met.add(id(going.tensor))
                    self._ready.append(_ready(going, self._copy(going)))
                    grad = going.tensor.grad if going.tensor.is_leaf else None
                    if grad is not None:
                        self._holders[id(going.tensor)] = going.tensor
                        if grad.device != going.device:
                            todo.append(TensorMove(f"{going.name}.grad", grad, going.device))
                self._ready += [each for each in map(self._base, list(self._ready)) if each]
                self._wait()
        except BaseException as error:
            self._free()
            if not isinstance(error, Exception):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold copies
            raise _refused(error, going, self.nbytes) from error

    def commit(self, then: Callable[[Callable[[Callable[[], None]], None]], None]) -> None:
        """Give every tensor its copy, then call `then`, with a function that registers undo steps.

        Raises RefusedError if torch refuses a tensor; then all tensors are unchanged.
        """
        going: TensorMove | None = None
        ready: list[_Ready] = []
        try:
            with torch.inference_mode(False), torch.no_grad(), _plainly():
                grads = self._set_aside()
                # The C++ object of a view holds the base, so that the base can't be swapped. So
                # views are swapped first, and their old contents are not kept here.
                for is_view in (True, False):
                    ready = [each for each in self._ready if each.is_view is is_view]
                    self._ready = [each for each in self._ready if each.is_view is not is_view]
                    while ready:
                        # A conjugate holds the view from which it was made until it is swapped.
                        held = [each.is_swapped and not _is_free(each) for each in ready]
                        if any(held) and (all(held) or not is_view):
                            going = ready[held.index(True)].going
                            check_free(going.tensor)
                        for n in reversed([n for n, is_held in enumerate(held) if not is_held]):
                            going = ready[n].going
                            self._give(ready.pop(n))
                going = None
                for tensor, grad in grads:
                    self._undo.append(_set_grad(tensor, None))
                    tensor.grad = grad
                then(self._undo.append)
        except BaseException as error:
            with torch.inference_mode(False), torch.no_grad(), _plainly():
                for undo in reversed(self._undo):
                    undo()
            if going is None or not isinstance(error, Exception):
                raise
            traceback.clear_frames(error.__traceback__)
            raise _stuck(going, self._suspects) from error
        finally:
            ready.clear()
            self._free()

    def _free(self) -> None:
        self._ready.clear()
        self._copies.clear()
        self._sources.clear()
        self._holders.clear()
        self._met.clear()
        self._undo.clear()

    # -- copying -----------------------------------------------------------------------------------

    def _copy(self, going: TensorMove) -> torch.Tensor:
        tensor, device = going.tensor, going.device
        if is_plain(tensor):
            return self._seen(tensor, device)
        if tensor.layout is torch.sparse_coo and not is_traceable_wrapper_subclass(tensor):
            return torch.sparse_coo_tensor(
                self._seen(tensor._indices(), device),
                self._seen(tensor._values(), device),
                tensor.size(),
                check_invariants=False,
                is_coalesced=tensor.is_coalesced(),
            )
        if str(tensor.layout).startswith("torch.sparse_"):
            by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
            inner = tensor.col_indices() if by_row else tensor.row_indices()
            return torch.sparse_compressed_tensor(
                self._seen(outer, device),
                self._seen(inner, device),
                self._seen(tensor.values(), device),
                tensor.size(),
                layout=tensor.layout,
                check_invariants=False,
            )
        with torch._C._EnableTorchFunction():  # the subclass knows how to move itself
            inner = tensor.detach()
            made = inner.to(device, copy=True) if inner.device == device else inner.to(device)
        if made.device != device or type(made) is not type(tensor.detach()):
            raise RuntimeError(f"{class_name(tensor)} is not moved to {device} by its .to()")
        return made

    def _seen(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A view of the copied storage that is like the tensor's view of its own storage."""
        storage = self._storage(tensor.untyped_storage(), device)
        with torch.inference_mode(tensor.is_inference()):
            nbytes = storage.nbytes()
            made = view_like(tensor, storage)
            if storage.nbytes() != nbytes:
                raise RuntimeError(f"it reaches beyond the {nbytes:,} bytes of its storage")
            return made

    def _storage(self, source: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        key = source._cdata, device
        if key not in self._copies:
            self._sources.append(source)
            old = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
            new = torch.empty(source.nbytes(), dtype=torch.uint8, device=device)
            pinned = self._non_blocking and device.type != "cpu" and old.is_pinned()
            new.copy_(old, non_blocking=pinned)
            self._copies[key] = new.untyped_storage()
            self.nbytes += source.nbytes()
        return self._copies[key]

    def _base(self, ready: _Ready) -> _Ready | None:
        """The base of a view, which must also be moved if `.data` is exchanged."""
        base = ready.going.tensor._base if ready.is_view else None
        if base is None or not base.is_leaf or id(base) in self._met:
            return None
        self._met.add(id(base))
        going = ready.going._replace(tensor=base)
        return _ready(going, self._seen(base, going.device))._replace(is_hidden=True)

    def _wait(self) -> None:
        devices = {device for _, device in self._copies}
        for device in devices | {source.device for source in self._sources}:
            waiting = getattr(getattr(torch, device.type, None), "synchronize", None)
            if waiting is not None and device.type != "cpu":
                waiting() if device.type == "mps" else waiting(device)

    # -- giving ------------------------------------------------------------------------------------

    def _set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Remove gradients from tensors, because both must be on one device."""
        found = [(each, each.grad) for each in self._holders.values()]
        grads = [
            (t, g) for t, g in found if g is not None and not self._met.isdisjoint((id(t), id(g)))
        ]
        for tensor, grad in grads:
            self._undo.append(_set_grad(tensor, grad))
            tensor.grad = None
        return grads

    def _give(self, ready: _Ready) -> None:
        tensor, new = ready.going.tensor, ready.new
        if ready.is_set:
            self._undo.append(_set_data(tensor, tensor.data))
            tensor.data = new
        elif ready.is_swapped:
            swap = Swap(tensor, new)
            self._undo.append(swap.undo)
            swap.make()


def _ready(going: TensorMove, new: torch.Tensor) -> _Ready:
    return _Ready(going, new, is_set(going.tensor, new), is_view(going.tensor))


def _is_free(ready: _Ready) -> bool:
    try:
        check_free(ready.going.tensor)
    except RuntimeError:
        return False
    return True


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    def undo() -> None:
        tensor.data = data

    return undo


def _set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> Callable[[], None]:
    def undo() -> None:
        tensor.grad = grad

    return undo


def _plainly() -> AbstractContextManager[Any]:
    """A context that uses torch's own methods, not those of tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


def _refused(error: Exception, going: TensorMove | None, nbytes: int) -> RefusedError:
    said = first_line(error)
    if going is None:
        return RefusedError(said, hint=_UNDONE)
    if _is_memory(error):
        return RefusedError(
            f"{going.device} has too little free memory for {going.name!r}, after "
            f"{nbytes:,} bytes: {said}",
            hint=_UNDONE,
        )
    return RefusedError(f"{going.name!r} can't be moved to {going.device}: {said}", hint=_UNDONE)


def _is_memory(error: Exception) -> bool:
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _stuck(going: TensorMove, suspects: str) -> RefusedError:
    if going.holder is not None:
        held, instead = going.holder
        return RefusedError(f"{going.name!r} can't be exchanged: {held}", hint=instead)
    weak = bool(weakref.getweakrefs(going.tensor))
    held = (
        "a weak reference to it exists" if weak else "torch itself holds it, for a graph or a view"
    )
    drop = "the guards of a compiled model: torch._dynamo.reset()" if weak else "a loss, or a view"
    if suspects and not weak:
        drop = f"{suspects}, which is a result of it; else {drop}"
    return RefusedError(
        f"{going.name!r} can't be exchanged: {held}",
        hint=f"nothing was moved; delete what may hold it ({drop}) and try again",
    )


def would_be_set(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor.data = new` will work, checked with a small stand-in for the copy."""
    if is_plain(tensor):
        new = torch.empty(0, dtype=tensor.dtype, device=device)
    elif tensor.layout is torch.sparse_coo:
        shape = [0] * max(tensor.dim(), 1)
        new = torch.zeros(shape, dtype=tensor.dtype, device=device, layout=torch.sparse_coo)
    else:
        return False
    return is_set(tensor, new)


def check_free(tensor: Any, released: int = 0) -> None:
    """Raise the error that `swap_tensors` would raise, before anything is swapped.

    A swap would break graphs that refer to the tensor. `released` is how many uses of the tensor
    will end before the swap.
    """
    if weakref.getweakrefs(tensor):
        raise RuntimeError("there is a weak reference")
    count = tensor._use_count() - released
    if count == 2 and tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
        node = torch.autograd.graph.get_gradient_edge(tensor).node  # the node holds the tensor
        count = tensor._use_count() - released - 1
        del node
    if count > 1:
        raise RuntimeError(f"it is used {count} times")


class Swap:
    """Two tensors swap their contents; the Python attributes of the first stay with it."""

    def __init__(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        self._tensor = tensor
        self._inside = tensor._cdata
        self._was_view = is_view(tensor) and is_plain(tensor)
        self._old = None if not self._was_view else view_like(tensor, tensor.untyped_storage())
        self._other = _alike(tensor, new)

    def make(self) -> None:
        """Swap."""
        _swap(self._tensor, self._other)
        if self._was_view:
            del self._other  # the other tensor holds the base

    def undo(self) -> None:
        """Swap back, if the tensors were swapped."""
        if self._tensor._cdata != self._inside:
            old = self._other if self._old is None else _alike(self._tensor, self._old)
            _swap(self._tensor, old)


def _swap(tensor: Any, other: Any) -> None:
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    grad_dtype = getattr(tensor, "grad_dtype", tensor.dtype)
    torch.utils.swap_tensors(tensor, other)
    if grad_dtype != tensor.dtype:
        tensor.grad_dtype = grad_dtype
    if hooks is not None:
        other._backward_hooks = None
        tensor._backward_hooks = hooks
    if after is not None:
        other._post_accumulate_grad_hooks = None
        tensor._post_accumulate_grad_hooks = after


def _alike(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A tensor of the same class and with the same attributes."""
    with torch.inference_mode(tensor.is_inference()):
        if type(new) is not type(tensor):
            new = torch.Tensor._make_subclass(type(tensor), new, tensor.requires_grad)
        elif tensor.requires_grad:
            new.requires_grad_()
    for name, value in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
        vars(new).setdefault(name, value)
    for name in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]
        if hasattr(tensor, name) and not hasattr(new, name):
            setattr(new, name, getattr(tensor, name))
    return new


def is_set(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `tensor.data = new` works; with other layouts, it would lose the inner tensors."""
    if is_traceable_wrapper_subclass(tensor):
        return False
    shallow = is_plain(tensor) or tensor.layout is torch.sparse_coo
    if not shallow or tensor.is_inference():
        return False
    return bool(torch._has_compatible_shallow_copy_type(tensor, new))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is only bytes of a storage."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return type(tensor).__torch_dispatch__ == torch.Tensor.__torch_dispatch__


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return not tensor.is_inference() and tensor._is_view()
