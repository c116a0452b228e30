"""Files that make a reader allocate far more than their own few megabytes, if it trusts them.

`python -m tests.making.bombs FOLDER [NBYTES]` measures every verb on every bomb and prints a table;
each bomb is about NBYTES long. Memory is without what the import of torch takes, where validate
imports it.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import resource
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

MODULUS = (1 << 61) - 1  # of the hashes of Python's numbers
ROOM = 1 << 30  # bytes of address space
FLOOR, PER_BYTE = 150_000_000, 2  # bytes of memory: for any file, and for each of its own
HANGING = 60  # seconds of processor time

Maker = Callable[[int], bytes]
BOMBS: dict[str, Maker] = {}


def bomb(suffix: str) -> Callable[[Maker], Maker]:
    """Register a maker of a file of about so many bytes, under its name and this suffix."""

    def add(maker: Maker) -> Maker:
        BOMBS[maker.__name__ + suffix] = maker
        return maker

    return add


def zipped(data: bytes, *, deflate: bool = False, more: dict[str, bytes] | None = None) -> bytes:
    """A checkpoint as torch.save lays it out, around any bytes as its pickle."""
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in {"data.pkl": data, "version": b"3\n", **(more or {})}.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def counted(content: bytes) -> bytes:
    """The BINBYTES opcode that pushes these bytes."""
    return b"B" + struct.pack("<I", len(content)) + content


#: Pickles of whatever length: what comes first, what is repeated, what comes last.
FLOODS: dict[str, tuple[bytes, bytes, bytes]] = {
    "lists": (b"(", b"]", b"l."),
    "dicts": (b"(", b"}", b"l."),
    "sets": (b"(", b"\x8f", b"l."),
    "filled_lists": (b"(", b"]Na", b"l."),
    "filled_dicts": (b"(", b"}K\0Ns", b"l."),
    "appended_numbers": (b"]", b"K\1a", b"."),
    "appended_nothing": (b"]", b"(e", b"."),
    "set_nothing": (b"}", b"(u", b"."),
    "lists_in_lists": (b"(", b"]]Naa", b"l."),
    "empty_tuples": (b"(", b")", b"l."),
    "tuples": (b"(", b"N\x85", b"l."),
    "texts": (b"(", b"\x8c\0", b"l."),
    "nones": (b"(", b"N", b"l."),
    "numbers": (b"(", b"K\1", b"l."),
    "wide_numbers": (b"(", b"M\0\3", b"l."),
    "large_numbers": (b"(", b"J\0\0\0\3", b"l."),
    "labeled_numbers": (b"(\x8c\1a", b"J\0\0\0\3", b"l."),
    "floats": (b"(", b"G" + struct.pack(">d", 0.5), b"l."),
    "pairs": (b"}(", b"NN", b"u."),
    "numbered_pairs": (b"}(", b"M\0\3K\1", b"u."),
    "calls": (b"ca\nb\nq\0(", b"h\0)R", b"l."),
    "names": (b"(", b"ca\nb\n", b"l."),
    "recalled_text": (b"\x8c\4cpu:q\0(", b"h\0", b"l."),
    "recalled_device": (b"\x8c\3cpuq\0(", b"h\0", b"l."),
    "recalled_list": (b"]q\0(", b"h\0", b"l."),
    "duplicates": (b"](", b"]2222222", b"l."),
    "marks": (b"", b"(", b"."),
    "marks_popped": (b"N", b"(1", b"."),
    "pops": (b"N", b"N0", b"."),
    "protocols": (b"N", b"\x80\2", b"."),
    "puts": (b"]", b"q\0", b"."),
    "memoized": (b"]", b"\x94", b"."),
    "doubled_tuples": (b")q\0", b"h\0h\0\x86q\0", b"."),
    "doubled_lists": (b"]Naq\0", b"](h\0h\0eq\0", b"."),
    "tuple_keys": (b"((" + b"K\1" * 4000 + b"tq\0", b"}h\0Ns", b"l."),
    "storages": (
        b"((\x8c\7storagectorch\nFloatStorage\n\x8c\x010\x8c\3cpuK\0tq\0Q",
        b"h\0Q",
        b"l.",
    ),
    "mixed": (b"(", b"}\x8c\1aNsN\x85J\0\0\0\3N", b"l."),
    "log": (b"\x8c\1aq\0\x8c\1bq\1(", b"}(h\0M\0\3h\1G" + struct.pack(">d", 0.5) + b"u", b"l."),
    "small_tuples": (b"(", b"K\1M\0\3\x86", b"l."),
    "texts_in_tuples": (b"(", b"\x8c\2cp\x85", b"l."),
    "blobs": (b"(", counted(b"\x80\2" + b"]" * 30), b"l."),
}


def _flood(name: str) -> Maker:
    first, again, last = FLOODS[name]

    def make(nbytes: int) -> bytes:
        return b"\x80\2" + first + again * (nbytes // len(again)) + last

    make.__name__ = name
    return make


for each in FLOODS:
    bomb(".pkl")(_flood(each))


@bomb(".pkl")
def scattered_memo(nbytes: int) -> bytes:
    return b"\x80\2]" + b"".join(b"r" + struct.pack("<I", 7 * n) for n in range(nbytes // 5)) + b"."


@bomb(".pkl")
def memo_with_gaps(nbytes: int) -> bytes:
    return (
        b"\x80\2]" + b"".join(b"r" + struct.pack("<I", n) for n in range(0, nbytes // 5, 2)) + b"."
    )


@bomb(".pkl")
def several_pickles(nbytes: int) -> bytes:
    one = b"\x80\2(" + b"]" * (nbytes // 64) + b"l."
    return one * 64


@bomb(".pkl")
def bytes_in_bytes(nbytes: int) -> bytes:
    content = b"\x80\2(" + b"]" * (nbytes // 2) + b"l."
    for _ in range(6):
        content = b"\x80\3(" + counted(content) + b"l."
    return content


@bomb(".pkl")
def shared_bytes(nbytes: int) -> bytes:
    inner = pickle.dumps([{} for _ in range(5000)], 2)
    return b"\x80\3(" + counted(inner) + b"q\0" + b"h\0" * (nbytes // 2) + b"l."


@bomb(".pkl")
def recalled_long_bytes(nbytes: int) -> bytes:
    content = counted(bytes(nbytes // 2))
    return b"\x80\3(" + content + b"q\0" + b"h\0" * (nbytes // 4) + b"l."


@bomb(".pkl")
def recalled_long_text(nbytes: int) -> bytes:
    content = b"X" + struct.pack("<I", nbytes // 2) + b"a" * (nbytes // 2)
    return b"\x80\3(" + content + b"q\0" + b"h\0" * (nbytes // 4) + b"l."


@bomb(".pkl")
def recalled_coded_bytes(nbytes: int) -> bytes:
    """Bytes as protocol 2 spells them, used as the value of many keys."""
    content = b"X" + struct.pack("<I", nbytes // 2) + b"a" * (nbytes // 2)
    coded = b"c_codecs\nencode\n" + content + b"X\6\0\0\0latin1\x86Rq\0"
    pairs = b"".join(b"\x8c\6%06dh\0" % n for n in range(nbytes // 20))
    return b"\x80\2(" + coded + b"}(" + pairs + b"ul."


@bomb(".pkl")
def zips_in_bytes(nbytes: int) -> bytes:
    content = zipped(b"\x80\2(" + b"]" * (nbytes * 20) + b"l.", deflate=True)
    for _ in range(2):
        content = b"\x80\3(" + counted(content) * 20 + b"l."
    return content


@bomb(".pkl")
def deep_paths(nbytes: int) -> bytes:
    down = b"".join(b"}\x8c\1%c" % (97 + n % 26) for n in range(900))
    wide = b"(" + b"](]Naael"[:0] + b"]]ca\nb\n)Raa" * (nbytes // 11) + b"l"
    return b"\x80\2" + down + wide + b"s" * 900 + b"."


def _tensors(again: bytes, nbytes: int) -> bytes:
    """A tensor, then something repeated; the memo holds the tensor, a function and arguments."""
    head = (
        b"\x80\2(ctorch._utils\n_rebuild_tensor_v2\nq\1"
        b"((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0\x30X\3\0\0\0cpuK\1tQ"
        b"K\0K\1\x85K\1\x85\x89ccollections\nOrderedDict\n)Rtq\2Rq\0"
    )
    return zipped(head + again * (nbytes // len(again)) + b"l.", more={"data/0": b"\0\0\0\0"})


@bomb(".pt")
def one_tensor_often(nbytes: int) -> bytes:
    return _tensors(b"h\0", nbytes)


@bomb(".pt")
def tensors_of_the_same(nbytes: int) -> bytes:
    return _tensors(b"h\1h\2R", nbytes)


@bomb(".pt")
def deflated_lists(nbytes: int) -> bytes:
    return zipped(b"\x80\2(" + b"]" * nbytes + b"l.", deflate=True)


@bomb(".pt")
def deflated_far(nbytes: int) -> bytes:
    return zipped(b"\x80\2(" + b"]" * (20 * nbytes) + b"l.", deflate=True)


@bomb(".zip")
def deflated_records(nbytes: int) -> bytes:
    out = io.BytesIO()
    inner = zipped(b"\x80\2(" + b"]N" * 100_000 + b"l.")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(nbytes // 2000):
            archive.writestr(f"{n}.pth", inner)
    return out.getvalue()


@bomb(".zip")
def zip_in_zip(nbytes: int) -> bytes:
    content = zipped(b"\x80\2(" + b"]" * (20 * nbytes) + b"l.", deflate=True)
    for n in range(4):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{n}.pth", content)
        content = out.getvalue()
    return content


def _empty_records(count: int) -> bytes:
    local, central = bytearray(), bytearray()
    for n in range(count):
        name = b"a/%x" % n
        at = len(local)
        local += struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        fields = (20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, at)
        central += struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + name
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(central), len(local)
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(local) + len(central), 1)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return bytes(local + central) + end + locator + last


@bomb(".pt")
def empty_records(nbytes: int) -> bytes:
    return _empty_records(nbytes // 90)


@bomb(".pt")
def legacy_keys(nbytes: int) -> bytes:
    start = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    keys = b"\x80\2](" + b"".join(b"\x8c\7%07d" % n for n in range(nbytes // 9)) + b"e."
    return start + pickle.dumps({}, 2) + keys


@bomb(".pt")
def legacy_many(nbytes: int) -> bytes:
    start = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    one = start + pickle.dumps([], 2) + pickle.dumps([], 2)
    return one * (nbytes // len(one))


@bomb(".tar")
def tar_storages(nbytes: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        count = pickle.dumps(nbytes // 64, 2)
        for name, content in {
            "sys_info": pickle.dumps({}, 2),
            "pickle": b"\x80\2(" + b"]" * nbytes + b"l.",
            "storages": count + pickle.dumps(("0", "cpu", "FloatStorage"), 2) * (nbytes // 64),
            "tensors": count + b"\x80\2(" + b"]" * nbytes + b"l.",
        }.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


def headed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@bomb(".safetensors")
def tiny_tensors(nbytes: int) -> bytes:
    one = '"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return headed(("{" + ",".join(one % n for n in range(nbytes // 56)) + "}").encode())


@bomb(".safetensors")
def small_tensors(nbytes: int) -> bytes:
    one = '"%x":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    count = nbytes // 60
    header = "{" + ",".join(one % (n, n, n + 1) for n in range(count)) + "}"
    return headed(header.encode(), bytes(count))


@bomb(".safetensors")
def deep_header(nbytes: int) -> bytes:
    return headed(b'{"a":' + b"[" * nbytes + b"]" * nbytes + b"}")


@bomb(".safetensors")
def wide_header(nbytes: int) -> bytes:
    return headed(b'{"a":[' + b"[]," * (nbytes // 3) + b"[]]}")


@bomb(".safetensors")
def header_of_objects(nbytes: int) -> bytes:
    return headed(b'{"a":[' + b'{"a":0},' * (nbytes // 8) + b"{}]}")


@bomb(".safetensors")
def header_of_numbers(nbytes: int) -> bytes:
    return headed(b'{"a":[' + b"0," * (nbytes // 2) + b"0]}")


@bomb(".safetensors")
def header_of_texts(nbytes: int) -> bytes:
    return headed(b'{"a":[' + b'"",' * (nbytes // 3) + b'""]}')


@bomb(".safetensors")
def giant_number(nbytes: int) -> bytes:
    return headed(b'{"a":' + b"9" * nbytes + b"}")


@bomb(".safetensors")
def same_key(nbytes: int) -> bytes:
    return headed(b"{" + b'"a":0,' * (nbytes // 6) + b'"a":0}')


def tree(text: str) -> bytes:
    about = {"ckptmove": f'{{"version":1,"root":{text}}}'}
    said = {"__metadata__": about, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header = json.dumps(said, separators=(",", ":")).encode()
    return headed(header, b"\0")


@bomb(".safetensors")
def tree_of_lists(nbytes: int) -> bytes:
    return tree("[" + "[]," * (nbytes // 3) + "[]]")


@bomb(".safetensors")
def tree_of_dicts(nbytes: int) -> bytes:
    return tree('{"a":[' + "{}," * (nbytes // 3) + "{}]}")


@bomb(".safetensors")
def tree_of_texts(nbytes: int) -> bytes:
    return tree("[" + '"",' * (nbytes // 5) + '""]')


@bomb(".safetensors")
def tree_of_references(nbytes: int) -> bytes:
    doubled = '{"$":"shared","as":0,"of":[0]}'
    for n in range(1, 200):
        doubled = f'{{"$":"shared","as":{n},"of":[{doubled},{{"$":"again","as":{n - 1}}}]}}'
        if n == 60:
            break
    return tree("[" + doubled + ',{"$":"again","as":59}' * (nbytes // 30) + "]")


@bomb(".safetensors")
def tree_of_tensors(nbytes: int) -> bytes:
    return tree("[" + ",".join(['{"$":"tensor","of":"w"}'] * (nbytes // 31)) + "]")


@bomb(".index.json")
def long_index(nbytes: int) -> bytes:
    where = {f"{n:x}": "w.safetensors" for n in range(nbytes // 30)}
    return json.dumps({"metadata": {}, "weight_map": where}).encode()


@bomb(".index.json")
def many_shards(nbytes: int) -> bytes:
    where = {f"{n:x}": f"{n:x}" for n in range(nbytes // 20)}
    return json.dumps({"metadata": {}, "weight_map": where}).encode()


def _exported(name: str, text: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/archive_version", "0")
        archive.writestr("m/byteorder", "little")
        archive.writestr(f"m/{name}", text)
        archive.writestr("m/.data/version", "3")
    return out.getvalue()


@bomb(".pt2")
def export_of_lists(nbytes: int) -> bytes:
    return _exported("models/model.json", b'{"a":[' + b"[]," * (nbytes // 3) + b"[]]}")


@bomb(".pt2")
def export_deep(nbytes: int) -> bytes:
    return _exported("models/model.json", b"[" * nbytes)


@bomb(".pt2")
def export_of_weights(nbytes: int) -> bytes:
    one = b'"%x":{"path_name":"weight_0","is_param":true,"tensor_meta":{}}'
    config = b",".join(one % n for n in range(nbytes // 70))
    return _exported("data/weights/model_weights_config.json", b'{"config":{' + config + b"}}")


@bomb(".pt")
def packaged(nbytes: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("m/.data/version", "6")
        archive.writestr("m/.data/extern_modules", "")
        archive.writestr("m/.data/python_version", "3.10")
        for n in range(8):
            archive.writestr(f"m/p/{n}.pkl", b"\x80\2(" + b"]" * (nbytes // 8) + b"l.")
    return out.getvalue()


@bomb(".pt")
def scripted_old(nbytes: int) -> bytes:
    out = io.BytesIO()
    text = b'{"protoVersion":"2","tensors":[' + b"{}," * (nbytes // 3) + b"{}]}"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("m/version", "1\n")
        archive.writestr("m/model.json", text)
    return out.getvalue()


@bomb(".pkl")
def colliding_numbers(nbytes: int) -> bytes:
    return dict_of(n * MODULUS for n in range(1, nbytes // 14))


@bomb(".pt")
def colliding_numbers_saved(nbytes: int) -> bytes:
    return zipped(dict_of(n * MODULUS for n in range(1, nbytes // 14)))


@bomb(".pt")
def colliding_floats(nbytes: int) -> bytes:
    return zipped(dict_of(float(n * MODULUS * 4) for n in range(1, nbytes // 12)))


@bomb(".pt")
def colliding_tuples(nbytes: int) -> bytes:
    return zipped(dict_of((n * MODULUS,) for n in range(1, nbytes // 20)))


@bomb(".pt")
def colliding_set(nbytes: int) -> bytes:
    numbers = items(n * MODULUS for n in range(1, nbytes // 14))
    return zipped(b"\x80\x04\x8f(" + numbers + b"\x90.")


def dict_of(keys: Iterable[object]) -> bytes:
    """The pickle of a dict from these keys to None, which no dict is made for: that takes hours."""
    return b"\x80\x02}(" + items(keys, b"N") + b"u."


def items(values: Iterable[object], after: bytes = b"") -> bytes:
    """The opcodes of values, each with these after it."""
    return b"".join(pickle.dumps(value, 2)[2:-1] + after for value in values)


#: Opcodes that push one object each, of the kinds that files have very many of. `%` is a number.
DENSE: dict[str, bytes] = {
    "lists": b"]",
    "lists of numbers": b"](J%J%e",
    "lists in lists": b"]]Naa",
    "dicts": b"}\x8c\1aNs",
    "dicts of five": b"}(" + b"".join(b"h%cG????????" % n for n in range(5)) + b"u",
    "records": b"}(h\0K\1h\1K\2u",
    "dicts with numbers as keys": b"}(J%NJ%Nu",
    "sets": b"\x8f(J%K\1\x90",
    "tuples": b"N\x85",
    "tuples of numbers": b"J%J%J%\x87",
    "tuples of texts": b"\x8c\4%\x8c\4%\x86",
    "texts": b"\x8c\4%",
    "texts that name devices": b"\x8c\x09cuda:%",
    "recalled texts": b"h\0" * 8,
    "calls": b"h\5)R",
    "objects": b"h\5)\x81}\x8c\1aJ%sb",
    "bytes": b"C\4%",
    "long numbers": b"\x8a\x0c\1\1\1\1\1\1\1\1%",
}
#: Opcodes before them: texts and a class that they recall. They lie in the slots 0 to 5.
_BEFORE_DENSE = b"".join(b"\x8c\1%cq%c" % (97 + n, n) for n in range(5)) + b"ca\nb\nq\5"


def dense(kinds: tuple[str, ...], count: int) -> bytes:
    """A pickle of a list of so many objects of each of these kinds, with different numbers."""
    one = b"".join(DENSE[kind] for kind in kinds)
    parts, marks = one.split(b"%"), one.count(b"%")
    numbers = (b"%04d" % (n % 10_000) for n in range(marks * count))
    out = bytearray(b"\x80\4(" + _BEFORE_DENSE + b"1(")
    for _ in range(count):
        for part in parts[:-1]:
            out += part + next(numbers)
        out += parts[-1]
    return bytes(out) + b"l."


VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{}"),
    "relocate": ("relocate", "{}", "{}.out.pt", "--to", "cuda:0"),
    "convert": ("convert", "{}", "{}.out.safetensors"),
    "convert back": ("convert", "{}", "{}.out.pt"),
    "diff": ("diff", "{}", "{}"),
    "validate": ("validate", "{}"),
}


class Taken(NamedTuple):
    """How a verb ended, its peak of private memory (RssAnon, in bytes), its processor seconds.

    `torch` is what the import of torch alone takes, in bytes; 0 where the verb did not import it.
    """

    verb: str
    code: int
    nbytes: int
    seconds: float
    said: str
    torch: int


@cache
def _taken_by_torch() -> int:
    """What the import of torch takes of private memory, in bytes, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        before = _most_memory()
        importlib.import_module("torch")
        os.write(writing, b"%d" % (_most_memory() - before))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        taken = int(stream.read())
    os.waitpid(child, 0)
    return taken


def _most_memory() -> int:
    """The peak of private memory of this process, without pages mapped from files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    said = {line[0]: 1024 * int(line[1]) for line in lines if line[0] in ("VmHWM:", "RssFile:")}
    return said["VmHWM:"] - said["RssFile:"]


def measure(path: str, verbs: tuple[str, ...] = tuple(VERBS)) -> list[Taken]:
    """Run each verb of the command line in its own process, with a small address space.

    What the first verb refuses, the others refuse where they read it, by the same code: of a large
    file like that, they are left out, except `validate`, which reads it in other ways too.
    """
    from ckptmove.cli import run

    for verb in ("convert", "diff", "inspect", "relocate"):  # once, and not in each process
        importlib.import_module(f"ckptmove.api.{verb}")
    found: list[Taken] = []
    is_large = Path(path).stat().st_size > 1_000_000
    for verb in verbs:
        if found and found[0].code == 3 and verb != "validate" and is_large:
            continue
        arguments = [each.replace("{}", path) for each in VERBS[verb]]
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writing, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
            resource.setrlimit(resource.RLIMIT_CPU, (HANGING, HANGING))
            code = 71
            with suppress(BaseException):
                code = run(arguments)
            os.write(2, b"\0%d %d" % (_most_memory(), "torch" in sys.modules))
            os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            said = stream.read().decode(errors="replace")
        _, status, usage = os.wait4(child, 0)
        seconds = usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        said, _, figures = said.partition("\0")
        most, torch = map(int, figures.split()) if figures else (usage.ru_maxrss * 1024, 0)
        found.append(Taken(verb, code, most, seconds, said, _taken_by_torch() if torch else 0))
        for left in (f"{path}.out.safetensors", f"{path}.out.pt"):
            Path(left).unlink(missing_ok=True)
    return found


def main() -> None:
    folder, nbytes = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000_000
    wanted = sys.argv[3:]
    for name, maker in BOMBS.items():
        if wanted and name.partition(".")[0] not in wanted:
            continue
        path = folder / name
        made = os.fork()  # of its own, for the memory of this process is also that of a verb
        if not made:
            path.write_bytes(maker(nbytes))
            os._exit(0)
        os.waitpid(made, 0)
        size = path.stat().st_size
        for taken in measure(str(path)):
            files = 2 if taken.verb == "diff" else 1
            own = taken.nbytes - taken.torch
            over = "OVER" if own > FLOOR + PER_BYTE * files * size else ""
            said = " ".join(taken.said.split())[-100:]
            facts = f"{taken.code:3} {own / 1e6:5.0f} MB {taken.seconds:5.2f} s {over:4}"
            sys.stdout.write(f"{name:28} {size / 1e6:5.1f} MB {taken.verb:13} {facts} {said}\n")
            sys.stdout.flush()
        path.unlink()


if __name__ == "__main__":
    main()
