"""Make a reproducible batch for a trial: from specs, a function, or a configuration.

A spec is `[name=]dtype[sizes][<limit]`: `float32[8,3,224,224]`, `int64[2,128]<1000`,
`mask=bool[4]`. Floating-point values are normally distributed; integers are uniformly distributed
from 0 to below the limit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import UsageError
from .factory import BuiltModel
from .import_by_name import import_named, is_named

SEED = 20240229
_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\](?:<(?P<limit>\d{1,18}))?"
)
_SIZE = re.compile(r"\d{1,18}")  # fits 64 bits; Python itself refuses thousands of digits
_BATCH, _LENGTH, _FRAMES = 2, 16, 3200  # sizes of inputs made from a configuration
_LIMIT = 2  # the default limit of integers: small enough for every vocabulary
_FULL_BYTE = 256


@dataclass(frozen=True)
class Spec:
    """One input. Integers are below `limit`; None: a default."""

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    limit: int | None = None

    def tensor(self) -> torch.Tensor:
        """A tensor with random values from torch's generator."""
        if self.dtype is torch.bool:
            return torch.randint(0, 2, self.shape).bool()
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, dtype=torch.float32).to(self.dtype)
        if self.dtype.is_complex:
            return torch.randn(self.shape, dtype=torch.complex64).to(self.dtype)
        limit = self.limit or (_FULL_BYTE if self.dtype is torch.uint8 else _LIMIT)
        return torch.randint(0, limit, self.shape).to(self.dtype)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a model's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: A description of the arguments, in one line.
    said: str
    #: Whether the batch has labels, so that a Hugging Face model returns its own loss.
    labelled: bool = False

    def to(self, device: torch.device) -> CallArguments:
        """The same batch on a device."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        args, kwargs = pytree.tree_map(moved, (self.args, self.kwargs))
        return CallArguments(args, kwargs, self.said, self.labelled)


def parse_spec(spec: str) -> Spec:
    """The input that a spec describes.

    Raises:
        UsageError: the spec is not valid.
    """
    found = _SPEC.fullmatch(spec.strip())
    if found is None:
        raise UsageError(
            f"--input {spec!r} is not valid",
            hint="write float32[8,3,224,224], int64[2,128]<1000, name=bool[4], or "
            "package.module:function",
        )
    dtype = getattr(torch, found["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {spec!r}: torch has no dtype {found['dtype']!r}")
    sizes = [size.strip() for size in found["shape"].split(",")] if found["shape"].strip() else []
    if not all(_SIZE.fullmatch(size) for size in sizes):
        raise UsageError(f"--input {spec!r}: a size is missing or too large")
    limit = None if found["limit"] is None else int(found["limit"])
    if limit is not None and (limit < 1 or dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"--input {spec!r}: a limit must be above 0, and needs an integer dtype")
    return Spec(found["name"], dtype, tuple(map(int, sizes)), limit)


def check(specs: Sequence[str]) -> None:
    """Check that specs are valid, without making tensors.

    Raises:
        UsageError: they are not.
    """
    named = [spec for spec in specs if is_named(spec)]
    if named and len(specs) > 1:
        raise UsageError(
            f"--input {named[0]}: a function gives all inputs, so it must be the only --input"
        )
    if not named:
        names = [parse_spec(spec).name for spec in specs]
        twice = {name for name in names if name is not None and names.count(name) > 1}
        if twice:
            raise UsageError(f"--input {min(twice)} is given twice")


def batch(specs: Sequence[str], built: BuiltModel, *, train: bool) -> CallArguments:
    """The batch, on the CPU; equal specs give equal values.

    Raises:
        UsageError: a spec is not valid, or a required one is missing.
    """
    torch.manual_seed(SEED)
    if specs:
        check(specs)
        made = _given(specs)
    elif built.config is not None:
        made = _configured(built)
    elif built.example is not None:
        args, kwargs = built.example
        made = CallArguments(
            tuple(args), dict(kwargs), "the example input that the program was traced with"
        )
    else:
        raise UsageError(
            "the input of this model is not known",
            hint="for example --input 'float32[8,3,224,224]'",
        )
    return _labelled(built, made) if train and built.config is not None else made


def _given(specs: Sequence[str]) -> CallArguments:
    if is_named(specs[0]):
        made = import_named(specs[0], "--input")
        return _called(made() if callable(made) else made, specs[0])
    inputs = [parse_spec(spec) for spec in specs]
    args = tuple(each.tensor() for each in inputs if each.name is None)
    kwargs = {each.name: each.tensor() for each in inputs if each.name is not None}
    return CallArguments(args, kwargs, ", ".join(spec.strip() for spec in specs))


def _called(made: Any, spec: str) -> CallArguments:
    said = f"the result of {spec}"
    if isinstance(made, Mapping):
        return CallArguments((), {str(key): value for key, value in made.items()}, said)
    if isinstance(made, (tuple, list)):
        return CallArguments(tuple(made), {}, said)
    return CallArguments((made,), {}, said)


# -- Hugging Face ----------------------------------------------------------------------------------


def _configured(built: BuiltModel) -> CallArguments:
    """A batch for a model of transformers, by its main input and its configuration."""
    config = built.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main = getattr(built.module, "main_input_name", "input_ids")
    takes = _takes(built.module)
    if main == "pixel_values":
        kwargs = _pictures(config)
        if "input_ids" in takes:
            kwargs |= _words(text, takes)
    elif main == "input_values":
        kwargs = {"input_values": torch.randn(_BATCH, _FRAMES)}
    elif main == "input_ids":
        kwargs = _words(text, takes)
        if getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = kwargs["input_ids"].clone()
        if hasattr(built.module, "logit_scale"):  # it compares words with pictures, like CLIP
            kwargs |= _pictures(config)
    else:
        raise UsageError(
            f"{type(built.module).__name__} takes {main}; its config.json does not "
            "describe it fully",
            hint=f"for example --input '{main}=float32[2,80,3000]'",
        )
    floating = next((p.dtype for p in built.module.parameters() if p.is_floating_point()), None)
    for name, value in kwargs.items():
        if value.is_floating_point() and floating is not None:
            kwargs[name] = value.to(floating)
    said = ", ".join(f"{name} {_spell(value)}" for name, value in kwargs.items())
    return CallArguments((), kwargs, f"{said}, from its config.json")


def _pictures(config: Any) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    sides = getattr(vision, "image_size", 224)
    height, width = sides if isinstance(sides, (tuple, list)) else (sides, sides)
    shape = (_BATCH, getattr(vision, "num_channels", 3), height, width)
    return {"pixel_values": torch.randn(shape)}


def _takes(module: torch.nn.Module) -> set[str]:
    forward: Callable[..., Any] = module.forward
    return set(inspect.signature(forward).parameters)


def _words(config: Any, takes: set[str]) -> dict[str, torch.Tensor]:
    longest = getattr(config, "max_position_embeddings", None) or _LENGTH
    # Some models (RoBERTa) number positions from after the padding index.
    length = max(1, min(_LENGTH, longest - 2)) if longest > 2 else longest
    vocabulary = getattr(config, "vocab_size", None) or _LIMIT
    padding = getattr(config, "pad_token_id", None)
    ids = torch.randint(0, vocabulary, (_BATCH, length))
    if padding is not None and vocabulary > 1:
        ids = torch.where(ids == padding, (padding + 1) % vocabulary, ids)
    mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in takes else {}
    return {"input_ids": ids, **mask}


def _labelled(built: BuiltModel, made: CallArguments) -> CallArguments:
    """The batch, with labels if the model is of a class whose loss is known to take them."""
    kind = type(built.module).__name__
    words = made.kwargs.get("input_ids")
    first = next((v for v in made.kwargs.values() if isinstance(v, torch.Tensor)), None)
    if "labels" not in _takes(built.module) or "labels" in made.kwargs or first is None:
        return made
    labels = None
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        labels = words
    elif kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        labels = torch.zeros(first.shape[0], dtype=torch.int64)
    elif kind.endswith("ForTokenClassification") and words is not None:
        labels = torch.zeros_like(words)
    if labels is None:
        return made
    kwargs = {**made.kwargs, "labels": labels.clone()}
    return CallArguments(made.args, kwargs, f"{made.said}, with labels", labelled=True)


def _spell(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}".replace(" ", "")
