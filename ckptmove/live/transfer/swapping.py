"""Swap the contents of two tensors: when torch allows it, and how to undo it."""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def would_be_set(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor.data = new` will do it, as a stand-in for the copy tells."""
    if is_plain(tensor):
        new = torch.empty(0, dtype=tensor.dtype, device=device)
    elif tensor.layout is torch.sparse_coo:
        shape = [0] * max(tensor.dim(), 1)
        new = torch.zeros(shape, dtype=tensor.dtype, device=device, layout=torch.sparse_coo)
    else:
        return False
    return is_set(tensor, new)


def check_free(tensor: Any, released: int = 0) -> None:
    """Raise what `swap_tensors` would, which spoils graphs that still lead to what it has swapped:
    nothing is swapped before it is known that the rest can be. `released` uses of it will be gone
    by then.
    """
    if weakref.getweakrefs(tensor):
        raise RuntimeError("there is a weak reference")
    count = tensor._use_count() - released
    if count == 2 and tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
        node = torch.autograd.graph.get_gradient_edge(tensor).node  # which holds the tensor itself
        count = tensor._use_count() - released - 1
        del node
    if count > 1:
        raise RuntimeError(f"it is used {count} times")


class Swap:
    """Two tensors swap what is in them; what Python sees of the first stays with it."""

    def __init__(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        self._tensor = tensor
        self._inside = tensor._cdata
        self._was_view = is_view(tensor) and is_plain(tensor)
        self._old = None if not self._was_view else _again(tensor)
        self._other = _alike(tensor, new)

    def make(self) -> None:
        """Swap."""
        _swap(self._tensor, self._other)
        if self._was_view:
            del self._other  # it holds the base

    def undo(self) -> None:
        """Swap back, if it was."""
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
    """A tensor of the same class, with the same attributes."""
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


def _again(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor that sees the same."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def is_set(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `tensor.data = new` does it; of other layouts it would forget the inside."""
    if is_traceable_wrapper_subclass(tensor):
        return False
    shallow = is_plain(tensor) or tensor.layout is torch.sparse_coo
    if not shallow or tensor.is_inference():
        return False
    return bool(torch._has_compatible_shallow_copy_type(tensor, new))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is bytes of a storage, and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return type(tensor).__torch_dispatch__ == torch.Tensor.__torch_dispatch__


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows it as a view of another tensor."""
    return not tensor.is_inference() and tensor._is_view()
