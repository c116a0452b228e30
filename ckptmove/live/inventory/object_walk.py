"""Find tensors in values of any class: containers, functions, and other objects.

No code of these objects runs: no property, `__getattr__`, `__getitem__` or `__iter__`. Objects that
refer to large parts of the program, such as a trainer, are skipped (`opaque_types`).
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence

from ...manifest.manifest import Role
from ...manifest.paths import Key, Path
from .containers import MOST_VALUES, container, kind_by_attributes
from .opaque_types import is_denied, is_opaque_type

#: The greatest depth: names in a chain of 100,000 lists would need quadratic memory.
_DEEPEST = 1000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
#: Classes whose objects hold no other objects.
_BARE = frozenset((*_PLAIN, type, torch.Size, torch.Generator, range, slice))
#: Attributes that torch gives every module.
_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))

_Part = tuple[Key, object]
_Opener = Callable[[Any], Iterable[_Part]]
_Link = tuple[Any, Key]  # the way to a value: the holder's link, and the key


class ReachedTensor(NamedTuple):
    """A tensor inside a value, and the path to it."""

    path: Path
    tensor: torch.Tensor
    role: Role | None = None  #: set if the tensor is meant for the host
    in_module: bool = False  #: whether the path leads through a module


class Reach:
    """A search that examines each object once; objects in `known` are skipped."""

    def __init__(self, known: Iterable[object] = ()) -> None:
        self._met = {id(each) for each in known}
        self._kept: list[object] = []  # keeps their ids unique
        self._openers: dict[type, _Opener | None] = {}
        #: Whether the limit was reached.
        self.full = False

    def within(self, value: object, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
        """Each tensor inside a value, with the path to it."""
        return ((each.path, each.tensor) for each in self.tensors_in(value, path))

    def tensors_in(self, value: object, path: Path) -> Iterator[ReachedTensor]:
        """Each tensor inside a value, with its path, role, and whether a module is on the path."""
        todo: list[tuple[_Link | None, object, int, bool, Role | None]]
        todo = [(None, value, 0, False, None)]
        while todo:
            link, value, depth, in_module, role = todo.pop()
            kind = type(value)
            if issubclass(kind, torch.Tensor):
                assert isinstance(value, torch.Tensor)
                yield ReachedTensor((*path, *_keys(link)), value, role, in_module)
            if id(value) in self._met:
                continue
            opener = self._opener(kind)
            if opener is None or (opener is _in_tensor and _is_bare(value)):
                continue
            if len(self._kept) >= MOST_VALUES or depth > _DEEPEST:
                self.full = True
                continue
            self._met.add(id(value))
            self._kept.append(value)
            inside: list[_Part] = []
            with suppress(Exception):  # classes may do unexpected things
                inside += opener(value)
            in_module = in_module or issubclass(kind, nn.Module)
            is_packed = issubclass(kind, PackedSequence)
            for n in range(len(inside) - 1, -1, -1):
                key, each = inside[n]
                if type(each) not in _BARE:
                    own = Role.LENGTHS if is_packed and key == "batch_sizes" else None
                    key = key if isinstance(key, (str, int, float, bytes)) else f"key {n}"
                    todo.append(((link, key), each, depth + 1, in_module, own))

    def _opener(self, kind: type) -> _Opener | None:
        if kind not in self._openers:
            self._openers[kind] = _opener(kind)
        return self._openers[kind]


def _keys(link: _Link | None) -> Path:
    keys: list[Key] = []
    while link is not None:
        link, key = link
        keys.append(key)
    return tuple(reversed(keys))


# -- modules and tensors ---------------------------------------------------------------------------


def attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Attributes of a module other than parameters, buffers, submodules and hooks."""
    for name, value in list(vars(module).items()):
        if name not in _OF_TORCH:
            yield name, value


def hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module, which are called when it runs."""
    for name in _HOOKS:
        found = vars(module).get(name)
        if isinstance(found, Mapping):
            yield from list(found.values())


def hooks_of(owner: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The hooks of a tensor (called with its gradient) or an optimizer (called with its step)."""
    if isinstance(owner, torch.Tensor):
        names: Iterable[str] = ("_backward_hooks", "_post_accumulate_grad_hooks")
    else:
        names = (name for name in vars(owner) if name.endswith("_hooks"))
    for name in names:
        found = getattr(owner, name, None)
        for hook in list(found.values()) if isinstance(found, dict) else ():
            yield f"hook {name_of(hook)}", hook


#: Where a jagged tensor stores the lengths that it also shows as inner tensors.
_LENGTHS = ("_metadata_cache",)


def besides(tensor: torch.Tensor | None) -> dict[str, object]:
    """The additional attributes of a tensor, such as main_grad; inner tensors are left out."""
    if tensor is None or isinstance(tensor, FakeTensor):
        return {}  # attributes of a fake tensor describe the real one
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner = {*flatten()[0], *_LENGTHS} if flatten is not None and vars(tensor) else ()
    return {name: each for name, each in vars(tensor).items() if name not in inner}


def has_no_tensors(value: object) -> bool:
    """Whether a value holds only numbers and strings, nested or not, or nothing."""
    todo, met = [value], set()
    while todo:
        each = todo.pop()
        kind = type(each)
        if id(each) in met or issubclass(kind, _PLAIN):
            continue
        met.add(id(each))
        if kind is dict:
            todo += each.values()  # type: ignore[attr-defined]  # it is one
        elif kind in _CONTAINERS:
            todo += each  # type: ignore[arg-type]  # it is one
        else:
            return False
    return True


def name_of(function: object) -> str:
    """The name of a function, or of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _is_bare(tensor: Any) -> bool:
    """Whether a tensor has no attributes and no hooks, like most tensors."""
    return not (vars(tensor) or any(True for _ in hooks_of(tensor)))


def _in_tensor(tensor: torch.Tensor) -> Iterator[_Part]:
    yield from besides(tensor).items()
    if not isinstance(tensor, FakeTensor):
        yield from hooks_of(tensor)


def _in_module(module: nn.Module) -> Iterator[_Part]:
    for held in (module._parameters, module._buffers, module._modules):
        yield from list(held.items())
    yield from attributes(module)
    for hook in hooks(module):
        yield f"hook {name_of(hook)}", hook


# -- parts of other values -------------------------------------------------------------------------


def _opener(kind: type) -> _Opener | None:
    """The function that yields the parts of objects of a class; None if they are not searched."""
    if issubclass(kind, _PLAIN) or kind in _BARE:
        return None
    for base, opener in _OPENERS:
        if issubclass(kind, base):
            return opener
    holder, is_opaque = container(kind), is_opaque_type(kind)
    if holder is None:
        return None if is_opaque else kind_by_attributes(kind).items
    return holder.contents if is_opaque else holder.items


def _in_partial(value: functools.partial[Any]) -> Iterator[_Part]:
    return enumerate((value.func, value.args, value.keywords))


def _in_method(value: types.MethodType) -> Iterator[_Part]:
    yield "self", value.__self__
    yield "function", value.__func__


def _in_function(function: types.FunctionType) -> Iterator[_Part]:
    module = function.__module__
    if isinstance(module, str) and (module.startswith("torch.") or is_denied(module)):
        return
    inner = vars(function).get("__wrapped__")
    if type(inner) is types.FunctionType:  # the names in what is decorated come first
        yield from _given_to(inner)
    yield from _given_to(function)
    yield from vars(function).items()


def _given_to(function: types.FunctionType) -> Iterator[_Part]:
    """The variables of a function's closure, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


_OPENERS: tuple[tuple[type, _Opener], ...] = (
    (torch.Tensor, _in_tensor),
    (nn.Module, _in_module),
    (functools.partial, _in_partial),
    (types.MethodType, _in_method),
    (types.FunctionType, _in_function),
)


def with_tensors(modules: Sequence[tuple[Path, nn.Module]]) -> set[int]:
    """The `id()` of each module that has tensors, itself or inside; an activation has none."""
    found = set()
    for _, module in reversed(modules):  # submodules come after their module
        children = module._modules.values()
        if any(True for _ in registered_in(module)) or any(id(each) in found for each in children):
            found.add(id(module))
    return found


def modules_of(model: nn.Module, start: Path) -> Iterator[tuple[Path, nn.Module]]:
    """Each module under each path, in the order of a state dict."""
    todo: list[tuple[Path, nn.Module, tuple[int, ...]]] = [(start, model, ())]
    while todo:
        path, module, around = todo.pop()
        if id(module) in around:  # a cycle of modules, which has no state dict
            continue
        yield path, module
        inner = (*around, id(module))
        children = [((*path, n), m, inner) for n, m in module._modules.items() if m is not None]
        todo += reversed(children)


def registered_in(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module, without those of submodules."""
    for held in (module._parameters, module._buffers):
        yield from (each for each in held.values() if each is not None)


class ListedObjects:
    """Objects that are listed by themselves, and so not again as parts of other objects."""

    def __init__(
        self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        modules = {id(m): m for each in models for _, m in modules_of(each, ())}
        self.objects: list[object] = [*modules.values(), *optimizers]  #: modules and optimizers
        #: `id()` of each tensor that a module has registered.
        self.registered = {id(t) for each in modules.values() for t in registered_in(each)}
