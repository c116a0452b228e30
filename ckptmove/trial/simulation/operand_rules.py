"""CUDA's rules for operands on several devices, and its errors for forbidden operands.

A table of torch, which every wheel has, tells the rule of each operation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .device_memory import NAME, THERE, Op, device_of, is_there, shown, tensors_in

#: Operations that take operands of any device.
_ANY = frozenset(
    (
        *("copy_", "set_", "_copy_from", "is_set_to", "_copy_from_and_resize", "record_stream"),
        *("_to_copy", "is_same_size"),
    )
)
_INDEXED = frozenset(
    (
        *("index", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
        "index_put",
    )
)
#: Operations for which CUDA, unlike the CPU, has no kernels of integer dtypes.
_MATRICES = frozenset(("addmm", "addmv", "addbmm", "baddbmm", "bmm", "mm", "mv", "dot"))


@functools.cache
def _unchecked() -> frozenset[str]:
    """The operations whose iterator checks devices; it allows a CPU operand that is one number."""
    import torchgen  # type: ignore[import-untyped]

    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    blocks = re.split(r"^- func: ", table.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    unchecked = re.compile(r"^  device_check: NoCheck", re.MULTILINE)
    return frozenset(each.partition("(")[0] for each in blocks if unchecked.search(each))


class OperandRules:
    """The rules of an operation.

    Attributes:
        name: the name of the operation, without its overload.
        names: the names of its arguments.
        written: the names of the arguments that it changes.
    """

    def __init__(self, op: Op) -> None:
        schema = op._schema
        self.name = name = schema.name.rpartition("::")[2]
        self.names = [each.name for each in schema.arguments]
        self.written = {
            each.name
            for each in schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        }
        self._full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        self._random = "generator" in self.names
        self._lists = name.startswith(("_foreach_", "_amp_foreach"))
        self._numbers = self._lists or self._full in _unchecked()

    def check(self, operands: Mapping[str, Any], generators: Mapping[int, object]) -> None:
        """Raise CUDA's error if operands are on devices that it does not allow.

        Args:
            operands: the operands, by argument name.
            generators: the generators of the device, by key.

        Raises:
            RuntimeError: the devices or dtypes are not allowed.
        """
        generator = operands.get("generator") if self._random else None
        if generator is not None and generator._cdata not in generators:
            kind = shown.device.type
            raise RuntimeError(
                f"Expected a '{kind}' device type for generator but found '{generator.device.type}'"
            )
        if self.name in _ANY:
            return
        if self.name in _INDEXED:
            _check_index(operands)
            return
        taken = [(name, each) for name, value in operands.items() for each in tensors_in(value)]
        if not any(is_there(each) for _, each in taken):
            return
        numbers = 0
        for name, each in taken:
            if is_there(each):
                if self.name in _MATRICES:
                    _check_matrix(self.name, each)
                continue
            if self._numbers and not each.dim() and name not in self.written:
                numbers += 1
                if numbers == 1 or self._lists or self.name == "where":
                    continue  # one number may be on the CPU; several only for lists and `where`
            if not self._numbers:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but got {name} is on "
                    f"{device_of(each)}, different from other tensors on {shown.device} (when "
                    f"checking argument in method wrapper_CUDA_{self._full.replace('.', '_')})"
                )
            first = next(device_of(e) for _, e in taken if e.dim() or is_there(e))
            raise _two(first, THERE if first.type != NAME else device_of(each))


def _two(one: torch.device, other: torch.device) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{shown.name(one)} and {shown.name(other)}!"
    )


def _check_index(operands: Mapping[str, Any]) -> None:
    """Check indexing: indices may be on the CPU; values may be numbers on the CPU."""
    indexed = operands["self"]
    for each in tensors_in(operands.get("indices")):
        if not is_there(indexed) and is_there(each):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
    values = operands.get("values")
    if values is not None and values.dim() and device_of(values) != device_of(indexed):
        raise _two(device_of(indexed), device_of(values))


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        kind = str(torch.empty(0, dtype=tensor.dtype).type()).rpartition(".")[2][: -len("Tensor")]
        raise RuntimeError(f"\"{name}_cuda\" not implemented for '{kind}'")
