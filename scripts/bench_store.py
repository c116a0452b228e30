"""Relocate and convert what lies in a store, on loopback, against a plain download or copy of it.

One large object comes from a server that gives files by the part of S3's protocol that reading
takes: moto
reads a whole object for each range of it. Many small ones are in moto, whose answers are delayed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_batch import TREE
from measuring import CKPTMOVE, FOLDER, TRAINING, Contender, compare, make

SERVE = """
import sys
from pathlib import Path
from tests.servers.fronts import Files
front = Files(Path(sys.argv[1]))
print(front.url, flush=True)
front.serve_forever()
"""
#: moto behind a proxy whose answers take so many milliseconds longer.
SERVE_S3 = """
import subprocess, sys
from tests.servers import object_store
from tests.servers.fronts import Fault, Proxy
command = [sys.executable, "-c", object_store.SERVER]
moto = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
front = Proxy("127.0.0.1:" + moto.stdout.readline().strip())
object_store.Store(front.behind, front, "bucket").say("PUT", "/bucket")
front.faults += [Fault("slow", int(sys.argv[1]), each) for each in ("GET", "HEAD", "PUT", "POST")]
print(front.url, flush=True)
try:
    front.serve_forever()
except KeyboardInterrupt:
    moto.kill()
"""
#: Each object of a prefix to a file and from there to another prefix, by so many threads.
COPY_OBJECTS = """
import os, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
import fsspec
source, out, count = sys.argv[1:]
fs, root = fsspec.core.url_to_fs(source)
target = fs._strip_protocol(out)
with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(count)) as threads:
    def copy(numbered):
        number, key = numbered
        here = os.path.join(folder, str(number))
        fs.get_file(key, here)
        fs.put_file(here, target + key[len(root):])
    list(threads.map(copy, enumerate(fs.find(root))))
"""
PUT_FOLDER = """
import sys, fsspec
fs, root = fsspec.core.url_to_fs(sys.argv[2])
fs.put(sys.argv[1], root, recursive=True)
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
def served(script: str, argument: object) -> Iterator[str]:
    """Have a process of its own answer requests; gives where."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, "-c", script, str(argument)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
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

    with served(SERVE, folder) as endpoint:
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


def small_items(folder: Path, rounds: int, count: int = 60, workers: int = 8) -> None:
    """Relocate and convert many small checkpoints of a store that takes 30 ms for each answer."""
    tree = make(TREE, folder / "tree", count, 0.02)
    with served(SERVE_S3, 30) as endpoint:
        os.environ.update(ACCESS, AWS_ENDPOINT_URL=endpoint)
        source, outs = "s3://bucket/tree", iter(f"s3://bucket/out-{n}" for n in range(1 << 20))
        subprocess.run([sys.executable, "-c", PUT_FOLDER, str(tree), source], check=True)
        ours = ["--jobs", str(workers), "--quiet"]
        contenders = [
            Contender(
                "s3fs get and put", [sys.executable, "-c", COPY_OBJECTS, source, "", str(workers)]
            ),
            Contender(
                "ckptmove batch relocate --to cpu",
                [*CKPTMOVE, "batch", "relocate", source, "", "--to", "cpu", *ours],
            ),
            Contender("ckptmove batch convert", [*CKPTMOVE, "batch", "convert", source, "", *ours]),
        ]

        def before() -> None:
            for each in contenders:
                each.command[each.command.index(source) + 1] = next(outs)

        compare(
            f"{count} small checkpoints of a store, 30 ms an answer, {workers} at once",
            contenders,
            rounds,
            before,
        )
    shutil.rmtree(tree)
