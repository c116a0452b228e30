"""Names that a checkpoint may import without anybody having to worry.

An allow-list of exact names: what torch's own `weights_only` unpickler accepts
(torch/_weights_only_unpickler.py, `_get_allowed_globals`), and a few more that only build plain
data. Everything else is an unknown callable: loading the file elsewhere would run it.
"""

from __future__ import annotations

from ..dtypes import BITS, STORAGE_CLASSES

_TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_SPARSE_TYPES = "BFloat16 Byte Char Double Float Half Int Long Short"
_QSCHEMES = (
    "per_channel_affine per_channel_affine_float_qparams per_channel_symmetric "
    "per_tensor_affine per_tensor_symmetric"
)

_TORCH = {
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    "torch.serialization._get_layout",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    "torch.storage._load_from_bytes",  # what it loads is always read, and its names are listed too
    "torch._C.Generator",
    "torch._tensor._rebuild_from_type",
    "torch._tensor._rebuild_from_type_v2",
    *(
        f"torch._utils._rebuild_{what}"
        for what in (
            "device_tensor_from_cpu_tensor",
            "device_tensor_from_numpy",
            "meta_tensor_no_storage",
            "nested_tensor",
            "parameter",
            "parameter_with_state",
            "qtensor",
            "sparse_csr_tensor",
            "sparse_tensor",
            "tensor",
            "tensor_v2",
            "tensor_v3",
            "wrapper_subclass",
            "xla_tensor",
        )
    ),
    *(f"torch.{dtype}" for dtype in BITS),
    *(f"torch.{scheme}" for scheme in _QSCHEMES.split()),
    *(f"torch.{name}" for name in STORAGE_CLASSES),
    *(f"torch.cuda.{name}" for name in STORAGE_CLASSES if not name.startswith("Q")),
    *(f"{module}.{t}Tensor" for t in _TENSOR_TYPES.split() for module in ("torch", "torch.cuda")),
    *(
        f"{module}.{t}Tensor"
        for t in _SPARSE_TYPES.split()
        for module in ("torch.sparse", "torch.cuda.sparse")
    ),
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.placement_types.Partial",
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
    "torch._dynamo.decorators._DimRange",
}

_PYTHON = {
    f"{module}.{name}"
    for module, names in {
        "_codecs": "encode",
        "argparse": "Namespace",
        "builtins": "bool bytearray bytes complex dict float frozenset int list object range set "
        "slice str tuple",
        "collections": "Counter OrderedDict defaultdict deque",
        "copyreg": "_reconstructor",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "pathlib": "Path PosixPath PurePath PurePosixPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath WindowsPath",
        "uuid": "UUID",
    }.items()
    for name in names.split()
}

_NUMPY = {
    "numpy.dtype",
    "numpy.ndarray",
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
    *(f"numpy.dtypes.{t}{n}DType" for t in ("Int", "UInt") for n in (8, 16, 32, 64)),
    *(f"numpy.dtypes.Float{n}DType" for n in (16, 32, 64)),
    "numpy.dtypes.BoolDType",
    *(f"numpy.{t}{n}" for t in ("int", "uint") for n in (8, 16, 32, 64)),
    *(f"numpy.float{n}" for n in (16, 32, 64)),
}

KNOWN = frozenset(_TORCH | _PYTHON | _NUMPY)
