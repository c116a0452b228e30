"""`python -m tests.faults.staged_job KIND FORCE OUT SOURCE...`: stages something and is killed."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from ckptmove.errors import CkptmoveError
from ckptmove.plans.plan import Copy, CrcRange, Gather, Plan, Write
from ckptmove.sources.file import File
from ckptmove.sources.source import Source
from ckptmove.writing.staged_file import LocalFile
from ckptmove.writing.staged_folder import LocalFolder


def joined(*sources: Source) -> Plan:
    """All sources one after another, behind a header and a checksum that is known last."""
    copies, at = [], 12
    for n, source in enumerate(sources):
        copies.append(Copy(0, source.nbytes, at, n))
        at += source.nbytes

    def seal(crcs: Sequence[int]) -> list[Write]:
        return [Write(8, struct.pack("<I", crcs[0]))]

    measure = CrcRange(12, at - 12)
    return Plan("relay", at, tuple(copies), (Write(0, b"a head: "),), (), (), (measure,), seal)


def turned(source: Source) -> Plan:
    """A few bytes, then the first 4000 bytes of a source as a transposed matrix."""
    gather = Gather(5, 4000, 0, 0, 4000, "int16", (40, 50), (1, 40), 0)
    return Plan("relay", 4005, (), (Write(0, b"first"),), gathers=(gather,))


def main(kind: str, force: str, out: str, *paths: str) -> None:
    """Stage, verify and commit a file."""
    with ExitStack() as stack:
        sources = [stack.enter_context(File.open(path)) for path in paths]
        if kind == "folder":
            folder = stack.enter_context(LocalFolder(out, sources, force=bool(force)))
            for name, plan in {
                "joined": joined(*sources),
                "a/b/first": Plan("clone", sources[0].nbytes, (Copy(0, sources[0].nbytes, 0),), ()),
                "a/settings.json": Plan("relay", 2, (), (Write(0, b"{}"),)),
            }.items():
                with folder.file(name) as file:
                    file.write(plan)
            folder.commit()
            return
        staged = stack.enter_context(LocalFile(out, sources, force=bool(force)))
        staged.write(turned(sources[0]) if kind == "turned" else joined(*sources))
        staged.commit()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CkptmoveError as error:
        sys.exit(error.exit_code)
