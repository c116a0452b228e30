"""Files of every format that carry a pickle with a payload; and what loading them really does."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.making.building import Part, build_zip
from tests.making.payloads import (
    EXTENSIONS,
    LEGACY,
    Family,
    called,
    content,
    items,
    legacy_of,
    legacy_storage,
    name,
    newobj,
    storage,
    text,
    zip_of,
)

Files = dict[str, bytes]
_LOADER = name("torch.storage", "_load_from_bytes")
#: What a package with a payload takes from the machine that loads it.
_EXTERN = (
    "os posix builtins io torch numpy collections functools argparse operator importlib pickle "
    "_pickle marshal types pathlib copyreg pkgutil pydoc itertools weakref timeit cProfile mailbox "
    "logging sqlite3 tempfile dbm _codecs"
)
_INDEX = "pytorch_model.bin.index.json"


def _zip(family: Family) -> bytes:
    return zip_of(family.beside(storage("0")), "0")


def _legacy(at: int) -> Callable[[Family], bytes]:
    def made(family: Family) -> bytes:
        if at == 3:
            return legacy_of(3, family.beside(legacy_storage("0")))
        return legacy_of(at, family.instead_of(LEGACY[at]))

    return made


def _numbered(family: Family) -> bytes:
    """The payload follows the magic number, and is part of the pickle that starts there."""
    return legacy_of(0, family.within(LEGACY[0], b"0."))


def _loading(inner: Callable[[Family], bytes]) -> Callable[[Family], bytes]:
    """A plain pickle that loads a storage from bytes."""

    def made(family: Family) -> bytes:
        return b"\x80\2}" + text("x") + called(_LOADER, content(inner(family))) + b"s."

    return made


def _zip_loading(inner: Callable[[Family], bytes]) -> Callable[[Family], bytes]:
    def made(family: Family) -> bytes:
        kept = Family(called(_LOADER, content(inner(family))))
        return zip_of(kept.beside(storage("0")), "0")

    return made


def _legacy_loading(inner: Callable[[Family], bytes]) -> Callable[[Family], bytes]:
    def made(family: Family) -> bytes:
        kept = Family(called(_LOADER, content(inner(family))))
        return legacy_of(3, kept.beside(legacy_storage("0")))

    return made


def _tar(member: str) -> Callable[[Family], bytes]:
    def made(family: Family) -> bytes:
        stored = items(b"K\7", text("cpu"), name("torch", "FloatStorage"))
        stored = b"\x80\2" + stored + b"."
        tensor = b"\x80\2" + items(b"K\x08", b"K\7", name("torch", "FloatTensor")) + b"."
        one = pickle.dumps(1, 2)
        members = {
            "sys_info": pickle.dumps({}, 2),
            "pickle": family.beside(text("8") + b"Q"),
            "tensors": one + tensor + struct.pack("<ii3q", 1, 0, 1, 1, 0),
            "storages": one + stored + struct.pack("<qf", 1, 1.5) + pickle.dumps([], 2),
        }
        if member != "pickle":
            members["pickle"] = b"\x80\2}" + text("w") + text("8") + b"Qs."
            members[member] = family.instead_of(b"K\1") + members[member][len(one) :]
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key, each in members.items():
                info = tarfile.TarInfo(key)
                info.size = len(each)
                tar.addfile(info, io.BytesIO(each))
        return file.getvalue()

    return made


def _package(family: Family) -> bytes:
    parts = [Part("p/.data/extern_modules", _EXTERN.replace(" ", "\n").encode())]
    parts.append(Part("p/model/data.pkl", family.beside(storage("0"))))
    parts.append(Part("p/.data/0.storage", struct.pack("<f", 1.5)))
    return build_zip([*parts, Part("p/.data/version", b"6\n"), Part("p/byteorder", b"little")])


def _program(family: Family) -> bytes:
    """A program of torch.export with a constant that is an object."""
    payload = {"path_name": "opaque_obj_0", "use_pickle": True, "is_param": False}
    constants = {"config": {"x": {**payload, "tensor_meta": None}}}
    graph: dict[str, object] = {"inputs": [], "outputs": [], "nodes": [], "tensor_values": {}}
    graph |= {"sym_int_values": {}, "sym_bool_values": {}}
    module = {"signature": {"input_specs": [], "output_specs": []}, "module_call_graph": []}
    version = {"major": 8, "minor": 1}
    program = {"graph_module": {"graph": graph, **module}, "schema_version": version}
    program |= {"opset_version": {}, "range_constraints": {}}
    records = {
        "archive_format": b"pt2",
        "archive_version": b"0",
        "byteorder": b"little",
        "models/model.json": json.dumps(program).encode(),
        "data/weights/model_weights_config.json": b'{"config": {}}',
        "data/constants/model_constants_config.json": json.dumps(constants).encode(),
        "data/constants/opaque_obj_0": family.beside(b""),
        "data/sample_inputs/model.pt": b"",
        ".data/version": b"3",
    }
    return build_zip([Part(f"p/{each}", held) for each, held in records.items()])


def _script(family: Family) -> bytes:
    parts = [
        Part("s/data.pkl", family.beside(storage("0"))),
        Part("s/data/0", struct.pack("<f", 1)),
    ]
    parts += [Part("s/constants.pkl", b"\x80\2)."), Part("s/version", b"3\n")]
    return build_zip(parts)


def _bundle(at: str) -> Callable[[Family], bytes]:
    def made(family: Family) -> bytes:
        clean = zip_of(b"\x80\2}" + text("w") + storage("0") + b"s.", "0")
        records = {"policy.pth": clean, "data": b"{}", "more.pkl": pickle.dumps({"a": [1] * 40}, 4)}
        records[at] = _zip(family) if at == "policy.pth" else family.beside(b"")
        return build_zip([Part(key, each) for key, each in records.items()])

    return made


def _behind(family: Family) -> bytes:
    """A legacy file behind a pickle that names its protocol only if the family does."""
    return family.instead_of(b"K\1") + legacy_of(1, b"\x80\2" + LEGACY[1] + b".")


def _followed(family: Family) -> bytes:
    """A pickle appended to a file of torch.save; torch reads none of it."""
    return legacy_of(1, b"\x80\2" + LEGACY[1] + b".") + family.beside(b"")


def _named(family: Family) -> bytes:
    """A tar whose first member's name is the opcodes, where they fit."""
    payload = family.instead_of(b"K\1")
    made = _tar("pickle")(Family(b"N"))
    if len(payload) > 99 or b"\0" in payload:
        return made
    head = payload.ljust(100, b"\0") + made[100:148] + b" " * 8 + b"0" + bytes(355)
    checksum = b"%06o\0 " % sum(head)
    return head[:148] + checksum + head[156:] + made


def _safetensors(family: Family) -> bytes:
    """Its first byte, of the header's length, is UNICODE: a text up to the first newline.

    torch.load unpickles it, unless its suffix says what it is.
    """
    data = b"\n0" + family.instead_of(b"K\1")
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode().ljust(0x100 + ord("V"))
    return struct.pack("<Q", len(header)) + header + data


def _nemo(family: Family) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w:") as tar:
        for each, held in (("model_config.yaml", b"a: 1"), ("model_weights.ckpt", _zip(family))):
            info = tarfile.TarInfo(f"./{each}")
            info.size = len(held)
            tar.addfile(info, io.BytesIO(held))
    return out.getvalue()


def _one(file: str, made: Callable[[Family], bytes]) -> Callable[[Family], Files]:
    return lambda family: {file: made(family)}


def _folder(family: Family) -> Files:
    return {"pytorch_model.bin": _zip(family), "config.json": b"{}"}


def _sharded(family: Family) -> Files:
    first = zip_of(b"\x80\2}" + text("a") + storage("0") + b"s.", "0")
    second = zip_of(family.beside(storage("0")), "0")
    index = {"metadata": {}, "weight_map": {"a": "1.bin", "w": "2.bin", "x": "2.bin"}}
    return {"1.bin": first, "2.bin": second, _INDEX: json.dumps(index).encode()}


def _metadata() -> tuple[bytes, bytes]:
    """The opcodes of a `.metadata` around one of its fields."""
    cls = newobj(name("torch.distributed.checkpoint.metadata", "Metadata"))
    fields = b"".join(text(each) + b"}" for each in ("state_dict_metadata", "storage_data"))
    return cls + b"}(" + fields + text("planner_data") + b"N" + text("storage_meta"), b"ub."


def _dcp(family: Family) -> Files:
    return {".metadata": family.within(*_metadata())}


def _dcp_beside(family: Family) -> Files:
    before, after = _metadata()
    return {"common.pt": _zip(family), ".metadata": b"\x80\2" + before + b"N" + after}


def _ranks(family: Family) -> Files:
    return {f"rank{n}.pt": _zip(family) for n in range(2)}


#: Those of which the folder is handed to the verbs.
FOLDERS = ("folder", "dcp", "dcp, beside", "ranks")
#: The name of each carrier → what makes its files; the first is what is handed to the verbs, but
#: for a folder, and an index.
CARRIERS: Mapping[str, Callable[[Family], Files]] = {
    "pickle": _one("x.pkl", lambda family: family.beside(b"")),
    "zip": _one("x.pt", _zip),
    "zip, compressed": _one("x.pt", lambda f: zip_of(f.beside(storage("0")), "0", method=8)),
    **{f"legacy {n}": _one("x.pt", _legacy(n)) for n in range(5)},
    "legacy 0, numbered": _one("x.pt", _numbered),
    "numbered in zip": _one("x.pt", _zip_loading(_numbered)),
    "tar": _one("x.tar", _tar("pickle")),
    "tar, storages": _one("x.tar", _tar("storages")),
    "tar, tensors": _one("x.tar", _tar("tensors")),
    "nemo": _one("x.nemo", _nemo),
    "safetensors": _one("x.pt", _safetensors),
    "tar, named": _one("x.pkl", _named),
    "behind": _one("x.pt", _behind),
    "followed": _one("x.more", _followed),
    "package": _one("x.package", _package),
    "script": _one("x.jit", _script),
    "program": _one("x.pt2", _program),
    "bundle": _one("x.zip", _bundle("policy.pth")),
    "bundle, pickle": _one("x.zip", _bundle("more.pkl")),
    "pickle in pickle": _one("x.pkl", _loading(lambda family: family.beside(b""))),
    "zip in pickle": _one("x.pkl", _loading(_zip)),
    **{f"legacy {n} in pickle": _one("x.pkl", _loading(_legacy(n))) for n in (0, 2, 3, 4)},
    "zip in zip": _one("x.pt", _zip_loading(_zip)),
    "legacy 4 in zip": _one("x.pt", _zip_loading(_legacy(4))),
    "zip in legacy": _one("x.pt", _legacy_loading(_zip)),
    "folder": _folder,
    "sharded": _sharded,
    "dcp": _dcp,
    "dcp, beside": _dcp_beside,
    "ranks": _ranks,
}

#: Loads each file of a list as its own users do, each in a folder of its own.
_TRUTH = """
import copyreg, io, json, os, pickle, sys, tarfile, warnings, zipfile
import numpy, torch, torch.export, torch.package
warnings.simplefilter("ignore")
for module, name, code in {extensions}:
    copyreg.add_extension(module, name, code)

def load(path):
    if path.endswith(".metadata"):
        with open(path, "rb") as file:
            pickle.load(file)
    elif path.endswith(".pkl"):
        with open(path, "rb") as file:
            while True:
                pickle.load(file)
    elif path.endswith(".package"):
        torch.package.PackageImporter(path).load_pickle("model", "data.pkl")
    elif path.endswith(".pt2"):
        torch.export.load(path)
    elif path.endswith(".nemo"):
        with tarfile.open(path) as tar:
            weights = tar.extractfile("./model_weights.ckpt").read()
        torch.load(io.BytesIO(weights), weights_only=False)
    elif path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=False)
            pickle.loads(archive.read("more.pkl"))
    elif path.endswith(".more"):
        with open(path, "rb") as file:
            torch.load(file, weights_only=False)
            pickle.load(file)
    else:
        torch.load(path, weights_only=False)

ran = []
out = os.dup(1)
for each in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), each)
for number, (path, apart) in enumerate(json.load(sys.stdin)):
    os.mkdir(str(number))
    child = os.fork() if apart else 0
    if not child:
        os.chdir(str(number))
        try:
            load(path)
        except BaseException:
            pass
        if apart:
            os._exit(0)
        os.chdir("..")
    else:
        os.waitpid(child, 0)
    ran.append(bool(os.listdir(str(number))))
os.write(out, json.dumps(ran).encode())
"""


def runs(paths: list[tuple[Path, bool]], scratch: Path) -> list[bool]:
    """Whether loading each of these files runs its payload.

    A path comes with whether the effect of its payload lasts, so that it needs its own process.
    Payloads run in folders below `scratch`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _TRUTH.format(extensions=EXTENSIONS)],
        input=json.dumps([(str(path), lasts) for path, lasts in paths]),
        cwd=scratch,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: list[bool] = json.loads(done.stdout)
    return found
