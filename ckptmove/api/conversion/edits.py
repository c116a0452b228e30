"""Check the changes that `convert` and its presets ask for, and make them in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...display.phrases import join_names, plural
from ...errors import RefusedError, UsageError
from ...graph.edit.cast import Casts, Dtype, cast, casts_of
from ...graph.patterns import covers, no_match
from ...manifest.manifest import Role, Section, TensorEntry
from ...pickles.nodes import Mapping as MappingNode
from ...torch_pickle.values.tensors import Recogniser
from ..options import OF_ZERO

if TYPE_CHECKING:
    from ...graph.draft import CheckpointGraph
    from ...graph.edit.optimizer_ids import OptimizerIds
    from ...manifest.device import Device
    from ...placement.move_totals import Kept
    from ...placement.rules import Rules

_SECTIONS_OF_WEIGHTS = frozenset(("model", "ema"))
#: The prefixes that DistributedDataParallel and torch.compile add to names.
_COMPILED = r"s/\b_orig_mod\.//g"
_WRAPPERS = r"s/^((module|_orig_mod)\.)+|\b_orig_mod\.//g"

#: The options of `convert` that each preset sets.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lightning": {
        **{"root": "state_dict", "weights": "model"},
        **{"rename": (_COMPILED,), "strip_prefix": "model"},
    },
    "hf": {"weights": "model", "rename": (_WRAPPERS,), "bare": True},
    "deploy": {"weights": "model", "rename": (_WRAPPERS,), "to": "cpu", "bare": True},
}


def texts(values: str | Iterable[str]) -> tuple[str, ...]:
    """Return the values of an option that takes one value or several."""
    return (values,) if isinstance(values, str) else tuple(values)


class Changes(NamedTuple):
    """What was changed in a graph. The field names are those of the report."""

    left_out: tuple[str, ...]
    weights: Mapping[str, Any] | None
    renamed: int
    cast: Mapping[str, int]
    kept: tuple[Kept, ...]


class Edits(NamedTuple):
    """The changes to make in a graph before it is written: the options of `convert`, checked."""

    select: tuple[str, ...]
    exclude: tuple[str, ...]
    root: str | None
    weights: str | None
    renames: Callable[[str], str] | None
    warns: bool  #: whether to warn if no key is renamed
    casts: Casts
    rules: Rules | None
    bare: bool
    optimizer_ids: OptimizerIds | None = None

    @classmethod
    def of(
        cls,
        *,
        preset: str | None = None,
        select: str | Iterable[str] = (),
        exclude_tensors: str | Iterable[str] = (),
        root: str | None = None,
        weights: str | None = None,
        rename: str | Iterable[str] = (),
        strip_prefix: str | None = None,
        add_prefix: str | None = None,
        dtype: Mapping[str, Dtype] | Dtype | None = None,
        keep_dtype: str | Iterable[str] = (),
        to: Device | None = None,
        bare: bool | None = None,
        optimizer_ids: OptimizerIds | None = None,
    ) -> Edits:
        """Check these options of `convert`, and add those of the preset."""
        if preset is not None and preset not in PRESETS:
            hint = f"one of {', '.join(PRESETS)}"
            raise UsageError(f"there is no preset {preset!r}", hint=hint)
        added = PRESETS.get(preset or "", {})
        if weights is None and (root is None or "root" not in added):
            root, weights = root or added.get("root"), added.get("weights")
        if weights in OF_ZERO:  # the format returns only the chosen weights
            weights = Section.MODEL.value
        if weights is not None:
            from ...graph.edit.model_weights import section_asked  # rarely needed

            section_asked(weights)
        strip = added.get("strip_prefix") if strip_prefix is None else strip_prefix
        renames = (*added.get("rename", ()), *texts(rename))
        to = added.get("to") if to is None else to
        return cls(
            texts(select),
            texts(exclude_tensors),
            root,
            weights,
            _renaming(renames, strip, add_prefix),
            bool(rename or strip_prefix or add_prefix),
            casts_of(dtype, texts(keep_dtype)),
            _rules(to),
            bool(added.get("bare") if bare is None else bare),
            optimizer_ids,
        )

    @property
    def narrow(self) -> bool:
        """Whether only a part is wanted. It may lie in a checkpoint inside the checkpoint."""
        return bool(self.root or self.weights or self.select)

    @property
    def keeps_tree(self) -> bool:
        """Whether every entry keeps its place and its name."""
        changed = self.narrow or self.exclude or self.renames or self.optimizer_ids
        return not (changed or self.bare)

    @property
    def of_training_state(self) -> Edits:
        """The changes for optimizers, schedulers and the like: only device and optimizer keys."""
        return Edits.of(optimizer_ids=self.optimizer_ids)._replace(rules=self.rules)

    def share(self, tensors: Sequence[TensorEntry]) -> Edits | None:
        """Return the edits that apply to these tensors of one model; None if none is selected."""
        heard = [glob for glob in self._globs if _speaks_of(glob, tensors)]
        select = tuple(glob for glob in self.select if glob in heard)
        if self.select and not select:
            return None
        casts = self.casts._replace(
            named=tuple(rule for rule in self.casts.named if rule[0] in heard),
            keep=tuple(glob for glob in self.casts.keep if glob in heard),
        )
        exclude = tuple(glob for glob in self.exclude if glob in heard)
        return self._replace(select=select, exclude=exclude, casts=casts)

    def check_heard(self, models: Sequence[Sequence[TensorEntry]]) -> None:
        """Raises RefusedError if a glob matches no tensor of any model."""
        for glob in self._globs:
            if not any(_speaks_of(glob, tensors) for tensors in models):
                raise no_match(glob)

    @property
    def _globs(self) -> tuple[str, ...]:
        casts = self.casts
        return (*self.select, *self.exclude, *(glob for glob, _ in casts.named), *casts.keep)

    def apply(self, draft: CheckpointGraph) -> Changes:
        """Change a graph; raises RefusedError if it lacks something, or a device cannot be set."""
        if self.bare or self.weights or not _SECTIONS_OF_WEIGHTS.isdisjoint(self.select):
            from ...graph.edit.numpy_arrays import tensors_for_arrays

            arrays = tensors_for_arrays(draft)
            if arrays:
                draft.warnings.append(f"{plural(len(arrays), 'numpy array')} written as tensors")
        left_out, weights = list[str](), None
        if self.narrow or self.exclude:
            from ...graph.edit.narrow import leave

            wanted = leave(
                draft,
                root=self.root,
                weights=self.weights,
                select=self.select,
                exclude=self.exclude,
            )
            left_out, weights = list(wanted.left_out), wanted.to_json()
        if self.bare or self.renames is not None or set(self.select) == {"model"}:
            from ...graph.edit.flatten_modules import flatten

            left_out += flatten(draft)
        draft.warnings[:] = dict.fromkeys(draft.warnings)
        renamed = self._rename(draft)
        if self.optimizer_ids is not None:
            from ...graph.edit.optimizer_ids import call_parameters

            call_parameters(draft, self.optimizer_ids)
        casts = self._cast(draft)
        return Changes(tuple(left_out), weights, renamed, casts, self._move(draft))

    def _rename(self, draft: CheckpointGraph) -> int:
        """Rename keys of state dicts, and count them."""
        if self.renames is None:
            return 0
        from ...graph.edit.subtree import rename_keys, state_dicts

        recogniser = Recogniser(draft.graph.ids)
        count = rename_keys(state_dicts(draft.graph.root, recogniser), self.renames)
        if not count and self.warns:
            draft.warnings.append("no key of a state dict was renamed: none is so called")
        return count

    def _cast(self, draft: CheckpointGraph) -> dict[str, int]:
        if not self.casts:
            return {}
        contents = draft.list_contents()
        entries = list(zip(contents.tensors, contents.nodes, strict=True))
        sections = self.casts.sections(contents.tensors)
        arrays = [e for e in contents.tensors if e.role is Role.ARRAY]
        kept = [e.name for e in arrays if self.casts.dtype_for(e, sections) not in (None, e.dtype)]
        if kept:
            what = f"{plural(len(kept), 'numpy array')} not cast: {join_names(kept, 3)}"
            draft.warnings.append(f"{what}; --bare writes arrays as tensors")
        return cast(draft, entries, self.casts)

    def _move(self, draft: CheckpointGraph) -> tuple[Kept, ...]:
        """Tag tensors with another device; return the tensors that stay, with the reasons."""
        if self.rules is None:
            return ()
        from ...placement.place import place

        moves = place(draft.manifest(), self.rules)
        if moves.tensors or moves.meshes or moves.remotes:
            raise RefusedError(
                "it has tensors that store their own device",
                hint="convert it without --to, and relocate the result",
            )
        draft.move(moves.storages)
        draft.warnings += moves.warnings
        return tuple(moves.kept)


def _renaming(
    renames: tuple[str, ...], strip: str | None, prefix: str | None
) -> Callable[[str], str] | None:
    if not renames and strip is None and prefix is None:
        return None
    from ...graph.edit.subtree import renaming

    return renaming(renames, strip, prefix)


def _rules(to: Device | None) -> Rules | None:
    if to is None:
        return None
    from ...placement.rules import rules_of

    return rules_of(to=to)


def _speaks_of(glob: str, tensors: Sequence[TensorEntry]) -> bool:
    """Whether a glob matches the name of a tensor, or its section."""
    return any(covers(glob, each.name) or glob == each.section.value for each in tensors)


def is_state_dict(draft: CheckpointGraph) -> bool:
    """Whether the checkpoint holds a dict of tensors and nothing else."""
    root = draft.graph.root
    at_top = [each for each in draft.list_contents().tensors if len(each.path) == 1]
    return isinstance(root, MappingNode) and len(at_top) == len(root.pairs)
