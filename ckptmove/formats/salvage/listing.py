"""List the tensors in a container, even if its contents contradict each other."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import InputError
from ...graph.plain_tensors import data_of, flags_of, is_plain
from ...manifest.dtypes import BITS, CARRIERS
from ...manifest.manifest import Storage, TensorEntry
from ...manifest.paths import spell
from ...pickles.nodes import Blob, Call, Dict, List, Node, Persistent, Set, Tuple
from ...sources.budget import Excess
from ...torch_pickle.callables.uses import latin_1
from ...torch_pickle.children import children_of
from ...torch_pickle.listed_tensors import PickleContents
from ...torch_pickle.listing import contents_of
from ...torch_pickle.merged_contents import merge_contents
from ...torch_pickle.streams import Container
from ...torch_pickle.values.numpy_arrays import KIND, array_of
from ...torch_pickle.values.persistent_ids import StorageId, storage_ids
from ...torch_pickle.values.strided import Tensor
from ...torch_pickle.values.tensors import Recogniser
from ...zips.found_records import ProofLevel
from .remains import NamedTensor, StorageRemains

_DEEPEST = 200  # keys of a path
_BITS_OF_BYTE = 8
_NUMBER_NBYTES = 8
_MORE = "it has metadata that are not known"
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_QUANTIZED = "torch._utils._rebuild_qtensor"


class ListedTensors(NamedTuple):
    """The tensors that pickles name, and the arrays whose bytes are inside a pickle."""

    tensors: list[NamedTensor]
    arrays: dict[str, StorageRemains]


def tensors_of(container: Container) -> ListedTensors:
    """The tensors that the pickles of a container name, with the same names as in `inspect`.

    Excess if there are far too many. If the usual listing fails, the tensors are listed one by one.
    """
    found = merge_contents(container)
    try:
        return of_contents(contents_of(container, found))
    except Excess:
        raise
    except InputError:
        return _one_by_one(container, Recogniser(found.ids, found.tensors))


def of_contents(contents: PickleContents) -> ListedTensors:
    """The strided tensors with a storage in a listing."""
    found = ListedTensors([], {})
    for entry, node in zip(contents.tensors, contents.nodes, strict=True):
        if entry.layout != "strided" or entry.storage is None:
            continue
        why = "" if BITS[entry.dtype] >= _BITS_OF_BYTE else "no format can hold its dtype"
        if entry.kind == KIND:
            held = _array(node)
            why = "is a numpy array" if held is None else why
            if held is not None:
                found.arrays[entry.storage] = held
        flags = _flags(node)
        why = why or ("" if flags is not None else _MORE)
        tensor = of_entry(entry, why)._replace(flags=flags or {})
        found.tensors.append(tensor)
        _add_quantizer(found, tensor, node)
    return found


def _flags(node: Node) -> Mapping[str, bool] | None:
    """The `conj` and `neg` flags that a tensor has set; None if its metadata has anything else."""
    node = data_of(node)
    if isinstance(node, Call) and node.qualname == _FROM_TYPE:
        items = node.args.items if isinstance(node.args, Tuple) else []
        # the recognized form always has these arguments
        node = Call(items[0], items[2], "REDUCE", 0)
    return flags_of(node) if isinstance(node, Call) and is_plain(node) else {}


def _add_quantizer(found: ListedTensors, tensor: NamedTensor, node: Node) -> None:
    """For a tensor with a single scale and zero point, add both as additional tensors."""
    node = data_of(node)
    items = node.args.items if isinstance(node, Call) and isinstance(node.args, Tuple) else []
    if not isinstance(node, Call) or node.qualname != _QUANTIZED or len(items) < 5:
        return
    params = items[4].items if isinstance(items[4], Tuple) else []
    if len(params) != 3:
        return  # one for each channel: these are tensors
    for part, dtype, form, number in (
        ("scale", "float64", "<d", params[1]),
        ("zero_point", "int64", "<q", params[2]),
    ):
        name = f"{tensor.name}.{part}"
        key, nbytes = f"{tensor.storage}: {name}", _NUMBER_NBYTES
        try:
            content = struct.pack(form, number)
        except struct.error:
            why = "the pickle does not say it as a number"
            found.tensors.append(NamedTensor(name, dtype, (), (), 0, nbytes, None, why=why))
            continue
        found.tensors.append(NamedTensor(name, dtype, (), (), 0, nbytes, key))
        found.arrays[key] = StorageRemains(nbytes, nbytes, ProofLevel.RIGHT, dtype, content=content)


def _array(node: Node) -> StorageRemains | None:
    """The bytes of a numpy array, if they are in the pickle."""
    array = array_of(node)
    content: object = None if array is None else array.content
    if isinstance(content, Blob):
        content = content.content
    elif isinstance(content, Call) and isinstance(content.args, Tuple) and content.args.items:
        text = content.args.items[0]
        content = latin_1(text) if isinstance(text, str) else None
    elif isinstance(content, str):
        content = latin_1(content)
    if array is None or not isinstance(content, bytes) or len(content) != array.nbytes:
        return None
    return StorageRemains(
        array.nbytes,
        array.nbytes,
        ProofLevel.RIGHT,
        array.dtype,
        content=content,
        big_endian=array.big_endian,
    )


def ids_of(persistents: tuple[Persistent, ...], folder: str, **kind: bool) -> dict[int, StorageId]:
    """The storages that these persistent ids name, without malformed ids."""
    found: dict[int, StorageId] = {}
    for each in persistents:
        try:
            found |= storage_ids([each], folder, **kind)
        except InputError:
            continue
    return found


def strict_storages(container: Container) -> dict[str, tuple[Storage, Container]]:
    """The storages of a container that was read strictly, and of all containers nested in it."""
    return {
        key: (storage, each)
        for each in container.everything()
        for key, storage in each.storages.items()
    }


def of_entry(entry: TensorEntry, why: str) -> NamedTensor:
    """A tensor of a listing, and why it can't be read, if that is known."""
    return NamedTensor(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.stride,
        entry.offset,
        entry.nbytes,
        entry.storage,
        entry.device,
        why,
    )


def _one_by_one(container: Container, recogniser: Recogniser) -> ListedTensors:
    """List the tensors one at a time, named by the keys that lead to them."""
    found, met, names = ListedTensors([], {}), set[int](), set[str]()
    room = 1 << 16 | 4 * container.described_nbytes
    todo: list[tuple[tuple[object, ...], Node]] = [
        (path, root) for path, root in reversed(container.roots)
    ]
    while todo and room > 0:
        path, node = todo.pop()
        tensor = _recognized(recogniser, node)
        if tensor is not None:
            name = spell(path)  # type: ignore[arg-type] # they are keys
            room -= len(name)
            if name not in names and tensor.layout == "strided":
                names.add(name)
                found.tensors.append(_of_tensor(name, tensor, _flags(node)))
                _add_quantizer(found, found.tensors[-1], node)
                if tensor.dtype in CARRIERS:  # its scales, one for each channel
                    todo += (((*path, each.key), each.node) for each in tensor.children)
        elif isinstance(node, (Call, Dict, List, Set, Tuple)) and id(node) not in met:
            met.add(id(node))
            if len(path) < _DEEPEST:
                held = [((*path, *keys), child) for keys, child in children_of(node)]
                room -= sum(len(keys) for keys, _ in held)
                todo += reversed(held)
    return found


def _recognized(recogniser: Recogniser, node: Node) -> Tensor | None:
    try:
        if isinstance(node, Call):
            return recogniser.tensor(node)
        return recogniser.outside(node) if isinstance(node, Persistent) else None
    except InputError:
        return None


def _of_tensor(name: str, tensor: Tensor, flags: Mapping[str, bool] | None) -> NamedTensor:
    return NamedTensor(
        name,
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.offset,
        tensor.nbytes,
        tensor.storage,
        tensor.device,
        "" if flags is not None else _MORE,
        flags=flags or {},
    )
