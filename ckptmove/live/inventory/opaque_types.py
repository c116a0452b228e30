"""Types of objects that are not searched for tensors, because they refer to too much else."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

#: Of the standard library only these have objects that may hold tensors of the user's.
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
#: Standard classes that drag in the rest of a program, whoever makes one of them his own.
_DRAGGING = frozenset(
    (
        *("asyncio", "concurrent", "ctypes", "io", "_io", "logging", "multiprocessing", "pathlib"),
        *("shelve", "socket", "socketserver", "sqlite3", "subprocess", "tempfile", "threading"),
        *("_thread", "unittest", "weakref", "_weakref", "zipfile", "tarfile", "queue"),
    )
)
_WORLDS = (torch.optim.Optimizer, DataLoader, Dataset, type, types.ModuleType)


def is_opaque_type(kind: type) -> bool:
    """Whether objects of a class are not looked into: trainers, loggers, data sets, locks."""
    if issubclass(kind, _WORLDS):
        return True
    module = _module_of(kind)
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__" and root not in _STANDARD:
        return True
    return any(is_denied(_module_of(base)) for base in kind.__mro__ if base is not object)


@functools.cache
def is_denied(module: str) -> bool:
    """Whether what a module of Python defines is not looked into."""
    return module.partition(".")[0] in _DRAGGING or any(
        each in _DENIED for each in _prefixes(module)
    )


def _module_of(kind: type) -> str:
    module = kind.__module__
    return module if isinstance(module, str) else ""


def _prefixes(module: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c`."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])
