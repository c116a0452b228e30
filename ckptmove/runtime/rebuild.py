"""Build tensors with torch's own rebuild functions, after checks that torch does not make.

torch/_utils.py trusts a checkpoint: if a view leaves its storage, torch enlarges the storage; an
expanded quantized tensor is allocated in full; the parts of a nested tensor may be anywhere; and
any attribute may be set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ..errors import CorruptError, DeviceError
from ..manifest.dtypes import nbytes_of
from ..torch_pickle.values.strided import MOST_DIMENSIONS, count_of, reach_of
from .device_copies import REMEDY
from .storages import WHOLE

_sparse_checks: Any = torch.sparse.check_sparse_tensor_invariants
_TYPES = (torch.Tensor, torch.nn.Parameter)


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise CorruptError(f"a tensor is invalid: {why}")


def _sizes(value: object) -> tuple[int, ...]:
    _check(isinstance(value, tuple) and len(value) <= MOST_DIMENSIONS, "its sizes are malformed")
    assert isinstance(value, tuple)
    _check(all(type(n) is int and 0 <= n < 1 << 63 for n in value), "its sizes are malformed")
    return value


def _check_view(
    storage: object, offset: object, size: object, stride: object, dtype: object = None
) -> None:
    _check(isinstance(storage, torch.TypedStorage), "its storage is invalid")
    assert isinstance(storage, torch.TypedStorage)
    shape, steps = _sizes(size), _sizes(stride)
    _check(len(shape) == len(steps), "it does not have one stride for each dimension")
    dtype = storage.dtype if dtype is None else dtype
    _check(isinstance(dtype, torch.dtype), "its dtype is invalid")
    count_of(shape)
    (start,) = _sizes((offset,))
    reach = reach_of(shape, steps, start, str(dtype).removeprefix("torch."))
    _check(reach <= storage._untyped_storage.nbytes(), "it reaches outside its storage")


def _check_rest(requires_grad: object, hooks: object, metadata: object = None) -> None:
    _check(isinstance(requires_grad, bool), "requires_grad is neither true nor false")
    _check(hooks is None or type(hooks) in (dict, OrderedDict), "its hooks are malformed")
    bits = metadata if isinstance(metadata, dict) else {}
    _check(metadata is None or metadata is bits, "its metadata is malformed")
    _check(all(type(value) is bool for value in bits.values()), "its metadata is malformed")


def _check_state(state: object) -> None:
    """Allow only plain attributes, which do not change the tensor itself."""
    parts = state if isinstance(state, tuple) else (state,)
    for part in parts:
        _check(part is None or isinstance(part, dict), "its attributes are malformed")
        for name in part or ():
            own = [vars(each).get(name) for each in torch.nn.Parameter.__mro__]
            plain = isinstance(name, str) and not any(hasattr(each, "__set__") for each in own)
            _check(plain, "an attribute would change the tensor itself")


# -- one check for each rebuild function, with the same order of arguments -------------------------

_Args = tuple[Any, ...]


def _tensor(args: _Args) -> None:
    storage, offset, size, stride = args
    _check_view(storage, offset, size, stride)


def _tensor_v2(args: _Args) -> None:
    *where, requires_grad, hooks = args[:6]
    _tensor(tuple(where))
    _check_rest(requires_grad, hooks, *args[6:])


def _tensor_v3(args: _Args) -> None:
    *where, requires_grad, hooks, dtype = args[:7]
    _check(isinstance(dtype, torch.dtype), "its dtype is invalid")
    storage, offset, size, stride = where
    _check_view(storage, offset, size, stride, dtype)
    _check_rest(requires_grad, hooks, *args[7:])


def _quantized(args: _Args) -> None:
    storage, offset, size, stride, quantizer, requires_grad, hooks = args
    _check_view(storage, offset, size, stride)
    _check_rest(requires_grad, hooks)
    whole = nbytes_of(count_of(size), str(storage.dtype).removeprefix("torch."))
    _check(whole <= storage._untyped_storage.nbytes(), "it is quantized and repeats elements")
    _check(isinstance(quantizer, tuple), "its quantizer is malformed")
    for each in quantizer[1:3] if len(quantizer) == 4 else ():
        _check(isinstance(each, (torch.Tensor, list)), "its quantizer is malformed")


def _parameter(args: _Args) -> None:
    data, requires_grad, hooks, *state = args
    _check(isinstance(data, torch.Tensor), "it is made from something that is not a tensor")
    _check_rest(requires_grad, hooks)
    for each in state:
        _check_state(each)


def _variable(args: _Args) -> None:
    data, requires_grad = (*args, True)[:2]
    _parameter((data, requires_grad, None))


def _sparse(args: _Args) -> None:
    layout, data = args
    parts = 2 if layout is torch.sparse_coo else 3
    _check(isinstance(data, tuple) and len(data) > parts, "its parts are malformed")
    for part in data[:parts]:
        _check(isinstance(part, torch.Tensor), "its parts are malformed")
    _sizes(tuple(data[parts]))


def _nested(args: _Args) -> None:
    values, sizes, strides, offsets = args
    for part, dimensions in ((values, 1), (sizes, 2), (strides, 2), (offsets, 1)):
        plain = isinstance(part, torch.Tensor) and part.layout is torch.strided
        _check(plain and part.dim() == dimensions, "its parts are malformed")
        _check(part is values or part.dtype is torch.int64, "its parts are malformed")
        _check(part.is_contiguous() and not part.is_meta, "its parts are malformed")
    for every in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        size, stride, offset = every
        _sizes((*size, *stride, offset))
        reach = reach_of(tuple(size), tuple(stride), offset, "uint8")  # uint8: in elements
        _check(reach <= values.numel(), "a part of it lies outside its values")


def _meta(args: _Args) -> None:
    _, size, stride, requires_grad = args
    count_of(_sizes(tuple(size)))
    reach_of(tuple(size), _sizes(tuple(stride)), 0, "uint8")
    _check_rest(requires_grad, None)


def _from_cpu_tensor(args: _Args) -> None:
    data, dtype, device, requires_grad = args
    _check(isinstance(data, torch.Tensor), "it is made from something that is not a tensor")
    _check(isinstance(dtype, torch.dtype), "its dtype is invalid")
    _check(isinstance(device, (str, torch.device)), "its device is invalid")
    _check(data.nbytes <= data.untyped_storage().nbytes(), "it repeats elements")
    _check_rest(requires_grad, None)


def _from_type(args: _Args) -> None:
    function, _, inner, state = args
    check = next((each for made_by, each in REBUILD.values() if made_by is function), None)
    _check(check is not None and isinstance(inner, tuple), "its rebuild function is not supported")
    assert check is not None
    _check(check is not _from_type, "its rebuild function is not supported")
    check(inner)
    _check_state(state)


def is_foreign(name: str, args: _Args) -> bool:
    """Whether a tensor's type is not torch's own, or its rebuild function is not callable."""
    return name == FROM_TYPE and (len(args) < 2 or args[1] not in _TYPES or not callable(args[0]))


def rebuild(name: str, args: _Args) -> object:
    """Make a tensor with the rebuild function of this name.

    Raises CorruptError for invalid arguments, DeviceError for a missing device.
    """
    function, check = REBUILD[name]
    try:
        check(args)
        made = function(*args)
        unchecked = _unchecked_sparse_tensors()
        if any(each.is_meta for each in unchecked):
            unchecked.clear()  # a meta tensor has no values or indices that could be wrong
        elif unchecked:
            with _sparse_checks():
                torch._utils._validate_loaded_sparse_tensors()
        return made
    except (CorruptError, MemoryError):
        raise
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        if name == _THROUGH_CPU:  # all its arguments except the device were checked
            raise DeviceError(f"a tensor can't be put on its device: {why}; {REMEDY}") from error
        raise CorruptError(f"a tensor can't be made by {name}: {why}") from error


def _unchecked_sparse_tensors() -> list[torch.Tensor]:
    """torch's own list of unchecked sparse tensors; since 2.14 at another place."""
    state: Any = getattr(torch.serialization, "_serialization_tls", None)
    if not hasattr(state, "sparse_tensors_to_validate"):
        state = torch._utils
        return cast("list[torch.Tensor]", state._sparse_tensors_to_validate)
    return cast("list[torch.Tensor]", state.sparse_tensors_to_validate)


def plain_tensor(
    storage: torch.UntypedStorage,
    dtype: str,
    offset: Any,
    shape: Sequence[Any],
    stride: Sequence[Any],
    requires_grad: bool,
) -> torch.Tensor | None:
    """The result of `_rebuild_tensor_v2` and `_v3`; None if the arguments may not be valid.

    The dtype is one of `WHOLE`; offset, shape and stride are in elements.
    """
    if type(offset) is not int or offset < 0 or not len(shape) == len(stride) <= MOST_DIMENSIONS:
        return None
    reach, count = offset + 1, 1
    for n, step in zip(shape, stride, strict=True):
        if type(n) is not int or type(step) is not int or n < 1 or step < 0:
            return None
        reach += (n - 1) * step
        count *= n
    kind = WHOLE[dtype]
    if reach * kind.itemsize > storage.nbytes() or count >= 1 << 59 or max(stride, default=0) >> 63:
        return None
    made = torch.empty(0, dtype=kind, device=storage.device)
    try:
        made.set_(storage, offset, shape, stride)
        made.requires_grad = requires_grad
    except RuntimeError:
        return None
    made._backward_hooks = OrderedDict()
    return made


FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_THROUGH_CPU = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
_CHECKS: dict[str, Callable[[_Args], None]] = {
    _THROUGH_CPU: _from_cpu_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch.nn.parameter.Parameter": _variable,
    FROM_TYPE: _from_type,
}
#: Name → rebuild function, and the check of its arguments. Only functions that this torch has and
#: allows.
REBUILD: dict[str, tuple[Callable[..., object], Callable[[_Args], None]]] = {
    name: (_get_allowed_globals()[name], check)
    for name, check in _CHECKS.items()
    if name in _get_allowed_globals()
}
#: The functions that read no values of tensors.
READING_NO_VALUES = frozenset(
    name
    for name, check in _CHECKS.items()
    if check in (_tensor, _tensor_v2, _tensor_v3, _parameter, _variable)
)
