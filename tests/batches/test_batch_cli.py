"""`ckptmove batch`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.test_printing import on_a_terminal
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import save
from tests.making.trees import CLI, contents, many, model_folder, small_tree, stamps


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Mixed checkpoints, two of them damaged."""
    return small_tree(tmp_path / "tree")


def test_the_summary_names_what_failed_and_the_command_to_retry(
    tree: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    done = run_cli("batch", "convert", "tree", "out", "--format", "safetensors", exit=1)
    refused, failed, summary, again = done.stdout.splitlines()
    assert refused == "refused empty.pt: is empty"
    assert failed.startswith("failed  a/cut.pt: the zip directory is missing")
    assert "(ckptmove salvage tree/a/cut.pt DST keeps what is left)" in failed
    moved = run_cli("batch", "relocate", "tree", "new", "--to", "cpu", "--include=/a/*", exit=1)
    assert "(ckptmove salvage tree/a/cut.pt DST keeps what is left)" in moved.stdout
    assert summary.startswith("converted 5 items, ")
    assert summary.endswith("; 1 refused; 1 failed; 1 other file left out")
    assert done.stderr == "ckptmove: tree: 2 of 7 items failed or were refused\n"
    (tree / "a" / "cut.pt").write_bytes((tree / "a" / "last.ckpt").read_bytes())
    (tree / "empty.pt").write_bytes((tree / "a" / "run.pt").read_bytes())
    before = stamps(tmp_path / "out")
    these, command = again.split(": ckptmove ")
    assert these == "retry"
    words = shlex.split(command)
    assert words[2:4] == ["--include=/a/cut.pt", "--include=/empty.pt"]
    done = run_cli(*words, exit=0)
    assert done.stdout.startswith("converted 2 items, ")
    assert before.items() <= stamps(tmp_path / "out").items()
    done = run_cli("batch", "convert", "tree", "out", exit=0)
    assert "converted 0 items, 0 B in " in done.stdout
    assert "; 7 done before; 1 other file left out" in done.stdout


def test_weights_that_are_left_out_are_named(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    shutil.rmtree(tree / "a")
    (tree / "empty.pt").unlink()
    whole = pickle.dumps({"w": torch.ones(9)}, protocol=4)
    (tree / "cut.pkl").write_bytes(whole[:-20])
    (tree / "other.pkl").write_bytes(pickle.dumps([1, 2, 3]))
    (tree / "w.gguf").write_bytes(b"GGUF\3\0\0\0")
    for _ in range(2):  # the ledger remembers what they are
        done = run_cli("batch", "convert", "tree", "out", "--copy-rest", exit=1)
        assert "failed  cut.pkl: the pickle is truncated" in done.stdout
        assert "ckptmove: tree: left out, since each is a GGUF file: w.gguf\n" in done.stderr
        assert "other.pkl" not in done.stdout + done.stderr


def test_quiet_names_what_failed(tree: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "convert", "tree", "out", "-q", exit=1)
    assert done.stdout == ""
    *failures, last = done.stderr.splitlines()
    refused, failed = sorted(failures, reverse=True)
    assert refused == "ckptmove: refused empty.pt: is empty"
    assert failed.startswith("ckptmove: failed  a/cut.pt: the zip directory is missing")
    assert last == "ckptmove: tree: 2 of 7 items failed or were refused"


def test_the_plan(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "relocate", "tree", "out", "--to", "cpu", "--dry-run", exit=1)
    *rows, summary = done.stdout.splitlines()
    assert len(rows) == 7
    assert [row.split()[0] for row in rows[5:]] == ["refused", "failed"]
    assert rows[0].split()[0] == "a/last.ckpt"
    assert rows[0].endswith("→ out/a/last.ckpt")
    assert "would relocate 4 items" in summary
    assert "; would copy 1 unchanged; " in summary  # the folder of a model in safetensors
    assert "; 1 would be refused; 1 would fail; " in summary
    assert "1 other file left out; " in summary
    assert not (tmp_path / "out").exists()
    said = json.loads(run_cli("batch", "validate", "tree", "--dry-run", "--json", exit=1).stdout)
    assert {each["name"]: each["kind"] for each in said["items"]}["model"] == "folder"
    assert said["destination"] is None


def test_log_and_json(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "convert", "tree", "out", "--log", "log", "--json", exit=1)
    said = json.loads(done.stdout)
    assert said["outcomes"] == {"done": 5, "skipped": 0, "left-out": 0, "refused": 1, "failed": 1}
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == 7
    [run] = [line for line in lines if line["name"] == "a/run.pt"]
    assert (run["outcome"], run["destination"]) == ("done", "out/a/run.safetensors")
    assert run["report"]["format"] == "safetensors"
    reasons = [line["reason"] for line in lines if line["outcome"] == "failed"]
    assert reasons == [each["reason"] for each in said["failures"] if each["outcome"] == "failed"]
    run_cli("batch", "convert", "tree", "out", "--log", "log", "-q", exit=1)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["outcome"] for line in lines[7:]].count("skipped") == 5
    done = run_cli("batch", "convert", "tree", "out", "--log", "none/log", exit=5)
    assert (
        done.stderr == "ckptmove: none/log: the log can't be written: No such file or directory\n"
    )


def test_a_log_that_fails_costs_neither_the_batch_nor_its_summary(
    tree: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    done = run_cli("batch", "convert", "tree", "out", "--log", "/dev/full", exit=5)
    assert "converted 5 items, " in done.stdout
    assert done.stderr == "ckptmove: /dev/full: the log can't be written: No space left on device\n"
    done = run_cli("batch", "convert", "tree", "out", exit=1)
    assert "; 5 done before; " in done.stdout


def pasted(stdout: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command that was printed last, as a user's shell does."""
    command = stdout.splitlines()[-1].partition(": ")[2]
    assert command.startswith("ckptmove batch ")
    python = shlex.join([sys.executable, "-m", "ckptmove"])
    script = f'ckptmove() {{ {python} "$1" "$2" --json "${{@:3}}"; }}\n{command}'
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    return subprocess.run(["bash", "-c", script], capture_output=True, cwd=folder, env=env)


ODD = (
    *("x.pt", "*.pt", "[x].pt", "it's $HOME.pt", "two\nlines.pt", "-j.pt", "süß.pt", "back\\n.pt"),
    os.fsdecode(b"\xff\xc3a1.pt"),
)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["validate", "convert"])
def test_the_command_to_retry_does_these_and_no_others(
    verb: str, tmp_path: Path, run_cli: RunCli
) -> None:
    last = b"" if verb == "validate" else b"\xfe"  # which torch can't load
    tree = tmp_path / os.fsdecode(b"a 'tree'" + last)
    (tree / "deep" / "x").mkdir(parents=True)
    names = [*ODD[:8]] if verb == "convert" else [*ODD]
    for name in names:
        (tree / name).write_bytes(b"")
        if name.isprintable():
            save(tree / "deep" / name, torch.ones(2))
            save(tree / "deep" / "x" / name, torch.ones(2))
    where = [tree, "out"] if verb == "convert" else [tree]
    options = ("--include", "*.pt", "--include=x", "--exclude", "deep/x", "-j1")
    done = run_cli("batch", verb, *options, "--", *where, exit=1)
    again = pasted(done.stdout, tmp_path)
    said = json.loads(again.stdout)
    assert (again.returncode, sum(said["outcomes"].values())) == (1, len(names))
    assert [each["name"] for each in said["failures"]] == sorted(names)


@pytest.mark.slow
def test_where_many_failed_the_same_command_does_the_rest(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 2, 100)
    for n in range(12):
        (tree / f"{n}.pt").touch()
    done = run_cli("batch", "convert", "tree", "out", "-j1", exit=1)
    assert done.stdout.endswith("retry: ckptmove batch convert tree out -j1\n")
    said = json.loads(pasted(done.stdout, tmp_path).stdout)
    assert said["outcomes"] == {"done": 0, "skipped": 2, "left-out": 0, "refused": 12, "failed": 0}


@pytest.mark.slow
def test_a_log_says_what_to_retry(tmp_path: Path, run_cli: RunCli) -> None:
    tree = many(tmp_path / "tree", 2, 100)
    for name in ODD:
        (tree / name).touch()
    done = run_cli("batch", "validate", "tree", "-j1", "--log", "log", exit=1)
    last = done.stdout.splitlines()[-1]
    assert last == "retry: ckptmove batch validate --retry=log tree -j1 --log log"
    (tree / "x.pt").write_bytes((tree / "run-0" / "step-000.pt").read_bytes())
    again = pasted(done.stdout, tmp_path)
    outcomes = json.loads(again.stdout)["outcomes"]
    assert (outcomes["done"], outcomes["failed"]) == (1, len(ODD) - 1)
    again = pasted(done.stdout, tmp_path)  # the last line of each counts
    assert json.loads(again.stdout)["outcomes"]["done"] == 0
    with (tmp_path / "log").open("a") as file:
        file.write('{"name": "x.pt", "outc')  # torn
    again = pasted(done.stdout, tmp_path)
    assert json.loads(again.stdout)["outcomes"]["failed"] == len(ODD) - 1
    for text, why in (("{}\n", "is not a log of ckptmove batch"), ("", None)):
        (tmp_path / "other").write_text(text)
        done = run_cli(
            *("batch", "validate", "tree", "--retry", "other", "-j1"), exit=3 if why else 0
        )
        assert why is None or done.stderr == f"ckptmove: other: {why}\n"
    done = run_cli("batch", "validate", "tree", "--retry", "none", exit=3)
    assert done.stderr == "ckptmove: none: the log can't be read: No such file or directory\n"


def test_verbose_tells_each_item(tree: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "relocate", "tree", "--in-place", "--to", "cpu", "-v", exit=1)
    told = done.stdout.splitlines()
    assert len(told) == 9
    assert sum(line.startswith("done    ") for line in told) == 5
    assert "done    a/run.pt" in told


@pytest.mark.slow
def test_other_trees_than_these(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    run_cli("batch", "convert", "tree/a", "out", "--exclude", "cut.pt", "-q", exit=0)
    done = run_cli("batch", "validate", "out", "--against", "tree/a", "-j1", exit=1)
    told = "nothing here goes by this name, to be compared with tree/a/cut.pt"
    assert f"failed  cut.pt: {told}" in done.stdout
    ahead = run_cli("batch", "validate", "out", "--against", "tree/a", "--dry-run", exit=1)
    assert f"failed  cut.pt: {told}" in ahead.stdout
    (tree / "a" / "cut.pt").unlink()
    done = run_cli("batch", "validate", "out", "--against", "tree/a", "-j1", exit=0)
    assert done.stdout.startswith("validated 4 items, ")
    (tmp_path / "one").mkdir()
    shutil.copy(tree / "a" / "run.pt", tmp_path / "one")
    run_cli(
        *("batch", "convert", "one", "parts", "--exclude-tensors"),
        *("optimizer", "--select", "model", "-q"),
        exit=0,
    )
    done = run_cli("batch", "validate", "parts", "--against", "one", "-j1", exit=1)
    assert "failed  run.safetensors: against: differs from one/run.pt" in done.stdout
    again = "ckptmove batch validate --include=/run.safetensors parts --against one -j1"
    assert f"retry: {again}\n" in done.stdout
    assert run_cli(
        "batch", "validate", "parts", "--against", "one", "--subset", "-j1", exit=0
    ).stdout.startswith("validated 1 item, ")


FAULTS = {
    "batch convert tree": (2, "the destination is missing"),
    "batch relocate tree out": (2, "the device is missing"),
    "batch relocate tree out --to cpu --in-place": (
        2,
        "give either a destination or --in-place",
    ),
    "batch relocate tree out --to cpu --map x": (2, "--map 'x' does not have the form A=B"),
    "batch convert tree out --jobs 0": (2, "jobs must be at least 1"),
    "batch convert tree out --shard-of 0/2": (2, "'0/2' does not have the form I/N"),
    "batch convert tree out --format gguf": (2, "'gguf' is no format that can be written"),
    "batch nope": (2, "No such command 'nope'"),
    "batch validate tree --copy-rest": (2, "No such option"),
    "batch convert none out": (3, "none: there is no such directory"),
    "batch convert tree tree": (4, "the destination is the source itself"),
    "batch convert tree out --format-in gguf": (2, "'gguf' is no format that can be read"),
    "batch convert tree out --newer soon": (2, "'soon' is neither a date nor an age"),
    "batch relocate tree out --to cpu --keep-suffix": (2, "No such option"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", FAULTS)
def test_an_error_is_one_line_and_a_code(
    command: str, tree: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    before = contents(tmp_path)
    code, message = FAULTS[command]
    done = run_cli(*command.split(), exit=code)
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert contents(tmp_path) == before


def test_without_arguments_it_helps(run_cli: RunCli) -> None:
    assert "Usage: ckptmove batch convert" in run_cli("batch", "convert", exit=2).stdout
    assert "out/ --against runs/" in run_cli("batch", "-h", exit=0).stdout


def test_a_terminal_shows_one_bar_and_what_is_being_done(tmp_path: Path) -> None:
    many(tmp_path / "tree", 6, 100_000)
    printed = on_a_terminal(tmp_path, *CLI[3:], "relocate", "tree", "out", "--to", "cpu")
    assert "%|" in printed
    assert re.search(r"run-\d/step-00\d", printed)
    assert "relocated 6 items, " in printed
    assert re.search(r"\d done, \d left", printed)
    words = (*CLI[3:], "relocate", "tree", "again", "--to", "cpu")
    printed = on_a_terminal(tmp_path, *words, width=0, height=0)
    assert "%|" in printed, "a terminal may not say how large it is"
    for option in ("-q", "--no-progress", "--json"):
        printed = on_a_terminal(
            tmp_path, *CLI[3:], "relocate", "tree", f"out{option}", "--to", "cpu", option
        )
        assert ("%|" in printed) == (option == "--json")


def test_a_folder_that_is_a_model_is_one_item(tmp_path: Path, run_cli: RunCli) -> None:
    model_folder(tmp_path / "tree" / "model")
    done = run_cli("batch", "validate", "tree", "-v", "-j1", exit=0)
    assert done.stdout.startswith("done    model\n")
