"""Random living models: trees of modules that hold, tie, share and look at tensors in every way."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.bool, torch.uint8, torch.int64),
]
_SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 2, 2)]
_LOOKS = ("same", "part", "turned", "expanded", "conjugate", "imaginary", "detached", "strided")
_PLACES = ("parameter", "buffer", "transient", "attribute", "list", "dict", "marked", "hook")

#: What a model is grown from: tensors, looks at earlier ones, and who holds which.
recipes = st.fixed_dictionaries(
    {
        "tensors": st.lists(
            st.tuples(st.sampled_from(DTYPES), st.sampled_from(_SHAPES)), min_size=1, max_size=5
        ),
        "looks": st.lists(st.tuples(st.integers(0, 99), st.sampled_from(_LOOKS)), max_size=6),
        "modules": st.lists(st.integers(0, 99), max_size=4),
        "places": st.lists(
            st.tuples(
                st.integers(0, 99), st.integers(0, 99), st.sampled_from(_PLACES), st.booleans()
            ),
            min_size=1,
            max_size=12,
        ),
    }
)


def grown(recipe: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A model of a recipe, and an optimizer with state if it has parameters to train."""
    chance = torch.Generator().manual_seed(0)
    pool: list[Tensor] = []
    with torch.no_grad():
        for dtype, shape in recipe["tensors"]:
            numbers = torch.randint(0, 2, shape, generator=chance)
            pool.append(numbers.to(dtype))
        for n, look in recipe["looks"]:
            pool.append(_look(pool[n % len(pool)], look))
    modules = [nn.Module()]
    for n in recipe["modules"]:
        modules.append(nn.Module())
        modules[n % (len(modules) - 1)].add_module(f"m{len(modules)}", modules[-1])
    for k, (where, which, place, has_grad) in enumerate(recipe["places"]):
        _hold(modules[where % len(modules)], pool[which % len(pool)], place, f"t{k}", has_grad)
    trained = list(modules[0].parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
    for parameter in trained:
        shared = [each for each in pool if each.shape == parameter.shape]
        state = shared[-1] if shared else torch.zeros(2)
        optimizer.state[parameter] = {"buffer": state, "count": 1}  # type: ignore[union-attr]
    return modules[0], optimizer


def _look(tensor: Tensor, look: str) -> Tensor:
    if look == "part" and tensor.dim():
        return tensor[1:]
    if look == "turned":
        return tensor.t() if tensor.dim() == 2 else tensor.view(tensor.shape)
    if look == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if look == "conjugate":
        return tensor.conj()
    if look == "imaginary" and tensor.is_complex():
        return tensor.conj().imag
    if look == "detached":
        return tensor.detach()
    if look == "strided" and tensor.numel() > 2 and tensor.is_contiguous():
        return tensor.as_strided((2,), (2,), tensor.storage_offset())
    return tensor


def _hold(module: nn.Module, tensor: Tensor, place: str, name: str, has_grad: bool) -> None:
    if place == "parameter":
        trains = tensor.is_floating_point() or tensor.is_complex()
        same = [each for each in module.parameters() if each.shape == tensor.shape]
        tied = same[0] if same and has_grad else None
        parameter = tied if tied is not None else nn.Parameter(tensor, requires_grad=trains)
        if trains and has_grad and tied is None and tensor.dtype.itemsize > 1:
            parameter.grad = torch.ones_like(tensor)
        module.register_parameter(name, parameter)
    elif place in ("buffer", "transient"):
        module.register_buffer(name, tensor, persistent=place == "buffer")
    elif place == "attribute":
        setattr(module, name, tensor)
    elif place == "list":
        setattr(module, name, [tensor, (tensor,)])
    elif place == "dict":
        setattr(module, name, {"a": {"b": tensor}})
    elif place == "hook":
        module.register_forward_hook(lambda m, args, output, held=tensor: held)
    else:
        marked = nn.Parameter(torch.ones(2))
        marked.main_grad = tensor  # type: ignore[attr-defined]
        module.register_parameter(name, marked)


def composites() -> dict[str, Tensor]:
    eye, four = torch.eye(3), torch.eye(4)
    rows = [torch.ones(2), torch.arange(3.0)]
    return {
        "coo": eye.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(
            torch.zeros(1, 2), torch.ones(2), (3,), check_invariants=False
        ),
        "csr": eye.to_sparse_csr(),
        "csc": eye.to_sparse_csc(),
        "bsr": four.to_sparse_bsr((2, 2)),
        "bsc": four.to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 2, torch.qint8),
        "by channel": torch.quantize_per_channel(
            eye, torch.ones(3), torch.zeros(3), 0, torch.qint8
        ),
        "two": TwoTensor(eye.clone(), four[:3, :3].clone()),
        "parameter": nn.Parameter(eye.to_sparse_csr()),
        "two parameters": nn.Parameter(TwoTensor(eye.clone(), eye.clone())),
    }
