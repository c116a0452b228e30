"""A simulated device with real values, built into torch's own dispatcher.

Its tensors are torch's `privateuseone` tensors over ordinary memory (`device_memory`). Each
operation runs on the CPU over the same bytes (`device_kernels`), operands follow CUDA's rules
(`operand_rules`), and autocast follows torch's lists (`autocasting`). Code that names the real
device, in Python or C++ and in any thread, gets the simulated one. `script_host` answers questions
of Python code about the device.

It does not support: storages that grow or shrink (`storage.resize_`), CSR, CSC and BSR tensors,
CUDA graphs, kernels that only CUDA has, a second device.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils import backend_registration

from . import device_kernels as kernels
from .autocasting import casts
from .device_kernels import Kernel, operation
from .device_memory import KEY, NAME, NotSimulated, new_storage, resize, shown, unset

#: The oldest torch that has the private functions that are needed.
OLDEST = "2.11"
_NEEDED = (
    (backend_registration, "_setup_privateuseone_for_python_backend"),
    (torch._C, "_acc"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_from_dlpack"),
    (torch._C, "_swap_tensor_impl"),
    (torch._C, "_construct_storage_from_data_pointer"),
)
#: The device types that can be simulated, with their dispatch keys.
_KEYS = {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
#: Operations with one kernel for every device, which reads the device type itself.
_ALSO = ("copy_", "convolution", "convolution_backward", "set_.source_Tensor")
_kept: list[torch.library.Library] = []  # kernels exist as long as the library that registered them


#: `torch.privateuseone`, for torch and libraries; it uses the CPU's random number generator.
DEVICE_MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    device=lambda _: nullcontext(),
    set_device=lambda _: None,
    synchronize=lambda _=None: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
    get_rng_state=lambda _=None: torch.get_rng_state(),
    set_rng_state=lambda state, _=None: torch.set_rng_state(state),
    manual_seed_all=lambda _: None,
    _is_in_bad_fork=lambda: False,
)


def install(device: torch.device) -> None:
    """Create the device, permanently and at most once in this process.

    Raises:
        NotSimulated: this kind of device, or this torch, is not supported.
    """
    if _kept:
        return
    if device.type not in _KEYS:
        raise NotSimulated(f"scripts are simulated on {', '.join(_KEYS)}, not on {device.type}")
    if any(not hasattr(of, name) for of, name in _NEEDED):
        raise NotSimulated(
            f"to simulate a script, torch {OLDEST} or newer is needed; this is {torch.__version__}"
        )
    shown.device = device
    backend_registration._setup_privateuseone_for_python_backend(NAME, DEVICE_MODULE)
    _kept.append(library := torch.library.Library("aten", "IMPL"))
    _register(library)
    _register_others(library)
    _register_names(library, _KEYS[device.type])
    _kept.append(rest := torch.library.Library("_", "IMPL"))
    rest.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    rest.fallback(_run_any, KEY)
    UntypedStorage.__new__ = staticmethod(new_storage)  # type: ignore[assignment]


def _names(key: str) -> set[str]:
    """The operations that have a kernel for a dispatch key."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {each.removeprefix("aten::") for each in found if each.startswith("aten::")}


@functools.cache
def _kernel(op: Any) -> Kernel:
    return Kernel(op)


def _run_any(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation without a kernel here, for example one of another library."""
    return _kernel(op)(*args, **kwargs)


def _register(library: torch.library.Library) -> None:
    """Register kernels for the operations for which the CPU has kernels."""
    special = {
        "convolution": kernels.convolution,
        "_softmax": kernels.softmax,
        "_log_softmax": kernels.softmax,
        "_softmax_backward_data": kernels.softmax_backward,
        "_log_softmax_backward_data": kernels.softmax_backward,
    }
    own = {"resize_": resize, "set_": unset, "scaled_dot_product_attention": None}
    for name in sorted((_names("CPU") | set(_ALSO)) - own.keys()):
        op = operation(name)
        kernel: Any = functools.partial(kernels.see, op) if kernels.sees(op) else Kernel(op)
        library.impl(op, special[name](kernel) if name in special else kernel, KEY)
    library.impl("resize_", resize, KEY)
    library.impl("set_", unset, KEY)
    library.impl("_to_copy", functools.partial(kernels.copy, operation("_to_copy")), KEY)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_") and not name.endswith("out"):
            op = operation(name.removeprefix("aten::"))
            library.impl(op, kernels.for_each(Kernel(op)), KEY)


def _register_others(library: torch.library.Library) -> None:
    """Register kernels that differ from the CPU: fused cells, attention, sparse ones, autocast."""
    for key in (KEY, f"Autograd{KEY}"):
        library.impl("_thnn_fused_lstm_cell", kernels.lstm_cell, key)
        library.impl("_thnn_fused_gru_cell", kernels.gru_cell, key)
        library.impl("scaled_dot_product_attention", kernels.attention, key)
        library.impl("ctc_loss.Tensor", kernels.ctc_loss, key)
    for name in sorted(_names("SparseCPU")):
        library.impl(name, kernels.sparse(operation(name)), f"Sparse{KEY}")
    for op, cast in casts():
        try:
            library.impl(op, cast, f"Autocast{KEY}")
        except RuntimeError:  # listed twice
            continue


def _register_names(library: torch.library.Library, real: str) -> None:
    """Make operations that create or move tensors use this device instead of the real one.

    This includes calls from torch's C++ code.
    """
    makers = {"empty.memory_format", "empty_strided", "_efficientzerotensor"}
    for name in sorted(makers | _names("BackendSelect")):
        op = operation(name)
        if any(each.name == "device" for each in op._schema.arguments):
            library.impl(op, functools.partial(kernels.make, op), real, allow_override=True)
    for name in ("to.device", "to.dtype_layout"):
        for key in (KEY, f"Autograd{KEY}", "CPU", "AutogradCPU"):
            library.impl(name, functools.partial(kernels.move, operation(name)), key)
