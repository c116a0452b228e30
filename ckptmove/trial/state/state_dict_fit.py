"""Check strictly whether a model accepts the state of a checkpoint, and if not, why.

The check is that of `load_state_dict(strict=True)`: missing, unexpected and misshapen tensors. In
addition, tied weights may be missing, and dtypes must agree, because torch casts silently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ...display.phrases import join_names, plural, show_name
from ...errors import UsageError
from .checkpoint_state import SavedCheckpoint, State

#: From this likeness on, a state dict may be the model's, even if its keys have other prefixes.
_LIKE = 0.2
_MOST_PREFIX = 4  # parts of a key that may be a prefix
#: Prefix → the wrapper that puts it before every key.
_WRAPPERS = {
    "module": "nn.DataParallel, DistributedDataParallel or DeepSpeed",
    "_orig_mod": "torch.compile",
    "model": "Lightning, or another wrapper",
    "base_model.model": "PEFT",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FSDP",
}


@dataclass(frozen=True)
class Fit:
    """How a state dict fits a model."""

    state: State
    matched: int
    missing: Sequence[str]
    unexpected: Sequence[str]
    #: Key, the model's shape, the checkpoint's shape.
    misshaped: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    #: Key, the model's dtype, the checkpoint's dtype, where only some tensors differ.
    retyped: Sequence[tuple[str, str, str]]
    #: The model's and the saved dtype, where all tensors of a dtype differ alike: harmless.
    cast: Sequence[tuple[str, str]]
    #: Pairs of keys that are one tensor in the model, but differ in the checkpoint.
    untied: Sequence[tuple[str, str]]
    #: Missing keys whose tensor is in the checkpoint under another key of the model.
    tied: Sequence[str]

    @property
    def loads(self) -> bool:
        """Whether torch would load it."""
        return not (self.missing or self.unexpected or self.misshaped)

    @property
    def ok(self) -> bool:
        """Whether it is the model's state, as far as known without running the model."""
        return self.loads and not self.retyped and not self.untied

    def title(self) -> str:
        """A line that counts the problems, or says that there are none."""
        if self.ok:
            return f"the model accepts all {plural(self.matched, 'tensor')}"
        wrong = [
            (len(self.missing), "key", "missing"),
            (len(self.unexpected), "key", "unexpected"),
            (len(self.misshaped), "tensor", "mis-shaped"),
            (len(self.retyped), "tensor", "of another dtype"),
            (len(self.untied), "tensor", "no longer tied"),
        ]
        return ", ".join(f"{plural(n, what)} {how}" for n, what, how in wrong if n)

    def details(self) -> list[str]:
        """Lines about the problems, in groups, with the likely causes and remedies."""
        lines = [*self._causes()]
        if self.missing:
            lines.append(f"missing: {join_names(self.missing)}")
        if self.unexpected:
            lines.append(f"unexpected: {join_names(self.unexpected)}")
        lines += [
            f"wrong shape: {show_name(key)} is {_shape(saved)}, the model's is {_shape(own)}"
            for key, own, saved in self.misshaped[:8]
        ]
        lines += [
            f"dtype: {show_name(key)} is {saved}, the model's is {own}"
            for key, own, saved in self.retyped[:8]
        ]
        lines += [
            f"untied: {show_name(key)} and {show_name(other)} are one tensor in the model, "
            "but differ in the checkpoint"
            for key, other in self.untied[:8]
        ]
        if self.tied:
            lines.append(
                f"tied: {join_names(self.tied)} not stored, because they equal a stored tensor"
            )
        lines += [f"cast: all {saved} tensors become the model's {own}" for own, saved in self.cast]
        return lines

    def _causes(self) -> list[str]:
        lines = []
        prefix = _prefix(self.unexpected, self.missing)
        if prefix:
            who = f" ({_WRAPPERS[prefix]})" if prefix in _WRAPPERS else ""
            lines.append(
                f"all keys start with `{prefix}.`{who}: ckptmove convert --strip-prefix {prefix}"
            )
        added = _prefix(self.missing, self.unexpected)
        if added:
            lines.append(
                f"the model's keys start with `{added}.`, the checkpoint's don't: "
                f"ckptmove convert --add-prefix {added}"
            )
        if any(".lora_" in key or ".base_layer." in key for key in self.unexpected):
            lines.append(
                "keys of a LoRA or other PEFT adapter: merge it, or wrap the model with PEFT"
            )
        if any(key.endswith(("weight_g", "weight_v", ".original0")) for key in self.unexpected):
            lines.append(
                "weight normalization: torch has two key formats for it, and this is the other one"
            )
        turned = [key for key, own, saved in self.misshaped if own == saved[::-1]]
        if turned:
            lines.append(
                f"transposed: {join_names(turned)} (GPT-2's Conv1D, or a kernel of another library)"
            )
        rows = [
            key
            for key, own, saved in self.misshaped
            if key not in turned and own[1:] == saved[1:] and len(own) == len(saved)
        ]
        if rows:
            lines.append(
                f"different number of rows: {join_names(rows)} "
                "(number of classes, or vocabulary size)"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "state_dict": self.state.name,
            "matched": self.matched,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "misshaped": [
                {"key": key, "model": list(own), "checkpoint": list(saved)}
                for key, own, saved in self.misshaped
            ],
            "retyped": [
                {"key": key, "model": own, "checkpoint": saved} for key, own, saved in self.retyped
            ],
            "cast": [{"model": own, "checkpoint": saved} for own, saved in self.cast],
            "untied": [list(pair) for pair in self.untied],
            "tied": list(self.tied),
        }


def chosen(module: torch.nn.Module, saved: SavedCheckpoint) -> tuple[State | None, list[State]]:
    """Choose the state dict of a checkpoint whose keys fit the model best.

    Averages of its weights (EMA) are chosen only if no other weights fit.

    Returns:
        The state dict, or None if there is none; and all averages that fit, which may include it.

    Raises:
        UsageError: several state dicts fit equally well.
    """
    own = set(module.state_dict())
    scored = [(_likeness(own, state.content), state) for state in saved.states]
    if not scored:
        return None, []
    averages = [state for score, state in scored if score and saved.is_average(state)]
    weights = [(score, state) for score, state in scored if not saved.is_average(state)]
    if any(score >= _LIKE for score, _ in weights):
        scored = weights
    best = max(score for score, _ in scored)
    fitting = [state for score, state in scored if score == best]
    same = {id(state.content) for state in fitting}
    if len(same) > 1 and best > 0:
        names = join_names([state.name for state in fitting])
        raise UsageError(
            f"several state dicts match the model equally well: {names}",
            hint=f"convert one of them first: ckptmove convert --root {fitting[0].name}",
        )
    return max(fitting, key=lambda state: len(state.content)), averages


def _likeness(own: Collection[str], state: Mapping[Any, Any]) -> float:
    """How similar the keys of the model and of the state dict are, apart from prefixes."""
    keys = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
    same = len(keys & set(own))
    if not same:
        tails = {key.rpartition(".")[0].rpartition(".")[2] + key.rpartition(".")[2] for key in own}
        same_tails = sum(
            key.rpartition(".")[0].rpartition(".")[2] + key.rpartition(".")[2] in tails
            for key in keys
        )
        return 0.5 * same_tails / max(1, len(keys) + len(own))
    return 1 + same / max(1, len(keys) + len(own) - same)


def fit_state(
    module: torch.nn.Module, state: State, valued: Callable[[], Mapping[Any, Any]] | None = None
) -> Fit:
    """Compare a state dict with a model; `valued` returns it with values, if it has none."""
    own = module.state_dict(keep_vars=True)
    content = state.content
    extra = {key for key in (*content, *own) if str(key).endswith("_extra_state")}
    missing = [key for key in own if key not in content and key not in extra]
    unexpected = [str(key) for key in content if key not in own and key not in extra]
    groups: dict[int, list[str]] = {}
    for key, value in own.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(key)
    twins = {key: group for group in groups.values() if len(group) > 1 for key in group}
    tied = [key for key in missing if any(other in content for other in twins.get(key, ()))]
    both = [
        (key, value, content[key])
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and isinstance(content.get(key), torch.Tensor)
    ]
    shapes = [
        (key, tuple(value.shape), tuple(saved.shape))
        for key, value, saved in both
        if not _is_any_shape(value) and not saved.is_nested and value.shape != saved.shape
    ]
    retyped, cast = _dtypes(both)
    return Fit(
        state,
        len(both),
        [key for key in missing if key not in tied],
        unexpected,
        shapes,
        retyped,
        cast,
        [pair for group in groups.values() for pair in _untied(group, content, valued)],
        tied,
    )


def _is_any_shape(own: torch.Tensor) -> bool:
    """Whether torch, not we, decides if a saved tensor has the shape of the model's."""
    return is_lazy(own) or own.is_nested  # a lazy module takes its shapes from the state


def _dtypes(
    both: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """The tensors with another dtype, and pairs of dtypes where all tensors of one differ alike."""
    kinds: dict[torch.dtype, set[torch.dtype]] = {}
    for _, own, saved in both:
        kinds.setdefault(own.dtype, set()).add(saved.dtype)
    whole = {
        own: next(iter(saved))
        for own, saved in kinds.items()
        if len(saved) == 1 and own not in saved
        # Integers are counters and indices, which are not cast on purpose.
        if own.is_floating_point and next(iter(saved)).is_floating_point
    }
    retyped = [
        (key, _dtype(own.dtype), _dtype(saved.dtype))
        for key, own, saved in both
        if own.dtype != saved.dtype and own.dtype not in whole
    ]
    return retyped, [(_dtype(own), _dtype(saved)) for own, saved in whole.items()]


def _untied(
    group: Sequence[str],
    content: Mapping[Any, Any],
    valued: Callable[[], Mapping[Any, Any]] | None,
) -> list[tuple[str, str]]:
    """Pairs of keys of one tensor in the model that are different tensors in the checkpoint."""
    first, *others = [key for key in group if isinstance(content.get(key), torch.Tensor)] or [""]
    apart = [key for key in others if not _shared(content[first], content[key])]
    if apart and valued is not None:
        content = valued()
    return [(first, key) for key in apart if not _same(content[first], content[key])]


def _shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with _disable_current_modes():
        return one.layout is not torch.strided or bits_equal(one, other)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors with the same shape and dtype are equal in every bit, even in NaNs."""
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return bool(torch.equal(*flat))


def _prefix(with_it: Sequence[str], without: Sequence[str]) -> str:
    """The prefix that all keys in `with_it` have and the keys in `without` lack; "" if none."""
    if not with_it:
        return ""
    parts = with_it[0].split(".")
    bare = set(without)
    for n in range(1, min(_MOST_PREFIX, len(parts) - 1) + 1):
        prefix = ".".join(parts[:n])
        if all(key.startswith(f"{prefix}.") for key in with_it):
            stripped = sum(key[len(prefix) + 1 :] in bare for key in with_it)
            if stripped and stripped >= 0.9 * len(with_it):
                return prefix
    return ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "0-d"


# -- loading ---------------------------------------------------------------------------------------


def loaded_into(
    module: torch.nn.Module,
    fit: Fit,
    made: Callable[[torch.Tensor], torch.Tensor] = lambda saved: saved,
) -> None:
    """Load the state dict strictly, except that tied tensors may be missing.

    `made` returns the tensor to load for a saved one. A model without values (on `meta`) gets
    copies of the saved tensors, as `load_state_dict(assign=True)` gives it.

    Raises:
        RuntimeError: torch refuses it.
    """
    own = module.state_dict(keep_vars=True)
    content = OrderedDict(fit.state.content)
    for key in fit.tied:
        twin = next(each for each in content if each in own and own[each] is own[key])
        content[key] = content[twin]
    bare = any(isinstance(each, torch.Tensor) and each.is_meta for each in own.values())
    for key, value in content.items():
        if isinstance(value, torch.Tensor):
            content[key] = made(value)
            if bare:
                content[key] = content[key].to(own[key].dtype, copy=True)
    versions = getattr(fit.state.content, "_metadata", None)
    if versions is not None:  # a module may read the state of an earlier version of itself
        cast("Any", content)._metadata = versions
    module.load_state_dict(content, strict=True, assign=bare)
