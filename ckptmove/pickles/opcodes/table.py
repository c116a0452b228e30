"""The opcodes of pickles and their lengths.

They are those of `Lib/pickletools.py`, which takes as long to import as a small file takes to read;
`tests/pickles/test_scan.py` compares both.
"""

from __future__ import annotations

UNKNOWN, LINES = 0, -100
#: The names and bytes of all opcodes, by their width with the argument; or by minus the width of
#: the count that the argument starts with; or by `LINES` if the argument is lines.
_BY_WIDTH = {
    1: {
        "NEXT_BUFFER": 0x97, "READONLY_BUFFER": 0x98, "NONE": 0x4e, "NEWTRUE": 0x88, "NEWFALSE":
        0x89, "EMPTY_LIST": 0x5d, "APPEND": 0x61, "APPENDS": 0x65, "LIST": 0x6c, "EMPTY_TUPLE":
        0x29, "TUPLE": 0x74, "TUPLE1": 0x85, "TUPLE2": 0x86, "TUPLE3": 0x87, "EMPTY_DICT": 0x7d,
        "DICT": 0x64, "SETITEM": 0x73, "SETITEMS": 0x75, "EMPTY_SET": 0x8f, "ADDITEMS": 0x90,
        "FROZENSET": 0x91, "POP": 0x30, "DUP": 0x32, "MARK": 0x28, "POP_MARK": 0x31, "MEMOIZE":
        0x94, "STACK_GLOBAL": 0x93, "REDUCE": 0x52, "BUILD": 0x62, "OBJ": 0x6f, "NEWOBJ": 0x81,
        "NEWOBJ_EX": 0x92, "STOP": 0x2e, "BINPERSID": 0x51,
    },
    2: {
        "BININT1": 0x4b, "BINGET": 0x68, "BINPUT": 0x71, "EXT1": 0x82, "PROTO": 0x80,
    },
    3: {
        "BININT2": 0x4d, "EXT2": 0x83,
    },
    5: {
        "BININT": 0x4a, "LONG_BINGET": 0x6a, "LONG_BINPUT": 0x72, "EXT4": 0x84,
    },
    9: {
        "BINFLOAT": 0x47, "FRAME": 0x95,
    },
    -1: {
        "LONG1": 0x8a, "SHORT_BINSTRING": 0x55, "SHORT_BINBYTES": 0x43, "SHORT_BINUNICODE":
        0x8c,
    },
    -4: {
        "LONG4": 0x8b, "BINSTRING": 0x54, "BINBYTES": 0x42, "BINUNICODE": 0x58,
    },
    -8: {
        "BINBYTES8": 0x8e, "BYTEARRAY8": 0x96, "BINUNICODE8": 0x8d,
    },
    LINES: {
        "INT": 0x49, "LONG": 0x4c, "STRING": 0x53, "UNICODE": 0x56, "FLOAT": 0x46, "GET": 0x67,
        "PUT": 0x70, "GLOBAL": 0x63, "INST": 0x69, "PERSID": 0x50,
    },
}  # fmt: skip

#: For each byte, the name of the opcode.
NAMES = {code: name for codes in _BY_WIDTH.values() for name, code in codes.items()}


def _widths() -> list[int]:
    """For each byte: the width of the opcode, or minus the width of the count that follows it."""
    table = [UNKNOWN] * 256
    for width, codes in _BY_WIDTH.items():
        for code in codes.values():
            table[code] = width
    return table


WIDTHS = _widths()
