"""Processes that are killed, interrupted, lied to or short of something, at every step there is.

Whatever happens: the source stays as it was, and the destination is not there, or is complete.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.serialization import set_crc32_options

from tests.conftest import ROOT, some
from tests.faults.injecting import (
    READING,
    Call,
    calls_of,
    command,
    few,
    needs_strace,
    run,
    start,
    wait_for_stop,
)
from tests.making.checkpoints import rezip, save
from tests.making.staging import small_source, sparse_source
from tests.oracles.readers import assert_same_checkpoint
from tests.servers.fronts import HANG


class Scene:
    """A source, and a folder where its relocation is to appear."""

    def __init__(self, source: Path, to: str = "cuda:0", *, relay: bool = False) -> None:
        folder, self.source = source.parent, source
        self.out = folder / "there" / "out.pt"
        self.out.parent.mkdir()
        self.command = command("relocate", "-q", self.source, "--to", to, "-o", self.out)
        calls = calls_of(self.command, self.source, folder / "log")
        self.reading = few([call for call in calls if call.name in READING])
        self.calls = [call for call in calls if call.name not in READING]
        if relay:  # which writes a header before every record
            self.calls = few(self.calls)
        assert_same_checkpoint(self.source, self.out, {"cpu": to}, trust=True)
        self.good = self.out.read_bytes()
        self.before = self.source.read_bytes()

    def clear(self) -> None:
        """Empty the folder."""
        for path in self.out.parent.iterdir():
            path.unlink()

    def left(self) -> list[str]:
        """What is there besides the destination, which is absent or complete."""
        assert self.source.read_bytes() == self.before
        assert not self.out.exists() or self.out.read_bytes() == self.good
        return [path.name for path in self.out.parent.iterdir() if path != self.out]

    def until_named(self) -> list[Call]:
        """The calls up to the one that gives the destination its name."""
        named = [call.name in ("linkat", "renameat", "renameat2") for call in self.calls]
        return self.calls[: named.index(True) + 1]


@pytest.fixture(scope="module", params=["patch", "relay"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A relocation, by each of the ways it is done."""
    source = small_source(tmp_path_factory.mktemp("scene"))
    if request.param == "relay":
        return Scene(rezip(source, source.with_name("packed.pt")), relay=True)
    return Scene(source)


# Each call


@needs_strace
def test_what_is_traced_is_all_that_matters(scene: Scene) -> None:
    """A run makes the calls that the tests below break one by one."""
    names = [call.name for call in scene.calls]
    assert names.count("fsync") == 2
    assert {"openat", "ftruncate", "pwrite64", "linkat", "unlinkat", "close"} <= set(names)
    assert names.index("pwrite64") < names.index("fsync") < names.index("linkat")
    assert names.index("linkat") < len(names) - 1 - names[::-1].index("fsync")
    assert any("O_EXCL" in call.text for call in scene.calls)


@pytest.mark.sample(1)
@needs_strace
def test_killed_at_any_call_nothing_is_half_there(scene: Scene) -> None:
    named = False
    for call in some(scene.calls, 8):
        scene.clear()
        ended = run(scene.command, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        left = scene.left()
        assert all(name.endswith(".ckptmove-tmp") for name in left), call
        assert len(left) <= 1, call
        assert scene.out.exists() >= named, call
        named = scene.out.exists()
    assert named


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_interrupted_at_any_call_nothing_is_left(number: signal.Signals, scene: Scene) -> None:
    for call in some(scene.calls[1:-1], 8):
        if number is not signal.SIGTERM and call.name in ("close", "pwrite64", "ioctl"):
            continue  # one signal is handled as another is
        scene.clear()
        what = f"{call.name}:signal={number.name[3:]}:when={call.ordinal}"
        assert run(scene.command, inject=what).code == -number, call
        assert scene.left() == [], call


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_error_of_any_call_is_an_error_of_ours(error: str, scene: Scene) -> None:
    harmless = {"ioctl"}  # the file system can't share blocks, that's all
    for call in some(scene.until_named(), 8):
        scene.clear()
        ended = run(scene.command, inject=f"{call.name}:error={error}:when={call.ordinal}")
        if call.name == "close":  # of what was only read it is harmless
            assert ended.code in (0, 5)
        else:
            expected = 0 if call.name in harmless else 3 if call is scene.calls[0] else 5
            assert ended.code == expected, call
        assert scene.left() == [], call
        assert scene.out.exists() == (ended.code == 0), call
        assert ended.said.count("\n") == (ended.code != 0), call


@pytest.mark.sample(1)
@needs_strace
def test_an_error_after_the_naming_leaves_it_complete(scene: Scene) -> None:
    for call in scene.calls[len(scene.until_named()) :]:
        scene.clear()
        ended = run(scene.command, inject=f"{call.name}:error=EIO:when={call.ordinal}")
        assert ended.code in (0, 5), call
        assert scene.left() == [], call
        assert scene.out.exists(), call


@pytest.mark.sample(2)
@needs_strace
@pytest.mark.parametrize("name", ["openat", "ftruncate", "copy_file_range", "pwrite64", "fsync"])
def test_a_call_that_was_interrupted_is_made_again(name: str, scene: Scene) -> None:
    for call in [each for each in scene.calls if each.name == name][:2]:
        scene.clear()
        assert run(scene.command, inject=f"{name}:error=EINTR:when={call.ordinal}") == (0, "")
        assert scene.left() == []
        assert scene.out.exists()


# A kernel that lies, or can't


@pytest.mark.sample(2)
@needs_strace
@pytest.mark.parametrize("name", ["copy_file_range", "pwrite64"])
def test_what_was_not_written_is_noticed(name: str, scene: Scene) -> None:
    """The call says that it did all, and did nothing."""
    for call in [each for each in scene.calls if each.name == name]:
        nbytes = int(call.text.rpartition("= ")[2])
        scene.clear()
        ended = run(scene.command, inject=f"{name}:retval={nbytes}:when={call.ordinal}")
        assert ended.code in (3, 5), call  # 3: what arrived is no checkpoint
        assert (scene.left(), scene.out.exists()) == ([], False), call


@needs_strace
def test_what_was_not_copied_is_noticed_without_checksums(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        source = save(tmp_path / "in.pt", [torch.ones(3), torch.ones(9)], "cpu", pickle_protocol=4)
    finally:
        set_crc32_options(True)
    scene = Scene(source, "privateuseone:15", relay=True)  # protocol 4 can't shrink
    test_what_was_not_written_is_noticed("copy_file_range", scene)


@pytest.mark.sample(2)
@needs_strace
@pytest.mark.parametrize("error", ["EXDEV", "ENOSYS", "EOPNOTSUPP", "EINVAL"])
def test_without_copying_in_the_kernel_bytes_are_read_and_written(error: str, scene: Scene) -> None:
    scene.clear()
    assert run(scene.command, inject=f"copy_file_range:error={error}:when=1+") == (0, "")
    assert scene.left() == []
    assert scene.out.exists()


@needs_strace
@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP"])
def test_without_hard_links_the_file_is_renamed(error: str, scene: Scene) -> None:
    scene.clear()
    assert run(scene.command, inject=f"linkat:error={error}:when=1+") == (0, "")
    assert scene.left() == []
    assert scene.out.exists()


@pytest.mark.sample(1)
@needs_strace
def test_an_error_of_reading_leaves_nothing(scene: Scene) -> None:
    for call in scene.reading:
        scene.clear()
        ended = run(scene.command, inject=f"{call.name}:error=EIO:when={call.ordinal}")
        assert ended.code == (0 if call.name == "sync_file_range" else ended.code), call
        assert ended.code in (0, 3, 5), call
        assert (scene.left(), scene.out.exists()) == ([], ended.code == 0), call


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOMEM"])
def test_an_error_while_verifying_leaves_nothing(error: str, scene: Scene) -> None:
    scene.clear()
    assert run(scene.command, inject=f"/^preadv2?$:error={error}:when=2").code == 5
    assert (scene.left(), scene.out.exists()) == ([], False)


@needs_strace
def test_without_hard_links_a_name_taken_meanwhile_stays(scene: Scene, tmp_path: Path) -> None:
    scene.clear()
    stop, unlinked = "fsync:signal=STOP:when=1", "linkat:error=EPERM:when=1+"
    log = tmp_path / "stopped"
    with start(scene.command, stop, unlinked, log=log) as process:
        stopped = wait_for_stop(process, log)
        assert not scene.out.exists()
        scene.out.write_bytes(b"mine")
        os.kill(stopped, signal.SIGCONT)
        said = process.communicate(timeout=HANG)[1]
    assert (process.returncode, scene.out.read_bytes()) == (4, b"mine"), said
    assert [path.name for path in scene.out.parent.iterdir()] == ["out.pt"]


# Limits


def spawn(
    arguments: list[str], before: Callable[[], object] | None = None
) -> subprocess.Popen[str]:
    """Start a command, after something was done in its process."""
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    return subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=before
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("twentieths", [0, 1, 10, 19])
def test_a_limit_on_the_size_of_files_is_an_error(twentieths: int, tmp_path: Path) -> None:
    source, out = small_source(tmp_path), tmp_path / "there" / "out.pt"
    out.parent.mkdir()
    limit = source.stat().st_size * twentieths // 20
    process = spawn(
        command("relocate", source, "--to", "cuda:0", "-o", out),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    said = process.communicate(timeout=HANG)[1]
    assert process.returncode == 5, said
    assert list(out.parent.iterdir()) == []


AS_NOBODY = """
import os, sys
from ckptmove import RefusedError, relocate
os.setgroups([]); os.setegid(65534); os.seteuid(65534)
try:
    relocate(sys.argv[1], sys.argv[2], to="cuda:0")
except RefusedError as error:
    sys.exit(f"{error}")
"""


def test_a_folder_that_others_own_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to be somebody else")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    source, out = small_source(tmp_path), tmp_path / "there" / "out.pt"
    out.parent.mkdir(mode=0o755)
    process = spawn([sys.executable, "-c", AS_NOBODY, os.fspath(source), os.fspath(out)])
    assert process.communicate(timeout=HANG)[1].strip() == "can't be written: Permission denied"
    assert process.returncode == 1
    assert list(out.parent.iterdir()) == []


# Signals


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_in_the_midst_of_a_giant(number: signal.Signals, tmp_path: Path) -> None:
    source = sparse_source(tmp_path, 8)
    out = tmp_path / "there" / "out.pt"
    out.parent.mkdir()
    process = spawn(command("relocate", source, "--to", "cuda:0", "--all", "-o", out))
    try:
        while not any(path.stat().st_size for path in out.parent.iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate(timeout=HANG)[1]
    finally:
        process.kill()
    assert process.returncode == -number, said
    left = [path.name for path in out.parent.iterdir()]
    assert len(left) == (number == signal.SIGKILL)
    assert all(name.endswith(".ckptmove-tmp") for name in left)
    assert said.strip() == ""
