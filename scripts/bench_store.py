"""Relocate and convert what lies in a store, against a plain download of it, on loopback.

What answers is a server that gives files by the part of S3's protocol that reading takes: moto's,
which the tests run against, reads a whole object for each range of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measuring import CKPTMOVE, FOLDER, TRAINING, Contender, compare, make

SERVE = """
import sys
from pathlib import Path
from tests.servers.fronts import Files
front = Files(Path(sys.argv[1]))
print(front.url, flush=True)
front.serve_forever()
"""
DOWNLOAD = """
import os, sys, fsspec
fs = fsspec.filesystem(sys.argv[1].partition(":")[0])
fs.get_file(sys.argv[1], sys.argv[2])
fd = os.open(sys.argv[2], os.O_RDWR); os.fsync(fd)
"""
ACCESS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Give the files of a folder, in a process of its own; gives where."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, "-c", SERVE, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def readings(folder: Path, size: float, rounds: int) -> None:
    """Relocate, convert and inspect a training checkpoint that lies in a bucket."""
    bucket = folder / "bucket"
    bucket.mkdir()
    source = make(TRAINING, bucket / "training.pt", size)
    out, shards = folder / "out.pt", folder / "out.safetensors"

    def before() -> None:
        for path in (out, shards):
            path.unlink(missing_ok=True)
        os.sync()

    with served(folder) as endpoint:
        os.environ.update(ACCESS, AWS_ENDPOINT_URL=endpoint)
        for url in ("s3://bucket/training.pt", f"{endpoint}/bucket/training.pt"):
            protocol = url.partition(":")[0]
            relocate = [*CKPTMOVE, "relocate", url, "--to", "cpu", "-o", str(out), "--quiet"]
            compare(
                f"From {protocol}:// on loopback: {source.stat().st_size / 1e9:.2f} GB",
                [
                    Contender(
                        "download by fsspec, then fsync",
                        [sys.executable, "-c", DOWNLOAD, url, str(out)],
                    ),
                    Contender("ckptmove relocate (verified, on disk)", relocate),
                    Contender("ckptmove convert", [*CKPTMOVE, "convert", url, str(shards)]),
                    Contender("ckptmove inspect", [*CKPTMOVE, "inspect", url]),
                ],
                rounds,
                before,
            )
    source.unlink()
