"""Find the place of a rank's part in the whole tensor, from the pickle of the rank's file.

    DTensor         _local_tensor, _spec {mesh, placements, …}: a placement for each dimension of
                    the mesh says by which dimension of the tensor it is divided, or that it is not
    ShardedTensor   [Shard {tensor, metadata {shard_offsets, shard_sizes, …}}], metadata, …

A mesh is an array of ranks; torch 2.9 and newer store it as a layout over a list of ranks. A
dimension of n elements is divided among m ranks into pieces of ceil(n / m); the last ones are
shorter or empty. If several dimensions of the mesh divide the same dimension, the first of them
divides first, unless `shard_order` gives another order. `_StridedShard` divides the rest that the
placements to its right leave, like FSDP2 after TP has divided. If the division is uneven,
`distribute_tensor` gives some of the last ranks other parts; on at least one rank their sizes
differ from those of FSDP2.

Sources: torch/distributed/tensor/_dtensor_spec.py, placement_types.py, _utils.py;
torch/distributed/device_mesh.py; torch/distributed/_shard/sharded_tensor/api.py (2.1 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...pickles.nodes import Call, Dict, Global, Items, List, Node, Tuple
from ...torch_pickle.values.persistent_ids import is_size
from ...torch_pickle.values.strided import MOST_DIMENSIONS
from .boxes import Box

_WRAPPED = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_PARAMETER = "torch._utils._rebuild_parameter"
_MOST_RANKS = 1 << 20
_MOST_OF_ALL = 1 << 22  # ranks in all meshes of a file: meshes may share them
_MOST_AGAIN = 1 << 16  # ranks in all meshes of a file together: meshes may share them
_MOST_FIELDS = 256
_MALFORMED = "a tensor that is divided among ranks is malformed"


class RankPart(NamedTuple):
    """A part of a tensor in the file of a rank."""

    shape: tuple[int, ...]  #: the shape of the whole tensor
    box: Box
    local: Node  #: the tensor that holds the part
    #: whether its mesh divides in strides; the box is then the one that FSDP2 uses
    by_strides: bool = False


class DividedTensor(NamedTuple):
    """A tensor that is divided among ranks, as described in the file of one rank."""

    kind: str  #: `DTensor` or `ShardedTensor`
    shape: tuple[int, ...]
    state: Node

    @property
    def shards(self) -> list[Mapping[str, Node]]:
        """The fields of a ShardedTensor's own shards, each with `tensor` and `metadata`."""
        return [_fields(each) for each in _items(_items(self.state)[0])]

    @property
    def local(self) -> Sequence[Node]:
        """The tensors with the rank's parts."""
        if self.kind == "ShardedTensor":
            return [each.get("tensor") for each in self.shards]
        return [_fields(self.state).get("_local_tensor")]


#: A dimension of a mesh: shape and strides, since it may be composed of several dimensions.
_Axis = tuple[tuple[int, ...], tuple[int, ...]]
#: Returns the numbers in a small tensor.
Numbers = Callable[[Node], Sequence[int]]


def divided_tensor(node: Node) -> DividedTensor | None:
    """The divided tensor that a node describes; None if it is not one."""
    try:
        return _divided_tensor(node)
    except IndexError as error:
        raise CorruptError(_MALFORMED) from error


def _divided_tensor(node: Node) -> DividedTensor | None:
    if isinstance(node, Call) and node.qualname == _PARAMETER:
        node = _items(node.args)[0]
    if not isinstance(node, Call) or node.qualname not in _WRAPPED:
        return None
    args = _items(node.args)
    cls = args[1]
    if not isinstance(cls, Global) or cls.name not in ("DTensor", "ShardedTensor"):
        return None
    if not cls.module.startswith("torch.distributed."):
        return None
    return DividedTensor(cls.name, _sizes(_items(args[2])[2]), args[3])


class Placement:
    """Finds the parts of a rank in divided tensors."""

    def __init__(self, rank: int, numbers: Numbers) -> None:
        """`numbers` returns the numbers in a small tensor of the rank's file."""
        self._rank = rank
        self._numbers = numbers
        self._meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by `id()`
        #: the shape of each mesh, with the names of its dimensions: `2×4 (dp, tp)`
        self.mesh_shapes: list[str] = []
        self._read = self._again = 0  # ranks, and parts of lists that were read before
        self._lists = set[int]()  # of parts, by `id()`

    def parts_of(self, found: DividedTensor) -> Iterator[RankPart]:
        """The rank's parts of a tensor; InputError if its file does not give their place."""
        try:
            yield from self._parts_of(found)
        except IndexError as error:
            raise CorruptError(_MALFORMED) from error

    def _ranks(self, node: Node) -> Sequence[int]:
        """The ranks of a mesh, which are stored as a tensor or a tuple of numbers."""
        is_row = isinstance(node, (Tuple, List))
        found = _sizes(node, _MOST_RANKS) if is_row else self._numbers(node)
        self._read += len(found)
        if self._read > _MOST_OF_ALL:
            raise CorruptError("the meshes of its tensors have too many ranks")
        return found

    def ranks_of(self, found: DividedTensor) -> set[int]:
        """The ranks that have parts of a tensor, or a copy of a part; InputError as `parts_of`."""
        try:
            if found.kind == "ShardedTensor":
                about = _fields(_items(found.state)[1]).get("shards_metadata")
                self._count(about)
                places = [_fields(_fields(each).get("placement")) for each in _items(about)]
                return {_size(each.get("_rank")) for each in places}
            return set(
                _mesh_in(
                    _fields(_fields(_fields(found.state).get("_spec")).get("mesh")), self._ranks
                )[1]
            )
        except IndexError as error:
            raise CorruptError(_MALFORMED) from error

    def _count(self, own: Node) -> None:
        """Raises CorruptError if many tensors have the same long list of parts."""
        self._again += len(_items(own)) if id(own) in self._lists else 0
        self._lists.add(id(own))
        if self._again > _MOST_AGAIN:
            raise CorruptError("too many tensors have the same list of parts")

    def _parts_of(self, found: DividedTensor) -> Iterator[RankPart]:
        if found.kind == "ShardedTensor":
            self._count(_items(found.state)[0])
            for told in found.shards:
                about = _fields(told.get("metadata"))
                box = Box(_sizes(about.get("shard_offsets")), _sizes(about.get("shard_sizes")))
                yield RankPart(found.shape, box, told.get("tensor"))
            return
        state = _fields(found.state)
        spec = _fields(state.get("_spec"))
        mesh = spec.get("mesh")
        if id(mesh) not in self._meshes:
            fields = _fields(mesh)
            sizes, _ = self._meshes[id(mesh)] = _place_in(fields, self._rank, self._ranks)
            self.mesh_shapes.append(_mesh_shape(sizes, fields))
        sizes, at = self._meshes[id(mesh)]
        box = _box(found.shape, _divided_by(spec, sizes), sizes, at)
        placements = [each for each in _items(spec.get("placements")) if isinstance(each, Call)]
        by_strides = any((each.qualname or "").endswith("._StridedShard") for each in placements)
        yield RankPart(found.shape, box, state.get("_local_tensor"), by_strides)


def _box(
    shape: tuple[int, ...],
    dims: Mapping[int, Sequence[int]],
    mesh: Sequence[int],
    at: Sequence[int],
) -> Box:
    """The box of a rank; `dims`: tensor dimension → the mesh dimensions that divide it."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, order in dims.items():
        if dim >= len(shape):
            raise CorruptError("a tensor is divided by a dimension that it does not have")
        for n in order:
            piece = -(-sizes[dim] // mesh[n])
            start = min(piece * at[n], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(piece, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _divided_by(spec: Mapping[str, Node], mesh: Sequence[int]) -> dict[int, list[int]]:
    """Dimension of a tensor → the mesh dimensions that divide it, in order."""
    placements = _items(spec.get("placements"))
    if len(placements) != len(mesh):
        raise CorruptError("a tensor has another number of placements than its mesh has dimensions")
    plain: dict[int, list[int]] = {}
    strided: dict[int, list[tuple[int, int]]] = {}
    for n, node in enumerate(placements):
        kind = node.qualname.rpartition(".")[2] if isinstance(node, Call) and node.qualname else ""
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UnsupportedError(
                f"a tensor has the placement {kind or 'of another kind'!s:.40}: no rank has a "
                "part of its values"
            )
        told = _fields(node)
        dim = _size(told.get("dim"))
        if kind == "Shard":
            plain.setdefault(dim, []).append(n)
        else:
            strided.setdefault(dim, []).append((n, _size(told.get("split_factor"))))
    for dim, found in strided.items():
        for n, factor in reversed(found):
            order = plain.setdefault(dim, [])
            after = [each for each in order if each > n]
            if prod(mesh[each] for each in after) != factor:
                raise UnsupportedError(
                    f"a tensor is divided in strides of {factor:,}, which are not those of its mesh"
                )
            order.append(n)
    return plain if strided else _ordered(plain, spec.get("shard_order"))


def _mesh_shape(sizes: Sequence[int], mesh: Mapping[str, Node]) -> str:
    names = mesh.get("_mesh_dim_names", mesh.get("mesh_dim_names"))  # torch 2.9 and newer; older
    told = [str(each) for each in _items(names) if isinstance(each, str)] if names else []
    shape = "×".join(f"{size:,}" for size in sizes)
    return f"{shape} ({', '.join(told):.80})" if told else shape


def _ordered(plain: dict[int, list[int]], told: Node) -> dict[int, list[int]]:
    """The same in the order given by `shard_order`, if there is one."""
    entries = _items(told) if told is not None else ()
    if len(entries) > MOST_DIMENSIONS:
        raise CorruptError(_MALFORMED)
    for entry in entries:
        args = _items(entry.args) if isinstance(entry, Call) else _items(entry)
        dim, order = _size(args[0]), [*_sizes(args[1])]
        if sorted(order) != sorted(plain.get(dim, [])):
            raise CorruptError("a tensor was divided in another order than its placements allow")
        plain[dim] = order
    return plain


def _place_in(
    mesh: Mapping[str, Node], rank: int, ranks_of: Numbers
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of a mesh, and the coordinates of a rank in it."""
    own = mesh.get("_rank")
    if own is not None and own != rank:
        raise CorruptError(f"its name says that it is of rank {rank:,}, and its mesh another")
    axes, ranks = _mesh_in(mesh, ranks_of)
    sizes = tuple(prod(shape) for shape, _ in axes)
    if len(sizes) > MOST_DIMENSIONS or prod(sizes) > len(ranks):
        raise CorruptError("a mesh has more places than ranks")
    if rank not in ranks:
        raise CorruptError(f"rank {rank:,} is not in the mesh of a tensor: a file of another save?")
    _check_nested(axes)
    n = ranks.index(rank)
    at = tuple(_along(n, *axis) for axis in axes)
    told = mesh.get("_coordinate_on_dim")
    if told is not None and _sizes(told) != at:
        raise CorruptError(f"rank {rank:,} is elsewhere in its mesh than its file says")
    return sizes, at


def _mesh_in(mesh: Mapping[str, Node], ranks_of: Numbers) -> tuple[list[_Axis], Sequence[int]]:
    """The dimensions of a mesh, and the ranks in its order."""
    whole = mesh.get("mesh", mesh.get("_mesh"))
    layout = mesh.get("_layout")
    if whole is not None:
        args = _items(whole.args) if isinstance(whole, Call) else ()
        sizes, ranks = _sizes(args[2] if len(args) > 2 else None), ranks_of(whole)
        strides = [prod(sizes[n + 1 :]) for n in range(len(sizes))]
        axes: list[_Axis] = [
            ((size,), (stride,)) for size, stride in zip(sizes, strides, strict=True)
        ]
    elif layout is not None:
        told = mesh.get("_flatten_rank_map")
        ranks = ranks_of(mesh.get("_rank_map") if told is None else told)
        axes = _axes(_fields(layout))
    else:
        raise UnsupportedError("a tensor has a mesh of a kind that is not known")
    return axes, ranks


def _check_nested(axes: Sequence[_Axis]) -> None:
    """UnsupportedError unless the coordinates of a rank follow from its index."""
    step = 1
    pairs = sorted((n, size) for sizes, steps in axes for size, n in zip(sizes, steps, strict=True))
    for n, size in pairs:
        if size > 1 and (not n or n % step):
            raise UnsupportedError("a tensor has a mesh whose dimensions are not nested")
        step = n * size if size > 1 else step


def _axes(layout: Mapping[str, Node]) -> list[_Axis]:
    """The shape and strides of each dimension of a mesh."""
    axes = layout.get("axes")
    if axes is not None:
        fields = [_fields(each) for each in _items(axes)]
        return [(_sizes(each.get("shape")), _sizes(each.get("stride"))) for each in fields]
    shape, stride = layout.get("shape"), layout.get("stride")
    shapes, strides = ([node] if is_size(node) else _items(node) for node in (shape, stride))
    if len(shapes) != len(strides):
        raise CorruptError("the layout of a mesh is malformed")
    rows = [[(n,) if isinstance(n, int) else _sizes(n) for n in each] for each in (shapes, strides)]
    return list(zip(*rows, strict=True))


def _along(n: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The coordinate in one mesh dimension of index `n` in the list of ranks."""
    at = 0
    for size, step in zip(shape, stride, strict=True):
        at = at * size + (n // step % size if size > 1 else 0)
    return at


# -- nodes -----------------------------------------------------------------------------------------


def _fields(node: Node) -> dict[str, Node]:
    """The fields of an object, or the entries of a dict, by name."""
    state: Node = node.state if isinstance(node, Call) else node
    if isinstance(state, Tuple) and len(state.items) == 2:  # an object with slots
        state = state.items[1] if state.items[0] is None else state.items[0]
    if not isinstance(state, Dict) or len(state.pairs) > _MOST_FIELDS:
        raise CorruptError(_MALFORMED)
    return {str(key): value for key, value in state.pairs if isinstance(key, str)}


def _items(node: Node) -> Items:
    if isinstance(node, Call) and node.qualname == "torch.Size":
        node = node.args.items[0] if isinstance(node.args, Tuple) and node.args.items else None
    if not isinstance(node, (Tuple, List)):
        raise CorruptError(_MALFORMED)
    return node.items


def _sizes(node: Node, most: int = MOST_DIMENSIONS) -> tuple[int, ...]:
    items = _items(node)
    if len(items) > most:
        raise CorruptError("a tensor that is divided among ranks has too many dimensions")
    return tuple(map(_size, items))


def _size(node: Node) -> int:
    if not is_size(node) or not isinstance(node, int):
        raise CorruptError(_MALFORMED)
    return node
