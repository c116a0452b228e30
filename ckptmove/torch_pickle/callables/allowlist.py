"""The allow-list: names that a checkpoint may import because they are harmless.

It holds exact names: those that torch's own `weights_only` unpickler accepts
(torch/_weights_only_unpickler.py, `_get_allowed_globals`), a few more that only build plain data,
and those of `reviewed_names`. If an argument decides what a name runs or imports, `uses` checks
each use of it. Everything else is an unknown callable: another loader would run it.
"""

from __future__ import annotations

from ...manifest.dtypes import BITS, STORAGE_CLASSES
from .reviewed_names import REVIEWED

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
    # the loaded bytes are always read, and their names are listed too
    "torch.storage._load_from_bytes",
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
        "builtins": "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int "
        "list object range set slice str tuple",
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

#: torch's own modules, as in `torch.nn.modules.__all__`, and the wrappers in which people save a
#: model: pickle makes them empty and gives them their state. `Module.__setstate__` stores the
#: state, and so do those of RNNs, convolutions, attention and similar modules: nothing in it is
#: called. Wrappers with a `__new__` that calls something are left out (`Container`, `NLLLoss2d`).
#: `uses` makes sure that none is called with arguments.
MODULES = frozenset(
    f"torch.nn.modules.{module}.{name}"
    for module, names in {
        "activation": "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU "
        "LogSigmoid LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid "
        "Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold",
        "adaptive": "AdaptiveLogSoftmaxWithLoss",
        "batchnorm": "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d "
        "LazyBatchNorm3d SyncBatchNorm",
        "channelshuffle": "ChannelShuffle",
        "container": "ModuleDict ModuleList ParameterDict ParameterList Sequential",
        "conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d "
        "LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d",
        "distance": "CosineSimilarity PairwiseDistance",
        "dropout": "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout",
        "flatten": "Flatten Unflatten",
        "fold": "Fold Unfold",
        "instancenorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d "
        "LazyInstanceNorm2d LazyInstanceNorm3d",
        "linear": "Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear",
        "loss": "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss "
        "GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss MarginRankingLoss "
        "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PoissonNLLLoss "
        "SmoothL1Loss SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss",
        "module": "Module",
        "normalization": "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm",
        "padding": "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d "
        "ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d "
        "ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d",
        "pixelshuffle": "PixelShuffle PixelUnshuffle",
        "pooling": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d "
        "FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d "
        "MaxUnpool2d MaxUnpool3d",
        "rnn": "GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase",
        "sparse": "Embedding EmbeddingBag",
        "transformer": "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
        "TransformerEncoderLayer",
        "upsampling": "Upsample UpsamplingBilinear2d UpsamplingNearest2d",
    }.items()
    for name in names.split()
) | {"torch.nn.parallel.data_parallel.DataParallel", "torch.optim.swa_utils.AveragedModel"}

#: Functions that torch's transformer layers keep as their `activation`. They compute with tensors
#: and are only values: `uses` makes sure that no pickle calls them.
ACTIVATIONS = frozenset(
    ("torch.nn.functional.relu", "torch.nn.functional.gelu", "torch._C._nn.gelu")
)

KNOWN = frozenset(_TORCH | _PYTHON | _NUMPY | REVIEWED.keys() | MODULES | ACTIVATIONS)
