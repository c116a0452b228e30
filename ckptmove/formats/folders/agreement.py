"""Check whether the files of a folder belong together, and whether all are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...display.phrases import plural
from ...manifest.manifest import Section, TensorEntry
from ...pickles.nodes import Call, Dict, List, Node
from ...torch_pickle.children import children_of
from .training_folder import FolderCheckpoint

_ARGUMENTS = "training_args"
_MOST_PROCESSES = 1_000_000
_MOST_GONE = 1_000
#: State that has the shape of its parameter, in every torch optimizer that keeps it.
_SHAPED = ("exp_avg", "momentum_buffer", "square_avg")


def disagreements(found: FolderCheckpoint) -> Iterator[str]:
    """Whatever is contradictory, missing or unreadable in the files, one sentence each."""
    for unread in found.not_looked_at:
        yield f"{unread.name} was not checked: {unread.why}"
    for missing in found.missing:
        yield f"{missing.name} is missing: {missing.because}"
    yield from _missing_for_training(found)
    yield from _missing_processes(found)
    shapes = _shapes_of_model(found)
    yield from _foreign_optimizers(found, shapes)
    yield from _miscounted_groups(found, shapes.total())


def _missing_for_training(found: FolderCheckpoint) -> Iterator[str]:
    """Files without which the library can't resume training, or not from the same state."""
    layout = found.layout_rules
    if layout is None or not layout.weights:
        return
    has = {part.section for part in found.parts}
    held = {each.path[:1]: each.section for each in found.manifest.tensors}
    unknown = {part.keys[:1] for part in found.parts if not part.is_known}
    has |= {section for keys, section in held.items() if keys in unknown}
    sections = ", ".join(sorted(map(str, has - {Section.OTHER}))) or "nothing of them"
    if not {Section.MODEL, Section.EMA} & has:
        yield f"the weights are missing, such as {layout.weights}: it holds {sections}"
    if Section.SCHEDULER in has and Section.OPTIMIZER not in has:
        yield f"the optimizer is missing, such as {layout.optimizer}: it holds {sections}"
    names = [*(each.name for each in found.parts), *(each.name for each in found.others)]
    own = {name.rpartition("/")[2] for name in names}
    by_hand = bool(layout.witnesses) and own.isdisjoint(layout.witnesses)
    if layout.rng and not by_hand and Section.OPTIMIZER in has and Section.RNG not in has:
        yield f"the RNG states are missing, such as {layout.rng}: it holds {sections}"


def _missing_processes(found: FolderCheckpoint) -> Iterator[str]:
    """Missing RNG states, by the number of processes in the arguments of a Trainer."""
    world, numbered = _processes_of(found), _numbered_states(found)
    if world is None or world == 1 or not numbered:
        return
    gone = [n for n in range(world) if n not in numbered]
    known = {each.name for each in found.missing}  # missing by the names of other files
    for name in (f"rng_state_{n}.pth" for n in gone[:_MOST_GONE]):
        if name not in known:
            yield f"{name} is missing: {_ARGUMENTS}.bin says that there were {world:,} processes"


def uncounted_note(found: FolderCheckpoint) -> str | None:
    """A sentence that no file says how many processes had RNG states; None if one does."""
    numbered = _numbered_states(found)
    if not numbered or _processes_of(found) is not None:
        return None
    many = "1 process" if len(numbered) == 1 else f"{len(numbered):,} processes"
    return f"RNG states of {many}; not checked whether there were more, which no file says"


def _numbered_states(found: FolderCheckpoint) -> set[int]:
    """The numbers of the processes whose RNG states are in the folder."""
    keys = [part.keys for part in found.parts if part.section is Section.RNG]
    return {n for each in keys if len(each) == 2 and isinstance(n := each[1], int)}


def _processes_of(found: FolderCheckpoint) -> int | None:
    """The number of processes, from accelerate's state in the arguments of a Trainer."""
    for part in found.parts:
        if part.keys != (_ARGUMENTS,):
            continue
        for _, root in part.checkpoint.container.roots:
            node: Node = root
            for wanted in ("distributed_state", "num_processes"):
                below = children_of(node) if isinstance(node, Call) else ()
                node = next((each for keys, each in below if keys == (wanted,)), None)
            if type(node) is int and 0 < node <= _MOST_PROCESSES:
                return node
    return None


def _shapes_of_model(found: FolderCheckpoint) -> Counter[tuple[int, ...]]:
    """How many tensors of each shape the model has; copies of its weights do not count."""
    copies = {part.keys for part in found.parts if part.copy_of is not None}
    return Counter(
        each.shape
        for each in found.manifest.tensors
        if each.part_of is None
        and each.section is Section.MODEL
        and not any(_is_below(each, keys) for keys in copies)
    )


def _foreign_optimizers(
    found: FolderCheckpoint, of_model: Counter[tuple[int, ...]]
) -> Iterator[str]:
    """Optimizers with state of shapes that no parameter of the model has."""
    entries = [each for each in found.manifest.tensors if each.part_of is None]
    for part in found.parts:
        if part.section is not Section.OPTIMIZER or not of_model:
            continue
        for slot in _SHAPED:
            state = [e for e in entries if _is_below(e, part.keys) and e.path[-1] == slot]
            unknown = Counter(each.shape for each in state) - of_model
            if unknown:
                shape = next(iter(unknown))
                yield (
                    f"{part.name} is not of this model: it has {slot} for "
                    f"{sum(unknown.values()):,} parameters that the model does not have, "
                    f"for example of shape {list(shape)}"
                )
                break


def _miscounted_groups(found: FolderCheckpoint, of_model: int) -> Iterator[str]:
    """Optimizers whose groups have more parameters than the model, or fewer than have state."""
    for part in found.parts:
        if part.section is not Section.OPTIMIZER:
            continue
        for _, root in part.checkpoint.container.roots:
            said = root if isinstance(root, Dict) else Dict()
            state, groups = said.get("state"), said.get("param_groups")
            if not isinstance(state, Dict) or not isinstance(groups, List):
                continue
            lists = [each.get("params") for each in groups.items if isinstance(each, Dict)]
            grouped = {n for each in lists if isinstance(each, List) for n in each.items}
            if not grouped or not all(type(n) is int for n in grouped):
                continue  # other libraries identify parameters by name
            if 0 < of_model < len(grouped):
                yield (
                    f"{part.name} is not of this model: its param_groups list "
                    f"{len(grouped):,} parameters, and the model has {plural(of_model, 'tensor')}"
                )
            lost = [n for n, _ in state.pairs if type(n) is int and n not in grouped]
            if lost:
                many = plural(len(lost), "parameter")
                yield (
                    f"{part.name} contradicts itself: it has state of {many} "
                    f"that its param_groups do not list, for example of {lost[0]}"
                )


def _is_below(entry: TensorEntry, keys: tuple[object, ...]) -> bool:
    return entry.path[: len(keys)] == keys
