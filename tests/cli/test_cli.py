"""The command line: its exit codes, its errors, and that it is the library's twin."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ckptmove
from ckptmove.cli import COMMANDS, cli, run
from ckptmove.display.text import one_line
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import MAKERS, kept_on_cpu, save

CLI = [sys.executable, "-m", "ckptmove"]


@pytest.fixture
def run_pt(tmp_path: Path) -> Path:
    """A training checkpoint from cuda:0 in the test's folder."""
    saved = MAKERS["adamw_training"]()
    return save(tmp_path / "run.pt", saved, keep_cpu=kept_on_cpu(saved))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes more to list than a pipe holds."""
    path = tmp_path_factory.mktemp("many") / "many.pt"
    return save(path, [torch.ones(1) for _ in range(3000)])


def shell(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """What bash makes of a line in which `ckptmove` is ours."""
    function = f'ckptmove() {{ "{sys.executable}" -m ckptmove "$@"; }}; set -o pipefail; '
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", function + command],
        cwd=folder,
        env={**plain, "PYTHONPATH": os.fspath(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


# -- exit codes, and one line for every error --------------------------------------------------

FAULTS: dict[str, tuple[int, str]] = {
    "inspect -": (3, "-: standard input can't be read: ckptmove reads from any place of a file"),
    "inspect /dev/null": (3, "/dev/null: is not a regular file (save it to a file first)"),
    "relocate run.pt --place x*=cpu": (4, "run.pt: no tensor's name matches 'x*'"),
    "relocate run.pt --to cpu --map cuda:7=cpu": (4, "run.pt: nothing is on cuda:7"),
    "inspect run.pt --require cuda:1 -q": (1, "run.pt: not on cuda:1: 'model.conv.weight'"),
    "inspect run.pt --require cpu -q": (1, "run.pt: not on cpu: 'model.conv.weight'"),
    "inspect run.pt --require gpu": (2, "'gpu' is not a device"),
    "inspect run.pt other.pt": (2, "unexpected extra argument"),
    "inspect --nope run.pt": (2, "No such option"),
    "nope run.pt": (2, "No such command 'nope'"),
    "--nope": (2, "No such option"),
    "relocate run.pt": (2, "the device is missing"),
    "relocate run.pt --to": (2, "requires an argument"),
    "relocate run.pt --to gpu": (2, "'gpu' is not a device"),
    "relocate run.pt --to cpu:0": (2, "the tag cpu takes no index"),
    "relocate run.pt --map cuda:0": (2, "--map 'cuda:0' does not have the form A=B"),
    "relocate run.pt --place =cpu": (2, "--place '=cpu' does not have the form GLOB=DEVICE"),
    "relocate run.pt --device-map none.json": (2, "the device map can't be read"),
    "relocate run.pt --device-map run.pt": (2, "the device map is not JSON"),
    "inspect none.pt": (3, "none.pt: can't be read: No such file"),
    "inspect .": (3, "./cut.pt: the zip directory is missing"),
    "inspect /": (3, "is a directory without any file that usually holds weights"),
    "relocate . --to cpu": (3, "./cut.pt: the zip directory is missing"),
    "inspect empty.pt": (3, "is empty"),
    "inspect text.pt": (3, "is not a checkpoint"),
    "inspect cut.pt": (3, "cut.pt: "),
    "relocate none.pt --to cpu": (3, "none.pt: can't be read"),
    "relocate text.pt --to cpu": (3, "is not a checkpoint"),
    "relocate module.pt --to cpu --strict": (3, "names unknown callables: tests.making"),
    "relocate run.pt --to cpu -o text.pt": (4, "text.pt: the destination exists (--force"),
    "relocate run.pt --to cpu -o run.pt --force": (4, "the destination is the source itself"),
    "relocate run.pt --to cpu -o none/x.pt": (
        4,
        "none/x.pt: can't be written: its directory is not there (make it first",
    ),
    "relocate run.pt --to cpu -o run.pt/x.pt": (4, "can't be written: Not a directory"),
    "relocate run.pt --to cpu -o .": (4, "is a directory"),
    "relocate tied.pt --place a=cpu": (4, "'a' and 'b' share a storage"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("command", FAULTS)
def test_an_error_is_one_line_and_a_code(
    command: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    tied = torch.ones(1)
    save(tmp_path / "tied.pt", {"a": tied, "b": tied})
    save(tmp_path / "module.pt", MAKERS["whole_module"]())
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("precious")
    (tmp_path / "cut.pt").write_bytes(run_pt.read_bytes()[:-100])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, message = FAULTS[command]
    for more in ((), ("--json",)) if code in (3, 4) else ((),):
        done = run_cli(*command.split(), *more, exit=code)
        assert done.stdout == ""
        assert message in done.stderr
        assert re.fullmatch(r"ckptmove: [^\n]+\n", done.stderr)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


LONG = "n" * 230  # no file system takes much longer a name
TOO_LONG = (
    f"inspect {'p' * 5000}",
    f"inspect {LONG}/{LONG}/{LONG}.pt",
    f"inspect s3://{'b' * 3000}",
    f"inspect run.pt --require {'d' * 3000}",
    f"inspect --{'o' * 3000} run.pt",
    "v" * 3000,
    f"relocate run.pt --to cuda:{'9' * 3000}",
    f"relocate run.pt --map {'m' * 3000}",
    f"relocate run.pt --device-map {'f' * 3000}",
    f"relocate long.pt --to cpu -o {LONG}.pt",
    f"convert run.pt out.{'x' * 3000}",
    f"convert run.pt out.safetensors --root {'r' * 3000}",
    f"convert run.pt out.safetensors --select {'ä' * 3000}",
    f"diff run.pt {'p' * 5000}",
    f"diff run.pt long.pt --select {'ä' * 3000}",
    f"validate run.pt --against {'p' * 5000}",
    f"validate run.pt --step train --optimizer {'o' * 3000}",
    f"doctor --device {'d' * 3000}",
    f"recover {'p' * 5000}",
    f"batch convert {'p' * 5000} out",
    f"batch validate . --shard-of {'1' * 3000}",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_rejection_has_few_bytes(
    command: str,
    run_pt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tied = torch.ones(1)
    names = [f"{'weight ' * 300}\n\x1b[2J{n}" for n in range(30)]
    save(tmp_path / "long.pt", {name: tied for name in names})
    (tmp_path / f"{LONG}.pt").touch()
    monkeypatch.chdir(tmp_path)
    code = run(command.split())
    gc.enable()  # which a process that ends soon does without
    (line,) = capsys.readouterr().err.splitlines()
    assert code in (2, 3, 4)
    assert line.startswith("ckptmove: ")
    assert len(line.encode()) < 300
    assert line.isprintable()


def test_what_is_shortened_keeps_its_ends() -> None:
    path = f"/models/{'deep/' * 200}run.pt"
    line = one_line(
        path, "the destination exists", "--force replaces it; or choose another name", 289
    )
    assert line.startswith("/models/")
    assert line.endswith(
        "run.pt: the destination exists (--force replaces it; or choose another name)"
    )
    line = one_line("run.pt", "so it is. " * 100, f"ckptmove recover {path}", 289)
    assert len(line.encode()) <= 289
    assert re.match(r"run\.pt: so it is.*….*is\.  \(ckptmove recover /models/.*run\.pt\)$", line)
    assert 95 < len(one_line("", "ä" * 1000, "", 100).encode()) <= 100


def test_what_can_not_be_written_is_code_5_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "big.pt", torch.ones(100_000))
    done = shell("ulimit -f 100; ckptmove relocate big.pt --to cpu -o out.pt", tmp_path)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == "ckptmove: out.pt: writing failed: File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["big.pt"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command",
    [
        *("inspect run.pt", "inspect run.pt --json", "inspect run.pt --tree", "inspect", "-h"),
        *("inspect -h", "--version", "relocate run.pt --to cpu", "relocate run.pt --to cpu --json"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_can_not_be_printed_is_code_5(
    command: str, unbuffered: str, run_pt: Path, tmp_path: Path
) -> None:
    done = shell(f"ckptmove {command} > /dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 5
    assert done.stderr == "ckptmove: output failed: No space left on device\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_in_part_is_code_5(unbuffered: str, many: Path) -> None:
    line = "ulimit -f 10; ckptmove inspect many.pt --json > list.json"
    done = shell(line, many.parent, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 5
    assert done.stderr == "ckptmove: output failed: File too large\n"


#: Of every verb, one that prints a result; and what it ends with where that can be printed.
PRINTING = {
    "-h": 0,
    "--version": 0,
    "inspect run.pt --json": 0,
    "relocate run.pt --to cpu -o out.pt": 0,
    "convert run.pt out.safetensors": 0,
    "diff run.pt run.pt": 0,
    "validate run.pt": 0,
    "doctor --json": 1,
    "recover run.pt": 0,
    "batch validate . --include run.pt": 0,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", PRINTING)
def test_a_result_that_nobody_gets_is_code_5(command: str, run_pt: Path, tmp_path: Path) -> None:
    done = shell(f"ckptmove {command} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (5, "ckptmove: output failed: Bad file descriptor\n")
    done = shell(f"ckptmove {command} --force >&- 2>&-" if "out" in command else "exit 5", tmp_path)
    assert done.returncode == 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("closed", ["2>&-", "<&-", ">&- -q", ">&- 2>&- -q", "<&- >&- 2>&- -q"])
def test_nobody_needs_to_listen(closed: str, run_pt: Path, tmp_path: Path) -> None:
    save(tmp_path / "module.pt", MAKERS["whole_module"]())  # there is something to warn of
    for name in ("run", "module"):
        line = f"ckptmove inspect {name}.pt --tensors {closed} && "
        line += f"ckptmove relocate {name}.pt --to cpu -o {name}.out.pt {closed}"
        done = shell(line, tmp_path)
        assert done.returncode == 0
        assert ckptmove.inspect(tmp_path / f"{name}.out.pt").verdict == "uniform cpu"


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["--tensors", "--json", "--tree"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(
    option: str, unbuffered: str, many: Path
) -> None:
    line = f"ckptmove inspect many.pt {option} | head -1; exit ${{PIPESTATUS[0]}}"
    done = shell(line, many.parent, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_as_that_signal(number: signal.Signals, many: Path) -> None:
    with subprocess.Popen(
        [*CLI, "inspect", many, "--json"],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell's `&` ignores SIGINT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"{"  # it is printing now, more than a pipe takes
        process.send_signal(number)
        assert process.stderr.read().strip() == b""
    assert process.returncode == -number


#: Interrupts at a call of a Python function, counted from the first statement of the package on.
INTERRUPTED = """
import os, signal, sys

name, at = os.environ["INTERRUPTED_AT"].split()
count = -1

def traced(frame, event, arg):
    global count
    code = frame.f_code
    if count < 0:
        count += code.co_filename.endswith("ckptmove/__init__.py")
    elif name in ("any", code.co_name):
        count += 1
        if count == int(at):
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGINT)

sys.settrace(traced)
"""
#: `cb` is what the import system has called back: Python prints what is raised there, and goes on.
POINTS = [
    *(f"any {each}" for each in (1, 2, 30, 100, 1000, 3000, 6000, 10000, 20000)),
    *(f"cb {each}" for each in (1, 2, 10, 30, 60, 70, 80, 90, 100, 110, 120)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("as_script", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_during_the_start_is_quiet(
    point: str, as_script: bool, run_pt: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    script = tmp_path / "ckptmove"
    script.write_text("from ckptmove.__main__ import main\n\nmain()\n")
    done = subprocess.run(
        [*([sys.executable, script] if as_script else CLI), "inspect", run_pt],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "INTERRUPTED_AT": point,
        },
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("how", ["-c", "-m", "script", "host"])
def test_ctrl_c_stays_as_it_is_where_the_package_is_a_library(how: str, tmp_path: Path) -> None:
    code = (
        "import signal, ckptmove\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "__init__.py").write_text(code)
    (tmp_path / "user" / "__main__.py").write_text("")
    longer = "import sys; sys.argv = [sys.orig_argv[0]] * 9\n"  # than what Python was called with
    call = {
        "-c": ["-c", code],
        "-m": ["-m", "user"],
        "script": ["user/__init__.py"],
        "host": ["-c", longer + code],
    }[how]
    subprocess.run(
        [sys.executable, *call, "ckptmove", "-m", "ckptmove"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_nothing_is_imported_before_ctrl_c_is_minded() -> None:
    script = (
        "import sys; before = set(sys.modules); import ckptmove.__main__; "
        "print(*sorted(each for each in set(sys.modules) - before if each.startswith('ckptmove')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["ckptmove", "ckptmove.__main__", "ckptmove.version"]


def test_the_help_says_of_each_command_how_its_own_help_begins() -> None:
    context = click.Context(cli)
    for name, said in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert " ".join((command.help or "").split("\n\n")[0].split()) == said


#: What takes a while to import, and calls that need little of it.
HEAVY = (
    "ckptmove.batches",
    "ckptmove.live.inventory",
    "ckptmove.trial",
    "ckptmove.api.convert",
)
START = {
    "",
    ".__main__",
    ".cli",
    ".cli.display",
    ".cli.display.streams",
    ".cli.help_text",
    ".errors",
    ".system",
    ".system.signals",
    ".version",
}
SLOW = ("base64", "hashlib", "html", "ipaddress", "random", "subprocess", "torch", "numpy")


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ("--version", START),
        ("--help", START),
        ("inspect run.pt", None),
        ("relocate run.pt moved.pt --to cuda:3", None),
        ("convert run.pt made.safetensors", None),
        ("convert run.pt made.pt", None),
    ],
)
def test_a_small_call_imports_little(arguments: str, ours: set[str] | None, run_pt: Path) -> None:
    text = (
        "import sys; from ckptmove.cli import run; "
        f"sys.argv[1:] = {arguments.split()!r}; run(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=run_pt.parent, capture_output=True, text=True, check=True
    )
    imported = done.stderr.split()
    found = {name.removeprefix("ckptmove") for name in imported if name.startswith("ckptmove")}
    assert ours is None or found <= ours
    heavy = tuple(name for name in HEAVY if name != f"ckptmove.api.{arguments.split()[0]}")
    assert not [name for name in imported if name.startswith(heavy) or name in SLOW]


# -- the library's twin ------------------------------------------------------------------------


TWINS: dict[str, Callable[[Path], Any]] = {
    "--to cuda:1": lambda path: ckptmove.relocate(path, to="cuda:1"),
    "--to cuda:1 --all": lambda path: ckptmove.relocate(path, to="cuda:1", all=True),
    "--map cuda:*=mps --map cpu=cuda:3": lambda path: ckptmove.relocate(
        path, map={"cuda:*": "mps", "cpu": "cuda:3"}
    ),
    "--place model.*=cpu --place *.bias=mps": lambda path: ckptmove.relocate(
        path, place={"model.*": "cpu", "*.bias": "mps"}
    ),
    "--place *.bias=mps --place model.*=cpu --place *.bias=xpu:0": lambda path: ckptmove.relocate(
        path, place={"model.*": "cpu", "*.bias": "xpu:0"}
    ),
    "--device-map map.json --to cpu": lambda path: ckptmove.relocate(
        path, device_map={"head": 1}, to="cpu"
    ),
    "--to cpu --values --dry-run": lambda path: ckptmove.relocate(
        path, to="cpu", values=True, dry_run=True
    ),
}


@pytest.mark.parametrize("options", TWINS)
def test_the_library_does_the_same(
    options: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    (tmp_path / "map.json").write_text('{"head": 1}')
    said = json.loads(run_cli("relocate", run_pt, *options.split(), "--json", exit=0).stdout)
    out = Path(said["destination"])
    content = out.read_bytes() if said["written"] else None
    out.unlink(missing_ok=True)
    assert {**TWINS[options](run_pt).to_json(), "seconds": 0} == {**said, "seconds": 0}
    assert (out.read_bytes() if out.exists() else None) == content


WITHOUT = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "tests"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Wall())
from ckptmove.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["inspect run.pt --tree", "relocate run.pt --to cpu", "-h"])
def test_neither_torch_nor_numpy_is_needed(command: str, run_pt: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["relocate", "convert", "validate", "diff", "doctor"])
def test_many_options_stand_in_named_groups(verb: str, run_cli: RunCli) -> None:
    shown = run_cli(verb, "-h", exit=0).stdout
    assert "\nOptions:\n" not in shown
    groups = re.findall(r"^(\w[\w ]+):$", shown, re.MULTILINE)
    assert len(groups) >= 2
    assert groups[-1] == "General"
    assert "\nOptions:\n" in run_cli("recover", "-h", exit=0).stdout


@pytest.mark.slow
def test_former_names_of_options_work_and_are_not_shown(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "tree").mkdir()
    for path in (tmp_path / "run.pt", tmp_path / "tree" / "run.pt"):
        save(path, {"a": torch.ones(2), "b": torch.ones(3)})
    for name in ("--exclude-tensors", "--exclude"):
        run_cli("convert", "run.pt", f"out{name}.pt", name, "b", exit=0)
    assert ckptmove.diff(tmp_path / "out--exclude-tensors.pt", tmp_path / "out--exclude.pt").equal
    for name in ("--subset", "--part"):
        run_cli("validate", "out--exclude.pt", "--against", "run.pt", name, exit=0)
    for name in ("--copy-rest", "--copy-others"):
        run_cli("batch", "convert", "tree", f"out{name}", name, exit=0)
    for verb, former in (("convert", "--exclude "), ("validate", "--part")):
        assert former not in run_cli(verb, "-h", exit=0).stdout
    assert "--copy-others" not in run_cli("batch", "convert", "-h", exit=0).stdout


def test_former_names_of_arguments_work_and_warn(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", {"a": torch.ones(2), "b": torch.ones(3)})
    former: Any = ckptmove.convert
    with pytest.warns(DeprecationWarning, match="exclude is now called exclude_tensors"):
        report = former(tmp_path / "run.pt", tmp_path / "a.pt", exclude="b")
    assert report.left_out == ("b",)
    with pytest.raises(ckptmove.UsageError, match="both are given"):
        former(tmp_path / "run.pt", tmp_path / "b.pt", exclude="b", exclude_tensors="b")
    former = ckptmove.batch
    with pytest.warns(DeprecationWarning, match="part is now called subset"):
        work = former("validate", tmp_path, part=True, against=tmp_path)
    work.close()


def test_a_help_keeps_names_and_sentences_whole(run_cli: RunCli) -> None:
    """A name with a hyphen is not broken at it, so that it can be searched for and copied."""
    for words in ("relocate", "batch", "batch convert", "convert"):
        shown = run_cli(*words.split(), "-h", exit=0).stdout
        assert not [line for line in shown.splitlines() if re.search(r"\w-$", line)]
        assert "\N{NON-BREAKING HYPHEN}" not in shown
        assert not re.search(r"\w\.\.\.$", shown, re.MULTILINE)
