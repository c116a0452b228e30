"""The names that loading a checkpoint would import, and those that could make tensors anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from ..pickles.device_tags import names_device
from ..pickles.nodes import Call, Global, Mapping, Node, Persistent, Tuple, without_source_text
from ..pickles.nodes import List as ListNode
from ..pickles.nodes import Set as SetNode
from ..pickles.opcodes.plain_tensors import compact_form
from .streams import Container

_INDIRECT = "(called indirectly)"


def unknown_callables_in(container: Container) -> tuple[str, ...]:
    """The names that loading it would import and that are not known to be harmless."""
    found = (each.unknown_callables() for each in container.everything())
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def unknown_makers_in(container: Container, unknown: Collection[str]) -> tuple[str, ...]:
    """The `unknown` callables that loading would call with a tensor or a device.

    The devices of their results are unknown. An object of an unknown class that is made empty and
    then given its state is not included.
    """
    if not unknown:
        return ()
    found = dict[str, None]()
    met = set[int]()
    for each in container.everything():
        for stream in each.streams:
            for call in stream.pickle.calls:
                if call.opcode not in ("NEWOBJ", "NEWOBJ_EX") and compact_form(call) is None:
                    function = without_source_text(call.function)
                    name = function.qualname if isinstance(function, Global) else _INDIRECT
                    if (name in unknown or name == _INDIRECT) and _is_given_any(call, met):
                        found[name] = None
    return tuple(found)


def _is_given_any(call: Call, met: set[int]) -> bool:
    """Whether the arguments or state of a call include a tensor, a storage or a device."""
    todo: list[Node] = [call.args, call.kwargs, call.state]
    while todo:
        node = todo.pop()
        if isinstance(node, Persistent):
            return True
        if isinstance(node, str):
            if names_device(node):
                return True
        elif isinstance(node, (Call, Mapping, Tuple, ListNode, SetNode)) and id(node) not in met:
            if isinstance(node, Call) and compact_form(node) is not None:
                return True
            met.add(id(node))
            todo += _held_by(node)
    return False


def _held_by(node: Call | Mapping | Tuple | ListNode | SetNode) -> Iterator[Node]:
    if isinstance(node, Mapping):
        yield from chain.from_iterable(node.pairs)
        if isinstance(node, Call):
            yield from (node.args, node.kwargs, node.state, *node.items)
    else:
        yield from node.items
