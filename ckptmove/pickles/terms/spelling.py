"""Write nodes as terms."""

from __future__ import annotations

import json
import re
import struct
from array import array
from binascii import b2a_base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from math import isfinite, isnan
from typing import Any, TypeAlias

from ...errors import UnsupportedError
from ..flag_row import FlagRow
from ..nodes import Blob, Call, Dict, Global, Items, List, Node, Persistent, Set, Tuple, are_plain
from ..opcodes.mixed_rows import MixedRow, parts_of
from ..opcodes.pairs import record_of

#: A plain JSON value, an array of numbers, or the pairs of a record.
Term: TypeAlias = Any
#: Returns the term of a call, a persistent id or a blob that the caller knows; else None.
Leaf: TypeAlias = Callable[[Node], "dict[str, Any] | None"]
#: Called with the least number of texts and the most characters that the JSON of a term has.
Foretelling: TypeAlias = Callable[[int, int], None]
#: A node, and the place of its term.
_Step: TypeAlias = "tuple[Node, Any, int | str]"

#: Many readers of JSON do not read integers of more bits correctly.
MAX_BITS = 63
_CHARACTERS_OF_AGAIN, _CHARACTERS_OF_TUPLE = (
    20,
    20,
)  # of what stands around a number, and around items
#: The most characters around the content of a node, with its number; and from an item to the next.
_MOST_AROUND, _MOST_BETWEEN = 200, 4
_MOST_OF_NUMBER = 32  # characters
_TEXTS_OF_AGAIN = 3
_SHORT_ROW = 64  # items
_MANY_AGAIN = 1 << 16  # so many repeated nodes make an estimate worthwhile
_LONG = 64  # characters or bytes; anything longer is shared
_PART = 1 << 16  # numbers of a row that are checked at once
_MADE = (Call, Persistent, Blob)
_INTEGERS = frozenset((int,))
_SURROGATE = "[\ud800-\udfff]"


def to_terms(
    root: Node,
    leaf: Leaf,
    most_characters: int | None = None,
    foretelling: Foretelling | None = None,
    *,
    records: bool = False,
) -> Term:
    """The term of a graph, which may be cyclic and of any depth.

    The term must not be changed: rows and records are those of the graph, not copies. `leaf` is
    called for each call, persistent id and blob, once and in order. Its result is the term, and
    everything below the node is ignored; if it returns None, the node is spelled like any other.
    `foretelling` is called before anything is spelled, if many nodes occur again, and may raise.
    `records`: whether the term may have the pairs of records instead of objects.

    TooLong if the term has more text than `most_characters`; UnsupportedError if the graph has
    bytes that were skipped, or names or calls that no loadable pickle has.
    """
    spelling = _Spelling(root, leaf, most_characters, foretelling is not None, records)
    if foretelling is not None and spelling.met_again_count > _MANY_AGAIN:
        foretelling(*spelling.foretold())
    return spelling.run()


def shareable(node: Node) -> bool:
    """Whether repeated use of a node must be preserved."""
    if isinstance(node, Tuple):
        return bool(node.items)
    if isinstance(node, (str, bytes)):
        return len(node) > _LONG
    if isinstance(node, int):
        return node.bit_length() > 8 * _LONG
    if isinstance(node, Global):
        return len(node.module) + len(node.name) > _LONG
    return not (node is None or isinstance(node, float))


def are_terms(nodes: Sequence[Node]) -> bool:
    """Whether all nodes are terms themselves; fast even for millions."""
    if type(nodes) is list and len(nodes) <= _SHORT_ROW:  # there may be very many such rows
        return are_plain(nodes) and _are_in_range(nodes)
    if isinstance(nodes, array):
        return nodes.typecode != "d" or all(map(isfinite, nodes))
    if isinstance(nodes, FlagRow):
        return True
    if not are_plain(nodes):
        return False
    # In parts: a list of the integers of a long row would be as large as the row.
    return all(_are_in_range(nodes[at : at + _PART]) for at in range(0, len(nodes), _PART))


def _are_in_range(numbers: Sequence[Node]) -> bool:
    if _INTEGERS.issuperset(map(type, numbers)):
        low, high = min(numbers, default=0), max(numbers, default=0)  # type: ignore[type-var]
        return max(low.bit_length(), high.bit_length()) <= MAX_BITS  # type: ignore[union-attr]
    ints = [each for each in numbers if type(each) is int]
    floats = [each for each in numbers if type(each) is float]
    longest = max(max(ints, default=0).bit_length(), min(ints, default=0).bit_length())
    return longest <= MAX_BITS and all(map(isfinite, floats))


def _most_characters(node: Node) -> int:
    """The most characters of a node in JSON, without the nodes it contains."""
    if isinstance(node, str):
        around = _MOST_BETWEEN if node.isascii() else _MOST_AROUND
        return len(encode_basestring_ascii(node)) + around
    if isinstance(node, (bytes, Blob)):
        return _MOST_AROUND + 2 * (node.nbytes if isinstance(node, Blob) else len(node))
    if isinstance(node, Global):
        return _MOST_AROUND + 12 * (len(node.module) + len(node.name))
    return _MOST_AROUND + (node.bit_length() if isinstance(node, int) else 0)


def _flat(pairs: Iterable[tuple[Node, Node]]) -> list[Node]:
    return [each for pair in pairs for each in pair]


def _inside(node: Node) -> Items:
    """The nodes that a node contains, in the order of its term."""
    if isinstance(node, (List, Tuple, Set)):
        return node.items
    if isinstance(node, Dict):
        return _flat(node.pairs)
    if isinstance(node, Call):
        made_of = [node.function, node.args, node.kwargs]
        return [*made_of, *node.items, *_flat(node.pairs), node.state]
    return [node.pid] if isinstance(node, Persistent) else []


class TooLong(Exception):
    """A term would take more characters than allowed."""


class _Spelling:
    """A graph while it is written as terms."""

    def __init__(
        self, root: Node, leaf: Leaf, most_characters: int | None, counting: bool, records: bool
    ) -> None:
        """`counting`: whether to estimate the length of the JSON."""
        self.root, self.counting, self.records = root, counting, records
        self.room = most_characters
        #: `id()` of a node → the term that `leaf` returned
        self.leaves: dict[int, Term] = {}
        #: `id()` of each node that is used more than once
        self.many: set[int] = set()
        #: how often such nodes occur again; the number of other texts; and the most characters of
        #: everything except repeated nodes and leaves
        self.met_again_count = self.texts = self.most = 0
        #: `id()` of such a node that was already spelled → its number
        self.numbers: dict[int, int] = {}
        #: its number → the term for each further use
        self.again: dict[int, Term] = {}
        #: what is still to be spelled of unfinished nodes, and its places; the next one at the end
        self.todo: list[Iterator[_Step]] = []
        self.survey(leaf)

    def survey(self, leaf: Leaf) -> None:
        met: set[int] = set()
        todo = [self.root]
        while todo:
            node = todo.pop()
            # the same as below, but faster: most are keys
            if isinstance(node, str) and len(node) <= _LONG:
                if self.counting:
                    self.note(node)
                continue
            made = isinstance(node, _MADE)
            if not made and not shareable(node):
                self.note(node)
                continue
            if id(node) in met:
                self.many.add(id(node))
                self.met_again_count += 1
                continue
            met.add(id(node))
            if made:
                term = leaf(node)
                if term is not None:
                    self.leaves[id(node)] = term
                    continue
            self.note(node)
            record = record_of(node)
            if record is not None and are_terms(record.values):
                for key in record.keys:
                    self.note(key)
                self.most += _MOST_OF_NUMBER * len(record)
                continue
            inside = _inside(node)
            others = [] if are_terms(inside) else parts_of(inside)
            self.most += _MOST_OF_NUMBER * (len(inside) - len(others))
            todo.extend(reversed(self.once_each(others)))

    def once_each(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Nodes in order; in a long row, nearby repetitions are counted and left out."""
        if len(nodes) <= _SHORT_ROW:
            return nodes
        found: list[Node] = []
        for at in range(0, len(nodes), _PART):
            part = list(nodes[at : at + _PART])
            once = dict(zip(map(id, part), part, strict=True))
            found += once.values()
            counts = Counter(map(id, part)) if len(once) < len(part) else {}
            for known, count in counts.items():
                if count > 1 and (isinstance(once[known], _MADE) or shareable(once[known])):
                    self.many.add(known)
                    self.met_again_count += count - 1
                elif count > 1:
                    self.note(once[known], count - 1)
        return found

    def note(self, node: Node, times: int = 1) -> None:
        """Count the texts and characters of a node, without the nodes it contains."""
        if not self.counting:
            return
        if isinstance(node, str):
            self.texts += times
        self.most += times * _most_characters(node)

    def foretold(self) -> tuple[int, int]:
        """The least number of texts and the most characters of the JSON."""
        again = _CHARACTERS_OF_AGAIN + len(str(len(self.many))) + _MOST_BETWEEN
        leaves = len(json.dumps(list(self.leaves.values())))
        most = self.most + leaves + self.met_again_count * again + _MOST_AROUND * len(self.many)
        return self.texts + _TEXTS_OF_AGAIN * self.met_again_count, most

    def run(self) -> Term:
        whole: list[Term] = [None]
        todo = self.todo
        todo.append(iter([(self.root, whole, 0)]))
        while todo:
            step = next(todo[-1], None)
            if step is None:
                todo.pop()
                continue
            node, place, key = step
            start = len(todo)
            place[key] = self.spell(node)
            todo[start:] = todo[start:][::-1]
        return whole[0]

    def put(self, node: Node, place: Term, key: int | str) -> None:
        """Queue a node whose term goes to a key of an object; this fixes the order of the keys."""
        place[key] = None
        self.todo.append(self.place_terms([(node, place, key)]))

    def place_terms(self, steps: Iterable[_Step]) -> Iterator[_Step]:
        """Store the terms of scalars and leaves in their places; yield all other steps."""
        leaves, many, numbers, again = self.leaves, self.many, self.numbers, self.again
        for node, place, key in steps:
            number = numbers.get(id(node))
            if number in again:  # checked first, since there may be millions
                self.spend_characters(_CHARACTERS_OF_AGAIN)
                place[key] = again[number]
                continue
            known = leaves.get(id(node))
            if known is not None and id(node) not in many:
                place[key] = known
            elif isinstance(node, (bool, int, float, str)) and id(node) not in many:
                self.spend(node)
                place[key] = _scalar(node)
            elif number is not None:
                place[key] = self.met_again(number)
            elif node is not None:
                yield node, place, key

    def row(self, nodes: Items) -> Term:
        if are_terms(nodes):
            return nodes  # a row of numbers is its own term: a copy of a long one takes much memory
        if isinstance(nodes, MixedRow) and all(map(self.is_bare, nodes.others)):
            for each in nodes.others:
                self.spend(each)
            return nodes
        terms: list[Term] = [None] * len(nodes)
        self.todo.append(self.place_terms((node, terms, n) for n, node in enumerate(nodes)))
        return terms

    def is_bare(self, node: Node) -> bool:
        """Whether a node is its own term and need not be shared."""
        if isinstance(node, str):
            return len(node) <= _LONG and not has_surrogates(node)
        return are_terms([node])

    def rows(self, pairs: Sequence[tuple[Node, Node]]) -> list[Term]:
        terms: list[Term] = [[None, None] for _ in pairs]
        rows = zip(pairs, terms, strict=True)
        self.todo.append(
            self.place_terms((each, row, n) for p, row in rows for n, each in enumerate(p))
        )
        return terms

    def spell(self, node: Node) -> Term:
        if id(node) not in self.many:
            return self.bare(node)
        number = self.numbers.get(id(node))
        if number is not None:
            return self.met_again(number)
        number = self.numbers[id(node)] = len(self.numbers)
        return {"$": "shared", "as": number, "of": self.bare(node)}

    def met_again(self, number: int) -> Term:
        self.spend_characters(_CHARACTERS_OF_AGAIN)
        return self.again.setdefault(number, {"$": "again", "as": number})

    def spend(self, node: Node) -> None:
        """Count the least number of characters that a text, bytes or a name takes in JSON."""
        if self.room is None or not isinstance(node, (str, bytes, Blob, Global)):
            return
        if isinstance(node, str):
            self.spend_characters(len(node) if node.isascii() else 6 * len(node))
        elif isinstance(node, Global):
            self.spend_characters(len(node.module) + len(node.name))
        else:
            self.spend_characters(node.nbytes if isinstance(node, Blob) else len(node))

    def spend_characters(self, count: int) -> None:
        if self.room is not None:
            self.room -= count
            if self.room < 0:
                raise TooLong

    def bare(self, node: Node) -> Term:
        known = self.leaves.get(id(node))
        if known is not None:
            return known
        self.spend(node)
        if isinstance(node, List):
            return self.row(node.items)
        if isinstance(node, Tuple):
            self.spend_characters(_CHARACTERS_OF_TUPLE)
            return {"$": "tuple", "of": self.row(node.items)} if node.items else _NO_ITEMS
        if isinstance(node, Set):
            return {"$": "frozenset" if node.frozen else "set", "of": self.row(node.items)}
        if isinstance(node, Dict):
            return self.dictionary(node)
        if isinstance(node, Call):
            return self.call(node)
        if isinstance(node, Persistent):
            term: dict[str, Term] = {"$": "persistent"}
            self.put(node.pid, term, "of")
            return term
        return _scalar(node)

    def dictionary(self, node: Dict) -> Term:
        record = record_of(node) if self.records else None
        if record is not None and all(map(self.is_name, record.keys)) and are_terms(record.values):
            for key in record.keys:
                self.spend(key)
            return record  # as rows of numbers
        keys = [key for key, _ in node.pairs if isinstance(key, str) and self.is_name(key)]
        term: dict[str, Term] = dict.fromkeys(map(str, keys))
        if len(term) != len(node.pairs):
            return {"$": "dict", "of": self.rows(node.pairs)}
        for key in term:
            self.spend(key)
        steps = zip(term, node.pairs, strict=True)
        self.todo.append(self.place_terms((value, term, key) for key, (_, value) in steps))
        return term

    def is_name(self, key: str) -> bool:
        """Whether a key can be a key of a JSON object."""
        return id(key) not in self.many and key != "$" and not has_surrogates(key)

    def call(self, node: Call) -> Term:
        term: dict[str, Term] = {"$": "call"}
        function, args = node.function, node.args
        if isinstance(function, str) or isinstance(args, List):
            raise UnsupportedError("the tree has a call that no unpickler could make")
        if isinstance(function, Global) and id(function) not in self.many:
            self.spend(function)
            term["of"] = _name(function)
        else:
            self.put(function, term, "of")
        if not isinstance(args, Tuple) or id(args) in self.many:
            self.put(args, term, "args")
        elif args.items:
            term["args"] = self.row(args.items)
        if node.opcode != "REDUCE":
            term["how"] = node.opcode
        if node.kwargs is not None:
            self.put(node.kwargs, term, "kwargs")
        if node.items:
            term["items"] = self.row(node.items)
        if node.pairs:
            term["pairs"] = self.rows(node.pairs)
        if node.built:
            self.put(node.state, term, "state")
        return term


_NO_ITEMS: Term = {"$": "tuple", "of": []}


def _scalar(node: Node) -> Term:
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, str):
        if has_surrogates(node):
            return {"$": "text", "of": _base64(node.encode("utf-8", "surrogatepass"))}
        return str(node)
    if isinstance(node, int):
        return node if node.bit_length() <= MAX_BITS else {"$": "int", "of": hex(node)}
    if isinstance(node, float):
        if isnan(node):
            return {"$": "float", "of": f"0x{struct.pack('>d', node).hex()}"}
        return node if isfinite(node) else {"$": "float", "of": str(node)}
    if isinstance(node, Global):
        return {"$": "name", "of": _name(node)}
    content = node.content if isinstance(node, Blob) else node
    if content is None:
        raise UnsupportedError("the tree has bytes that were too many to be held")
    if isinstance(content, bytes):
        return {"$": "bytes", "of": _base64(content)}
    raise TypeError(f"{type(node).__name__} is no node")


def _base64(content: bytes) -> str:
    return b2a_base64(content, newline=False).decode("ascii")


def _name(node: Global) -> str:
    name = f"{node.module}:{node.name}"
    if ":" in node.module or has_surrogates(name):
        raise UnsupportedError("the tree names a module as none can be named")
    return name


def has_surrogates(text: str) -> bool:
    """Whether text has surrogates, which UTF-8 can't encode."""
    return not text.isascii() and re.search(_SURROGATE, text) is not None
