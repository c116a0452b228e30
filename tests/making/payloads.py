"""Pickles that run something when they are unpickled, built opcode by opcode.

What they run is harmless: it makes an entry in the working directory, mostly `canary`. Nothing here
shares code with ckptmove.
"""

from __future__ import annotations

import pickle
import struct
from typing import NamedTuple

from tests.making.building import Part, build_zip

CANARY = "canary"
#: Names that are registered as extension codes before anything is loaded.
EXTENSIONS = (("os", "makedirs", 0x70), ("os", "mkdir", 0x1234), ("posix", "mkdir", 0x123456))
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class Family(NamedTuple):
    """One way to make an unpickler run something."""

    fragment: bytes  #: opcodes that run it and leave one object on the stack
    protocol: int | None = 2  #: of the PROTO opcode before them; None for none
    behind: bool = False  #: it is a separate pickle that follows another one
    #: the error in the length of a FRAME around all of it; None for no FRAME
    frame: int | None = None

    def within(self, before: bytes, after: bytes) -> bytes:
        if self.behind:
            return self.proto + before + b"N" + after + self.proto + self.fragment + b"."
        inner = before + self.fragment + after
        if self.frame is not None:
            inner = b"\x95" + struct.pack("<Q", len(inner) + self.frame) + inner
        return self.proto + inner

    @property
    def proto(self) -> bytes:
        return b"" if self.protocol is None else b"\x80" + bytes([self.protocol])

    def instead_of(self, value: bytes) -> bytes:
        """A pickle of a value, given as opcodes, that first runs the payload."""
        return self.within(b"", b"0" + value + b".")

    def beside(self, tensor: bytes) -> bytes:
        """A pickle of a dict with a tensor, given as opcodes, and the result of the payload."""
        return self.within(b"}" + (text("w") + tensor + b"s" if tensor else b"") + text("x"), b"s.")


# Opcodes


def text(value: str) -> bytes:
    """BINUNICODE."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def content(value: bytes) -> bytes:
    """BINBYTES."""
    return b"B" + struct.pack("<I", len(value)) + value


def name(module: str, qualname: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{qualname}\n".encode()


def stacked(module: str, qualname: str) -> bytes:
    """STACK_GLOBAL."""
    return text(module) + text(qualname) + b"\x93"


def items(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def called(function: bytes, *args: bytes) -> bytes:
    """REDUCE."""
    return function + items(*args) + b"R"


def newobj(cls: bytes, *args: bytes) -> bytes:
    """NEWOBJ."""
    return cls + items(*args) + b"\x81"


def given(target: bytes, **state: bytes) -> bytes:
    return target + b"}" + b"".join(text(key) + value + b"s" for key, value in state.items()) + b"b"


def storage(key: str) -> bytes:
    """A tensor of one element, as torch.save spells it since 0.4."""
    pid = items(text("storage"), name("torch", "FloatStorage"), text(key), text("cpu"), b"K\1")
    return _tensor(pid + b"Q")


def legacy_storage(key: str) -> bytes:
    """As `storage`, before 1.6."""
    kind = name("torch", "FloatStorage")
    return _tensor(items(text("storage"), kind, text(key), text("cpu"), b"K\1", b"N") + b"Q")


def _tensor(stored: bytes) -> bytes:
    hooks = called(name("collections", "OrderedDict"))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return called(rebuild, stored, b"K\0", b"K\1\x85", b"K\1\x85", b"\x89", hooks)


# Files as torch.save lays them out


def zip_of(pickled: bytes, *keys: str, stem: str = "archive", method: int = 0) -> bytes:
    """A torch-zip file whose storages have one element."""
    parts = [Part(f"{stem}/data.pkl", pickled, method=method), Part(f"{stem}/byteorder", b"little")]
    parts += [Part(f"{stem}/data/{key}", struct.pack("<f", 1.5)) for key in keys]
    return build_zip([*parts, Part(f"{stem}/version", b"3\n")])


LEGACY = tuple(
    pickle.dumps(value, 2)[2:-1]
    for value in (MAGIC, PROTOCOL, {"protocol_version": 1001, "little_endian": True}, {}, ["0"])
)


def legacy_of(at: int, payload: bytes) -> bytes:
    """A torch-legacy file with one pickle replaced."""
    pickles = [b"\x80\2" + each + b"." for each in LEGACY]
    pickles[3] = b"\x80\2}" + text("w") + legacy_storage("0") + b"s."
    pickles[at] = payload
    return b"".join(pickles) + struct.pack("<qf", 1, 1.5)
