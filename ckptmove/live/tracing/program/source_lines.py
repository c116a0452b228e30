"""Find the line in the user's own files that an operation comes from."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard, TypeVar, cast

import torch

from ....display.phrases import format_error, text_of
from ....reports.events import Site

_Kind = TypeVar("_Kind")
_MOST_FRAMES = 64  # the most frames that are searched for the user's code
_MOST_CALLERS = 8  # the most callers whose variables are searched for a module
#: The types of `__dict__` in classes that do not replace it.
_DICTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_MOST_CAUSES = 16  # the most causes of an exception that are followed
_MOST_ITEMS = 64  # the most items of a searched container
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
#: Libraries without torch: their exceptions are caused by the code that calls them.
_WITHOUT_TORCH = re.compile(
    r"-packages[/\\](numpy|scipy|pandas|matplotlib|seaborn|sklearn|PIL)[/\\]"
)
CALLED = ", called at "  #: Between a line in a library and the user's line that called it.
LAYER = "nn."  #: The prefix of the name of a torch layer, which makes its tensors.
_files: dict[str, str] = {}  # the short name of a file in `line_in` → its path
_TYPED = ("<stdin>", "<ipython-input")  # the user's code that is not in a file

_OURS = str(Path(__file__).parents[3]) + os.sep
#: Code of ckptmove that replaces code of torch; the user's code calls it.
_LIKE_TORCH = f"{_OURS}trial{os.sep}simulation{os.sep}"
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGES = tuple(
    str(each) + os.sep
    for kind in ("purelib", "platlib")
    for path in [Path(sysconfig.get_path(kind))]
    for each in (path, path.resolve())  # a virtual environment may be a link
)
#: Also packages of the user's site, of a distribution, or of another environment.
_INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
_STDLIB = str(Path(sysconfig.get_path("stdlib"))) + os.sep
#: The Python file of torch that starts the engine for backward passes.
_ENGINE = str(Path("torch", "autograd", "graph.py"))
#: Code of torch between the user's code and the methods of a tensor.
_PASSING = tuple(
    _TORCH + name.replace("/", os.sep)
    for name in (
        *("_tensor.py", "_tensor_str.py", "overrides.py", "utils/_", "_subclasses/"),
        *("_compile.py", "_dynamo/eval_frame.py"),  # they wrap the calls of modes
    )
)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model's or the user's code; None if only torch calls."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        place = _place(frame.f_code.co_filename)
        if place == "users":
            return frame
        if place == "ours" and not frame.f_code.co_name.startswith("__torch_"):
            return None
        frame = frame.f_back
    return None


def own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code, among a frame and its callers; or None."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def made_site(site: Site, frame: FrameType | None) -> Site:
    """A site that makes a tensor, named by the torch layer that is made there: `nn.Linear`.

    In a `forward`, it is the line that makes the outermost new module, even one of a user's class.
    """
    users, forward = user_frame(frame), site.phase == "forward"
    for _ in range(_MOST_FRAMES):
        if frame is None or (frame is users and not forward):
            break
        made = locals_of(frame).get("self") if frame.f_code.co_name == "__init__" else None
        kinds = type(made).__mro__ if is_a(made, torch.nn.Module) else ()
        names = [each.__name__ for each in kinds if each.__module__.startswith("torch.nn.")]
        if names:
            site = site._replace(op=f"{LAYER}{names[0]}")
            if forward:
                site = site._replace(source=user_line(frame.f_back))
        elif is_users(frame.f_code.co_filename):
            break
        frame = frame.f_back
    own = own_frame(users)
    within = own is not None and own is not users
    return site._replace(source=f"{site.source}{CALLED}{line_of(own)}") if within else site


@functools.lru_cache(maxsize=4096)  # asked for every operation, frame by frame
def _place(file: str) -> str:
    """The owner of a file: `ours`, `users`, or "" for files of torch and Python."""
    if file.startswith(_OURS) and not file.startswith(_LIKE_TORCH):
        return "ours"
    return "users" if is_users(file) else ""


def frame_outside(file: str) -> FrameType | None:
    """The innermost frame outside of `file`, a file of ckptmove."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return frame


def backward_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of user code inside a backward pass; None if only torch runs."""
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code.co_filename.endswith(_ENGINE):
            return None
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType | None) -> str:
    """The line that a frame runs, `file.py:12`; "" without a frame."""
    return "" if frame is None else line_in(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=4096)
def line_in(file: str, number: int) -> str:
    """The name of a line in a file, `file.py:12`."""
    spelled = _spell(file)
    _files[spelled] = file
    return f"{spelled}:{number}"


def file_of(line: str) -> tuple[str, int]:
    """The file and the number of a line from `line_in`; ("", 0) for any other text."""
    spelled, _, number = line.rpartition(":")
    return (_files[spelled], int(number)) if spelled in _files and number.isdigit() else ("", 0)


def is_library(file: str) -> bool:
    """Whether a file is not the user's own."""
    return not is_users(file) or is_installed(file)


@functools.lru_cache(maxsize=4096)  # called for each frame
def is_installed(file: str) -> bool:
    """Whether this is a file of an installed package."""
    return file.startswith(_PACKAGES) or _INSTALLED.match(file) is not None


def user_line(frame: FrameType | None) -> str:
    """The line of the innermost frame of the model's or the user's code; "" if there is none."""
    return line_of(user_frame(frame))


def is_asked(frame: FrameType | None) -> bool:
    """Whether the call of torch in a frame comes from the user's own code, not from a library."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if not file.startswith(_PASSING):
                return False
        elif is_users(file):
            return not is_installed(file)
        frame = frame.f_back
    return False


def is_within(frame: FrameType, line: str) -> bool:
    """Whether a line belongs to the function that a frame runs."""
    file, _, number = line.rpartition(":")
    if file != _spell(frame.f_code.co_filename):
        return False
    return int(number) in {at for _, _, at in frame.f_code.co_lines()}


def is_function(frame: FrameType) -> bool:
    """Whether a frame runs a function, and not the code of a module."""
    return bool(frame.f_code.co_flags & inspect.CO_NEWLOCALS)


def is_outer(frame: FrameType, name: str) -> bool:
    """Whether a function's variable is not local: it is global, from a closure, or in `self`."""
    code = frame.f_code
    root = re.split(r"[.\[]", name, maxsplit=1)[0]
    if not root or not is_function(frame):
        return False
    return name.startswith("self.") or root not in (*code.co_varnames, *code.co_cellvars)


def variable(frame: FrameType, wanted: object) -> str:
    """A frame's variable for an object: `x`, `batch['x']`, `self.critic`; "" if there is none."""
    own = [(name, each) for name, each in locals_of(frame).items() if not name.startswith("_")]
    own += [(name, frame.f_globals.get(name)) for name in frame.f_code.co_names]
    for name, value in own:
        if value is wanted:
            return name
    for name, value in own:
        for key, each in items_of(value):
            if each is wanted:
                return f"{name}{key}"
    held = fields_of(dict(own).get("self"))
    modules = held.get("_modules")  # other classes may use this name differently
    for name, value in [*held.items(), *(modules.items() if type(modules) is dict else ())]:
        if value is wanted:
            return f"self.{name}"
    return ""


def locals_of(frame: FrameType) -> dict[str, object]:
    """The variables of a frame; the frame does not keep a copy of them alive."""
    held = frame.f_locals
    found = dict(held)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()  # a copy that lives as long as the frame
    return found


def is_a(value: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether an object is of a class, by its type; `isinstance` also runs its own `__class__`."""
    return issubclass(type(value), kind)


def fields_of(value: object) -> dict[str, Any]:
    """The attributes that an object itself holds; none of its own code runs."""
    for kind in type(value).__mro__:
        if "__dict__" in vars(kind):
            plain = type(vars(kind)["__dict__"]) in _DICTS
            held = object.__getattribute__(value, "__dict__") if plain else None
            return held if type(held) is dict else {}
    return {}


def items_of(value: object) -> Iterator[tuple[str, object]]:
    """The items of a small dict, list or tuple, with their code: `['x']`, `[0]`, `.x`."""
    if issubclass(type(value), Mapping):
        held = cast("Mapping[object, object]", value)
        if len(held) <= _MOST_ITEMS:
            yield from ((f"[{key!r}]", each) for key, each in list(held.items()))
    elif (is_a(value, list) or is_a(value, tuple)) and len(value) <= _MOST_ITEMS:
        fields = getattr(value, "_fields", ())
        for n, each in enumerate(value):
            yield f".{fields[n]}" if n < len(fields) else f"[{n}]", each


def modules_in(
    frame: FrameType | None,
) -> Iterator[tuple[str, torch.nn.Module, FrameType]]:
    """The modules in variables of a frame and its callers: `ema`, `self.shadow`.

    Each item is the variable, the module and the variable's frame. Arguments come last, so that the
    caller's name for a module is preferred.
    """
    given: list[tuple[str, torch.nn.Module, FrameType]] = []
    for _ in range(_MOST_CALLERS):
        if frame is None:
            break
        code, arguments = frame.f_code, _arguments(frame)
        own = list(locals_of(frame).items())
        own += [(name, frame.f_globals.get(name)) for name in code.co_names]
        for name, value in own:
            if is_a(value, torch.nn.Module):
                if name in arguments:
                    given.append((name, value, frame))
                else:
                    yield name, value, frame
                continue
            module = is_a(value, types.ModuleType)  # which holds what it imports, too
            fields = [] if module else list(fields_of(value).items())
            for key, each in (*items_of(value), *((f".{key}", each) for key, each in fields)):
                if is_a(each, torch.nn.Module):
                    yield f"{name}{key}", each, frame
        frame = user_frame(frame.f_back)
    yield from given


def _arguments(frame: FrameType) -> set[str]:
    """The argument names of the function that a frame runs, without `self`."""
    code = frame.f_code
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self"}


def model_name(frame: FrameType, model: torch.nn.Module) -> str:
    """The variable of a model in the user's code around a frame: `net`, `agent.policy`; or "".

    If only libraries are around, it is their variable.
    """
    own = own_frame(frame)
    if own is None:
        return variable(frame, model)
    name = variable(own, model)
    if name and name not in _arguments(own):
        return name
    return next((n for n, each, _ in modules_in(own) if each is model), name)


def move_of(value: object) -> str:
    """The method `to` of a class of the user's own that is no module, and its line; or ""."""
    method = None if is_a(value, torch.nn.Module) else getattr(type(value), "to", None)
    code = getattr(method, "__code__", None)
    if method is None or code is None or is_library(code.co_filename):
        return ""
    return f"{method.__qualname__} at {line_in(code.co_filename, code.co_firstlineno)}"


def raised_at(error: BaseException, *, own: bool = False) -> str:
    """The innermost line outside of torch and ckptmove that an exception comes from; or "".

    With `own`, it is outside of all libraries.
    """
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users(file) and not (is_library(file) if own else _WITHOUT_TORCH.search(file)):
            found = line_in(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _raised_in_worker(error: BaseException) -> tuple[str, str] | None:
    """The text and line of an exception in a process or thread of a DataLoader; else None."""
    head, found, rest = text_of(error).partition("Original Traceback (most recent call last):")
    if not found or not any(each in head for each in ("DataLoader", "pin memory")):
        return None
    lines = [each for each in rest.splitlines() if each and not each.startswith(" ")]
    frames = _FRAME.findall(rest)
    users = [f"{_spell(file)}:{number}" for file, number in frames if is_users(file)]
    return (lines[0], users[-1] if users else "") if lines else None


def error_line(error: BaseException) -> str:
    """An exception in one line, with the line that it comes from."""
    where, own = raised_at(error), raised_at(error, own=True)
    where += f"{CALLED}{own}" if own and own != where else ""
    worker = _raised_in_worker(error)
    if worker is not None:
        line, inner = worker
        return f"{line} (at {inner or where})" if inner or where else line
    return format_error(error) + (f" (at {where})" if where else "")


def comes_from(error: BaseException, known: tuple[int, str]) -> bool:
    """Whether an exception is the known one, by its id and text, or a consequence of it."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None or known == (id(found), format_error(found)):
            return found is not None
        found = found.__cause__ or found.__context__
    return False


def raising_module(error: BaseException) -> tuple[str, torch.nn.Module | None]:
    """The innermost module that an exception passes through, after the user's variable of it.

    Only modules count that the innermost frame of the user's code calls, and has in a variable.
    """
    own: FrameType | None = None
    found: tuple[str, torch.nn.Module | None] = "", None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        running = locals_of(frame).get("self")
        if not is_library(frame.f_code.co_filename):
            own, found = frame, ("", None)
        elif own is not None and is_a(running, torch.nn.Module):
            name = variable(own, running)
            found = (name, running) if name else found
        traceback = traceback.tb_next
    return found


def raised_in(error: BaseException, module: torch.nn.Module) -> str:
    """The name of the innermost module whose code an exception passes through; or ""."""
    names = {id(each): path for path, each in module.named_modules()}
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        running = traceback.tb_frame.f_locals.get("self")
        found = names.get(id(running), found) if running is not None else found
        traceback = traceback.tb_next
    return found


@functools.lru_cache(maxsize=4096)  # asked for every operation, frame by frame
def is_users(file: str) -> bool:
    """Whether a file is the user's, or belongs to a library that is not torch."""
    if file.startswith((_OURS, _TORCH, "<")):
        return file.startswith(_TYPED)
    return is_installed(file) or not file.startswith(_STDLIB)


def _spell(file: str) -> str:
    for packages in _PACKAGES:
        if file.startswith(packages):
            return file.removeprefix(packages)
    installed = _INSTALLED.match(file)
    if installed is not None:
        return file[installed.end() :]
    here = os.getcwd() + os.sep  # noqa: PTH109 - a path is slower, and this is asked often
    return file.removeprefix(here)
