"""Seeded damage to checkpoints: bytes, structure, borders, and pieces of other files.

`mutated(data, donors, dice)` is one more file. A structural mutation takes a file apart, changes
something inside, and rebuilds it with valid checksums, counts and lengths, so that readers reach
the change; it falls back to bytes if a file can't be parsed. Nothing here shares code with
ckptmove.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.making.building import CODES, Part, build_zip, deflate

#: Numbers at which readers break: borders of signs and widths, and what no file can hold.
NUMBERS = (
    *(0, 1, 2, 3, 7, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x10000, 5056, 0x7FFFFFFF),
    *(0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, 1 << 32, 1 << 40, (1 << 61) - 1, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_MAGICS = (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b"\x80\x02", b"tq")
_TEXTS = (b"cpu", b"cuda:0", b"cuda:1", b"meta", b"storage", b"0", b"", b"\xed\xa0\x80", b"a\nb")
_BYTES_OPCODES = ("BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINBYTES")
_TEXT_OPCODES = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_DEEPEST = 4


def mutated(data: bytes, donors: Sequence[bytes], dice: Random) -> bytes:
    """The file with one kind of damage, sometimes with a second one."""
    for _ in range(dice.choice((1, 1, 1, 2))):
        how: Callable[[bytes, Sequence[bytes], Random], bytes]
        how = dice.choice((scratched, restructured, restructured, restructured, cut, spliced))
        data = how(data, donors, dice) or b"P"
    return data


# -- bytes -----------------------------------------------------------------------------------------


def scratched(data: bytes, _donors: Sequence[bytes], dice: Random) -> bytes:
    """Some bytes flipped, removed, doubled, moved or set, often near a magic number."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at, length = _somewhere(changed, dice), dice.choice((1, 1, 2, 4, 8, 40, 400))
        source = _somewhere(changed, dice)
        piece = bytes(changed[source : source + length])
        how = dice.randrange(7)
        if how <= 1:
            changed[at] ^= 1 << dice.randrange(8)
        elif how == 2:
            del changed[at : at + length]
        elif how == 3:
            changed[at:at] = piece
        elif how == 4:
            changed[at : at + length] = piece
        elif how == 5:
            changed[at : at + 1] = dice.randbytes(1)
        else:
            number, width = dice.choice(NUMBERS), dice.choice((1, 2, 4, 8))
            changed[at : at + width] = _packed(number, width, dice)
        changed = changed or bytearray(b"P")
    return bytes(changed)


def _somewhere(data: bytes | bytearray, dice: Random) -> int:
    magic = dice.choice((*_MAGICS, b""))
    found = data.find(magic, dice.randrange(len(data))) if magic else -1
    at = dice.randrange(len(data)) if found < 0 else found + dice.randrange(56)
    return min(at, len(data) - 1)


def _packed(number: int, width: int, dice: Random) -> bytes:
    raw = (number % (1 << 8 * width)).to_bytes(width, "little")
    return raw[::-1] if dice.random() < 0.1 else raw


# -- borders ---------------------------------------------------------------------------------------


def borders(data: bytes) -> list[int]:
    """Offsets at which something starts or ends."""
    found = {0, len(data), *range(0, min(len(data), 1 << 15), 512)}
    for magic in _MAGICS:
        at = data.find(magic)
        while at >= 0 and len(found) < 4000:
            found.update((at, at + len(magic)))
            at = data.find(magic, at + 1)
    pickles, _ = pickles_of(data)
    at = 0
    for opcodes in pickles:
        for _, raw in opcodes:
            at += len(raw)
            found.add(at)
    return sorted(found)


def cut(data: bytes, _donors: Sequence[bytes], dice: Random) -> bytes:
    """The start of a file up to a border, or nearly; sometimes its end."""
    at = max(0, dice.choice(borders(data)) + dice.choice((0, 0, -1, 1)))
    return data[at:] if dice.random() < 0.1 else data[:at]


def spliced(data: bytes, donors: Sequence[bytes], dice: Random) -> bytes:
    """The start of one file and the end of another, or a piece of it in between."""
    other = dice.choice(donors)
    at, start = dice.choice(borders(data)), dice.choice(borders(other))
    if dice.random() < 0.5:
        return data[:at] + other[start:]
    end = dice.choice([each for each in borders(other) if each >= start])
    return (
        data[:at] + other[start:end] + data[dice.choice((at, min(len(data), at + end - start))) :]
    )


# -- structure -------------------------------------------------------------------------------------


def restructured(data: bytes, donors: Sequence[bytes], dice: Random, depth: int = 0) -> bytes:
    """Taken apart, changed inside, and put together again."""
    try:
        if data.startswith(b"PK\3\4"):
            return _other_zip(data, donors, dice, depth)
        if data[257:262] == b"ustar":
            return _other_tar(data, donors, dice, depth)
        if data[:1] in (b"{", b"[") and depth:
            return _other_json(data, dice)
        return _other_pickles(data, donors, dice, depth)
    except (ArithmeticError, LookupError, ValueError, EOFError, OSError, struct.error):
        return scratched(data, donors, dice)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, RuntimeError):
        return scratched(data, donors, dice)


def _content(data: bytes, donors: Sequence[bytes], dice: Random, depth: int) -> bytes:
    """Other content of a record or member, or of bytes within a pickle."""
    if not data:
        return dice.choice((b"", b"1", dice.choice(donors)[:100]))
    if depth >= _DEEPEST or dice.random() < 0.1:
        return scratched(data, donors, dice)
    if dice.random() < 0.05:
        return cut(data, donors, dice)
    return restructured(data, donors, dice, depth + 1)


def _other_zip(data: bytes, donors: Sequence[bytes], dice: Random, depth: int) -> bytes:
    """Another record, name, size, offset or checksum in a zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [Part(name, archive.read(name)) for name in archive.namelist()]
    for part in parts:
        part.flags |= dice.choice((0, 0, 8))
        length = len(part.name.encode())
        if dice.random() < 0.5:
            part.extra = b"FB" + struct.pack("<H", length) + b"Z" * length
    options: dict[str, Any] = {"wide": dice.random() < 0.5}
    telling = [part for part in parts if part.name.endswith((".pkl", ".json", ".py"))] or parts
    for _ in range(dice.choice((1, 1, 2))):
        part = dice.choice(telling if dice.random() < 0.7 else parts)
        number = dice.choice(NUMBERS)
        narrow = number & 0xFFFFFFFF
        how = dice.randrange(12)
        if how <= 5:
            part.content = _content(part.content, donors, dice, depth)
        elif how == 6:
            fields = dice.choice((part.local, part.central, part.descriptor))
            names = ("crc", "stored", "nbytes")
            assert isinstance(fields, dict)
            fields[dice.choice(names)] = narrow
            part.flags |= 8 if fields is part.descriptor else 0
        elif how == 7:
            assert isinstance(part.central, dict)
            which, most = dice.choice((("at", 32), ("flags", 16), ("method", 16), ("outside", 32)))
            part.central[which] = number & ((1 << most) - 1)
        elif how == 8:
            other = dice.choice(parts).name.encode()
            raw = dice.choice((other, other.upper(), other + b"\0", b"/" + other, b"\xff" + other))
            assert isinstance(part.central, dict)
            assert isinstance(part.local, dict)
            part.central["name"] = raw
            if dice.random() < 0.7:
                part.local["name"] = raw
        elif how == 9:
            part.method = 8
            if dice.random() < 0.5:
                part.raw = deflate(part.content)[: dice.randrange(1 + len(part.content))]
        elif how == 10:
            parts = dice.choice((parts[1:], [*parts, part], parts[::-1], [part, *parts])) or parts
        elif dice.random() < 0.5:
            options["end"] = {dice.choice(("here", "entries", "comment")): narrow & 0xFFFF}
        else:
            names64 = ("at", "nbytes", "here", "entries", "size")
            options |= {"wide": True, "end64": {dice.choice(names64): number}}
    return build_zip(parts, **options)


def _other_tar(data: bytes, donors: Sequence[bytes], dice: Random, depth: int) -> bytes:
    """Other members, or other fields of their headers, with valid checksums."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [
            (member.name, file.read() if (file := archive.extractfile(member)) else b"")
            for member in archive.getmembers()
        ]
    chosen = dice.randrange(len(members))
    if dice.random() < 0.6:
        name, content = members[chosen]
        members[chosen] = name, _content(content, donors, dice, depth)
    elif dice.random() < 0.3:
        members = dice.choice((members[1:], members[::-1], [*members, members[chosen]])) or members
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    made = bytearray(out.getvalue())
    if dice.random() < 0.4:
        headers = [at for at in range(0, len(made), 512) if made[at + 257 : at + 262] == b"ustar"]
        at = dice.choice(headers)
        start, width = dice.choice(((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (345, 155)))
        octal = f"{dice.choice(NUMBERS):o}".encode().rjust(width - 1, b"0")[-width:]
        base256 = b"\x80" + dice.choice(NUMBERS).to_bytes(width + 8, "big")[-width + 1 :]
        piece = dice.choice((octal, base256, b"-1", b"\xff" * width, b"", dice.randbytes(1)))
        made[at + start : at + start + width] = piece.ljust(width, b"\0")[:width]
        made[at + 148 : at + 156] = b" " * 8
        made[at + 148 : at + 156] = f"{sum(made[at : at + 512]):06o}\0 ".encode()
    return bytes(made)


def _other_json(data: bytes, dice: Random) -> bytes:
    """One value of a JSON text changed, doubled, removed or made enormous."""
    root = json.loads(data)
    places: list[tuple[Any, Any]] = []
    todo = [root]
    while todo:
        held = todo.pop()
        keys: list[Any] = list(held) if isinstance(held, dict) else list(range(len(held)))
        for key in keys:
            places.append((held, key))
            if isinstance(held[key], (dict, list)):
                todo.append(held[key])
    if not places:
        return dice.choice((b"[]", b"{}", b"null", b"1" * 5000, b"[" * 5000))
    held, key = dice.choice(places)
    _, other_key = dice.choice(places)
    values: list[Any] = [
        *(None, True, -1, 1.5, float("nan"), "", "cuda:0", [], {}, "\ud800", "../../x", "a\nb"),
        *dice.sample(NUMBERS, 4),
        *(there[which] for there, which in dice.sample(places, min(3, len(places)))),
    ]
    if isinstance(held, dict) and dice.random() < 0.2:
        held[str(other_key)] = held.pop(key)
    elif dice.random() < 0.1:
        del held[key]
    else:
        held[key] = dice.choice(values)
    try:
        return json.dumps(root).encode()
    except ValueError:  # it holds itself by now
        return data[: len(data) // 2]


# -- pickles ---------------------------------------------------------------------------------------

Opcodes = list[tuple[str, bytes]]

_MOST_PICKLES = 8
_OPCODES = {
    ord(each.code): (each.name, 0 if each.arg is None else each.arg.n)
    for each in pickletools.opcodes
}
_COUNTS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def pickles_of(data: bytes) -> tuple[list[Opcodes], bytes]:
    """The pickles at the start of a file, opcode by opcode, and what follows them."""
    pickles: list[Opcodes] = []
    at = 0
    while len(pickles) < _MOST_PICKLES:
        found, end = _opcodes(data, at)
        if end is None:
            break
        pickles.append(found)
        at = end
        if data[at : at + 1] != b"\x80":
            break
    return pickles, data[at:]


def _opcodes(data: bytes, at: int) -> tuple[Opcodes, int | None]:
    """The opcodes up to STOP, and the offset after it; None if there is no STOP."""
    found: Opcodes = []
    while at < len(data) and data[at] in _OPCODES:
        name, nbytes = _OPCODES[data[at]]
        end = at + 1
        if nbytes >= 0:
            end += nbytes
        elif nbytes == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if name in ("GLOBAL", "INST") else 1):
                end = data.find(b"\n", end) + 1 or len(data) + 1
        else:
            width = _COUNTS[nbytes]
            end += width + int.from_bytes(data[end : end + width], "little")
        if end > len(data):
            break
        found.append((name, data[at:end]))
        if name == "STOP":
            return found, end
        at = end
    return found, None


def _other_pickles(data: bytes, donors: Sequence[bytes], dice: Random, depth: int) -> bytes:
    """Other opcodes in one of the pickles, or another tail."""
    pickles, tail = pickles_of(data)
    if not pickles:
        return scratched(data, donors, dice)
    chosen = max(range(len(pickles)), key=lambda n: len(pickles[n]))
    if dice.random() < 0.25:
        chosen = dice.randrange(len(pickles))
    if tail and dice.random() < 0.1:
        number = struct.pack("<Q", dice.choice(NUMBERS))
        tail = dice.choice((number + tail[8:], tail[:-1], tail + b"\0", scratched(tail, (), dice)))
    elif dice.random() < 0.05:
        pickles = dice.choice((pickles[::-1], [*pickles, pickles[chosen]], pickles[:-1]))
    else:
        for _ in range(dice.choice((1, 1, 2, 3))):
            pickles[chosen] = _other_opcodes(pickles[chosen], donors, dice, depth)
    return b"".join(_framed(each, dice) for each in pickles) + tail


def _framed(opcodes: Opcodes, dice: Random) -> bytes:
    """The opcodes, mostly in frames of the right length."""
    if dice.random() < 0.1:
        return b"".join(raw for _, raw in opcodes)
    out = b""
    frame: bytes | None = None
    for name, raw in opcodes:
        if name == "FRAME":
            out += _frame(frame)
            frame = b""
        elif frame is None or (name in _BYTES_OPCODES and len(raw) > 1 << 16):
            out += _frame(frame) + raw
            frame = None
        else:
            frame += raw
    return out + _frame(frame)


def _frame(content: bytes | None) -> bytes:
    return b"" if not content else b"\x95" + struct.pack("<Q", len(content)) + content


def _other_opcodes(opcodes: Opcodes, donors: Sequence[bytes], dice: Random, depth: int) -> Opcodes:
    """Some opcodes of a pickle swapped, doubled, dropped, moved or given another argument."""
    changed = list(opcodes)
    at, other = dice.randrange(len(changed)), dice.randrange(len(changed))
    nested = [n for n, each in enumerate(changed) if _may_hold_more(*each)]
    if nested and dice.random() < 0.5:
        at = dice.choice(nested)
        changed[at] = _other_held(*changed[at], donors, dice, depth)
        return changed
    how = dice.randrange(10)
    if how == 0:
        changed[at], changed[other] = changed[other], changed[at]
    elif how == 1:
        start = min(at, other)
        changed[at:at] = changed[start : start + dice.choice((1, 1, 2, 5, 20))]
    elif how == 2:
        del changed[at : at + dice.choice((1, 1, 2, 5))]
    elif how == 3:
        changed.insert(other, changed.pop(at))
    elif how == 4:
        name = dice.choice(list(CODES))
        changed.insert(
            at, (name, CODES[name] + dice.choice((b"", b"\0", b"\1" * 4, b"a\n", b"a\nb\n")))
        )
    elif how == 5:
        name = dice.choice(list(CODES))
        changed[at] = name, CODES[name] + changed[at][1][1:]
    else:
        with_arguments = [n for n, (_, raw) in enumerate(changed) if len(raw) > 1] or [at]
        at = dice.choice(with_arguments)
        changed[at] = _other_argument(*changed[at], changed[other][1], dice)
    return changed or opcodes


def _other_argument(name: str, raw: bytes, donor: bytes, dice: Random) -> tuple[str, bytes]:
    number = dice.choice(NUMBERS)
    if name in ("BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT"):
        short = name in ("BINGET", "BINPUT")
        slot = dice.choice((number, raw[1] + 1, raw[1] ^ 1, dice.randrange(40)))
        return name, raw[:1] + _packed(slot, 1 if short else 4, dice)
    if name in ("BININT", "BININT1", "BININT2"):
        length = number.bit_length() // 8 + 1
        wide = b"\x8a" + bytes([length]) + number.to_bytes(length, "little")
        minus = b"J" + struct.pack("<i", -dice.choice((1, 2, 1000)))
        return "LONG1", dice.choice(
            (wide, wide, minus, b"\x88", b"G" + b"\x7f\xf8" + bytes(6), b"N")
        )
    if name in _TEXT_OPCODES:
        text = dice.choice((*_TEXTS, donor[-8:], raw[5:] * 2, b"a" * dice.choice((70, 300, 5000))))
        count = len(text) if dice.random() < 0.9 else number & 0xFFFFFFFF
        return "BINUNICODE", b"X" + struct.pack("<I", count) + text
    if name in ("GLOBAL", "INST"):
        names = b"torch\nSize\n", b"torch\ndevice\n", b"_codecs\nencode\n", b"os\nsystem\n"
        rebuilt = b"torch._utils\n_rebuild_tensor_v2\n", b"torch\nFloatStorage\n"
        more = b"torch._utils\n_rebuild_nested_tensor\n", b"torch._utils\n_rebuild_qtensor\n"
        return name, raw[:1] + dice.choice((*names, *rebuilt, *more))
    if name in ("PUT", "GET", "INT", "LONG", "FLOAT"):
        return name, raw[:1] + f"{dice.choice((number, -number, number << 64))}\n".encode()
    if name == "PROTO":
        return name, raw[:1] + bytes([dice.randrange(8)])
    if name in (*_BYTES_OPCODES, "LONG1", "LONG4", "FRAME"):
        width = {"SHORT_BINBYTES": 1, "LONG1": 1, "BINBYTES": 4, "BINSTRING": 4, "LONG4": 4}.get(
            name, 8
        )
        return name, raw[:1] + _packed(number, width, dice) + raw[1 + width :]
    return name, raw[:1] + scratched(raw[1:], (), dice)


def _may_hold_more(name: str, raw: bytes) -> bool:
    if name in _BYTES_OPCODES:
        return raw[2:3] == b"\x80" or b"PK\3\4" in raw[:16] or raw[5:6] == b"\x80"
    return name in _TEXT_OPCODES and raw[5:7] == b"\xc2\x80"


def _other_held(
    name: str, raw: bytes, donors: Sequence[bytes], dice: Random, depth: int
) -> tuple[str, bytes]:
    """Other bytes within a pickle, with the right length."""
    if name in _TEXT_OPCODES:
        text = raw[5:].decode("utf-8")
        new = _content(text.encode("latin-1"), donors, dice, depth).decode("latin-1").encode()
        return "BINUNICODE", b"X" + struct.pack("<I", len(new)) + new
    width = {"SHORT_BINBYTES": 1, "BINBYTES": 4, "BINSTRING": 4}.get(name, 8)
    new = _content(raw[1 + width :], donors, dice, depth)
    if name == "SHORT_BINBYTES":
        name, raw, width = "BINBYTES", b"B", 4
    return name, raw[:1] + struct.pack("<Q", len(new))[:width] + new
