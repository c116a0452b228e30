"""Find where an operation runs. It must be fast: it is called for each operation of a run."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from ....reports.events import Site
from ..program.source_lines import backward_frame, line_of, user_frame
from .tally import SiteCount, Tally

_MOST_LINES = 1 << 17  # the most operations whose places and lines are kept
_NOWHERE: tuple[SiteCount | None, object] = None, None


class CallSites:
    """The places of a run.

    Attributes:
        lines: the module and line of an operation, by its number in autograd.
    """

    def __init__(self, tally: Tally) -> None:
        self.lines: dict[int, tuple[str, str]] = {}
        self._tally = tally
        #: Places by operation, phase, module, and instruction of the user's code.
        self._known: dict[tuple[Any, ...], tuple[SiteCount | None, object]] = {}

    def of(
        self, func: Any, text: str, phase: str, module: str, frame: FrameType | None
    ) -> SiteCount:
        """The place of an operation `func`, shown as `text`, that is called from a frame."""
        frame = user_frame(frame)
        code, at = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        key = id(func), phase, module, id(code), at  # hashing code is slow
        place, _ = self._known.get(key, _NOWHERE)
        if place is None:
            place = self._tally.place(Site(phase, module, text, line_of(frame)))
            if len(self._known) < _MOST_LINES:
                self._known[key] = place, code  # keeps the id of the code
        if len(self.lines) < _MOST_LINES and torch.is_grad_enabled():
            # Autograd numbered the node of this operation just before this call.
            number = torch._C._autograd._get_sequence_nr() - 1
            if number not in self.lines:
                self.lines[number] = module, place.site.source
        return place

    def of_node(self, node: Any, text: str, frame: FrameType | None) -> SiteCount:
        """The place of an operation that a node of autograd runs in a backward pass."""
        module, line = self.lines.get(node._sequence_nr(), ("", ""))
        line = line_of(backward_frame(frame)) or line
        return self._tally.place(Site("backward", module, text, line))
