"""Whether the files of a training folder belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...manifest.manifest import Section, TensorEntry
from .training_folder import FolderCheckpoint

#: State that has the shape of its parameter in every optimizer of torch that keeps it.
_SHAPED = ("exp_avg", "momentum_buffer", "square_avg")


def disagreements(found: FolderCheckpoint) -> Iterator[str]:
    """What contradicts each other in the files, and which files can't be read, a sentence each."""
    for unread in found.not_looked_at:
        yield f"{unread.name} was not checked: {unread.why}"
    yield from _missing_ranks(found)
    copies = {part.keys for part in found.parts if part.copy_of is not None}
    entries = [each for each in found.manifest.tensors if each.part_of is None]
    of_model = Counter(
        each.shape
        for each in entries
        if each.section is Section.MODEL and not any(_is_below(each, keys) for keys in copies)
    )
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


def _missing_ranks(found: FolderCheckpoint) -> Iterator[str]:
    """RNG states are numbered by process, from 0 on."""
    ranks = {
        part.keys[1] for part in found.parts if part.section is Section.RNG and len(part.keys) == 2
    }
    numbers = {each for each in ranks if isinstance(each, int)}
    last = max(numbers, default=-1)
    missing = last + 1 - len(numbers)
    if missing:
        first = next(n for n in range(last + 1) if n not in numbers)
        of = f"{missing:,} of {last + 1:,} processes"
        yield f"the RNG states of {of} are missing, first of {first}"


def _is_below(entry: TensorEntry, keys: tuple[object, ...]) -> bool:
    return entry.path[: len(keys)] == keys
