"""Read terms into nodes."""

from __future__ import annotations

import re
import struct
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from itertools import count
from math import isfinite, isnan
from typing import Any

from ...errors import CorruptError
from ..device_tags import may_be_tag
from ..flag_row import FlagRow
from ..nodes import Blob, Call, Dict, Global, Items, List, Node, Persistent, Set, Text, Tuple
from ..opcodes.literals import may_be_checkpoint
from ..opcodes.mixed_rows import MixedRow, is_worth_it, parts_of
from ..opcodes.pairs import Pairs, RecordKinds, with_pairs
from ..opcodes.rows import compact_row
from .spelling import MAX_BITS, Term, are_terms, has_surrogates, shareable

_OPCODES = frozenset(("NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BYTEARRAY8"))
_FIELDS = frozenset(("$", "of", "args", "how", "kwargs", "items", "pairs", "state"))
_MOST_TEXTS = 1 << 10
_PART = 1 << 16  # items of a row that are read at once
_HEX = "-?0x[1-9a-f][0-9a-f]*"
_NAN = re.compile("0x[0-9a-f]{16}")
_INFINITE = ("inf", "-inf")
_ROWS = (list, array, FlagRow, MixedRow)  # the types for lists in JSON
_NESTED = (dict, *_ROWS)


def from_terms(
    term: Term,
    leaf: Callable[[dict[str, Any]], Node],
    base: int = 0,
    kinds: set[str] | None = None,
) -> Node:
    """The graph of a term, with the nodes that `walk` would make; their `at` count up from `base`.

    The term is emptied on the way, since both together would take twice the memory. It may have any
    depth. `leaf` makes the node of an object with an unknown "$", or raises.
    `kinds` gets the kinds of all other objects that say one.
    CorruptError if it is not a term, or if no pickle can build the graph.
    """
    return _Reading(leaf, base, set() if kinds is None else kinds).run(term)


class _Reading:
    """Terms while they are read into a graph."""

    def __init__(
        self, leaf: Callable[[dict[str, Any]], Node], base: int, kinds_met: set[str]
    ) -> None:
        self.leaf = leaf
        self.kinds_met = kinds_met
        self.places = count(base)
        self.empty = Tuple([], next(self.places))
        self.records = RecordKinds()
        #: the nodes that may occur again, by their numbers
        self.shared: list[Node] = []
        #: the numbers of nodes that are not yet complete
        self.open: set[int] = set()
        #: nodes that occur within themselves
        self.knots: list[Node] = []
        #: "module:name" → the one node of that name
        self.globals: dict[str, Global] = {}
        #: shared strings that are never rewritten: each is stored once, as in a pickle
        self.texts: dict[str, Text] = {}
        #: terms, and where their nodes go; or a function to call when the terms before are done;
        #: the next one is last
        self.todo: list[tuple[Term, Any, Any]] = []
        self.kinds: dict[str, Callable[[dict[str, Term]], Node]] = {
            "again": self.again,
            "bytes": self.content,
            "call": self.call,
            "dict": self.dictionary,
            "float": self.real,
            "frozenset": self.frozenset,
            "int": self.integer,
            "name": self.name,
            "persistent": self.persistent,
            "set": self.set,
            "shared": self.share,
            "text": self.bytes_of_text,
            "tuple": self.tuple,
        }

    def run(self, term: Term) -> Node:
        whole: list[Node] = [None]
        todo = self.todo
        todo.append((term, whole, 0))
        while todo:
            term, place, key = todo.pop()
            start = len(todo)
            if place is _LATER:
                term(key)
            elif isinstance(key, str):
                setattr(place, key, self.node(term))
            else:
                place[key] = self.node(term)
            todo[start:] = todo[start:][::-1]
        # they refer back to this object: avoid cycles that wait for garbage collection
        self.kinds.clear()
        _refuse_knots(self.knots)
        return whole[0]

    def put(self, term: Term, place: list[Node], index: int) -> None:
        """Store a scalar at once; queue any other node, in the order of the text."""
        if isinstance(term, _NESTED):
            self.todo.append((term, place, index))
        else:
            place[index] = self.node(term)

    def row(self, terms: Term) -> Items:
        if are_terms(terms):
            return compact_row(terms)
        others = parts_of(terms)
        if is_worth_it(terms) and not any(isinstance(each, (dict, *_ROWS)) for each in others):
            row = MixedRow()
            for at in range(0, len(terms), _PART):
                part = terms[at : at + _PART]
                row.extend(part if are_terms(part) else map(self.node, part))
            return row
        nodes: list[Node] = [None] * len(terms)
        for index, term in enumerate(terms):
            self.put(term, nodes, index)
        del terms[:]
        return nodes

    def node(self, term: Term) -> Node:
        if isinstance(term, str):
            return self.text(term)
        if isinstance(term, dict):
            kind = term.get("$", _NOTHING)
            if kind is _NOTHING:
                return self.plain(term)
            if not isinstance(kind, str):
                raise CorruptError("the saved tree has an object that does not say what it is")
            known = self.kinds.get(kind)
            if known is None:
                return self.leaf(term)
            self.kinds_met.add(kind)
            return known(term)
        if isinstance(term, Pairs):
            node = Dict()
            node.pairs = term
            return node
        if isinstance(term, _ROWS):
            return List(self.row(term))
        if term is None or isinstance(term, bool):
            return term
        if isinstance(term, int) and term.bit_length() <= MAX_BITS:
            return term
        if isinstance(term, float) and isfinite(term):
            return term
        raise CorruptError("the saved tree has a number that is none, or of absurd size")

    # -- scalars -----------------------------------------------------------------------------

    def text(self, text: str) -> Text:
        if has_surrogates(text):
            raise CorruptError("the saved tree has text with surrogates")
        if shareable(text) or may_be_tag(text):
            return Text(text, next(self.places))
        if len(self.texts) == _MOST_TEXTS:
            self.texts.clear()
        if text not in self.texts:
            self.texts[text] = Text(text, next(self.places))
        return self.texts[text]

    def bytes_of_text(self, term: dict[str, Term]) -> Node:
        try:
            text = _bytes(term).decode("utf-8", "surrogatepass")
        except UnicodeError:
            raise _malformed(term) from None
        if not has_surrogates(text):
            raise _malformed(term)
        return Text(text, next(self.places))

    def content(self, term: dict[str, Term]) -> Node:
        content = _bytes(term)
        if may_be_checkpoint(content):
            return Blob(next(self.places), len(content), content)
        return content

    def integer(self, term: dict[str, Term]) -> Node:
        digits = _text(term)
        value = int(digits, 16) if re.fullmatch(_HEX, digits) else 0
        if value.bit_length() <= MAX_BITS:
            raise _malformed(term)
        return value

    def real(self, term: dict[str, Term]) -> Node:
        text = _text(term)
        if text in _INFINITE:
            return float(text)
        if _NAN.fullmatch(text):
            value: float = struct.unpack(">d", bytes.fromhex(text[2:]))[0]
            if isnan(value):
                return value
        raise _malformed(term)

    def name(self, term: dict[str, Term]) -> Node:
        return self.named(_text(term), term)

    def named(self, text: str, term: dict[str, Term]) -> Global:
        if text not in self.globals:
            module, colon, name = text.partition(":")
            if not colon or has_surrogates(text):
                raise _malformed(term)
            self.globals[text] = Global(module, name, next(self.places))
        return self.globals[text]

    # -- containers --------------------------------------------------------------------------

    def plain(self, term: dict[str, Term]) -> Node:
        node = Dict()
        flat: list[Node] = [None] * (2 * len(term))
        for index, (key, value) in enumerate(term.items()):
            flat[2 * index] = self.text(key)
            self.put(value, flat, 2 * index + 1)
        term.clear()
        self.pair_up(node, flat)
        return node

    def dictionary(self, term: dict[str, Term]) -> Node:
        node = Dict()
        self.pairs(node, _list(term), term)
        return node

    def pairs(self, node: Dict | Call, terms: Term, term: dict[str, Term]) -> None:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in terms):
            raise _malformed(term)
        self.pair_up(node, self.row([each for pair in terms for each in pair]))

    def pair_up(self, node: Dict | Call, flat: Items) -> None:
        """Give a node its pairs, once all keys and values exist."""

        def pair(flat: Items) -> None:
            record = self.records.pairs_of(flat) if type(node) is Dict else None
            node.pairs = with_pairs([], list(flat)) if record is None else record

        self.todo.append((pair, _LATER, flat))

    def tuple(self, term: dict[str, Term]) -> Node:
        items = self.row(_list(term))
        return Tuple(items, next(self.places)) if items else self.empty

    def set(self, term: dict[str, Term]) -> Node:
        return Set(self.row(_list(term)), frozen=False)

    def frozenset(self, term: dict[str, Term]) -> Node:
        return Set(self.row(_list(term)), frozen=True)

    def persistent(self, term: dict[str, Term]) -> Node:
        node = Persistent(None, next(self.places))
        self.todo.append((_of(term, object), node, "pid"))
        return node

    def call(self, term: dict[str, Term]) -> Node:
        if "of" not in term or not term.keys() <= _FIELDS:
            raise _malformed(term)
        how = term.get("how", "REDUCE")
        if "how" in term and not (isinstance(how, str) and how in _OPCODES):
            raise _malformed(term)
        node = Call(None, self.empty, how, next(self.places))
        if isinstance(term["of"], str):
            node.function = self.named(term["of"], term)
        else:
            self.todo.append((term["of"], node, "function"))
        if "args" in term:
            self.arguments(node, term)
        if "kwargs" in term:
            if how != "NEWOBJ_EX" or term["kwargs"] is None:
                raise _malformed(term)
            self.todo.append((term["kwargs"], node, "kwargs"))
        if "items" in term:
            node.items = self.row(_list(term, "items"))
        if "pairs" in term:
            self.pairs(node, _list(term, "pairs"), term)
        if "state" in term:
            node.built = True
            self.todo.append((term["state"], node, "state"))
        return node

    def arguments(self, node: Call, term: dict[str, Term]) -> None:
        args = term["args"]
        if isinstance(args, _ROWS):
            node.args = Tuple(self.row(args), node.at) if args else self.empty
        else:
            self.todo.append((args, node, "args"))

    # -- what is met again -------------------------------------------------------------------

    def share(self, term: dict[str, Term]) -> Node:
        inner, number = term.get("of"), term.get("as")
        if len(term) != 3 or type(number) is not int or number != len(self.shared):
            raise _malformed(term)
        if isinstance(inner, dict) and inner.get("$") in ("shared", "again"):
            raise _malformed(term)
        node = self.node(inner)
        if not shareable(node):
            raise _malformed(term)
        self.shared.append(node)
        self.open.add(number)
        self.todo.append((self.open.discard, _LATER, number))
        return node

    def again(self, term: dict[str, Term]) -> Node:
        number = term.get("as")
        if len(term) != 2 or type(number) is not int or not 0 <= number < len(self.shared):
            raise _malformed(term)
        if number in self.open:
            self.knots.append(self.shared[number])
        return self.shared[number]


_LATER = object()
_NOTHING = object()


def _refuse_knots(starts: list[Node]) -> None:
    """Refuse cycles through nodes that can't be filled later, such as tuples.

    A list may contain itself, and a tuple may contain a list that contains the tuple. Every cycle
    has a node that occurs within itself, so it is enough to start there.
    """
    done: set[int] = set()
    within: set[int] = set()
    todo = starts[:]
    while todo:
        node = todo[-1]
        if id(node) in done or id(node) in within:
            within.discard(id(node))
            done.add(id(node))
            todo.pop()
            continue
        within.add(id(node))
        for each in _made_of(node):
            if id(each) in within:
                raise CorruptError("the saved tree has something that is made of itself")
            if id(each) not in done:
                todo.append(each)


def _made_of(node: Node) -> Items:
    """The nodes that must exist before a node can be created."""
    if isinstance(node, Tuple) or (isinstance(node, Set) and node.frozen):
        return node.items
    if isinstance(node, Call):
        return [node.function, node.args, node.kwargs]
    return [node.pid] if isinstance(node, Persistent) else []


def _of(term: dict[str, Term], kind: type | tuple[type, ...]) -> Term:
    if len(term) != 2 or "of" not in term or not isinstance(term["of"], kind):
        raise _malformed(term)
    return term["of"]


def _text(term: dict[str, Term]) -> str:
    text: str = _of(term, str)
    return text


def _list(term: dict[str, Term], field: str | None = None) -> Term:
    terms = _of(term, _ROWS) if field is None else term[field]
    if not isinstance(terms, _ROWS):
        raise _malformed(term)
    return terms


def _bytes(term: dict[str, Term]) -> bytes:
    text = _text(term)
    try:
        content = a2b_base64(text)
    except ValueError:
        raise _malformed(term) from None
    if b2a_base64(content, newline=False).decode("ascii") != text:
        raise _malformed(term)
    return content


def _malformed(term: dict[str, Term]) -> CorruptError:
    return CorruptError(f"the saved tree has a malformed {term['$']!r}")
