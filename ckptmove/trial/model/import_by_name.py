"""Import code that the user names: `package.module:name`, or `path/to/file.py:name`.

ckptmove imports no other user code, and this code only because the user named it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import UsageError


def is_named(spec: str) -> bool:
    """Whether a text is spelled like a name in code, not like a path."""
    place, colon, name = spec.rpartition(":")
    dotted = all(part.isidentifier() for part in place.split("."))
    return bool(colon and place and _is_dotted(name)) and (dotted or place.endswith(".py"))


def optimizer_name(spec: str) -> str:
    """The full name of an optimizer in code: a bare name, such as `SGD`, is in torch.optim."""
    return f"torch.optim:{spec}" if spec.isidentifier() else spec


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def import_named(spec: str, what: str) -> Any:
    """Import the object with a name.

    Raises:
        UsageError: there is no such module, file or name. Any other exception comes from the
            imported code.
    """
    place, _, name = spec.rpartition(":")
    if not is_named(spec):
        raise UsageError(
            f"{what} {spec!r} is not a name in Python code",
            hint="write package.module:name, or path/to/file.py:name",
        )
    module = _of_file(place, what) if place.endswith(".py") else _of_package(place, what)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UsageError(f"{what}: {place} has no {name!r}") from error
    return found


def _of_package(name: str, what: str) -> Any:
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):  # `python -m` adds the folder, an installed command doesn't
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise UsageError(
            f"{what}: there is no module {missing!r}",
            hint="run ckptmove in the folder of the module, or give a file: path/to/file.py:name",
        ) from error


def _of_file(place: str, what: str) -> Any:
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"{what}: there is no file {place!r}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else None
    name = name or f"_ckptmove_{abs(hash(path))}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    sys.path.append(str(path.parent))  # it may import modules beside it
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def importable_name(function: Callable[..., Any]) -> str | None:
    """The name by which another process can import a function; None if it has none."""
    name = getattr(function, "__qualname__", "")
    module = inspect.getmodule(function)
    if module is None or not name or not _is_dotted(name):  # `<lambda>`, `<locals>`
        return None
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or importlib.util.find_spec(module.__name__) is None:
        return None if file is None else f"{file}:{name}"
    return f"{module.__name__}:{name}"
