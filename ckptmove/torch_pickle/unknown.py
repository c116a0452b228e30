"""What loading a checkpoint would import, and what of that could make tensors anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from ..pickles.nodes import Call, Global, Mapping, Node, Persistent, Tuple, named
from ..pickles.nodes import List as ListNode
from ..pickles.nodes import Set as SetNode
from ..pickles.opcodes.plain_tensors import compact_form
from ..placement.device import names_device
from .streams import Container

_INDIRECT = "(called indirectly)"


def unknown_callables_in(container: Container) -> tuple[str, ...]:
    """The names that loading it would import, and that are not known to be harmless."""
    found = (each.unknown_callables() for each in container.everything())
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def unknown_makers_in(container: Container, unknown: Collection[str]) -> tuple[str, ...]:
    """Those of the `unknown` callables that it would call with a tensor or a device.

    Nobody knows where what they make is. An object of an unknown class that is made empty and given
    its state is none of these.
    """
    if not unknown:
        return ()
    found = dict[str, None]()
    met = set[int]()
    for each in container.everything():
        for stream in each.streams:
            for call in stream.pickle.calls:
                if call.opcode not in ("NEWOBJ", "NEWOBJ_EX") and compact_form(call) is None:
                    function = named(call.function)
                    name = function.qualname if isinstance(function, Global) else _INDIRECT
                    if (name in unknown or name == _INDIRECT) and _is_given_any(call, met):
                        found[name] = None
    return tuple(found)


def _is_given_any(call: Call, met: set[int]) -> bool:
    """Whether a tensor, a storage or a device is among what a call is given."""
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
