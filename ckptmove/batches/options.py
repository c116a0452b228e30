"""Check the options of a verb in a batch, and adapt them to each item."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ..api.convert import check_options, convert
from ..api.inspect import inspect
from ..api.options import Declaration, Option, former_names, options_of, with_current_names
from ..api.relocate import relocate
from ..api.validate import validate
from ..errors import InputError, StrPath, UsageError
from ..manifest.device import parse
from ..placement.rules import rules_of
from ..sources import place_of
from ..sources.filesystem import stamp_of
from ..sources.known_objects import known_about
from .outputs import bare_name

VerbName = Literal["inspect", "relocate", "convert", "validate"]
VERBS: Mapping[str, Callable[..., Any]] = {
    "inspect": inspect,
    "relocate": relocate,
    "convert": convert,
    "validate": validate,
}
_FORCE = Option("Replace reports in DST that this command did not write.", group="Destination")


def item_options(verb: str) -> dict[str, Declaration]:
    """Return the options of a verb that apply to each item; `dry_run` is an option of the batch."""
    options = dict(options_of(VERBS[verb]))
    options.pop("dry_run", None)
    options.pop("allow_unmatched", None)  # a rule for a tree need not match in each item
    if verb == "validate":
        options["force"] = Declaration("force", _FORCE, (bool,), False)
    return options


def resolve_options(verb: str, dst: StrPath | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a verb for all items, without defaults; reads a device map."""
    if verb not in VERBS:
        raise UsageError(f"{verb!r} is not a verb of batch", hint=f"one of {', '.join(VERBS)}")
    declared = item_options(verb)
    options = dict(options)
    with_current_names(options, former_names(declared))
    for name in options:
        if name not in declared:
            raise UsageError(f"batch {verb} has no option {name!r}")
    given = {
        name: _plain(value)
        for name, value in options.items()
        if value is not None and value != declared[name].default and value not in ((), [], {})
    }
    if verb == "relocate":
        found = rules_of(
            to=given.get("to"),
            map=given.get("map"),
            place=given.get("place"),
            device_map=given.get("device_map"),
        )
        if "device_map" in given:
            given["device_map"] = dict(found.device_map)
        if bool(given.get("in_place")) == (dst is not None):
            raise UsageError("give either a destination or --in-place")
    elif verb == "convert":
        if dst is None:
            raise UsageError("the destination is missing")
        check_options(given)
    elif verb == "inspect":
        if dst is not None:
            raise UsageError("inspect writes nothing: it takes no destination")
        if "require" in given:
            parse(given["require"])
    return given


def _plain(value: Any) -> Any:
    """Return the value of an option as plain data, so that another process can unpickle it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch":  # a device or a dtype, by its name
        return str(value).removeprefix("torch.")
    if not isinstance(value, (str, int, float)) and isinstance(value, Iterable):
        return tuple(_plain(each) for each in value)
    return value


def code_of(model: object) -> str | None:
    """Return the file or folder with the code of the model, `path/to/file.py:Net`, if any."""
    if not isinstance(model, str):
        return None
    return next((each for each in (model, model.rpartition(":")[0]) if os.path.exists(each)), None)


def absolute(path: StrPath) -> str:
    """Return an absolute path; a URL is absolute already."""
    return place_of(path).absolute()


def from_root(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with absolute paths, so that they work in any working directory."""
    found = dict(options)
    if isinstance(found.get("against"), (str, os.PathLike)):
        found["against"] = absolute(found["against"])
    code = code_of(found.get("model"))
    if code is not None:
        found["model"] = os.path.abspath(code) + str(found["model"])[len(code) :]
    return found


class ReferenceTree:
    """Another tree; checkpoints of this tree are compared with its checkpoints."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._alike: dict[str, dict[str, list[str]]] = {}

    @staticmethod
    def stamp_of(path: str) -> str:
        """Return the stamp of an object of the tree, as far as it was listed; empty otherwise."""
        about = known_about(path)
        return "" if about is None or about.get("type") == "directory" else stamp_of(about)

    def of(self, name: str) -> str:
        """Return the checkpoint of the same name there, or the only one with another suffix.

        `run.pt.safetensors`, as --keep-suffix names it, is also that of `run.pt`.
        """
        place, last = place_of(self._root).child(name), name.rpartition("/")[2]
        folder = place.parent
        if folder.path not in self._alike:
            alike = self._alike[folder.path] = dict[str, list[str]]()
            with contextlib.suppress(InputError):
                for each in folder.entries():
                    alike.setdefault(bare_name(each.name), []).append(each.name)
        alike, bare = self._alike[folder.path], bare_name(last)
        if last in alike.get(bare, ()):
            return place.path
        found = [bare] if bare in alike.get(bare_name(bare), ()) else alike.get(bare, [])
        return folder.child(found[0]).path if len(found) == 1 else place.path
