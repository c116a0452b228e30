"""Classes whose objects are not searched for tensors, or not rebuilt with other tensors.

Objects that refer to large parts of a program, such as a trainer, are not searched. Objects of
classes written in Python are rebuilt, unless they are more than their attributes: an open file, a
lock, a model that other objects refer to.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from io import IOBase
from threading import Condition, Event, Lock, RLock, Semaphore, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .containers import MOST_VALUES, container, kind_by_attributes, maker_of

#: The only modules of the standard library whose objects may hold the user's tensors.
_STANDARD = ("argparse", "collections", "functools", "types")
_TORCH = """
    torch._C torch._dynamo torch._export torch._functorch torch._guards torch._inductor
    torch._library torch._logging torch._ops torch._subclasses torch.autograd torch.backends
    torch.cuda torch.distributed torch.export torch.fx torch.jit torch.library torch.mps
    torch.multiprocessing torch.nn.utils torch.optim torch.package torch.profiler torch.utils.data
    torch.utils.hooks torch.utils.tensorboard torch.xpu
"""
_OTHERS = """
    PIL _pytest accelerate aim boto3 botocore cachetools ckptmove clearml click comet_ml cv2
    datasets deepspeed fsspec google grpc gymnasium h5py horovod huggingface_hub hydra hypothesis
    ignite ipykernel IPython jax lightning lightning_fabric lightning_utilities loguru matplotlib
    mlflow neptune numpy omegaconf pandas polars psutil pyarrow pytest pytorch_lightning ray
    requests rich scipy sklearn sympy tensorboard tensorboardX tensorflow tokenizers torch_xla tqdm
    transformers.data transformers.integrations transformers.tokenization_python
    transformers.tokenization_utils transformers.tokenization_utils_base
    transformers.tokenization_utils_fast transformers.tokenization_utils_tokenizers
    transformers.trainer transformers.trainer_callback triton urllib3 wandb yaml zarr
"""
_DENIED = frozenset((*_TORCH.split(), *_OTHERS.split()))
#: Standard modules whose classes lead to the rest of a program, also as bases of user classes.
_DRAGGING = frozenset(
    (
        *("asyncio", "concurrent", "ctypes", "io", "_io", "logging", "multiprocessing", "pathlib"),
        *("shelve", "socket", "socketserver", "sqlite3", "subprocess", "tempfile", "threading"),
        *("_thread", "unittest", "weakref", "_weakref", "zipfile", "tarfile", "queue"),
    )
)
_WORLDS = (torch.optim.Optimizer, DataLoader, Dataset)
#: Classes whose objects are shared: a copy of an object that holds one can't replace it.
_SHARED = (
    *(*_WORLDS, torch.nn.Module, torch.optim.lr_scheduler.LRScheduler, Sampler),
    *(Thread, IOBase, Condition, Event, Semaphore, type(Lock()), type(RLock())),
)
_MORE_THAN_DATA = ("__next__", "__anext__", "__exit__", "__aexit__", "__del__")
#: Modules of the standard library whose classes may be bases of rebuilt objects.
_BASES = frozenset(("abc", "argparse", "collections.abc", "typing"))
#: Libraries whose objects may be very large, or hold no data.
_NOT_DATA = frozenset(("datasets", "tokenizers", "torch"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not a static type in C

_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_opaque_type(kind: type) -> bool:
    """Whether objects of a class are not searched: trainers, loggers, data sets, locks."""
    if issubclass(kind, (*_WORLDS, type, types.ModuleType)):
        return True
    module = _module_of(kind)
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__" and root not in _STANDARD:
        return True
    return any(is_denied(_module_of(base)) for base in kind.__mro__ if base is not object)


@functools.cache
def is_denied(module: str) -> bool:
    """Whether objects that a Python module defines are not searched."""
    return module.partition(".")[0] in _DRAGGING or any(
        each in _DENIED for each in _prefixes(module)
    )


def _module_of(kind: type) -> str:
    module = kind.__module__
    return module if isinstance(module, str) else ""


def _prefixes(module: str) -> Iterator[str]:
    """The prefixes of a module's name: `a`, `a.b`, `a.b.c`."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])


# -- rebuilt objects -------------------------------------------------------------------------------


def is_divisible(kind: type) -> bool:
    """Whether objects of a class may be taken apart and rebuilt."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _is_divisible(kind)
    return found


def is_shared(parts: Iterable[tuple[str, Any]]) -> bool:
    """Whether an object with these parts can't be copied."""
    return any(issubclass(type(part), _SHARED) for _, part in parts)  # this runs no code of it


def holds_tensors(value: Any) -> bool:
    """Whether an object holds a tensor, in parts of any class."""
    stack, seen = [value], {id(value)}
    while stack and len(seen) < MOST_VALUES:
        each = stack.pop()
        kind = type(each)
        if issubclass(kind, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            return True
        if issubclass(kind, (*_SHARED, type)):
            continue
        for _, part in (container(kind) or kind_by_attributes(kind)).parts(each):
            if id(part) not in seen:
                seen.add(id(part))
                stack.append(part)
    return False


def _is_divisible(kind: type) -> bool:
    if issubclass(kind, (type, Enum, *_SHARED)):
        return False
    if any(hasattr(kind, name) for name in _MORE_THAN_DATA):
        return False
    if maker_of(kind) is not object.__new__:
        return False
    return all(_is_data(base) for base in kind.__mro__ if base is not object)


def _is_data(kind: type) -> bool:
    """Whether a class adds only attributes to its bases."""
    if not kind.__flags__ & _HEAP_TYPE:
        return False
    module = str(kind.__module__)
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return module in _BASES
    return root not in _NOT_DATA or module.startswith("torch.distributions.")
