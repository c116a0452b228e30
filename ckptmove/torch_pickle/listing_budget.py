"""Limit the size of a listing, in proportion to the bytes that describe the checkpoint."""

from __future__ import annotations

from ..errors import CorruptError

_LEAST_ROOM = 1 << 22  # characters of names and paths; even a tiny pickle may need some
_ROOM_PER_BYTE = 64  # characters of names and paths, per byte of description
_LEAST_TENSORS, _NBYTES_OF_TENSOR = 1 << 14, 56  # a pickle takes about 90 bytes for a tensor
_NBYTES_OF_REPEAT = 512  # bytes of description for each repeated tensor
_LEAST_AGAIN = 10_000
_LEAST_PLACES, _NBYTES_OF_PLACE = 1 << 16, 64  # for containers that occur again


class Allowance:
    """The remaining budget for listing one checkpoint."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: the size of the data that describes the checkpoint."""
        # Steps from one node to another; an opcode makes at most two of them.
        self.room = 2 * nbytes
        self.room_for_names = _LEAST_ROOM + _ROOM_PER_BYTE * nbytes
        self.room_for_tensors = _LEAST_TENSORS + nbytes // _NBYTES_OF_TENSOR
        self.room_for_repeats = _LEAST_TENSORS + nbytes // _NBYTES_OF_REPEAT
        self.room_for_places = _LEAST_PLACES + nbytes // _NBYTES_OF_PLACE
        self.room_again = _LEAST_AGAIN + nbytes // 8  # steps within repeated modules

    def take_room(self, characters: int) -> None:
        """Count characters of names and paths; CorruptError if they take too much memory."""
        self.room_for_names -= characters
        if self.room_for_names < 0:
            raise CorruptError("the names in the checkpoint would take too much memory")

    def take_tensors(self, *, again: bool) -> None:
        """Count a tensor or a named device; CorruptError if there are far too many."""
        self.room_for_tensors -= 1
        self.room_for_repeats -= again
        if self.room_for_tensors < 0 or self.room_for_repeats < 0:
            raise CorruptError("it lists far more tensors or devices than its size allows")

    def take_place(self) -> None:
        """Count a repeated container; CorruptError if there are too many."""
        self.room_for_places -= 1
        if self.room_for_places < 0:
            raise CorruptError("the same objects appear in far too many places")

    def take_steps(self, steps: int) -> None:
        """Count steps from one node to another; CorruptError if opcodes can't have made so many."""
        self.room -= steps
        if self.room < 0:
            raise CorruptError("the same objects are reached on too many paths")
