"""Find a library call that takes a device, but was given none: skorch, ignite, poutyne.

Such a library moves the model, the batch, or both to the CPU by default. The search is done if one
of its frames lies between the user's code and a failure, or a model on another device. No code of
the user is called: names are looked up in modules, and signatures are read.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from .source_lines import fields_of, is_installed, is_library, line_in, locals_of
from .syntax import tree_of

_MOST_FRAMES = 64
#: Libraries that move the model to the given device; others move only batches.
_MOVES_MODEL = frozenset(("skorch", "poutyne", "transformers"))
#: Keywords that tell libraries to use the CPU.
_ON_CPU = {"use_cpu": True, "no_cuda": True, "cpu": True, "accelerator": "cpu", "device": "cpu"}
#: Libraries that use `device=` for another purpose, or find the device by themselves.
_NOT_MEANT = frozenset(("torch", "torchvision", "accelerate", "lightning", "pytorch_lightning"))


class LibraryCall(NamedTuple):
    """A library call that takes `device=` but was given none, or that is told to use the CPU."""

    name: str  #: the called name in the user's code: `create_supervised_trainer`
    line: str  #: the line of the call: `train.py:12`
    moves_model: bool  #: whether the library moves the model too, and not only batches
    says: str = ""  #: the keyword that tells it to use the CPU: `use_cpu=True`

    lacks: str = ""  #: what is wrong, if the call takes no device
    cure: str = ""  #: the fix in that case

    @property
    def why(self) -> str:
        """The text that says what is wrong with the call."""
        if self.lacks:
            return f"{self.name} at {self.line} {self.lacks}"
        lacks = f"is given {self.says}" if self.says else "is given no device"
        return f"{self.name} at {self.line} {lacks}"

    def fix(self, device: str) -> str:
        """The text that says how to mend the call."""
        if self.cure:
            return self.cure
        if self.says:
            return f"drop {self.says} of {self.name} at {self.line}"
        return f'give it: {self.name}(…, device="{device}") at {self.line}'


def call_without_device(frame: FrameType | None) -> LibraryCall | None:
    """Find such a call in the files of a frame and its callers, of a library that runs there.

    Of several calls, the one that made an object whose method runs is preferred; then the last one.
    """
    libraries: set[str] = set()
    running: list[Any] = []
    inner: list[FrameType] = []  # the frames of libraries, the outermost last
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if is_installed(file):
            libraries.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
            running.append(locals_of(frame).get("self"))
            inner.append(frame)
        elif not is_library(file):
            names = {**frame.f_globals, **locals_of(frame)}
            found = list(_calls(file, names, libraries, running)) if libraries else []
            if found:
                return max(found)[1]
            for each in inner[-2:]:  # a decorator may be the outermost
                if _lacks_device(each):
                    line = line_in(file, frame.f_lineno)
                    return LibraryCall(each.f_code.co_name, line, moves_model=False)
            inner.clear()
            prepared = _prepared(file, names)
            if prepared is not None:
                return prepared
        frame = frame.f_back
    return None


def _lacks_device(frame: FrameType) -> bool:
    """Whether a frame runs a function of torch, no method, that takes `device` and has None."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
    if not is_torch or "self" in arguments or "device" not in arguments:
        return False
    return locals_of(frame).get("device") is None


def _prepared(file: str, names: Mapping[str, Any]) -> LibraryCall | None:
    """The `prepare` call of accelerate that should bring batches to the device, or None."""
    tree = tree_of(file)
    own = {
        name for name, each in names.items() if type(each).__module__ == "accelerate.accelerator"
    }
    nodes = list(ast.walk(tree)) if own and tree is not None else []
    for each in nodes:
        made = each.value if isinstance(each, ast.Assign) else None
        if isinstance(made, ast.Call) and ast.unparse(each.targets[0]) in own:  # type: ignore[attr-defined]
            for key in made.keywords:
                if key.arg in _ON_CPU and _value_of(key.value, names) == _ON_CPU[key.arg]:
                    line = line_in(file, key.value.lineno)
                    return LibraryCall(ast.unparse(made.func), line, True, ast.unparse(key))
    for each in nodes:
        call = each.value if isinstance(each, (ast.Expr, ast.Assign)) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "prepare" and ast.unparse(call.func.value) in own:
            name, line = ast.unparse(call.func), line_in(file, call.lineno)
            given = ", ".join(map(ast.unparse, call.args))
            lacks, cure = "has a result that is not used", f"{given} = {ast.unparse(call)}"
            if isinstance(each, ast.Assign):
                lacks = "is not given the loader of this batch"
                cure = f"give {name} at {line} the loader of this batch too"
            return LibraryCall(name, line, False, "", lacks, cure)
    return None


def _calls(
    file: str, names: Mapping[str, Any], libraries: set[str], running: Sequence[Any]
) -> Iterator[tuple[tuple[bool, bool, int], LibraryCall]]:
    """The calls in a file that could be given a device, each with its rank."""
    tree = tree_of(file)
    nodes = [] if tree is None else list(ast.walk(tree))
    targets = {id(e.value): e.targets[0] for e in nodes if isinstance(e, ast.Assign)}
    for call in (each for each in nodes if isinstance(each, ast.Call)):
        callee = _called(call.func, names)
        library = _library(callee)
        if library not in libraries - {"torch"}:
            continue
        name, line = ast.unparse(call.func), line_in(file, call.lineno)
        for key in call.keywords:
            if key.arg in _ON_CPU and _value_of(key.value, names) == _ON_CPU[key.arg]:
                line = line_in(file, key.value.lineno)
                found = LibraryCall(name, line, True, ast.unparse(key))
                yield (True, True, call.lineno), found
        named = any(key.arg in ("device", None) for key in call.keywords)
        if named or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        if library not in _NOT_MEANT and _takes_device(callee, len(call.args)):
            target = targets.get(id(call))
            made = names.get(target.id) if isinstance(target, ast.Name) else None
            runs = made is not None and any(each is made for each in running)
            runs = runs or (isinstance(callee, type) and callee in map(type, running))
            found = LibraryCall(name, line, library in _MOVES_MODEL)
            yield (runs, target is not None, call.lineno), found


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> object:
    """What a constant, a variable or its attribute is; None if that is not known, or not plain."""
    value: object = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name):
        value = names.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        value = fields_of(names.get(node.value.id)).get(node.attr)
    return value if type(value) in (bool, str) else None


def _called(func: ast.expr, names: Mapping[str, Any]) -> Any:
    """The function or class that is called by a name, or as an attribute of a module."""
    if isinstance(func, ast.Name):
        return names.get(func.id)
    if isinstance(func, ast.Attribute):
        holder = _called(func.value, names)
        if isinstance(holder, types.ModuleType):
            return vars(holder).get(func.attr)
    return None


def _library(callee: Any) -> str:
    """The installed package of a function or class, or of the first base class that has one."""
    if not isinstance(callee, (type, types.FunctionType)):
        return ""
    for each in callee.__mro__ if isinstance(callee, type) else (callee,):
        module = sys.modules.get(str(each.__module__))
        file = getattr(module, "__file__", None) or ""
        if is_installed(file):
            return str(each.__module__).partition(".")[0]
    return ""


def _takes_device(callee: Any, positional: int) -> bool:
    """Whether a callable takes `device` in addition to so many positional arguments."""
    kinds = callee.__mro__ if isinstance(callee, type) else ()
    makers = [vars(each)["__init__"] for each in kinds if "__init__" in vars(each)] or [callee]
    for each in makers:  # a class may pass on `**kwargs` to its base
        try:
            parameters = inspect.signature(each).parameters
        except (TypeError, ValueError):
            return False
        if "device" in parameters:
            at = list(parameters).index("device") - isinstance(callee, type)
            keyword_only = parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY
            return keyword_only or at >= positional
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            return False
    return False
