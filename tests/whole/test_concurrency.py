"""Several processes or threads at one file: who write one destination, who read what changes.

`CKPTMOVE_ROUNDS` says how many times; `scripts/acceptance` asks for more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptmove
from tests.conftest import ROOT
from tests.making.checkpoints import MAKERS, save
from tests.making.staging import journals, training_source
from tests.oracles.sameness import assert_same_tree

ROUNDS = int(os.environ.get("CKPTMOVE_ROUNDS", "5"))
WRITERS = 4
PATIENCE = 300  # seconds, after which a process has hung
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}

Record = Callable[[str, object], None]

#: Relocates to one destination as soon as the round begins, which a line on stdin says.
_WRITER = """
import sys
import ckptmove
source, out, force = sys.argv[1:]
for line in sys.stdin:
    try:
        ckptmove.relocate(source, out, to=line.strip(), all=True, force=force == "force")
        print("won", flush=True)
    except ckptmove.RefusedError as error:
        print("lost", "exists" in str(error), flush=True)
"""

#: Changes a file in place, there and back.
_CHANGER = """
import sys
import ckptmove
for n in range(int(sys.argv[2])):
    ckptmove.relocate(sys.argv[1], to=("cpu", "cuda:1")[n % 2], all=True, in_place=True, force=True)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("force", [False, True])
def test_of_many_writers_one_wins(tmp_path: Path, force: bool, record_property: Record) -> None:
    """Without force exactly one; with it the destination is what one of them has written whole."""
    source, out = training_source(tmp_path), tmp_path / "out.pt"
    devices = [f"cuda:{n + 2}" for n in range(WRITERS)]
    whole = set()
    for device in devices:
        ckptmove.relocate(source, out, to=device, all=True, force=True)
        whole.add(out.read_bytes())
    files = [os.fspath(source), os.fspath(out)]
    command = [sys.executable, "-c", _WRITER, *files, "force" if force else "keep"]
    writers = [
        subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in devices
    ]
    try:
        for _ in range(ROUNDS):
            out.unlink(missing_ok=True)
            for writer, device in zip(writers, devices, strict=True):
                print(device, file=writer.stdin, flush=True)
            ended = [writer.stdout.readline().split() for writer in writers if writer.stdout]
            won = sum(each == ["won"] for each in ended)
            assert won == WRITERS if force else won == 1
            assert all(each in (["won"], ["lost", "True"]) for each in ended)
            assert out.read_bytes() in whole
            assert {each.name for each in tmp_path.iterdir()} == {source.name, out.name}
    finally:
        for writer in writers:
            writer.communicate(timeout=PATIENCE)
    record_property("rounds", ROUNDS)


def test_who_reads_what_changes_in_place_never_reads_wrong_tensors(
    tmp_path: Path, record_property: Record
) -> None:
    """torch finds the tensors as they are, whatever they are tagged with, or fails cleanly."""
    path = save(tmp_path / "run.pt", MAKERS["gan"](), "cuda:1")
    wanted = torch.load(path, map_location="cpu", weights_only=True)
    command = [sys.executable, "-c", _CHANGER, os.fspath(path), str(2 * ROUNDS)]
    reads = 0
    with subprocess.Popen(command, env=ENVIRONMENT) as changer:
        while changer.poll() is None:
            try:
                found = torch.load(path, map_location="cpu", weights_only=True)
            except Exception:  # what torch says of a pickle that changes under it is its own
                continue
            assert_same_tree(found, wanted)
            reads += 1
    assert changer.returncode == 0
    assert journals(tmp_path) == []
    assert reads > 0
    record_property("reads", reads)


@pytest.mark.slow
def test_threads_make_what_one_makes(tmp_path: Path) -> None:
    """Sixteen at once, several at the same file; `scripts/matrix` does so without a GIL too."""
    for name in ("adamw_training", "sparse_csr", "quantized_qint8"):
        save(tmp_path / f"{name}.pt", MAKERS[name](), "cuda:1")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "adamw_training.pt").read_bytes()[:-300])
    script = [sys.executable, os.fspath(ROOT / "scripts" / "digests.py")]
    said = [
        subprocess.run(
            [*script, *option, os.fspath(tmp_path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        for option in ((), ("--threads",))
    ]
    alone, together = (each.stdout.splitlines() for each in said)
    assert sorted(together) == sorted(alone)
    assert len(alone) == 4 * len([*tmp_path.iterdir()])
