"""Declare an option of a verb once: for its signature and docs, for the command line and `batch`.

The annotation of a parameter declares it: `name: Annotated[str | None, Option("What it does.")]`.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, cleandoc, signature
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from ..errors import UsageError, descriptor_error

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WIDTH = 96  # columns of a docstring


class Option(NamedTuple):
    """What a parameter does. The signature has its name, its type and usually its default."""

    #: What it does, in the words of the command line: SRC and `--other-option`.
    help: str
    #: The placeholder of its value. `KEY=VALUE` makes it a mapping; in `[KEY=]VALUE` the key is
    #: optional.
    metavar: str = ""
    #: The heading above it in the help of a command that has many options; that of the option
    #: before it if empty.
    group: str = ""
    #: What a default of None means.
    default: str = ""
    #: Its parameter in an earlier version, still accepted.
    former: str = ""
    #: Its letter on the command line, if it has one.
    short: str = ""
    #: More text for the docs of the function.
    python: str = ""
    #: A sentence about its metavar, for the help and the docs of the verb.
    value: str = ""
    #: The side of `KEY=VALUE` that may itself contain a `=`.
    equals_in: Literal["key", "value"] = "key"


class Declaration(NamedTuple):
    """An option, with its name, type and default from the signature."""

    name: str
    option: Option
    types: tuple[Any, ...]  #: the types that a value may have, except None
    default: Any

    @property
    def is_mapping(self) -> bool:
        """Whether the option takes a mapping."""
        return "=" in self.option.metavar

    @property
    def is_repeatable(self) -> bool:
        """Whether the option takes several values."""
        several = any(get_origin(each) in (Iterable, Sequence) for each in self.types)
        return several or self.is_mapping

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if the type lists them."""
        return next((get_args(each) for each in self.types if get_origin(each) is Literal), ())


def options_of(function: Callable[..., Any]) -> Mapping[str, Declaration]:
    """Return the options of a verb by parameter name, in the order of its signature."""
    found: Mapping[str, Declaration] = function.options  # type: ignore[attr-defined]
    return found


def former_names(options: Mapping[str, Declaration]) -> dict[str, str]:
    """Return the former names of these options, with their current names."""
    return {each.option.former: name for name, each in options.items() if each.option.former}


def values_of(options: Mapping[str, Declaration]) -> str:
    """Return a paragraph on the values of these options; empty if no option describes them."""
    return " ".join(each.option.value for each in options.values() if each.option.value)


def declare_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Read the options of a function, describe them in its docs, and accept their former names.

    Its signature then shows plain types.
    """
    written = signature(function, eval_str=True)
    options = _declarations(written.parameters.values())
    current = former_names(options)

    @functools.wraps(function)
    def verb(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with_current_names(kwargs, current)
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if (known := descriptor_error(error)) is None:
                raise
            raise known from error

    plain = written.replace(parameters=[_without_option(p) for p in written.parameters.values()])
    verb.options = MappingProxyType(options)  # type: ignore[attr-defined]
    verb.__signature__ = plain  # type: ignore[attr-defined]
    verb.__annotations__ = {
        **{name: each.annotation for name, each in plain.parameters.items()},
        "return": plain.return_annotation,
    }
    verb.__doc__ = _docs_with_options(cleandoc(function.__doc__ or ""), plain.parameters, options)
    return verb


def with_current_names(arguments: dict[str, Any], current: Mapping[str, str]) -> None:
    """Rename arguments with a former name, and warn; using both names is a UsageError."""
    for old, new in current.items():
        if old not in arguments:
            continue
        if new in arguments:
            raise UsageError(f"{old} is the former name of {new}; both are given")
        arguments[new] = arguments.pop(old)
        warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)


def _declarations(parameters: Iterable[Parameter]) -> dict[str, Declaration]:
    """Return the declarations of these parameters, by name."""
    declared, group = dict[str, Declaration](), "General"
    for each in parameters:
        for option in getattr(each.annotation, "__metadata__", ()):
            plain, group = each.annotation.__origin__, option.group or group
            either = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
            types = tuple(kind for kind in either if kind is not NoneType)
            option = option._replace(group=group)
            declared[each.name] = Declaration(each.name, option, types, each.default)
    return declared


def _without_option(parameter: Parameter) -> Parameter:
    annotation = parameter.annotation
    return parameter.replace(annotation=getattr(annotation, "__origin__", annotation))


def _docs_with_options(
    text: str, parameters: Mapping[str, Parameter], options: Mapping[str, Declaration]
) -> str:
    """Add the options to a docstring, under `Args`, in the order of the signature."""
    before, heading, after = text.partition("\nArgs:\n")
    written, *rest = after.split("\n\n", 1)
    entries = {each.split(":")[0].strip(" *"): each for each in re.split(r"\n(?=    \S)", written)}
    entries |= {name: _entry(each, parameters, options) for name, each in options.items()}
    shown = [entries[name] for name in parameters if name in entries]
    if values := values_of(options):
        before += f"\n{_fill(values)}\n"
    return before + heading + "\n\n".join(["\n".join(shown), *rest])


def _entry(
    declared: Declaration, parameters: Mapping[str, Parameter], options: Mapping[str, Declaration]
) -> str:
    """Return the text about an option for the docs of a function."""

    def in_python(found: re.Match[str]) -> str:
        name = found[0].lstrip("-").replace("-", "_").lower()
        is_meant = name in options if found[0].startswith("-") else name not in options
        return f"`{name}`" if name in parameters and is_meant else found[0]

    option = declared.option
    texts = [re.sub(r"--[a-z-]+[a-z]|\b[A-Z]{3,}\b", in_python, option.help), option.python]
    if declared.is_mapping:
        key, value = re.findall(r"[A-Z]+", option.metavar)
        one = f"One {value}, or a" if option.metavar.startswith("[") else "A"
        texts.append(f"{one} mapping from {key} to {value}.")
    elif declared.is_repeatable:
        texts.append(f"One {option.metavar}, or several.")
    if option.default:
        texts.append(f"Default: {option.default}.")
    text = " ".join(filter(None, texts))
    first = text[0].lower() if text[1:2] == " " or text[1:2].islower() else text[0]
    return _fill(f"{declared.name}: {first}{text[1:]}", " " * 4, " " * 8)


def _fill(text: str, first: str = "", others: str = "") -> str:
    """Wrap a text into lines with these indents."""
    lines, line = list[str](), first
    for word in text.split():
        if line.strip() and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = others
        line += f" {word}" if line.strip() else word
    return "\n".join([*lines, line])


# -- options of several verbs ---------------------------------------------------------------------

Strict = Annotated[
    bool, Option("Refuse files that name callables not known to be harmless.", group="Safety")
]
#: ZeRO saves two copies of the weights: one for the optimizer, one for the model.
OF_ZERO = ("master", "module")
Weights = Literal["model", "ema", "master", "module"]
OF_WHICH_WEIGHTS = (
    "only the state dict of one model; or its averaged weights (EMA, SWA) under the names that the "
    "model uses; or from ZeRO, the weights that its optimizer has in float32 (master), or those in "
    "the dtype that the model trained with (module)."
)
FollowLinks = Annotated[
    bool,
    Option("Follow symbolic links that lead out of the folder of a checkpoint.", group="Safety"),
]
DryRun = Annotated[bool, Option("Show what would be done; write nothing.", group="Destination")]
ForceLarger = Annotated[
    bool,
    Option(
        "Replace an existing destination; allow a result more than eight times the size of SRC.",
        group="Destination",
    ),
]
Format = Annotated[
    str | None,
    Option(
        "safetensors, torch-zip, zip-bundle (a dict of files), dcp (a folder of "
        "torch.distributed.checkpoint) or universal (a folder that DeepSpeed resumes from with "
        "`load_universal`; it needs a model and its Adam).",
        "FORMAT",
        group="Format",
        default="by the suffix of the destination",
    ),
]
Shared = Annotated[
    Literal["keep", "duplicate", "error"],
    Option(
        "What to do with bytes that tensors share: write them once and note the other names "
        "(keep), write them under each name (duplicate), or refuse (error).",
        group="Format",
    ),
]
BARE = Option("Write tensors only; the result cannot be converted back.", group="Format")
Metadata = Annotated[
    Mapping[str, str] | None,
    Option(
        "Add text to the header of safetensors.", "KEY=VALUE", group="Format", equals_in="value"
    ),
]
MaxShardSize = Annotated[
    int | str | None,
    Option(
        "Write a folder of files of at most SIZE, for example 5GB.",
        "SIZE",
        group="Format",
        python="A number is bytes.",
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        "With --format dcp: divide the rows of tensors among N files, as N ranks do. Any number of "
        "ranks can load the result.",
        "N",
        group="Format",
        default="1",
    ),
]
Input = Annotated[
    str | Sequence[str],
    Option(
        "The inputs of the model, in order.",
        "SPEC",
        "Model",
        value="SPEC is `float32[8,3,224,224]`, `int64[2,128]<1000` (values below 1000), "
        "`NAME=SPEC`, or the name of a function that returns the inputs.",
    ),
]
Simulate = Annotated[
    bool, Option("Simulate the device if this machine does not have it.", group="Device")
]
