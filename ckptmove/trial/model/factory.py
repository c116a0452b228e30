"""Build the model that the user names with `--model`.

The name refers to one of:

- a function or class in the user's code;
- a folder of a transformers or diffusers model: only its config.json is used, no weights and no
  network;
- a program (TorchScript, `torch.export`), which is itself the model;
- a whole pickled module, only if trusted. No other part of ckptmove runs a pickle.
"""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError, UnsupportedError, UsageError
from ..sandbox import configurations, exported_programs, torchscript
from .import_by_name import import_named, is_named

#: A function or class that makes a module, or its name; or a path.
Model = str | os.PathLike[str] | Callable[..., Any]


@dataclass(frozen=True)
class BuiltModel:
    """A model, without the checkpoint's values."""

    module: torch.nn.Module
    #: `code`, `huggingface`, `diffusers`, `torchscript`, `export` or `pickle`.
    kind: str
    config: Any = None
    #: The positional and keyword inputs with which an exported program was traced.
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def is_program(self) -> bool:
        """Whether the model's values and devices come from its own file."""
        return self.kind in ("torchscript", "export", "pickle")


def is_of_file(model: Model | None) -> bool:
    """Whether a model is made from a file or folder, or from the checkpoint (None)."""
    if model is None:
        return True
    return isinstance(model, (str, os.PathLike)) and Path(model).exists()


def build_model(model: Model, *, trust_pickle: bool = False, fmt: str | None = None) -> BuiltModel:
    """Build the named model; `trust_pickle` allows unpickling a module, which runs its code.

    Raises:
        UsageError: nothing has this name, or it is not a model.
        UnsupportedError: the file could run code and is not trusted. Any other exception is the
            model's own failure.
    """
    if not isinstance(model, (str, os.PathLike)):
        return BuiltModel(_module(model, "the model"), "code")
    spec = os.fspath(model)
    path = Path(spec)
    if path.is_dir():
        return _of_folder(path)
    if path.name == "config.json" and path.is_file():
        return _of_folder(path.parent)
    if path.is_file() and path.suffix == ".py":
        raise UsageError(
            f"--model {spec!r} is a file; the name of the model in it is missing",
            hint=f"write {spec}:Net, where Net makes the model",
        )
    if path.is_file():
        return _file(path, trust_pickle, fmt)
    if not is_named(spec):
        raise UsageError(
            f"--model {spec!r} is neither a file or folder nor a name in Python code",
            hint="write package.module:factory, or path/to/file.py:factory",
        )
    return BuiltModel(_module(import_named(spec, "--model"), f"--model {spec}"), "code")


def _module(factory: Any, what: str) -> torch.nn.Module:
    if isinstance(factory, torch.nn.Module):
        return factory
    if not callable(factory):
        raise UsageError(f"{what} is a {type(factory).__name__}, which does not make a model")
    needed = _needed(factory)
    if needed:
        raise UsageError(
            f"{what} can't be called without arguments: it needs {', '.join(needed)}",
            hint="give a function that returns the model",
        )
    module = factory()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{what} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def _needed(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in varying]


# -- Hugging Face ----------------------------------------------------------------------------------


def import_classes(folder: Path) -> None:
    """Import the library code that a folder's configuration needs, if any."""
    with suppress(Exception):  # a failure is reported when the code is needed
        said = json.loads((folder / "config.json").read_bytes())
        if _is_of_diffusers(said):
            _class_of_diffusers(said)
            return
        import transformers

        for name in ("AutoModel", *_architectures(said)):
            getattr(transformers, name, None)
        # The code of a model whose configuration names no class.
        transformers.MODEL_MAPPING.get(transformers.CONFIG_MAPPING[said["model_type"]], None)


def _architectures(said: Mapping[str, Any]) -> list[str]:
    """The classes of transformers that a configuration names."""
    names = said.get("architectures")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def _of_folder(folder: Path) -> BuiltModel:
    """The model of a folder's configuration, built by transformers or diffusers."""
    file = folder / "config.json"
    if not file.is_file():
        raise _without_configuration(folder)
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError("config.json is not JSON", path=str(file)) from error
    if not isinstance(said, dict):
        raise UsageError("config.json holds no configuration", path=str(file))
    if _is_of_diffusers(said):
        return _diffusers(said, file)
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a Hugging Face folder needs the transformers library", hint="pip install transformers"
        ) from error
    _refuse_danger(said, transformers.CONFIG_MAPPING, file)
    with _quiet(transformers.utils.logging):
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        names = _architectures(said)
        for name in names:
            made: Any = getattr(transformers, name, None)
            if isinstance(made, type) and issubclass(made, torch.nn.Module):
                factory: Any = made
                return BuiltModel(factory._from_config(config), "huggingface", config)
        note = f"no class {names[0]} in transformers: AutoModel" if names else "AutoModel"
        module = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return BuiltModel(module, "huggingface", config, notes=(note,))


def _without_configuration(folder: Path) -> UsageError:
    """The error for a folder without a config.json, with a hint about what to name instead."""
    text = str(folder)
    if (folder / "model_index.json").is_file():
        below = sorted(str(each.parent) for each in folder.glob("*/config.json"))
        return UsageError(
            f"--model {text!r} is a pipeline of diffusers, which has several models",
            path=text,
            hint=f"name the folder of one: --model {below[0]}" if below else None,
        )
    hint = None
    if (folder / "adapter_config.json").is_file():
        hint = "an adapter needs its base model: write a function that gives the PeftModel"
    return UsageError(f"--model {text!r} is a folder without a config.json", path=text, hint=hint)


def _refuse_danger(said: dict[str, Any], known: Container[object], file: Path) -> None:
    found = configurations.danger(said, known)
    if found is not None:
        raise UnsupportedError(
            found,
            path=str(file),
            hint="use your own factory: --model path/to/file.py:factory",
        )


def _is_of_diffusers(said: Mapping[str, Any]) -> bool:
    return isinstance(said.get("_class_name"), str) and "model_type" not in said


def _diffusers(said: dict[str, Any], file: Path) -> BuiltModel:
    """A model of diffusers, made by `from_config` of its class.

    Source: diffusers/configuration_utils.py, `ConfigMixin.from_config`.
    """
    try:
        from diffusers.utils import logging
    except ImportError as error:
        raise UsageError(
            "a folder of diffusers needs the diffusers library", hint="pip install diffusers"
        ) from error
    _refuse_danger(said, (), file)
    factory = _class_of_diffusers(said)
    if factory is None:
        raise UsageError(
            f"the diffusers that is installed has no model {said['_class_name'][:60]!r}",
            path=str(file),
            hint="use your own factory: --model path/to/file.py:factory",
        )
    with _quiet(logging):
        return BuiltModel(factory.from_config(said), "diffusers")


def _class_of_diffusers(said: Mapping[str, Any]) -> Any:
    """The class that a configuration names, if it is a model class of diffusers; else None."""
    import diffusers

    made = getattr(diffusers, said["_class_name"], None)
    return made if isinstance(made, type) and issubclass(made, diffusers.ModelMixin) else None


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """A context without a library's warnings about a configuration."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


# -- files -----------------------------------------------------------------------------------------


def _file(path: Path, trust_pickle: bool, fmt: str | None) -> BuiltModel:
    fmt = _format(path) if fmt is None else fmt
    if fmt.startswith("torchscript"):
        return BuiltModel(torchscript.load_module(path, trust=trust_pickle), "torchscript")
    if fmt in ("torch-export", "pt2"):
        return _exported(path, trust_pickle)
    if not trust_pickle:
        raise UnsupportedError(
            "the file could only hold a pickled module, and unpickling it runs its code",
            path=str(path),
            hint="give the code of the model with --model, or trust the file with --trust-pickle",
        )
    made = torch.load(path, map_location="cpu", weights_only=False)
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"the pickle holds a {type(made).__name__}, not a model", path=str(path))
    note = "the pickle was trusted and run, so it may have run any code"
    return BuiltModel(made, "pickle", notes=(note,))


def _format(path: Path) -> str:
    from ... import formats

    with formats.open_checkpoint(path, follow_links=True) as found:
        return found.format


def _exported(path: Path, trust_pickle: bool) -> BuiltModel:
    """A program of torch.export; of its pickles, only plain tensors are read."""
    found = None if trust_pickle else exported_programs.danger(path)
    if found is not None:
        raise UnsupportedError(
            f"torch might run what is in the program: {found}",
            path=str(path),
            hint="trust the file with --trust-pickle",
        )
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(str(path))
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
    try:
        module = program.module()
    except Exception as error:
        raise InputError("torch can't run the program", path=str(path)) from error
    return BuiltModel(module, "export", example=program.example_inputs)
