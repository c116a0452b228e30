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

import torch

from ....reports.display.phrases import format_error, text_of
from ....reports.events import Site

_MOST_FRAMES = 64  # that are searched for the user's code
_MOST_CALLERS = 8  # whose variables are looked at for a module
_DICT = type(vars(type("", (), {}))["__dict__"])  # of classes written in Python
_MOST_CAUSES = 16  # of an exception
_MOST_ITEMS = 64  # of a container that may hold a tensor
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
#: Libraries that know nothing of torch: what they raise is for the code that calls them.
_WITHOUT_TORCH = re.compile(
    r"-packages[/\\](numpy|scipy|pandas|matplotlib|seaborn|sklearn|PIL)[/\\]"
)
CALLED = ", called at "  #: Between a line in a library and the user's own that called it.
LAYER = "nn."  #: The beginning of the name of a layer of torch, which makes what it holds.
_files: dict[str, str] = {}  # by how they are spelled
_TYPED = ("<stdin>", "<ipython-input")  # what is the user's, though it is no file

_OURS = str(Path(__file__).parents[3]) + os.sep
#: Our code that replaces code of torch, and is called by the user's.
_LIKE_TORCH = f"{_OURS}trial{os.sep}simulation{os.sep}"
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGES = tuple(
    str(each) + os.sep
    for kind in ("purelib", "platlib")
    for path in [Path(sysconfig.get_path(kind))]
    for each in (path, path.resolve())  # a virtual environment may be a link
)
#: Also of a user's own, of a distribution, or of another environment that this one refers to.
_INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
_STDLIB = str(Path(sysconfig.get_path("stdlib"))) + os.sep
#: Where torch's Python calls the engine of backward passes.
_ENGINE = str(Path("torch", "autograd", "graph.py"))
#: Code of torch between the user's code and the methods of a tensor.
_PASSING = tuple(
    _TORCH + name.replace("/", os.sep)
    for name in (
        *("_tensor.py", "_tensor_str.py", "overrides.py", "utils/_", "_subclasses/"),
        *("_compile.py", "_dynamo/eval_frame.py"),  # around what stands between torch and kernels
    )
)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model's or the user's code; None for calls from torch alone."""
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
    """The innermost frame of the user's own code, from a frame on; None if there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def made_site(site: Site, frame: FrameType | None) -> Site:
    """A site that makes a tensor, by the layer of torch that is made there: `nn.Linear`.

    In a `forward`, it is the outermost module made there, at the line that makes it, of any class.
    """
    users, forward = user_frame(frame), site.phase == "forward"
    for _ in range(_MOST_FRAMES):
        if frame is None or (frame is users and not forward):
            break
        made = locals_of(frame).get("self") if frame.f_code.co_name == "__init__" else None
        kinds = type(made).__mro__ if isinstance(made, torch.nn.Module) else ()
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
    """Whose a file is: `ours`, `users`, or "" for torch's and Python's."""
    if file.startswith(_OURS) and not file.startswith(_LIKE_TORCH):
        return "ours"
    return "users" if is_users(file) else ""


def frame_outside(file: str) -> FrameType | None:
    """The innermost frame outside of a file of ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return frame


def backward_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code that a backward pass calls; None for torch's own."""
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code.co_filename.endswith(_ENGINE):
            return None
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType | None) -> str:
    """The line that a frame is at, `file.py:12`; "" for none."""
    return "" if frame is None else line_in(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=4096)
def line_in(file: str, number: int) -> str:
    """A line of a file, `file.py:12`."""
    spelled = _spell(file)
    _files[spelled] = file
    return f"{spelled}:{number}"


def file_of(line: str) -> tuple[str, int]:
    """The file and the number of a line that `line_in` spelled; ("", 0) of another."""
    spelled, _, number = line.rpartition(":")
    return (_files[spelled], int(number)) if spelled in _files and number.isdigit() else ("", 0)


def is_library(file: str) -> bool:
    """Whether this is no file of the user's own."""
    return not is_users(file) or is_installed(file)


@functools.lru_cache(maxsize=4096)  # asked for each frame
def is_installed(file: str) -> bool:
    """Whether this is a file of an installed package."""
    return file.startswith(_PACKAGES) or _INSTALLED.match(file) is not None


def user_line(frame: FrameType | None) -> str:
    """The innermost line of the model's or the user's code, from a frame on; "" if none."""
    return line_of(user_frame(frame))


def is_asked(frame: FrameType | None) -> bool:
    """Whether the user's own code, not a library, calls torch in a frame."""
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
    """Whether a line is one of the function that a frame runs."""
    file, _, number = line.rpartition(":")
    if file != _spell(frame.f_code.co_filename):
        return False
    return int(number) in {at for _, _, at in frame.f_code.co_lines()}


def is_function(frame: FrameType) -> bool:
    """Whether a frame runs a function, and not the code of a module."""
    return bool(frame.f_code.co_flags & inspect.CO_NEWLOCALS)


def is_outer(frame: FrameType, name: str) -> bool:
    """Whether a variable of a function is not its own: of the module, of a closure, of `self`."""
    code = frame.f_code
    root = re.split(r"[.\[]", name, maxsplit=1)[0]
    if not root or not is_function(frame):
        return False
    return name.startswith("self.") or root not in (*code.co_varnames, *code.co_cellvars)


def variable(frame: FrameType, wanted: object) -> str:
    """A frame's variable for an object: `x`, `batch['x']`, `self.critic`; "" if none."""
    own = [(name, each) for name, each in locals_of(frame).items() if not name.startswith("_")]
    own += [(name, frame.f_globals.get(name)) for name in frame.f_code.co_names]
    for name, value in own:
        if value is wanted:
            return name
    for name, value in own:
        for key, each in items_of(value):
            if each is wanted:
                return f"{name}{key}"
    held = getattr(dict(own).get("self"), "__dict__", {})
    modules = held.get("_modules")  # those of a module; other classes have other things there
    for name, value in [*held.items(), *(modules.items() if isinstance(modules, dict) else ())]:
        if value is wanted:
            return f"self.{name}"
    return ""


def locals_of(frame: FrameType) -> dict[str, object]:
    """The variables of a frame, which doesn't keep what they are at this moment."""
    held = frame.f_locals
    found = dict(held)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()  # a copy that lives as long as the frame
    return found


def items_of(value: object) -> Iterator[tuple[str, object]]:
    """The items of a small dict or list, each with its code: `['x']`, `[0]`, `.x` of a tuple."""
    if isinstance(value, Mapping) and len(value) <= _MOST_ITEMS:
        yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        fields = getattr(value, "_fields", ())
        for n, each in enumerate(value):
            yield f".{fields[n]}" if n < len(fields) else f"[{n}]", each


def modules_in(
    frame: FrameType | None,
) -> Iterator[tuple[str, torch.nn.Module, FrameType]]:
    """The modules that the user's code knows from a frame on, by variable: `ema`, `self.shadow`.

    With the frame of the variable. What a function was given goes by the name at its caller.
    """
    given: list[tuple[str, torch.nn.Module, FrameType]] = []
    for _ in range(_MOST_CALLERS):
        if frame is None:
            break
        code, arguments = frame.f_code, _arguments(frame)
        own = list(locals_of(frame).items())
        own += [(name, frame.f_globals.get(name)) for name in code.co_names]
        for name, value in own:
            if isinstance(value, torch.nn.Module):
                if name in arguments:
                    given.append((name, value, frame))
                else:
                    yield name, value, frame
                continue
            held = list(items_of(value))
            if isinstance(value, types.SimpleNamespace) or (
                isinstance(getattr(type(value), "__dict__", {}).get("__dict__"), _DICT)
            ):
                fields = object.__getattribute__(value, "__dict__")
                held += [(f".{key}", each) for key, each in list(fields.items())]
            for key, each in held:
                if isinstance(each, torch.nn.Module):
                    yield f"{name}{key}", each, frame
        frame = user_frame(frame.f_back)
    yield from given


def _arguments(frame: FrameType) -> set[str]:
    """The parameters of the function that a frame runs, but for `self`."""
    code = frame.f_code
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self"}


def model_name(frame: FrameType, model: torch.nn.Module) -> str:
    """What the user's own code around a frame calls a model: `net`, `agent.policy`; "" if nothing.

    If only libraries are around, it is what they call it.
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
    method = None if isinstance(value, torch.nn.Module) else getattr(type(value), "to", None)
    code = getattr(method, "__code__", None)
    if method is None or code is None or is_library(code.co_filename):
        return ""
    return f"{method.__qualname__} at {line_in(code.co_filename, code.co_firstlineno)}"


def raised_at(error: BaseException, *, own: bool = False) -> str:
    """The line outside of torch and ckptmove where an exception comes from; "" if none.

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
    """What an exception in a process or thread of a DataLoader said, and its line; else None."""
    head, found, rest = text_of(error).partition("Original Traceback (most recent call last):")
    if not found or not any(each in head for each in ("DataLoader", "pin memory")):
        return None
    lines = [each for each in rest.splitlines() if each and not each.startswith(" ")]
    frames = _FRAME.findall(rest)
    users = [f"{_spell(file)}:{number}" for file, number in frames if is_users(file)]
    return (lines[0], users[-1] if users else "") if lines else None


def error_line(error: BaseException) -> str:
    """An exception in a line, and where it comes from."""
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


def raising_module(error: BaseException) -> str:
    """The user's variable of the innermost module that an exception comes through; "" if none.

    It is one that the innermost code of the user's own calls, and that it knows by a variable.
    """
    own: FrameType | None = None
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        running = locals_of(frame).get("self")
        if not is_library(frame.f_code.co_filename):
            own, found = frame, ""
        elif own is not None and isinstance(running, torch.nn.Module):
            found = variable(own, running) or found
        traceback = traceback.tb_next
    return found


def raised_in(error: BaseException, module: torch.nn.Module) -> str:
    """The name of the innermost module whose code an exception comes through; "" if none."""
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
    """Whether this is a file of the user's, or of a library that uses torch."""
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
