"""The unknown callables of what is to be written, listed as those of what was read."""

from __future__ import annotations

import contextlib

from ..errors import InputError
from ..graph.edit.callables import Judge, misused
from ..pickles.nodes import Blob, Node
from ..sources.source import Memory
from ..torch_pickle.streams import Container
from . import new_session, uncollected
from .checkpoint import unknown_callables_in


def unknown_callables(pickle: bytes, path: str) -> tuple[str, ...]:
    """The unknown callables of a pickle that is to be written, as torch.save writes it."""
    with uncollected():
        session = new_session()
        session.folder()
        container = Container(Memory(pickle, path))
        container.streams.append(session.stream(container.source))
        return unknown_callables_in(container)


def judge(path: str) -> Judge:
    """Tells which unknown callable a node of a file's graph is, or holds as bytes, if any."""
    session = new_session()
    session.folder()

    def judged(node: Node) -> str | None:
        if isinstance(node, Blob) and node.content is not None:
            return next(iter(_unknown_within(node.content)), None)
        return misused(node)

    def _unknown_within(content: bytes) -> tuple[str, ...]:
        with contextlib.suppress(InputError):
            container = session.open(Memory(content, path))
            if container is not None:
                return unknown_callables_in(container)
        return ()

    return judged
