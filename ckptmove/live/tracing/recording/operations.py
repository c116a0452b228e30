"""Classify operations of torch: a copy, a wait of the host, an alias, or one that failed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

#: Operations that the host waits for, because it needs their shape or value.
SYNCS = frozenset(
    (
        *("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
        *("_unique", "_unique2", "unique_consecutive", "unique_dim"),
    )
)
COPIES = frozenset(("_copy_from", "_to_copy", "copy", "copy_"))
#: Operations that compute nothing: other names for a tensor.
NAMES = frozenset(("alias", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy"))
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_MOST_KINDS = 1 << 14
#: Shown for what copies a tensor to another device.
COPY = "a copy"
#: Shown for what reads a checkpoint.
LOAD = "torch.load"
#: Shown for an operation without a name in Python.
UNNAMED = "an operation"
#: Python's names of operations that make a tensor, where they differ.
_FACTORIES = {
    "_sparse_coo_tensor_with_dims_and_tensors": "torch.sparse_coo_tensor",
    "_sparse_compressed_tensor_with_dims": "torch.sparse_compressed_tensor",
    "_efficientzerotensor": "torch.zeros",
    "lift": "torch.tensor",
    "lift_fresh": "torch.tensor",
    "lift_fresh_copy": "torch.tensor",
}


class Facts(NamedTuple):
    """What is remembered of a tensor; big ones are not single numbers, which may be anywhere."""

    device: torch.device
    is_big: bool
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Facts:
        """The facts about a tensor."""
        return cls(indexed(tensor.device), is_big(tensor), bytes_of([tensor]))


class Kind(NamedTuple):
    """What is known of an operation by its name."""

    text: str  #: such as `aten.add.Tensor`
    asks: bool  #: it only asks a tensor about itself
    is_plain: bool  #: it computes, and neither copies, waits, makes nor renames
    func: Any  #: itself, so that its id stays its own


#: The kinds of operations by their id, since to hash one takes a call.
KINDS: dict[int, Kind] = {}


def kind_of_operation(func: Any) -> Kind:
    """The kind of an operation, kept for the next time."""
    name = func._schema.name.rpartition("::")[2] if hasattr(func, "_schema") else str(func)
    makes = name.startswith("new_") or name.endswith("_like")
    special = name in COPIES or name in SYNCS or name in NAMES
    found = Kind(str(func), func.namespace == "prim", not (makes or special), func)
    if len(KINDS) < _MOST_KINDS:
        KINDS[id(func)] = found
    return found


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of some tensors; of ragged ones that are nested nothing is known."""
    nbytes = sum([each.numel() * each.element_size() for each in tensors])
    return nbytes if type(nbytes) is int else 0


def operands_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation."""
    found: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [item for item in each if isinstance(item, torch.Tensor)]
    return found


def are_all_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are on a device."""
    for each in tensors:  # noqa: SIM110 - `all` takes twice the time, and this is asked often
        if each.device != device:
            return False
    return True


def factory(op: str) -> str:
    """The function behind a factory op, `aten.arange.start` → `torch.arange`; "" if unknown."""
    space, _, name = op.partition(".")
    name = name.partition(".")[0]
    if space != "aten":
        return ""
    if name in _FACTORIES:
        return _FACTORIES[name]
    public = not name.startswith("_")
    if public and name.startswith("fft_") and hasattr(torch.fft, name.removeprefix("fft_")):
        return f"torch.fft.{name.removeprefix('fft_')}"
    if public and hasattr(torch, name):
        return f"torch.{name}"
    return f"x.{name}" if public and hasattr(torch.Tensor, name) else ""


def is_big(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than a mere number, which may be on any device."""
    return tensor.dim() > 0


def is_table(module: torch.nn.Module) -> bool:
    """Whether a module has parameters in embeddings alone, which may be too large for a device."""
    return all(type(each) in _TABLES for each in module.modules() if each._parameters)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, which hold nothing but lists and dicts of them."""
    found = []
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            todo.extend(reversed(each))
        elif isinstance(each, dict):
            todo.extend(reversed(each.values()))
    return found


def indexed(device: torch.device) -> torch.device:
    """`cuda` is `cuda:0` here: one run has one device of a kind."""
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return torch.device(device.type, 0)
    return device


def must_wait(device: torch.device, home: torch.device, phase: str) -> bool:
    """Whether the host must wait for a value, or would if the model were on its device."""
    return device.type != "cpu" or (home.type == "cpu" and phase != "optimizer")


def runs_for(thread: int) -> bool:
    """Whether the current thread is a given one, or one of autograd's for a backward pass.

    Hooks run in all threads, modes in one.
    """
    mine = threading.get_ident()
    if mine == thread:
        return True
    if torch._C._current_autograd_node() is None:
        return False
    pythons = threading.enumerate()  # one that Python has not started is autograd's own
    dummy = threading._DummyThread
    return not any(each.ident == mine and not isinstance(each, dummy) for each in pythons)
