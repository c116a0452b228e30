"""What the command line prints: for people, for programs, and on terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import MAKERS, kept_on_cpu, save

pytestmark = pytest.mark.cold


@pytest.fixture
def run_pt(tmp_path: Path) -> Path:
    """A training checkpoint from cuda:0 in the test's folder."""
    saved = MAKERS["adamw_training"]()
    return save(tmp_path / "run.pt", saved, keep_cpu=kept_on_cpu(saved))


# -- what is printed ---------------------------------------------------------------------------


def test_json_is_all_there_is_on_stdout(run_pt: Path, run_cli: RunCli) -> None:
    said = json.loads(run_cli("inspect", run_pt, "--json", exit=0).stdout)
    assert said == ckptmove.inspect(run_pt).to_json()
    done = run_cli("relocate", run_pt, "--to", "cpu", "--json", exit=0)
    report = ckptmove.relocate(run_pt, to="cpu", force=True).to_json()
    assert {**json.loads(done.stdout), "seconds": 0} == {**report, "seconds": 0}
    assert done.stderr == ""


def test_json_of_a_part(run_pt: Path, run_cli: RunCli) -> None:
    done = run_cli("inspect", run_pt, "--select", "model.head.*", "--json", exit=0)
    assert json.loads(done.stdout) == ckptmove.inspect(run_pt).select(["model.head.*"]).to_json()


def test_quiet_prints_nothing_but_errors(run_pt: Path, tmp_path: Path, run_cli: RunCli) -> None:
    module = save(tmp_path / "module.pt", MAKERS["whole_module"]())
    for command in (
        ("inspect", run_pt, "-q"),
        ("inspect", run_pt, "--quiet", "--tensors", "--require", "cuda:0"),
        ("relocate", module, "--to", "cpu", "-q"),
        ("relocate", run_pt, "--to", "cpu", "--quiet", "--dry-run"),
    ):
        done = run_cli(*command, exit=0)
        assert (done.stdout, done.stderr) == ("", "")
    assert run_cli("inspect", "none.pt", "-q", exit=3).stderr.count("\n") == 1


def test_the_verdict_comes_first(run_pt: Path, run_cli: RunCli) -> None:
    verdict = ckptmove.inspect(run_pt).verdict
    for option in ([], ["--tensors"]):
        assert run_cli("inspect", run_pt, *option, exit=0).stdout.splitlines()[0] == verdict


def test_every_tensor_has_its_line(run_pt: Path, run_cli: RunCli) -> None:
    names = [entry.name for entry in ckptmove.inspect(run_pt).tensors]
    lines = run_cli("inspect", run_pt, "--tensors", exit=0).stdout.splitlines()[2:]
    assert [line.split()[0] for line in lines] == names
    tree = run_cli("inspect", run_pt, "--tree", exit=0).stdout
    assert len(re.findall(r"(?:float32|int64|uint8)\[.*\] (?:cuda:0|cpu)$", tree, re.M)) == 29


def test_a_model_of_many_layers_fits_a_screen(tmp_path: Path, run_cli: RunCli) -> None:
    layers = {f"layers.{n}.{w}.weight": torch.ones(1) for n in range(80) for w in "qkvo"}
    path = save(tmp_path / "made.pt", layers)
    printed = run_cli("inspect", path, exit=0).stdout
    assert len(printed.splitlines()) < 24
    assert "layers.{0..79}.q.weight" in printed


def test_unknown_callables_are_warned_of(tmp_path: Path, run_cli: RunCli) -> None:
    path = save(tmp_path / "module.pt", MAKERS["whole_module"]())
    done = run_cli("relocate", path, "--to", "cpu", exit=0)
    assert re.fullmatch(r"ckptmove: .*/module.pt: names 1 unknown callable[^\n]*\n", done.stderr)
    assert "tests.making.modules.TinyNet" in run_cli("inspect", path, exit=0).stdout


def test_verbose_tells_all_that_stays(run_pt: Path, run_cli: RunCli) -> None:
    brief = run_cli("relocate", run_pt, "--to", "cuda:1", "--dry-run", exit=0).stdout
    whole = run_cli("relocate", run_pt, "--to", "cuda:1", "--dry-run", "-v", exit=0).stdout
    assert "optimizer.state.0.step and 5 more" in brief
    assert "optimizer.state.5.step" in whole


NASTY = ("a\nNEXT", "\x1b[31mred\x1b[0m", "\u202ertl", "bell\x07", "\r\x9b2J", "\x1b]0;title\x07")


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["", "--tensors", "--tree", "--require=cpu", "--json"])
def test_names_do_not_act_on_the_terminal(option: str, tmp_path: Path, run_cli: RunCli) -> None:
    saved: dict[str, Any] = {name: torch.ones(1) for name in NASTY}
    saved["values"] = {f"{name}!": "cuda:0" for name in NASTY}
    saved["texts"] = list(NASTY)
    path = save(tmp_path / "made\x1b[2J\n.pt", saved)
    done = run_cli("inspect", path, *([option] if option else []), exit=int("require" in option))
    assert "\\x1b" in done.stdout or "\\u001b" in done.stdout
    moved = run_cli("relocate", path, "--to", "cpu", "--values", "-v", exit=0)
    for printed in (done.stdout, done.stderr, moved.stdout, moved.stderr):
        assert [c for c in printed if not c.isprintable() and c != "\n"] == []
    assert "\nNEXT" not in done.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", ["", "inspect", "relocate"])
def test_help(command: str, option: str, run_cli: RunCli) -> None:
    done = run_cli(*command.split(), option, exit=0)
    assert done.stdout.startswith("Usage: ckptmove")
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["", "inspect", "relocate", "relocate --to cpu"])
def test_a_missing_argument_prints_help(command: str, run_cli: RunCli) -> None:
    done = run_cli(*command.split(), exit=2)
    assert (done.stdout + done.stderr).startswith("Usage: ckptmove")
    assert "--help" in done.stdout + done.stderr


def test_version(run_cli: RunCli) -> None:
    assert run_cli("--version", exit=0).stdout == f"ckptmove, version {ckptmove.__version__}\n"


# -- a terminal --------------------------------------------------------------------------------


def on_a_terminal(
    folder: Path,
    *arguments: object,
    width: int = 80,
    height: int = 24,
    exit: int = 0,
    **env: str,
) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    taken = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {key: os.environ[key] for key in os.environ if key not in taken}
    environment = {**kept, "PYTHONPATH": os.fspath(ROOT), "TERM": "xterm", **env}
    with subprocess.Popen(
        [sys.executable, "-m", "ckptmove", *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            printed += chunk
    os.close(ours)
    assert process.returncode == exit
    return printed.decode()


def test_a_terminal_shows_progress_and_then_the_result(run_pt: Path, tmp_path: Path) -> None:
    printed = on_a_terminal(tmp_path, "relocate", "run.pt", "--to", "cpu")
    assert "relocate:" in printed
    assert "%|" in printed
    assert printed.endswith("verified\r\n")


@pytest.mark.sample(1)
@pytest.mark.parametrize("option", ["--no-progress", "--quiet", "--dry-run"])
def test_no_progress_where_none_is_wanted(option: str, run_pt: Path, tmp_path: Path) -> None:
    printed = on_a_terminal(tmp_path, "relocate", "run.pt", "--to", "cpu", option)
    assert "%|" not in printed
    assert (printed == "") == (option == "--quiet")


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [["inspect"], ["relocate", "--to", "cpu", "--no-progress"]])
def test_no_colour_where_none_is_wanted(arguments: list[str], run_pt: Path, tmp_path: Path) -> None:
    printed = on_a_terminal(tmp_path, *arguments, "run.pt", NO_COLOR="1")
    assert "\x1b" not in printed


# -- on a terminal -----------------------------------------------------------------------------

_COLOR = "\x1b[1;31m"


@pytest.mark.slow
def test_color_for_what_is_wrong(run_pt: Path, tmp_path: Path, run_cli: RunCli) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(run_pt.read_bytes()[:-100])
    plain = run_cli("validate", cut, exit=1).stdout
    shown = on_a_terminal(tmp_path, "validate", cut, exit=1)
    assert f"{_COLOR}FAILED\x1b[0m" in shown
    assert _COLOR not in plain
    assert "FAILED" in plain  # never by color alone
    assert f"{_COLOR}ckptmove: \x1b[0m" in on_a_terminal(tmp_path, "inspect", cut, exit=3)
    assert "\x1b" not in on_a_terminal(tmp_path, "validate", run_pt)
    without: tuple[dict[str, Any], ...] = (
        {"NO_COLOR": "1"},
        {"TERM": "dumb"},
        {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    )
    for taken in without:
        assert "\x1b" not in on_a_terminal(tmp_path, "validate", cut, exit=1, **taken)
    forced = run_cli("validate", cut, exit=1, env={"FORCE_COLOR": "1"}).stdout
    assert re.sub("\x1b\\[[0-9;]*m", "", forced) == plain
    assert _COLOR in forced


@pytest.mark.slow
def test_tables_fit_the_terminal(tmp_path: Path, run_cli: RunCli) -> None:
    name = "encoder." + "very_long_name." * 8 + "weight"
    path = save(tmp_path / "made.pt", {name: torch.ones(3), "short": torch.ones(2)})
    for width, columns in ((70, "0"), (200, "70")):
        shown = on_a_terminal(tmp_path, "inspect", "--tensors", path, width=width, COLUMNS=columns)
        lines = shown.splitlines()[2:]
        assert max(map(len, lines)) <= 70
    assert any(re.search(r"encoder.*….*weight ", line) for line in lines)
    for whole in (
        run_cli("inspect", "--tensors", path, exit=0).stdout,
        on_a_terminal(tmp_path, "inspect", "--tensors", path, "-v", width=70),
    ):
        assert name in whole
