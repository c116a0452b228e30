"""Recognize tensors among the inert calls of a pickle, and check them.

Sources: torch/_utils.py and torch/_tensor.py (`_rebuild_*` and `Tensor._reduce_ex_internal`);
torch/serialization.py (`persistent_id`). A function that is not known here makes an object, never
a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from ...errors import CorruptError, UnsupportedError
from ...manifest.dtypes import ALIASES, BITS, nbytes_of, storage_element_nbytes
from ...manifest.manifest import Role
from ...pickles.nodes import Call, Dict, Global, Items, List, Node, Persistent, Text, Tuple
from ...pickles.opcodes.plain_tensors import PlainTensor, compact_form
from .persistent_ids import StorageId, TensorId, is_size
from .plain_tensors import PlainTensors
from .strided import MOST_DIMENSIONS, Child, Tensor, count_of, tensor_at

_DEEPEST = 16  # levels of tensors wrapped in each other
_NOT_ATTRIBUTES = {"data", "grad", "requires_grad"}  # setting these changes the tensor itself
#: Parameters of torch 0.1 to 0.3, and the class that they were made of.
VARIABLES = ("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable")


def device_text(node: Node) -> str | None:
    """The device that a `torch.device` call makes; None for any other node."""
    if not isinstance(node, Call) or node.qualname != "torch.device":
        return None
    args = node.args.items if isinstance(node.args, Tuple) else []
    if len(args) == 1 and isinstance(args[0], str):
        return str(args[0])
    if len(args) == 2 and isinstance(args[0], str) and is_size(args[1]):
        return f"{args[0]!s}:{args[1]!r}"
    return None


def variable_of(node: Call) -> tuple[Node, Node, Node] | None:
    """The data, the requires_grad flag and the hooks of a parameter of torch 0.1 to 0.3.

    It was made from its data or from nothing, and then given its state.
    """
    if node.qualname not in VARIABLES:
        return None
    args = node.args.items if isinstance(node.args, Tuple) else []
    state = node.state.items if isinstance(node.state, Tuple) else []
    if len(args) == 1 and len(state) == 3:
        return args[0], state[0], state[2]
    return (state[0], state[3], state[2]) if not args and len(state) == 5 else None


class Recogniser(PlainTensors):
    """Finds the tensor that a node makes, given what persistent ids name."""

    def __init__(
        self, ids: Mapping[int, StorageId], tensors: Mapping[int, TensorId] | None = None
    ) -> None:
        """`ids` and `tensors`: `id()` of a node → the storage or tensor that it stands for."""
        super().__init__(ids)
        self._tensors = tensors or {}
        # keeps the nodes alive, so that their ids stay valid
        self._known: dict[int, tuple[Call, Tensor | None]] = {}

    def tensor(self, node: Call, depth: int = 0) -> Tensor | None:
        """The tensor that a call would rebuild; None if it makes something else."""
        plain = compact_form(node)
        if plain is not None and isinstance(node, PlainTensor):
            found = self.ids.get(id(node.storage))
            if found is not None and found.dtype is not None:
                return self.plain(plain, found, found.dtype)
        known = id(node)
        if known in self._known:
            return self._known[known][1]
        function = node.qualname
        if function in VARIABLES:
            tensor = self._variable(node, depth)
        else:
            args = node.args.items if isinstance(node.args, Tuple) else []
            tensor = self._rebuilt(function, args, depth)
            if tensor is not None and (node.built or node.pairs or node.items or node.kwargs):
                raise CorruptError("a tensor is changed after it was rebuilt")
        self._known[known] = node, tensor
        return tensor

    def _rebuilt(self, function: str | None, args: Items, depth: int) -> Tensor | None:
        rebuild = _REBUILD.get(function or "")
        if rebuild is None:
            return None
        if depth > _DEEPEST:
            raise CorruptError("tensors are wrapped in each other too deeply")
        try:
            return rebuild(self, args, depth)
        except (_MalformedArguments, IndexError, ValueError) as error:
            raise CorruptError(f"a tensor has malformed arguments ({function})") from error

    def _variable(self, node: Call, depth: int) -> Tensor | None:
        """The tensor of a parameter of torch 0.1 to 0.3."""
        found = variable_of(node)
        if found is None:
            return None
        data, requires_grad, hooks = found
        try:
            tensor = self._inner(data, depth)
        except _MalformedArguments:
            return None
        kind = "parameter" if node.qualname == "torch.nn.parameter.Parameter" else tensor.kind
        children = (*tensor.children, *_hooks(hooks))
        return tensor._replace(kind=kind, requires_grad=requires_grad is True, children=children)

    def outside(self, node: Persistent) -> Tensor | None:
        """The tensor or storage that a persistent id names; None if it names a class."""
        tensor = self._tensors.get(id(node))
        if tensor is not None:
            return tensor_at(*tensor)
        found = self.ids.get(id(node))
        if found is None:
            return None
        dtype = found.dtype or "uint8"
        shape = (found.nbytes // storage_element_nbytes(dtype),)
        return Tensor(
            dtype=dtype,
            shape=shape,
            device=str(found.location),
            nbytes=found.nbytes,
            kind="storage",
            stride=(1,),
            offset=found.view_at,
            storage=found.id,
        )

    # -- one method a rebuild function; the arguments are in its order -------------------------

    def _strided(
        self,
        args: Items,
        dtype: str | None = None,
        requires_grad: Node = False,
        children: tuple[Child, ...] = (),
    ) -> Tensor:
        found = self.ids.get(id(args[0]))
        if found is None or not isinstance(args[0], (Persistent, Call)):
            raise _MalformedArguments
        dtype = dtype or found.dtype
        offset, shape, stride = args[1], _sizes(args[2]), _sizes(args[3])
        if dtype is None or not is_size(offset) or len(shape) != len(stride):
            raise _MalformedArguments
        assert isinstance(offset, int)
        return tensor_at(found, shape, stride, offset, dtype, requires_grad is True, children)

    def _tensor(self, args: Items, depth: int) -> Tensor:
        return self._strided(args)

    def _tensor_v2(self, args: Items, depth: int) -> Tensor:
        return self._strided(args, None, args[4], _hooks(args[5]))

    def _tensor_v3(self, args: Items, depth: int) -> Tensor:
        return self._strided(args, _dtype(args[6]), args[4], _hooks(args[5]))

    def _quantized(self, args: Items, depth: int) -> Tensor:
        tensor = self._strided(args, None, args[5], _hooks(args[6]))
        params = _items(args[4])
        if len(params) != 4:
            return tensor
        # Per channel: scheme, scales, zero points, axis.
        parts = Child("scales", params[1]), Child("zero_points", params[2])
        return tensor._replace(children=(*tensor.children, *parts), composite=True)

    def _parameter(self, args: Items, depth: int) -> Tensor:
        tensor = self._inner(args[0], depth)
        kind = "parameter" if tensor.kind == "tensor" else tensor.kind
        children = (*tensor.children, *_hooks(args[2]))
        if len(args) > 3:
            children += _attributes(args[3])
        return tensor._replace(kind=kind, requires_grad=args[1] is True, children=children)

    def _from_type(self, args: Items, depth: int) -> Tensor:
        function, cls, inner, state = args[:4]
        if isinstance(cls, Call):
            raise UnsupportedError("tensors of a class within another class are not known")
        if not isinstance(function, Global) or not isinstance(cls, Global):
            raise _MalformedArguments
        tensor = self._rebuilt(function.qualname, _items(inner), depth + 1)
        if tensor is None:
            raise UnsupportedError(f"tensors rebuilt by {function.qualname} are not known")
        kind = {"Tensor": "tensor", "Parameter": "parameter"}.get(cls.name, cls.qualname)
        if not cls.module.startswith("torch"):
            kind = cls.qualname
        children = (*tensor.children, *_attributes(state))
        if cls.name == "NestedTensor":  # its attributes repeat what it is rebuilt from
            children = tensor.children
        # its wrapper claims to be on the CPU, wherever the shards are
        if cls.name == "ShardedTensor":
            device = self._device_of_shards(state, depth) or tensor.device
            tensor = tensor._replace(device=device, spelled=())
        return tensor._replace(kind=kind, children=children)

    def _device_of_shards(self, state: Node, depth: int) -> str | None:
        """The device of the first shard of a ShardedTensor that is in this file."""
        shards = _items(_items(state)[0])
        for shard in shards:
            attributes = _items(shard.state) if isinstance(shard, Call) else []
            for each in attributes:
                if isinstance(each, Dict):
                    return self._inner(each.get("tensor"), depth).device
        return None

    def _sparse(self, args: Items, depth: int) -> Tensor:
        return self._compressed(_layout(args[0]), _items(args[1]), depth)

    def _compressed(self, layout: str, parts: Items, depth: int) -> Tensor:
        if layout == "sparse_coo":
            names = ["indices", "values"]
        elif layout in ("sparse_csr", "sparse_bsr"):
            names = ["crow_indices", "col_indices", "values"]
        elif layout in ("sparse_csc", "sparse_bsc"):
            names = ["ccol_indices", "row_indices", "values"]
        else:
            raise UnsupportedError(f"tensors of layout {layout} are not known")
        inner = [self._inner(part, depth) for part in parts[: len(names)]]
        return Tensor(
            dtype=inner[-1].dtype,
            shape=_sizes(parts[len(names)]),
            device=inner[-1].device,
            nbytes=sum(each.nbytes for each in inner),
            layout=layout,
            children=tuple(Child(name, part) for name, part in zip(names, parts, strict=False)),
            composite=True,
        )

    def _sparse_csr(self, args: Items, depth: int) -> Tensor:
        return self._compressed("sparse_csr", _items(args[0]), depth)

    def _nested(self, args: Items, depth: int) -> Tensor:
        values, sizes = self._inner(args[0], depth), self._inner(args[1], depth)
        if len(sizes.shape) != 2 or sizes.shape[1] > MOST_DIMENSIONS:
            raise _MalformedArguments
        names = ("sizes", "strides", "offsets")
        parts = [Child(name, part, Role.SHAPE) for name, part in zip(names, args[1:], strict=False)]
        return Tensor(
            dtype=values.dtype,
            shape=(sizes.shape[0], *[-1] * sizes.shape[1]),
            device=values.device,
            nbytes=values.nbytes,
            layout="nested",
            children=(Child("values", args[0]), *parts),
            composite=True,
        )

    def _jagged(self, args: Items, depth: int) -> Tensor:
        state = args[0]
        if not isinstance(state, Dict):
            raise _MalformedArguments
        values, offsets = state.get("values"), state.get("offsets")
        inner, bounds = self._inner(values, depth), self._inner(offsets, depth)
        children = [Child("values", values), Child("offsets", offsets)]
        if isinstance(state.get("lengths"), Call):
            children.append(Child("lengths", state.get("lengths")))
        cache = state.get("_metadata_cache")
        for key, value in cache.pairs if isinstance(cache, Dict) else []:
            if isinstance(key, str) and isinstance(value, Call):
                children.append(Child(str(key), value, Role.SHAPE))
        return Tensor(
            dtype=inner.dtype,
            shape=(max(0, prod(bounds.shape) - 1), -1, *inner.shape[1:]),
            device=inner.device,
            nbytes=inner.nbytes,
            layout="jagged",
            requires_grad=state.get("requires_grad") is True,
            children=tuple(children),
            composite=True,
        )

    def _meta(self, args: Items, depth: int) -> Tensor:
        dtype, shape = _dtype(args[0]), _sizes(args[1])
        return Tensor(
            dtype=dtype,
            shape=shape,
            device="meta",
            nbytes=nbytes_of(count_of(shape), dtype),
            stride=_sizes(args[2]),
            requires_grad=args[3] is True,
        )

    def _through_cpu(self, args: Items, depth: int) -> Tensor:
        """XLA and similar devices: the bytes are in a CPU tensor, the device is an argument."""
        tensor = self._inner(args[0], depth)
        device = args[2]
        if not isinstance(device, Text):
            raise _MalformedArguments
        return tensor._replace(device=str(device), requires_grad=args[3] is True, spelled=(device,))

    def _through_numpy(self, args: Items, depth: int) -> Tensor:
        """XLA as torch 1 saved it: the values are an array within the pickle."""
        array, device = args[0], args[2]
        state = array.state if isinstance(array, Call) else None
        dtype, shape = _dtype(args[1]), _sizes(_items(state)[1])
        if not isinstance(device, Text):
            raise _MalformedArguments
        return Tensor(
            dtype=dtype,
            shape=shape,
            device=str(device),
            nbytes=nbytes_of(count_of(shape), dtype),
            requires_grad=args[3] is True,
            spelled=(device,),
        )

    def _wrapper(self, args: Items, depth: int) -> Tensor:
        cls, device = args[0], args[6]
        text = device_text(device)
        if not isinstance(cls, Global) or text is None or not isinstance(device, Call):
            raise _MalformedArguments
        dtype, shape = _dtype(args[1]), _sizes(args[2])
        offset = args[4]
        return Tensor(
            dtype=dtype,
            shape=shape,
            device=text,
            nbytes=nbytes_of(count_of(shape), dtype),
            kind=cls.qualname,
            layout=_layout(args[5]),
            stride=_sizes(args[3]),
            offset=offset if isinstance(offset, int) else 0,
            requires_grad=args[7] is True,
            spelled=(device,),
            composite=True,
        )

    def _inner(self, node: Node, depth: int) -> Tensor:
        if isinstance(node, Persistent) and id(node) in self._tensors:
            return tensor_at(*self._tensors[id(node)])
        tensor = self.tensor(node, depth + 1) if isinstance(node, Call) else None
        if tensor is None:
            raise _MalformedArguments
        return tensor


class _MalformedArguments(Exception):
    """The arguments are not those of the rebuild function."""


_Rebuild = Callable[[Recogniser, Items, int], Tensor]
_REBUILD: dict[str, _Rebuild] = {
    "torch._utils._rebuild_tensor": Recogniser._tensor,
    "torch._utils._rebuild_tensor_v2": Recogniser._tensor_v2,
    "torch._utils._rebuild_tensor_v3": Recogniser._tensor_v3,
    "torch._utils._rebuild_parameter": Recogniser._parameter,
    "torch._utils._rebuild_parameter_with_state": Recogniser._parameter,
    "torch._utils._rebuild_qtensor": Recogniser._quantized,
    "torch._utils._rebuild_sparse_tensor": Recogniser._sparse,
    "torch._utils._rebuild_sparse_csr_tensor": Recogniser._sparse_csr,
    "torch._utils._rebuild_nested_tensor": Recogniser._nested,
    "torch._utils._rebuild_meta_tensor_no_storage": Recogniser._meta,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Recogniser._through_cpu,
    "torch._utils._rebuild_device_tensor_from_numpy": Recogniser._through_numpy,
    "torch._utils._rebuild_xla_tensor": Recogniser._through_numpy,
    "torch._utils._rebuild_wrapper_subclass": Recogniser._wrapper,
    "torch._tensor._rebuild_from_type": Recogniser._from_type,
    "torch._tensor._rebuild_from_type_v2": Recogniser._from_type,
    "torch.nested._internal.nested_tensor._rebuild_njt": Recogniser._jagged,
}


def _items(node: Node) -> Items:
    if not isinstance(node, (Tuple, List)):
        raise _MalformedArguments
    return node.items


def _sizes(node: Node) -> tuple[int, ...]:
    """A shape or stride: a tuple of sizes, or a `torch.Size` made of one."""
    if isinstance(node, Call) and node.qualname == "torch.Size":
        node = _items(node.args)[0]
    items = _items(node)
    if len(items) > MOST_DIMENSIONS:
        raise _MalformedArguments
    for n in items:
        if not is_size(n):
            raise _MalformedArguments
    return tuple(items)  # type: ignore[arg-type] # they are sizes


def _dtype(node: Node) -> str:
    if not isinstance(node, Global) or node.module != "torch":
        raise _MalformedArguments
    name = ALIASES.get(node.name, node.name)
    if name not in BITS:
        raise UnsupportedError(f"the dtype {node.qualname} is not known")
    return name


def _layout(node: Node) -> str:
    if not isinstance(node, Call) or node.qualname != "torch.serialization._get_layout":
        raise _MalformedArguments
    name = _items(node.args)[0]
    if not isinstance(name, str):
        raise _MalformedArguments
    return str(name).removeprefix("torch.")


def _hooks(node: Node) -> tuple[Child, ...]:
    """Backward hooks, which are objects of the user; usually there are none."""
    if isinstance(node, Call) and not node.pairs:
        return ()
    return () if node is None else (Child("_backward_hooks", node),)


def _attributes(state: Node) -> tuple[Child, ...]:
    """The attributes in a state: a dict, or a pair of a dict and the slots (copyreg's form)."""
    parts = state.items if isinstance(state, Tuple) else [state]
    pairs = [pair for part in parts if isinstance(part, Dict) for pair in part.pairs]
    named = tuple(Child(str(key), value) for key, value in pairs if isinstance(key, str))
    if any(child.key in _NOT_ATTRIBUTES for child in named):
        raise CorruptError("the data of a tensor is replaced after it was rebuilt")
    rest = tuple(Child("<state>", p) for p in parts if p is not None and not isinstance(p, Dict))
    return named + rest
