"""Read ranks' files of ZeRO: assemble whole weights and optimizer state from their partitions.

    model file          module, param_shapes [group] {name: size}, frozen_param_fragments {name: …},
                        shared_params {name: the name whose weight it is}, and what the user saved
    optimizer file      optimizer_state_dict, ds_config, ds_version
    … of stage 1, 2     single_partition_of_fp32_groups [group], partition_count [group],
                        group_paddings [group], param_alignment_paddings [group] [parameter],
                        base_optimizer_state {state {group: {step, exp_avg, …}}, param_groups}
    … of stage 3        fp32_flat_groups [subgroup], partition_count,
                        optimizer_state_dict {state {subgroup: …}, param_groups}

Because of a padding, the partitions of an optimizer's state may be longer than those of the
weights.

Source: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py; utils/zero_to_fp32.py (0.8 to 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from ....errors import CorruptError, UnsupportedError
from ....manifest.dtypes import BITS
from ....pickles.nodes import Dict, List, Node
from ....torch_pickle.values.persistent_ids import is_size
from ..saved_file import SavedFile, by_number, dict_in, shapes_in
from .flat import Elements, FlatTensors, Whole, share
from .trained import INNER, TrainedState, Value, abouts_of, frozen_in, groups_of, rest_of

_FLAT, _FLAT_OF_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_BASE, _BASE_OF_3 = "base_optimizer_state", "optimizer_state_dict"
#: Keys that only describe how the partitions were made.
LAYOUT = frozenset((_FLAT, _FLAT_OF_3, _BASE, _BASE_OF_3)) | {
    *("group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"),
}
_LARGEST_VALUE = 64  # bytes of a tensor that all ranks have, such as a step
_MOST_KINDS = 16  # kinds of optimizer state of a parameter; Adam has four
_SCALARS = (bool, int, float, str, type(None))


class Zero(TrainedState):
    """The merged weights and optimizer state of all ranks."""

    def __init__(self, model: Sequence[SavedFile], ranks: Sequence[SavedFile]) -> None:
        """`model`: the file of the model, or in stage 3 the files of all ranks."""
        super().__init__()
        self.ranks = ranks
        self._model = model
        self._inner = [dict_in(rank, rank.root, INNER) for rank in ranks]
        self.is_divided = self._inner[0].get(_FLAT_OF_3) is not None
        self._states = [
            by_number(_base(rank, inner, self.is_divided).get("state"))
            for rank, inner in zip(ranks, self._inner, strict=True)
        ]
        self._cut = [by_number(inner.get("group_paddings")) for inner in self._inner]
        self._aligned = by_number(self._inner[0].get("param_alignment_paddings"))
        key = _FLAT_OF_3 if self.is_divided else _FLAT
        self._flats = [
            _flats(rank, inner, key) for rank, inner in zip(ranks, self._inner, strict=True)
        ]
        if len({len(each) for each in self._flats}) > 1:
            raise CorruptError("its ranks have different numbers of groups: of two saves")
        shapes = shapes_in(model[0], "param_shapes", grouped=True)
        if self.is_divided:
            self._read_slices(shapes)
        else:
            self._read_partitions(shapes)
        self.groups = groups_of(shapes, self._abouts(len(shapes)))
        self.frozen = frozen_in(model)
        self.rest = rest_of(ranks[0], self._inner[0], LAYOUT)

    # -- stages 1 and 2 ------------------------------------------------------------------------

    def _read_partitions(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        if len(shapes) != len(self._flats[0]):
            raise self._model[0].malformed_error("the number of its groups of parameters")
        for n, group in enumerate(shapes):
            flats = [each[n] for each in self._flats]
            row, dtype = _row(flats, f"group {n}")
            block = self._block(n)
            rows = {key: _row(parts, key) for key, parts in block.divided.items()}
            start, paddings = 0, self._paddings(n, len(group))
            for (name, shape), padding in zip(group.items(), paddings, strict=True):
                numel = prod(shape)
                self.weights[name] = Whole(dtype, shape, numel, [row], start)
                self.state[name] = block.in_order(
                    {key: Whole(d, shape, numel, [r], start) for key, (r, d) in rows.items()}
                )
                start += numel + padding
            self._check_length(n, start, row.numel)

    def _check_length(self, group: int, needed: int, there: int) -> None:
        """Check a group's size: its partitions are equal, padded to a multiple of two elements."""
        unit = 2 * len(self.ranks)
        if there < needed or -(-needed // unit) != -(-there // unit):
            raise CorruptError(
                f"the partitions of group {group} have {there:,} elements, and its parameters "
                f"{needed:,}"
            )

    def _paddings(self, group: int, count: int) -> Sequence[int]:
        """How many elements of padding follow each parameter of a group."""
        told = self._aligned.get(group)
        if told is None:
            return [0] * count
        items = told.items if isinstance(told, List) else ()
        if len(items) != count or not all(map(is_size, items)):
            raise self.ranks[0].malformed_error("its param_alignment_paddings")
        return [each for each in items if isinstance(each, int)]

    # -- stage 3 -------------------------------------------------------------------------------

    def _read_slices(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        ranks = len(self.ranks)
        rows, (dtype, *_) = _rows(self._flats, "fp32_flat_groups")
        blocks = [self._block(n) for n in range(len(self._flats[0]))]
        keys = {key for block in blocks for key in block.divided}
        if any(block.divided.keys() != keys for block in blocks):
            raise UnsupportedError("its subgroups have different kinds of optimizer state")
        whole_rows = {
            key: _rows([[each.divided[key][n] for each in blocks] for n in range(ranks)], key)
            for key in keys
        }
        owned = self._first_subgroups(self._abouts(len(shapes)), len(blocks))
        start = 0
        named = ((g, n, s) for g, group in enumerate(shapes) for n, s in group.items())
        for group, name, shape in named:
            numel = prod(shape)
            each = share(numel, ranks)
            self.weights[name] = Whole(dtype, shape, numel, rows, start, True)
            block = self._block_at(name, rows[0], start, each, blocks, owned[group])
            self.state[name] = block.in_order(
                {
                    key: Whole(kinds[0], shape, numel, r, start, True)
                    for key, (r, kinds) in whole_rows.items()
                }
            )
            start += each
        for row in rows:
            if row.numel != start:
                raise CorruptError(
                    f"the partitions of a rank have {row.numel:,} elements, and its parameters "
                    f"{start:,}"
                )

    @staticmethod
    def _block_at(
        name: str,
        row: FlatTensors,
        start: int,
        numel: int,
        blocks: Sequence[_Block],
        owned: Sequence[int],
    ) -> _Block:
        """The subgroup that contains a parameter; if there are several, their values must agree.

        `owned` has the first subgroup of its group.
        """
        if start + numel > row.numel:
            raise CorruptError(f"its partitions end before {name!r:.100} does")
        met = [n for n, _, _ in row.within(start, numel)] or owned
        found = [blocks[n] for n in met] or [_Block([], {}, {})]
        first = found[0].values
        for each in found[1:]:
            same = each.values.keys() == first.keys()
            if not same or not all(_same(each.values[key], first[key]) for key in first):
                raise UnsupportedError(f"{name!r:.100} is in two subgroups whose steps differ")
        return found[0]

    @staticmethod
    def _first_subgroups(abouts: Sequence[Node], count: int) -> list[list[int]]:
        """For each group, a list with its first subgroup, of `count`; empty if it has none."""
        first = list[list[int]]()
        found = dict[int, list[int]]()  # lists may be shared, and long
        for about in abouts:
            params = about.get("params") if isinstance(about, Dict) else None
            if id(params) not in found:
                items = params.items if isinstance(params, List) else ()
                known = (n for n in items if is_size(n) and isinstance(n, int) and n < count)
                found[id(params)] = list(islice(known, 1))
            first.append(found[id(params)])
        return first

    # -- both ----------------------------------------------------------------------------------

    def _abouts(self, count: int) -> Sequence[Node]:
        """The param_groups of the optimizer, of which there must be `count`."""
        return abouts_of(
            self.ranks[0], _base(self.ranks[0], self._inner[0], self.is_divided), count
        )

    def _block(self, n: int) -> _Block:
        """The optimizer state of a (sub)group: divided tensors, and values common to all ranks."""
        entries = [states.get(n) for states in self._states]
        first = entries[0]
        if all(entry is None for entry in entries):
            return _Block([], {}, {})
        pairs = first.pairs if isinstance(first, Dict) else []
        if len(pairs) > _MOST_KINDS:
            raise UnsupportedError(
                f"its optimizer has {len(pairs):,} kinds of state of each parameter"
            )
        names = [str(key) for key, _ in pairs]
        divided: dict[str, list[Elements]] = {}
        values: dict[str, Value] = {}
        for entry in entries:
            if not isinstance(entry, Dict) or [str(key) for key, _ in entry.pairs] != names:
                raise CorruptError(f"ranks differ in the optimizer state of group {n}")
        for key in names:
            nodes = [entry.get(key) for entry in entries if isinstance(entry, Dict)]
            found = [r.elements(node) for r, node in zip(self.ranks, nodes, strict=True)]
            parts = [
                each.first(flats[n].numel)
                for each, flats, cut in zip(found, self._flats, self._cut, strict=True)
                if each is not None and _fits(each, flats[n].numel, cut.get(n))
            ]
            if len(parts) == len(self.ranks):
                divided[key] = parts
            else:
                values[key] = _value(key, nodes, found)
        return _Block(names, divided, values)


class _Block(NamedTuple):
    """The optimizer state of a group or subgroup."""

    names: Sequence[str]
    divided: Mapping[str, Sequence[Elements]]  #: for each rank
    values: Mapping[str, Value]

    def in_order(self, divided: Mapping[str, Whole]) -> dict[str, Value]:
        """The state of a parameter, given its divided tensors."""
        return {key: divided[key] if key in divided else self.values[key] for key in self.names}


def world_of(rank: SavedFile) -> int:
    """The number of ranks that saved, from the file of one.

    UnsupportedError if its groups differ.
    """
    inner = dict_in(rank, rank.root, INNER)
    told = inner.get("partition_count")
    counts = told.items if isinstance(told, List) else [told]
    if len(set(map(str, counts))) > 1:
        raise UnsupportedError(
            "its groups are divided among different numbers of ranks, as those of experts are",
            path=rank.source.path,
        )
    count = counts[0] if counts else None
    if not is_size(count) or not count:
        raise rank.malformed_error("its partition_count")
    assert isinstance(count, int)
    return count


def _base(rank: SavedFile, inner: Dict, is_divided: bool) -> Dict:
    """The state that the user's optimizer saved."""
    base = inner.get(_BASE_OF_3 if is_divided else _BASE)
    if isinstance(base, List):
        raise UnsupportedError("is an elastic checkpoint of ZeRO 1", path=rank.source.path)
    if not isinstance(base, Dict):
        raise rank.malformed_error("its optimizer's state")
    return base


def _flats(rank: SavedFile, inner: Dict, key: str) -> list[Elements]:
    """The partitions of the weights of a rank."""
    listed = inner.get(key)
    found = [rank.elements(node) for node in listed.items] if isinstance(listed, List) else [None]
    flats = [each for each in found if each is not None and len(each.shape) == 1]
    if len(flats) != len(found):
        raise rank.malformed_error(f"its {key}")
    return flats


def _fits(state: Elements, numel: int, cut: Node) -> bool:
    """Whether state is divided like the weights, whose padding may have been cut off."""
    padding = cut if is_size(cut) and isinstance(cut, int) else 0
    return len(state.shape) == 1 and state.numel in (numel, numel + padding)


def _row(flats: Sequence[Elements], what: str) -> tuple[FlatTensors, str]:
    dtypes = {each.dtype for each in flats}
    if len(dtypes) > 1:
        raise CorruptError(f"ranks differ in the dtype of {what:.100}")
    (dtype,) = dtypes or {"float32"}
    return FlatTensors(flats, BITS[dtype] // 8), dtype


def _rows(flats: Sequence[Sequence[Elements]], what: str) -> tuple[list[FlatTensors], list[str]]:
    """The row of each rank, and its dtype."""
    made = [_row(each, what) for each in flats]
    dtypes = [dtype for _, dtype in made]
    if len(set(dtypes)) > 1:
        raise CorruptError(f"ranks differ in the dtype of {what:.100}")
    return [row for row, _ in made], dtypes


def _value(key: str, nodes: Sequence[Node], found: Sequence[Elements | None]) -> Value:
    """A value that all ranks have in common, such as a step."""
    first, node = found[0], nodes[0]
    if first is not None and first.numel * BITS[first.dtype] // 8 <= _LARGEST_VALUE:
        if any(each is None or not _same(first, each) for each in found):
            raise CorruptError(f"ranks differ in {key!r:.100} of the optimizer: of two saves")
        return first
    if first is None and isinstance(node, _SCALARS):
        if any(type(each) is not type(node) or each != node for each in nodes):
            raise CorruptError(f"ranks differ in {key!r:.100} of the optimizer: of two saves")
        return node
    raise UnsupportedError(f"the optimizer's {key!r:.100} is not divided as the weights are")


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Elements) and isinstance(b, Elements):
        return a[2:5] == b[2:5] and _bytes(a) == _bytes(b)
    return type(a) is type(b) and a == b


def _bytes(elements: Elements) -> bytes:
    return elements.source.read(elements.at, elements.numel * BITS[elements.dtype] // 8)
