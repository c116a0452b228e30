"""Answers to the questions that code may ask torch about a simulated device."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...live.tracing.program.source_lines import is_users
from .device_memory import check_named

_MEMORY = 16 << 30  # bytes
_PROPERTIES = types.SimpleNamespace(
    name="simulated",
    major=7,
    minor=0,
    total_memory=_MEMORY,
    multi_processor_count=80,
    warp_size=32,
    is_integrated=0,
    is_multi_gpu_board=0,
)
_COUNTERS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached", "utilization", "temperature", "initial_seed"),
)
_RESETS = (
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"),
    *("reset_max_memory_cached", "ipc_collect", "init", "synchronize", "seed"),
    *("empty_cache", "manual_seed", "manual_seed_all", "seed_all", "set_rng_state", "set_stream"),
    *("set_rng_state_all", "set_per_process_memory_fraction", "set_sync_debug_mode"),
)
#: The legacy names of tensor types on the device.
TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_ABSENT = object()


@contextmanager
def replaced_attribute(target: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute has another value."""
    own = vars(target).get(name, _ABSENT) if isinstance(target, (type, types.ModuleType)) else None
    before = getattr(target, name) if own is None else own
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, before)


def answers(name: str) -> list[tuple[Any, str, Any]]:
    """The answers about a device such as `cuda:0`: owner, name, and replacement of a function."""
    kind, _, index = name.partition(":")
    current = int(index or 0)
    found: list[tuple[Any, str, Any]] = [(torch, "Generator", _generator(kind))]
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        found += [
            (accelerator, each, _for_users(getattr(accelerator, each, None), answer))
            for each, answer in (
                ("is_available", lambda: True),
                ("current_accelerator", lambda check_available=False: torch.device(kind)),
                ("device_count", lambda: current + 1),
                ("current_device_index", lambda: current),
                ("set_device_index", _nothing),
                ("synchronize", _nothing),
            )
        ]
        # torch's optimizers call this too, and the real function fails without a driver.
        found.append((accelerator, "current_stream", lambda device=None: Stream()))
    if kind == "cuda":
        found += _of_cuda(name, current)
    if kind == "mps":
        found.append((torch.backends.mps, "is_available", lambda: True))
    return [each for each in found if hasattr(each[0], each[1])]


def _of_cuda(name: str, current: int) -> list[tuple[Any, str, Any]]:
    nvtx = torch.cuda.nvtx
    given: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": _for_users(torch.cuda.is_initialized, lambda: True),
        "device_count": lambda: current + 1,
        "current_device": lambda: current,
        "get_device_capability": lambda device=None: (7, 0),  # no special kernels
        "get_arch_list": lambda: ["sm_70"],
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_tf32_supported": lambda: False,
        "get_device_name": _about(name, f"simulated {name}"),
        "get_device_properties": _about(name, _PROPERTIES),
        "mem_get_info": _about(name, (_MEMORY, _MEMORY)),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "",
        "memory_snapshot": lambda *args, **kwargs: [],
        "can_device_access_peer": lambda *args: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "device": _Current,
        "device_of": _Current,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "default_stream": lambda device=None: Stream(),
        "Stream": Stream,
        "Event": _Event,
        **{each: lambda device=None: 0 for each in _COUNTERS},
        **{each: noop() for each in _RESETS},
        "set_device": _about(name, None),
        **{each: _Kind(each, (), {"dtype": TYPES[each], "home": name}) for each in TYPES},
    }
    return [
        *((torch.cuda, each, answer) for each, answer in given.items()),
        *((nvtx, each, noop()) for each in ("mark", "range_push", "range_pop")),
        *((nvtx, each, noop()) for each in ("range_start", "range_end")),
        (nvtx, "range", lambda *args, **kwargs: nullcontext()),
        (torch, "set_default_tensor_type", _set_type),
        (torch.Tensor, "record_stream", _nothing),
        (torch.nn.DataParallel, "forward", _alone(name)),
    ]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces functions of torch that do nothing on a simulated device."""


def noop() -> Callable[..., None]:
    """A function that does nothing."""
    return lambda *args, **kwargs: None  # a new one each: torch._dynamo compares them by identity


def _about(name: str, answer: Any) -> Callable[..., Any]:
    """An answer about a device of CUDA, by its number or name; another is not simulated."""

    def about(device: Any = None) -> Any:
        number = isinstance(device, int)
        if device is not None and not (number and device < 0):  # which is the current one
            named = f"cuda:{device}" if number else device
            check_named(torch.device(named), torch.device(name))
        return answer

    return about


def _for_users(truly: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function that answers user code; torch's own code gets the real answer, if there is one."""

    def for_users(*args: Any, **kwargs: Any) -> Any:
        asks = is_users(sys._getframe(1).f_code.co_filename)
        return (answer if asks or truly is None else truly)(*args, **kwargs)

    return for_users


class _Event:
    """`torch.cuda.Event`: all work is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    record = wait = synchronize = _nothing


class Stream(_Event):
    """`torch.cuda.Stream`."""

    cuda_stream = stream_id = priority = 0
    wait_event = wait_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        """A completed event."""
        return event or _Event()

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never."""
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _Current:
    """`torch.cuda.device(...)`, which torch also uses in `isinstance` checks."""

    idx = 0

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class _Kind(type):
    """A type of tensors on the device, such as `torch.cuda.FloatTensor`."""

    dtype: torch.dtype
    home: str

    def __call__(cls, *args: Any) -> torch.Tensor:
        return torch.Tensor(*args).to(cls.home, cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype
        )


def _set_type(named: Any) -> None:
    """`torch.set_default_tensor_type`, for types on the device too."""
    name = getattr(named, "__name__", None) or str(named).rpartition(".")[2]
    there = isinstance(named, _Kind) or ".cuda." in str(named)
    torch.set_default_device("cuda" if there else None)
    torch.set_default_dtype(TYPES[name])


def _generator(kind: str) -> type:
    """`torch.Generator`, which is always a CPU generator but shows the device that was given."""
    real = torch.Generator

    class Meta(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=Meta):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            there = not isinstance(device, (str, torch.device)) or str(device).startswith(kind)
            made: Any = real.__new__(cls, device="cpu" if there else device)  # type: ignore[call-arg]
            if there:
                made.__dict__["_there"] = torch.device(kind, 0)
            return made

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        @property
        def device(self) -> Any:
            return self.__dict__.get("_there") or real.device.__get__(self)

    return Generator


def _alone(name: str) -> Callable[..., Any]:
    """`DataParallel.forward` for one device: it checks the devices, then calls the module."""

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        first = getattr(self, "src_device_obj", name)
        for each in (*self.module.parameters(), *self.module.buffers()):
            if str(each.device) != str(first):
                raise RuntimeError(
                    f"module must have its parameters and buffers on device {first} "
                    f"(device_ids[0]) but found one of them on device: {each.device}"
                )

        def there(value: Any) -> Any:
            return value.to(name) if isinstance(value, torch.Tensor) else value

        inputs, kwargs = torch.utils._pytree.tree_map(there, (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    return forward
