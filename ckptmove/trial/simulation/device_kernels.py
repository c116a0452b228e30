"""Kernels of the simulated device: each runs the CPU's operation on the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .device_memory import (
    CPU_KEY,
    NAME,
    Bridge,
    Device,
    Op,
    device_of,
    here,
    is_there,
    shown,
    tensors_in,
)
from .operand_rules import OperandRules

_aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_true_type: Any = torch.Tensor.type

#: The generators of the device, by key; kept alive so that no other generator gets the same key.
generators: dict[int, object] = {}


def operation(name: str) -> Op:
    """The operation with a name such as `add.Tensor`."""
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


class Kernel:
    """An operation on the device."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.rules = OperandRules(op)
        self._tensors = [e.name for e in op._schema.arguments if str(e.type) == "Tensor"]

    def run(self, near: dict[str, Any]) -> Any:
        """Run it on the CPU; torch's C++ may pass a number for an argument that is a tensor."""
        numbers = any(isinstance(near.get(name), (int, float, complex)) for name in self._tensors)
        return (self.op.overloadpacket if numbers else self.op)(**near)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the devices of the operands, then run the operation on the CPU."""
        shown.use()
        operands = dict(zip(self.rules.names, args, strict=False)) | kwargs
        self.rules.check(operands, generators)
        bridge = Bridge()
        near = {name: bridge.here(value) for name, value in operands.items()}
        try:
            made = self.run(near)
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for" not in str(error) and "not supported" not in str(error):
                raise
            made = self._widened(near, error)
        if self.rules.written:
            bridge.settle()
        return bridge.there(made)

    def _widened(self, near: dict[str, Any], error: Exception) -> Any:
        """Run in float32 if the CPU has no half-precision kernel; else raise the error again."""
        low: list[torch.dtype] = []

        def up(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype in _HALF:
                low.append(value.dtype)
                return value.float()
            return [up(each) for each in value] if isinstance(value, (list, tuple)) else value

        def down(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype is torch.float32:
                return value.to(low[0])
            return tuple(map(down, value)) if isinstance(value, (list, tuple)) else value

        wide = {name: up(value) for name, value in near.items()}
        if not low:
            raise error
        made = self.run(wide)
        written = [name for name in self.rules.names if name in self.rules.written]
        for name in written:
            near[name].copy_(wide[name])
        return near[written[0]] if written else down(made)


def sees(op: Op) -> bool:
    """Whether an operation only returns another view of its operand."""
    aliases = [each.alias_info for each in op._schema.returns]
    views = any(each is not None and not each.is_write for each in aliases)
    return views or op.name().startswith("aten::set_.") or op.name() == "aten::is_set_to"


def see(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that returns a view; it needs no device."""
    return op._op_dk(CPU_KEY, *args, **kwargs)


def make(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that makes a tensor on the real device; make it on the simulated one."""
    shown.use()
    kwargs.pop("pin_memory", None)
    device = shown.true_device(kwargs.get("device") or shown.device)
    return op(*args, **{**kwargs, "device": device})


def move(op: Op, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to`, which returns the tensor itself if it is already on the device."""
    args = tuple(shown.true_device(each) if isinstance(each, Device) else each for each in args)
    if kwargs.get("device") is not None:
        kwargs["device"] = shown.true_device(kwargs["device"])
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def copy(op: Op, *args: Any, **kwargs: Any) -> Any:
    """`Tensor._to_copy`, which would make a tensor in pinned memory if it does not block."""
    kwargs["non_blocking"] = False
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def for_each(kernel: Kernel) -> Callable[..., Any]:
    """A `_foreach_` operation: as one call, or tensor by tensor if devices mix, as in torch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if all(is_there(each) for each in tensors_in([*args, *kwargs.values()])):
            return kernel(*args, **kwargs)
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        return kernel.op._op_dk(key, *args, **kwargs)

    return run


# -- CUDA's own kernels that the CPU composes of others, or has in another form --------------------


def lstm_cell(
    igates: Any, hgates: Any, cx: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any, Any]:
    """`_thnn_fused_lstm_cell`, differentiable any number of times."""
    gates = igates + hgates
    if b_ih is not None:
        gates = gates + b_ih + b_hh
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates.detach().clone()


def gru_cell(
    igates: Any, hgates: Any, hx: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any]:
    """`_thnn_fused_gru_cell`."""
    if b_ih is not None:
        igates, hgates = igates + b_ih, hgates + b_hh
    ir, iz, inew = igates.chunk(3, 1)
    hr, hz, hnew = hgates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    return (hx - n) * z + n, igates.detach().clone()


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention`."""
    for each in (key, value, attn_mask):
        if each is not None and device_of(each) != device_of(query):
            raise RuntimeError(
                "Expected query, key, and value to have the same device type, but got "
                f"query.device: {query.device} key.device: {key.device} and "
                f"value.device: {value.device} instead."
            )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), -float("inf"))
    math = _aten._scaled_dot_product_attention_math
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return math(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any
) -> Any:
    """`ctc_loss.Tensor`: torch allows lengths on any device only if no mode such as ours is active.

    So they are passed as lists.
    """
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return _aten.ctc_loss.IntList(log_probs, targets, *lengths, *rest)


def convolution(kernel: Kernel) -> Callable[..., Any]:
    """A convolution, which compares tensor types before devices."""

    def run(given: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> Any:
        for each, what in ((weight, "weight"), (bias, "bias")):
            if each is not None and (kind := type_name(given)) != type_name(each):
                told = f"Input type ({kind}) and {what} type ({type_name(each)})"
                raise RuntimeError(f"{told} should be the same")
        return kernel(given, weight, bias, *rest, **named)

    return run


def type_name(tensor: Tensor) -> str:
    """`x.type()`, with the name of the real device."""
    return str(_true_type(tensor)).replace(f".{NAME}.", f".{shown.device.type}.")


def softmax(kernel: Kernel) -> Callable[..., Any]:
    """A softmax that can return float32 for half-precision input."""

    def run(given: Tensor, dim: int, half_to_float: bool) -> Any:
        return kernel(given.float() if half_to_float else given, dim, False)

    return run


def softmax_backward(kernel: Kernel) -> Callable[..., Any]:
    """The backward pass of `softmax`."""

    def run(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        return kernel(grad, output, dim, grad.dtype).to(input_dtype)

    return run


# -- sparse tensors --------------------------------------------------------------------------------

#: Operations that read the parts of a sparse tensor, or make one from parts.
_PARTS = frozenset(
    (
        *("_indices", "_values", "indices", "values", "_nnz", "sparse_dim", "dense_dim"),
        *("_dimI", "_dimV", "is_coalesced", "_coalesced_", "_sparse_coo_tensor_with_dims"),
        "_sparse_coo_tensor_with_dims_and_tensors",
    )
)


def sparse(op: Op) -> Callable[..., Any]:
    """The kernel of an operation on sparse tensors (COO)."""
    if op._schema.name.removeprefix("aten::") in _PARTS:
        return functools.partial(_see_sparse, op)
    return functools.partial(_run_sparse, Kernel(op))


def _see_sparse(op: Op, *args: Any, **kwargs: Any) -> Any:
    return op._op_dk(torch._C.DispatchKey.SparseCPU, *args, **kwargs)


def _run_sparse(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    shown.use()
    rules = kernel.rules
    operands = dict(zip(rules.names, args, strict=False)) | kwargs
    rules.check(operands, generators)
    if any(operands[name].is_sparse for name in rules.written):
        raise NotImplementedError(f"Could not run '{kernel.op}' with a sparse tensor on {NAME}")
    bridge = Bridge()

    def near(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_sparse and is_there(value):
            parts = here(value._indices()), here(value._values())
            return torch.sparse_coo_tensor(
                *parts, value.size(), is_coalesced=value.is_coalesced(), check_invariants=False
            )
        if isinstance(value, (list, tuple)):
            return [near(each) for each in value]
        return bridge.here(value)

    made = kernel.op(**{name: near(value) for name, value in operands.items()})
    if rules.written:
        bridge.settle()
        return operands[next(name for name in rules.names if name in rules.written)]
    return _sparse_there(bridge, made)


def _sparse_there(bridge: Bridge, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_sparse_there(bridge, each) for each in value)
    if not isinstance(value, Tensor) or not value.is_sparse:
        return bridge.there(value)
    return _aten._sparse_coo_tensor_with_dims_and_tensors(
        *(value.sparse_dim(), value.dense_dim(), value.size()),
        *(bridge.there(value._indices()), bridge.there(value._values())),
        dtype=value.dtype,
        layout=torch.sparse_coo,
        device=torch.device(NAME, 0),
        is_coalesced=value.is_coalesced(),
    )
