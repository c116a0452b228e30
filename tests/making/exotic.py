"""Tensors that are more than a view of one storage: sparse, quantised, nested, lazy bits."""

from __future__ import annotations

from typing import Any

import torch

from tests.making.registry import maker, register


def mostly_zeros() -> torch.Tensor:
    return torch.randn(4, 6).relu()


register("sparse_coo", lambda: mostly_zeros().to_sparse())
register("sparse_coo_uncoalesced", lambda: _uncoalesced())
register("sparse_coo_hybrid", lambda: mostly_zeros().view(4, 3, 2).to_sparse(1))
register("sparse_csr", lambda: mostly_zeros().to_sparse_csr())
register("sparse_csc", lambda: mostly_zeros().to_sparse_csc())
register("sparse_bsr", lambda: mostly_zeros().to_sparse_bsr((2, 2)))
register("sparse_bsc", lambda: mostly_zeros().to_sparse_bsc((2, 2)))
register("sparse_empty", lambda: torch.zeros(3, 2).to_sparse())


def _uncoalesced() -> torch.Tensor:
    twice = torch.tensor([[1, 1, 2], [0, 0, 1]])
    return torch.sparse_coo_tensor(twice, torch.ones(3), (3, 2), check_invariants=False)


def _per_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, dtype)


def _per_channel(dtype: torch.dtype) -> torch.Tensor:
    scales, zero_points = torch.rand(4) + 0.1, torch.zeros(4)
    # Rows of whole bytes, however small the elements: torch leaves the rest uninitialised.
    return torch.quantize_per_channel(torch.randn(4, 8), scales, zero_points, 0, dtype)


register("quantized_quint8", lambda: _per_tensor(torch.quint8))
register("quantized_qint8", lambda: _per_tensor(torch.qint8))
register("quantized_qint32", lambda: _per_tensor(torch.qint32))
register("quantized_per_channel_quint8", lambda: _per_channel(torch.quint8))
register("quantized_per_channel_qint8", lambda: _per_channel(torch.qint8))
register("quantized_quint4x2", lambda: _per_channel(torch.quint4x2))
register("quantized_quint2x4", lambda: _per_channel(torch.quint2x4))


@maker
def quantized_linear_state_dict() -> object:
    """Packed parameters: a tuple under a dotted name, beside a dtype as a value."""
    module: Any = torch.ao.nn.quantized.Linear(3, 2)
    module.set_weight_bias(_per_tensor(torch.qint8), torch.randn(4))
    return module.state_dict()


def _ragged() -> list[torch.Tensor]:
    return [torch.randn(2, 3), torch.randn(4, 3)]


register("nested_strided", lambda: torch.nested.nested_tensor(_ragged()))
register("nested_jagged", lambda: torch.nested.nested_tensor(_ragged(), layout=torch.jagged))


@maker
def meta_tensor() -> object:
    return {"meta": torch.empty(2, 3, device="meta"), "real": torch.ones(2)}


@maker
def conjugate_view() -> object:
    base = torch.randn(3, dtype=torch.complex64)
    return {"base": base, "conj": base.conj()}


@maker
def negative_view() -> object:
    return torch.randn(3, dtype=torch.complex64).conj().imag
