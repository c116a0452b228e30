"""Checks of real kernels and casts of autocast, both of which fake tensors lack.

The casts are needed because autocast is enabled for the simulated device, not for its stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...live.tracing.recording.operations import tensors_of
from .torch_answers import replaced_attribute

#: Operations whose operands must have the same device and dtype.
_STRICT = frozenset(("addmm", "addmv", "baddbmm", "bmm", "convolution", "mm", "mv"))
#: Operations that autocast runs in its lower dtype, by the names of their kernels.
_LOWER = _STRICT | {
    "addbmm",
    "addr",
    "prelu",
    "_prelu_kernel",
    "_scaled_dot_product_attention_math",
}
#: Operations that autocast runs in float32.
_HIGHER = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow"),
        *("reciprocal", "rsqrt", "sinh", "tan", "softplus", "_softmax", "_log_softmax"),
        *("cumprod", "cumsum", "prod", "sum", "norm", "linalg_vector_norm", "dist", "renorm"),
        *("native_layer_norm", "native_group_norm", "_fused_rms_norm"),
        *("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss"),
    )
)


class Kernels(TorchDispatchMode):
    """Applies the casts of autocast and the checks of real kernels to fake tensors."""

    def __init__(self, named: str, kind: str) -> None:
        """Args:
        named: the type of the device that is simulated.
        kind: the type of its stand-in.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._named, self._kind = named, kind
        self._casting = self._cast_once = False
        self._set = torch.set_autocast_enabled
        self._replaced = ExitStack()

    def __enter__(self) -> Kernels:
        self._replaced.enter_context(
            replaced_attribute(torch, "set_autocast_enabled", self._enable)
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def _enable(self, *args: Any) -> None:
        """`torch.set_autocast_enabled`; the setting is kept, since operations can't read it."""
        named = args[0] if len(args) > 1 else "cuda"
        if named == self._named:
            self._casting = bool(args[-1])
            self._cast_once |= self._casting
        self._set(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if self._casting and "out" not in kwargs and name in _LOWER | _HIGHER:
            lower = torch.get_autocast_dtype(self._named)
            args, kwargs = self._cast((args, kwargs), lower if name in _LOWER else torch.float32)
        if name in _STRICT:
            # A backward pass casts gradients itself.
            backward = torch._C._current_autograd_node() is not None
            check_operands(tensors_of((args, kwargs)), dtypes=not (self._cast_once and backward))
        return func(*args, **kwargs)

    def _cast(self, operands: Any, dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            if not isinstance(value, FakeTensor) or value.fake_device.type != self._kind:
                return value
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            return torch.ops.aten._to_copy.default(value, dtype=dtype)

        return pytree.tree_map(cast, operands)


def check_operands(taken: Sequence[torch.Tensor], *, dtypes: bool = True) -> None:
    """Raise the error of a kernel that needs operands of one device and dtype.

    Fake tensors don't raise it: a convolution uses the device of its input, and products of
    matrices do not compare dtypes.

    Args:
        taken: the operands.
        dtypes: whether their dtypes are compared.

    Raises:
        RuntimeError: they have several devices or dtypes.
    """
    if not any(isinstance(each, FakeTensor) for each in taken):
        return
    devices = {str(each.device): None for each in taken}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found " + " and ".join(devices)
        )
    found = {str(each.dtype): None for each in taken}
    if dtypes and len(found) > 1:
        raise RuntimeError("expected operands of the same dtype, but got " + " and ".join(found))
