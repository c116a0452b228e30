"""Compare a relocated checkpoint with the planned one."""

from __future__ import annotations

from ..errors import WriteError
from ..pickles.compare import difference
from ..placement.place import Moves
from ..torch_pickle.merged_contents import merge_contents
from ..torch_pickle.streams import Container, LocationEdits, PickleStream


def check_container(old: Container, new: Container, spelling: LocationEdits, moves: Moves) -> None:
    """Compare a container with the written one: WriteError if more differs than the spelling.

    Storage ids are compared by their ends: in one file of several, they may start with its name.
    """
    mine, theirs = merge_contents(old), merge_contents(new)
    if len(mine.streams) != len(theirs.streams):
        raise WriteError("the written file differs from the source in the number of pickles")
    for before, after in zip(mine.streams, theirs.streams, strict=True):
        found = difference_in(before, after, spelling)
        if found is not None:
            raise WriteError(f"the written file differs from the source in {found}")
    wanted = [
        (each.nbytes, moves.storages.get(key, each.location)) for key, each in mine.storages.items()
    ]
    written = [(each.nbytes, each.location) for each in theirs.storages.values()]
    named = len(written) == len(wanted) and all(map(str.endswith, mine.storages, theirs.storages))
    frames = [each.frame(spelling) for each in old.everything()]
    if not named or wanted != written or frames != [each.frame() for each in new.everything()]:
        raise WriteError("the written file has other storages than the source")


def difference_in(old: PickleStream, new: PickleStream, spelling: LocationEdits) -> str | None:
    """The first difference of two pickles, except in spelling and nested checkpoints."""
    if len(old.nested) != len(new.nested):
        return "the number of checkpoints in its byte strings"
    nested = {id(a.node): b.node for a, b in zip(old.nested, new.nested, strict=True)}
    return difference(old.pickle, new.pickle, spelling.texts_of(old), spelling.devices, nested)
