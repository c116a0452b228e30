"""Replacements of `torch.save` and `torch.load` for tensors without values.

No file is written, because it would be worthless; what it would hold is kept in memory.
"""

from __future__ import annotations

import functools
import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .patches import FakeDevice, valueless


class _Kept(NamedTuple):
    """What was saved: a pickle without its tensors, and those."""

    pickled: bytes
    tensors: list[torch.Tensor]


class _Pickler(pickle.Pickler):
    """Pickles anything but tensors."""

    def __init__(self, file: io.BytesIO, number: Callable[[object], int | None]) -> None:
        super().__init__(file, protocol=2)
        self._number = number

    def persistent_id(self, obj: object) -> int | None:
        """The number of a tensor."""
        return self._number(obj)


class _Unpickler(pickle.Unpickler):
    """Puts tensors in where they were."""

    def __init__(self, file: io.BytesIO, tensor: Callable[[int], torch.Tensor]) -> None:
        super().__init__(file)
        self._tensor = tensor

    def persistent_load(self, pid: int) -> torch.Tensor:
        """The tensor of a number."""
        return self._tensor(pid)


class Files:
    """What the script saves and loads."""

    def __init__(self, cast: FakeDevice, mode: FakeTensorMode) -> None:
        self._cast, self._mode = cast, mode
        self._save, self._load = torch.save, torch.load
        self._saved: dict[str, _Kept] = {}

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.save`."""
        with _disable_current_modes():
            kept = self._kept(obj)
            named = _place(f) if isinstance(f, (str, os.PathLike)) else ""
            self._saved.pop(named, None)
            if kept is None:
                self._save(obj, f, *args, **kwargs)
            elif named:
                self._saved[named] = kept
            else:
                self._save(self._given(kept, here=True), f, *args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.load`; onto the device by way of the CPU."""
        given = kwargs.pop("map_location", args[1] if len(args) > 1 else None)
        if isinstance(given, Mapping):
            given = given.get(self._cast.name)
        there = self._cast.of(given)
        file = args[0] if args else kwargs.pop("f")
        kept = self._saved.get(_place(file)) if isinstance(file, (str, os.PathLike)) else None
        with _disable_current_modes():
            if kept is None:
                loaded = self._load(file, "cpu", *args[2:], **kwargs)
            else:
                loaded = self._given(kept, here=given is not None)
        if there is None:
            return loaded
        home = torch.device(self._cast.name)

        def moved(value: Any) -> Any:
            goes = isinstance(value, (torch.Tensor, torch.nn.Module))
            return value.to(home) if goes else value

        return pytree.tree_map(moved, loaded)

    def changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Functions that rename, copy or remove files, and the same for files that aren't there.

        So a script may save under another name first, as it should, and then rename.
        """
        of_paths = getattr(pathlib, "_NormalAccessor", None)  # where Python 3.10 keeps them
        for module, names, change in (
            (os, ("rename", "replace"), self._rename),
            (of_paths, ("rename", "replace"), self._rename),
            (os, ("link",), self._copy),
            (shutil, ("copy", "copy2", "copyfile"), self._copy),
            (os, ("remove", "unlink"), self._remove),
            (of_paths, ("unlink",), self._remove),
        ):
            for name in names if module is not None else ():
                yield module, name, functools.partial(change, getattr(module, name))

    def _rename(self, really: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        src, dst = self._names(args, kwargs, 2)
        if src in self._saved:
            self._saved[dst] = self._saved.pop(src)
            return None
        done = really(*args, **kwargs)
        self._saved.pop(dst, None)
        return done

    def _copy(self, really: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        src, dst = self._names(args, kwargs, 2)
        if src in self._saved:
            within = os.fspath(Path(dst, Path(src).name))
            self._saved[within if Path(dst).is_dir() else dst] = self._saved[src]
            return args[1] if len(args) > 1 else kwargs["dst"]
        done = really(*args, **kwargs)
        self._saved.pop(dst, None)
        return done

    def _remove(self, really: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (path,) = self._names(args, kwargs, 1)
        if self._saved.pop(path, None) is None:
            return really(*args, **kwargs)
        return None  # a file of that name is of another run

    def _names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[str]:
        """The places that a call names; none where it means descriptors, or makes no sense."""
        named = dict(zip(("src", "dst") if count > 1 else ("path",), args, strict=False))
        named |= {key: value for key, value in kwargs.items() if value is not None}
        names = [named.pop(key, None) for key in (("src", "dst") if count > 1 else ("path",))]
        if any("dir_fd" in key for key in named):
            return [""] * count
        return [_place(each) if isinstance(each, (str, os.PathLike)) else "" for each in names]

    def _kept(self, obj: Any) -> _Kept | None:
        """What is to be saved, if it holds what has no values; as it is at this moment."""
        tensors: list[torch.Tensor] = []
        numbers: dict[int, int] = {}

        def number(value: object) -> int | None:
            if not isinstance(value, torch.Tensor):
                return None
            if id(value) not in numbers:
                numbers[id(value)] = len(tensors)
                tensors.append(value)
            return numbers[id(value)]

        held = io.BytesIO()
        try:
            _Pickler(held, number).dump(obj)
        except Exception:
            # Else torch says why it can't be saved, or another pickle module can.
            if any(isinstance(each, FakeTensor) for each in tensors):
                raise
            return None
        if not any(isinstance(each, FakeTensor) for each in tensors):
            return None
        return _Kept(held.getvalue(), [self._made(each, here=False) for each in tensors])

    def _given(self, kept: _Kept, *, here: bool) -> Any:
        """A copy of what was saved: on the CPU, or on its old device."""
        made: dict[int, torch.Tensor] = {}

        def anew(number: int) -> torch.Tensor:
            if number not in made:
                made[number] = self._made(kept.tensors[number], here=here)
            return made[number]

        return _Unpickler(io.BytesIO(kept.pickled), anew).load()

    def _made(self, tensor: torch.Tensor, *, here: bool) -> torch.Tensor:
        """Another tensor like one; without values, it is on the device or is zeros."""
        if isinstance(tensor, FakeTensor) and not here:
            with self._mode:
                made = valueless(tensor, tensor.fake_device)
        elif isinstance(tensor, FakeTensor):
            made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        else:
            made = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(made, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        return made


def _place(file: str | os.PathLike[str]) -> str:
    return os.path.realpath(os.fspath(file))
