"""Writing checkpoints as other machines would have: tags, sparse giants, odd zips."""

from __future__ import annotations

import os
import pickletools
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import _package_registry, register_package, skip_data

from tests.making.walking import nodes

Storage = torch.UntypedStorage
Tag = str | Callable[[Storage], str | None]
Keep = Callable[[Storage], bool]

HOST_RNG_NBYTES = 5056  # torch.get_rng_state()
CUDA_RNG_NBYTES = 16  # torch.cuda.get_rng_state(), a host tensor too


def keep_none(_: Storage) -> bool:
    return False


def save_tagged(
    saved: object, path: Path, tag: Tag, keep_cpu: Keep = keep_none, **torch_save_kwargs: Any
) -> dict[str, str]:
    """`torch.save` as a machine with `tag` would have written it; the tag of each storage key.

    The storages of `saved` are in host memory; `tag` is a location or a function from a storage to
    one (None: `cpu`). Storages that `keep_cpu` accepts stay `cpu`.
    """
    with tagging(tag, keep_cpu) as tags:
        torch.save(saved, path, **torch_save_kwargs)
    return {str(key): given for key, given in enumerate(tags.values())}


def save(path: Path, saved: object, tag: Tag = "cuda:0", **options: Any) -> Path:
    """`save_tagged`, for callers that want the path and not the tags."""
    save_tagged(saved, path, tag, **options)
    return path


@contextmanager
def tagging(tag: Tag, keep_cpu: Keep = keep_none) -> Iterator[dict[int, str]]:
    """Every `torch.save` inside writes these tags; yields storage address → tag, in key order."""
    given: dict[int, str] = {}

    def tagger(storage: Storage) -> str | None:
        if storage.device.type != "cpu":
            return None
        wanted = None if keep_cpu(storage) else tag if isinstance(tag, str) else tag(storage)
        given.setdefault(storage._cdata, wanted or "cpu")
        return wanted and as_a_tagger_returns(wanted)

    before = list(_package_registry)
    register_package(5, tagger, lambda _storage, _location: None)  # type: ignore[arg-type]
    try:
        yield given
    finally:
        _package_registry[:] = before


def as_a_tagger_returns(tag: str) -> str:
    """The string object that torch's own tagger makes: new with an index, else a constant.

    It decides what the pickle memo shares: a constant is one object with the user's equal strings.
    """
    kind, colon, index = tag.partition(":")
    return kind + colon + index if colon else sys.intern(tag)


def kept_on_cpu(saved: object) -> Keep:
    """Whether training on an accelerator leaves a storage of `saved` in host memory."""
    kept = {tensor.untyped_storage()._cdata for tensor in _host_tensors(saved)}
    return lambda storage: storage._cdata in kept or storage.nbytes() == HOST_RNG_NBYTES


def _host_tensors(saved: object) -> Iterator[torch.Tensor]:
    for _, node in nodes(saved):
        if isinstance(node, torch.Tensor):
            yield from _host_parts(node)
        elif isinstance(node, torch.optim.Optimizer):
            yield from _host_values(vars(node))
        elif isinstance(node, dict) and {"state", "param_groups"} <= node.keys():
            yield from _host_values(node)


def _host_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself if it is an RNG state; parts that describe it and are not its values."""
    if tensor.dtype is torch.uint8 and tensor.shape == (CUDA_RNG_NBYTES,):
        yield tensor
    elif tensor.layout is torch.jagged:
        yield from tensor._metadata_cache.values()  # type: ignore[attr-defined]
    elif tensor.is_nested:
        yield tensor._nested_tensor_size()
        yield tensor._nested_tensor_strides()
        yield tensor._nested_tensor_storage_offsets()
    elif (spec := getattr(tensor, "_spec", None)) is not None:
        yield spec.mesh._rank_map


def _host_values(optimizer: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Step counters that the device need not see, and hyper-parameters that are tensors."""
    for group in optimizer["param_groups"]:
        yield from (value for value in group.values() if isinstance(value, torch.Tensor))
        for key in group["params"]:
            yield from _counters(optimizer["state"].get(key, {}), group)


def _counters(state: dict[str, Any], group: dict[str, Any]) -> Iterator[torch.Tensor]:
    on_device = group.get("capturable") or group.get("fused") or "eta" in state  # eta: ASGD
    for name in ("step", "mu_product"):
        if not on_device and isinstance(state.get(name), torch.Tensor):
            yield state[name]


def sparse_zip64(path: Path, gib: float = 5, tag: str = "cuda:1", **options: Any) -> Path:
    """A checkpoint above 4 GiB with zip64 entries, almost all of it a hole in the file.

    CRCs of the storages are 0 ("not computed"), as torch's `skip_data` writes them. Marks at the
    ends of each storage show a moved byte. Fake tensors always write an index: `mps` becomes
    `mps:0`.
    """
    with FakeTensorMode():
        saved = {
            "before": torch.empty(8, device="cpu"),
            "big": torch.empty(int(gib * 2**30), dtype=torch.uint8, device=tag),
            "after": torch.empty(16, device=tag),
        }
    with skip_data(materialize_fake_tensors=True):
        torch.save(saved, path, **options)
    _mark_storages(path)
    return path


def _mark_storages(path: Path) -> None:
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    with path.open("r+b") as file, zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if name.startswith("data/"):
                start = reader.get_record_offset(name)
                for at in (start, start + info.file_size - 16):
                    file.seek(at)
                    file.write(name.encode().ljust(16, b"~"))


def only_pickle(name: str) -> bool:
    return name.endswith("/data.pkl")


def rezip(
    path: Path,
    out: Path,
    compress: Callable[[str], bool] = only_pickle,
    edit_pickle: Callable[[bytes], bytes] = bytes,
) -> Path:
    """The same records, written by Python's zipfile: unaligned, some of them deflated."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            data = edit_pickle(data) if only_pickle(info.filename) else data
            method = zipfile.ZIP_DEFLATED if compress(info.filename) else zipfile.ZIP_STORED
            target.writestr(zipfile.ZipInfo(info.filename), data, method)
    return out


def squeeze(path: Path, out: Path) -> Path:
    """The same checkpoint with a pickle that has no unused PUT."""
    return rezip(path, out, lambda _: False, pickletools.optimize)


def save_by_cpp(saved: object, path: Path) -> Path:
    """Save as libtorch does: storages first, and strings memoized by value."""
    path.write_bytes(torch._C._pickle_save(saved))
    return path
