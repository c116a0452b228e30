"""Classify operations of torch: copies, waits of the host, aliases, and factories."""

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
#: Operations that compute nothing, and only give a tensor another name.
NAMES = frozenset(("alias", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy"))
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_MOST_KINDS = 1 << 14
#: Shown for an operation that copies a tensor to another device.
COPY = "a copy"
#: Shown for the function that reads a checkpoint.
LOAD = "torch.load"
#: Shown for an operation without a name in Python.
UNNAMED = "an operation"
#: Python names of operations that make a tensor, if they differ from the operation's name.
_FACTORIES = {
    "_sparse_coo_tensor_with_dims_and_tensors": "torch.sparse_coo_tensor",
    "_sparse_compressed_tensor_with_dims": "torch.sparse_compressed_tensor",
    "_efficientzerotensor": "torch.zeros",
    "lift": "torch.tensor",
    "lift_fresh": "torch.tensor",
    "lift_fresh_copy": "torch.tensor",
}


class TensorFacts(NamedTuple):
    """Facts about a tensor; a single number is not big, and may be on any device."""

    device: torch.device
    is_big: bool
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """The facts about a tensor."""
        return cls(indexed(tensor.device), is_big(tensor), bytes_of([tensor]))


class Operation(NamedTuple):
    """Properties of an operation, known from its name."""

    text: str  #: such as `aten.add.Tensor`
    name: str  #: such as `add`
    asks: bool  #: whether it only reads properties of a tensor
    is_plain: bool  #: whether it only computes: no copy, wait, factory or alias
    func: Any  #: the operation itself, so that its id stays unique


#: The kinds of operations by their id, because hashing an operation takes a Python call.
KINDS: dict[int, Operation] = {}


def kind_of_operation(func: Any) -> Operation:
    """Find the kind of an operation, and keep it for the next time."""
    name = func._schema.name.rpartition("::")[2] if hasattr(func, "_schema") else str(func)
    makes = name.startswith("new_") or name.endswith("_like")
    special = name in COPIES or name in SYNCS or name in NAMES
    found = Operation(str(func), name, func.namespace == "prim", not (makes or special), func)
    if len(KINDS) < _MOST_KINDS:
        KINDS[id(func)] = found
    return found


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of some tensors; 0 if one is nested and ragged, so that its size is unknown."""
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
    """Whether a tensor is not a single number (0-d), which may be on any device."""
    return tensor.dim() > 0


def is_table(module: torch.nn.Module) -> bool:
    """Whether only embeddings in a module have parameters; they may be too large for a device."""
    return all(type(each) in _TABLES for each in module.modules() if each._parameters)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, also in lists, tuples and dicts at any depth."""
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
    """A device with its index: `cuda` means `cuda:0`, as a run uses one device of a kind."""
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return torch.device(device.type, 0)
    return device


def must_wait(device: torch.device, home: torch.device, phase: str) -> bool:
    """Whether the host waits for a value, or would wait if a model on the CPU were on a GPU."""
    return device.type != "cpu" or (home.type == "cpu" and phase != "optimizer")


def runs_for(thread: int) -> bool:
    """Whether the current thread is the given one, or autograd's thread in a backward pass.

    Hooks run in all threads, but a mode only in one.
    """
    mine = threading.get_ident()
    if mine == thread:
        return True
    if torch._C._current_autograd_node() is None:
        return False
    pythons = threading.enumerate()  # Python did not start autograd's threads
    dummy = threading._DummyThread
    return not any(each.ident == mine and not isinstance(each, dummy) for each in pythons)
