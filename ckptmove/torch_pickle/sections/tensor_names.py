"""Give each tensor a unique name, and find which tensors share bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...manifest.manifest import MOST_SHARED, TensorEntry
from ...manifest.paths import Path, spell_apart


def set_apart(tensors: list[TensorEntry], take_room: Callable[[int], object]) -> set[str]:
    """Rename tensors that would have the same name: their new names quote the keys.

    They are replaced in the list. If quoting is not enough, as when an attribute of an object has
    the name of one of its keys, they are numbered. `take_room` is called with the characters of
    each new name. Returns the names that several tensors had.
    """
    names = [entry.name for entry in tensors]
    if len(set(names)) == len(names):
        return set()
    counts = Counter(names)
    alike = {name for name, count in counts.items() if count > 1}
    taken = counts.keys() - alike
    owners: list[tuple[Path, str, str]] = []  # of tensors with parts: path, old name, new name
    for n, entry in enumerate(tensors):
        while owners and entry.path[: len(owners[-1][0])] != owners[-1][0]:
            owners.pop()
        before, name = entry.name, entry.name
        if name in alike:
            take_room(2 * len(name))
            name = _free(spell_apart(entry.path), taken)
        taken.add(name)
        part_of = next((now for _, old, now in reversed(owners) if old == entry.part_of), None)
        if name != before or part_of not in (None, entry.part_of):
            tensors[n] = entry._replace(name=name, part_of=part_of or entry.part_of)
        owners.append((entry.path, before, name))
    return alike


def _free(wanted: str, taken: set[str]) -> str:
    name, n = wanted, 1
    while name in taken:
        n += 1
        name = f"{wanted}~{n}"
    return name


def with_shared(tensors: list[TensorEntry]) -> list[TensorEntry]:
    """Fill in `shared_with`."""
    storages = [entry.storage for entry in tensors]
    if len(set(storages)) == len(storages):
        return tensors
    counts = Counter(storages)
    names = {key: list[str]() for key, count in counts.items() if count > 1 and key is not None}
    for entry in tensors if names else ():
        if entry.storage in names:
            names[entry.storage].append(entry.name)
    for n, entry in enumerate(tensors if names else ()):
        sharing = names.get(entry.storage or "")
        if sharing:
            others = [name for name in sharing[: MOST_SHARED + 1] if name != entry.name]
            tensors[n] = entry._replace(shared_with=tuple(others[:MOST_SHARED]))
    return tensors
