"""The table of all dtypes, by torch's names: sizes, storage classes, safetensors names.

Sources: torch/storage.py (`_dtype_to_storage_type_map`, `_new_dtypes`), c10/core/ScalarType.h,
safetensors/src/tensor.rs (`Dtype`) and bindings/python/src/lib.rs (`parse_dtype_str`).
"""

from __future__ import annotations

#: Bits per element in memory, of every torch dtype that a checkpoint can hold.
BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,  # one element is a pair of 4-bit floats
    "complex128": 128,
    "complex64": 64,
    "complex32": 32,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "bool": 8,
    "qint32": 32,
    "qint8": 8,
    "quint8": 8,
    "quint4x2": 4,
    "quint2x4": 2,
    "bits16": 16,
    "bits8": 8,
    "bits1x8": 8,
    "bits2x4": 8,
    "bits4x2": 8,
    **{f"{sign}int{n}": 8 for sign in ("", "u") for n in range(1, 8)},  # torch stores a byte each
}

#: The dtype that each typed storage class of torch stands for.
STORAGE_CLASSES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}

#: Other names under which `torch` holds the same dtype object.
ALIASES: dict[str, str] = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cdouble": "complex128",
    "cfloat": "complex64",
    "chalf": "complex32",
}

#: The dtypes of safetensors, from the least aligned to the most, with torch's names. The library
#: also has `F6_E2M3` and `F6_E3M2`, which torch lacks.
SAFETENSORS: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",  # counted singly there, in pairs by torch
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: dtypes that safetensors has no name for: the dtype that carries their bytes, and the size of the
#: last dimension that this adds, 0 if none.
CARRIERS: dict[str, tuple[str, int]] = {
    "complex128": ("float64", 2),
    "complex32": ("float16", 2),
    "qint32": ("int32", 0),
    "qint8": ("int8", 0),
    "quint8": ("uint8", 0),
    "bits16": ("uint16", 0),
    **{f"bits{kind}": ("uint8", 0) for kind in ("8", "1x8", "2x4", "4x2")},
    **{f"int{n}": ("int8", 0) for n in range(1, 8)},
    **{f"uint{n}": ("uint8", 0) for n in range(1, 8)},
}


def storage_element_nbytes(dtype: str) -> int:
    """Return the bytes per element of a typed storage; sub-byte types count whole bytes."""
    return max(1, BITS[dtype] // 8)


def nbytes_of(elements: int, dtype: str) -> int:
    """Return the bytes that `elements` densely packed elements take."""
    return (elements * BITS[dtype] + 7) // 8
