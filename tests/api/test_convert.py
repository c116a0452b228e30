"""convert: what each option does, and that the command line is the library's twin."""

from __future__ import annotations

import inspect as introspection
import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ckptmove
from ckptmove import ConvertReport, RefusedError, UsageError, convert, inspect
from ckptmove.api.conversion.edits import PRESETS
from ckptmove.cli.convert import convert as convert_command
from tests.cli.test_cli import WITHOUT
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import MAKERS, rezip
from tests.making.scripts import SCRIPT_MAKERS
from tests.oracles.readers import load
from tests.oracles.sameness import assert_same_tree, assert_shows_the_same


@pytest.fixture
def run_pt(tmp_path: Path) -> Path:
    """A training checkpoint in the test's folder."""
    path = tmp_path / "run.pt"
    torch.save(MAKERS["adamw_training"](), path)
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def content(folder: Path) -> dict[str, bytes]:
    """Everything that lies in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- exit codes, and one line for every error --------------------------------------------------

FAULTS: dict[str, tuple[int, str]] = {
    "run.pt --max-shard-size 1GB": (2, "the destination is missing"),
    "run.pt --format onnx": (2, "the destination is missing"),
    "run.pt out": (
        2,
        "'out' has no suffix and names no format to write (out/ is a folder",
    ),
    "run.pt out.xyz": (2, "the suffix '.xyz' names no format to write (--format"),
    "run.pt out.pt --format onnx": (2, "'onnx' is no format that can be written"),
    "run.pt out.pt --preset nope": (2, "there is no preset 'nope'"),
    "run.pt out.pt --rename module": (2, "'module' does not have the form s/OLD/NEW/"),
    "run.pt out.pt --rename s/(/x/": (2, "can't be understood"),
    "run.pt out.pt --rename s/a/\\1/": (2, "can't be understood"),
    "run.pt out.pt --dtype int8": (2, "'int8' is not a dtype to cast to"),
    "run.pt out.pt --to gpu": (2, "'gpu' is not a device"),
    "run.pt out.pt --shared maybe": (2, "'maybe' is not one of"),
    "run.pt out.pt --metadata k": (2, "--metadata 'k' does not have the form KEY=VALUE"),
    "run.pt out.pt --metadata ckptmove=1": (2, "is reserved for ckptmove"),
    "run.pt out.pt --metadata k=v": (2, "takes no --metadata"),
    "run.pt out.pt --keep-dtype *norm*": (2, "--keep-dtype needs --dtype"),
    "run.pt out.safetensors --max-shard-size 1GB": (2, "(name one, e.g. out/)"),
    "run.pt out/ --max-shard-size much": (2, "'much' is no size"),
    "run.pt out/ --max-shard-size 0": (2, "'0' is no size"),
    f"run.pt out/ --max-shard-size {'9' * 400}": (2, "is no size"),
    "none.pt out.pt": (3, "none.pt: can't be read: No such file"),
    "text.pt out.pt": (3, "is not a checkpoint"),
    "cut.pt out.pt": (3, "cut.pt: "),
    "run.pt text.pt": (4, "text.pt: the destination exists (--force"),
    "run.pt run.pt --force": (4, "the destination is the source itself"),
    "run.pt none/out.pt": (4, "can't be written: its directory is not there"),
    "run.pt out.pt --select nope": (4, "no name in it matches 'nope'"),
    "run.pt out.pt --exclude-tensors nope*": (4, "no name in it matches 'nope*'"),
    "run.pt out.pt --root nope": (4, "it has nothing under the name 'nope'"),
    "run.pt out.pt --select model --exclude-tensors model": (4, "nothing is left"),
    "run.pt out.pt --dtype nope=bf16": (4, "no name in it matches 'nope'"),
    "run.pt out.pt --dtype bf16 --keep-dtype *nrm*": (4, "no name in it matches '*nrm*'"),
    "run.pt out.pt --rename s/bias/weight/": (4, "would both get the name"),
    "script.pt out.pt": (4, "would lose <its code>, which cannot be stored in other formats"),
    "tied.pt out.safetensors --shared error": (4, "'a' and 'b' share their bytes"),
    "tied.pt out.safetensors --dtype a=bf16": (4, "'a' and 'b' share a storage"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("command", FAULTS)
def test_an_error_is_one_line_and_a_code(
    command: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    tied = torch.ones(2)
    torch.save({"a": tied, "b": tied}, tmp_path / "tied.pt")
    if "script" in command:
        SCRIPT_MAKERS["scripted"](tmp_path / "script.pt", "cpu")
    (tmp_path / "text.pt").write_text("precious")
    (tmp_path / "cut.pt").write_bytes(run_pt.read_bytes()[:-100])
    before = content(tmp_path)
    code, message = FAULTS[command]
    for more in ([], ["--dry-run", "--json"]) if code in (3, 4) else ([],):
        done = run_cli("convert", *command.split(), *more, exit=code)
        assert done.stdout == ""
        assert message in done.stderr
        assert re.fullmatch(r"ckptmove: [^\n]+\n", done.stderr)
    assert before == content(tmp_path)


# -- the library's twin ------------------------------------------------------------------------


def test_options_are_the_keywords_of_the_library() -> None:
    ours = {"--json", "-q", "--quiet", "-v", "--verbose", "--no-progress"}
    options = [each for each in convert_command.params if isinstance(each, click.Option)]
    spelled = {spelling for option in options for spelling in option.opts} - ours
    keywords = introspection.signature(convert).parameters
    named = {name for name, each in keywords.items() if each.kind is each.KEYWORD_ONLY}
    assert spelled == {f"--{name.replace('_', '-')}" for name in named - {"progress"}}


TWINS: dict[str, dict[str, Any]] = {
    "out.safetensors": {},
    "out.pt --to cuda:1": {"to": "cuda:1"},
    "out.safetensors --preset hf": {"preset": "hf"},
    "out.safetensors --select model.conv.* --select optimizer --exclude-tensors *.bias": {
        "select": ["model.conv.*", "optimizer"],
        "exclude_tensors": "*.bias",
    },
    "out.safetensors --root model --strip-prefix conv --add-prefix net.": {
        "root": "model",
        "strip_prefix": "conv",
        "add_prefix": "net.",
    },
    "out.safetensors --rename s/conv/first/ --rename s/(first).bias/\\1.shift/": {
        "rename": ["s/conv/first/", r"s/(first).bias/\1.shift/"]
    },
    "out.pt --dtype bf16 --dtype *.bias=fp16 --keep-dtype model.head.*": {
        "dtype": {"": "bf16", "*.bias": "fp16"},
        "keep_dtype": ["model.head.*"],
    },
    "out.bin --shared duplicate --format safetensors": {
        "shared": "duplicate",
        "format": "safetensors",
    },
    "out.safetensors --bare --metadata a=b=c --metadata d=": {
        "bare": True,
        "metadata": {"a": "b=c", "d": ""},
    },
    "out.safetensors --dry-run": {"dry_run": True},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", TWINS)
def test_the_library_does_the_same(
    command: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    name = command.split()[0]
    said = json.loads(run_cli("convert", "run.pt", *command.split(), "--json", exit=0).stdout)
    out = tmp_path / name
    written = out.read_bytes() if out.exists() else None
    out.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        report = convert("run.pt", name, **TWINS[command])
    assert {**report.to_json(), "seconds": 0} == {**said, "seconds": 0}
    assert (out.read_bytes() if out.exists() else None) == written
    assert said["written"] is (written is not None)
    assert said["bytes_written"] == (0 if written is None else len(written))
    assert list(said["files"].values()) == [len(written)] if written else said["files"]


def test_it_says_what_it_did(run_pt: Path, run_cli: RunCli) -> None:
    done = run_cli("convert", run_pt, "out.safetensors", "--select", "model", "-v", exit=0)
    assert re.search(r"^left out: .*optimizer", done.stdout, re.MULTILINE)
    assert re.search(r"^wrote out.safetensors as safetensors: \d+ tensors", done.stdout, re.M)
    quiet = run_cli("convert", run_pt, "quiet.safetensors", "-q", exit=0)
    assert (quiet.stdout, quiet.stderr) == ("", "")


# -- nothing is written, changed or run that should not be -------------------------------------


def test_a_dry_run_says_what_would_be_and_writes_nothing(run_pt: Path, tmp_path: Path) -> None:
    before = content(tmp_path)
    would = convert(run_pt, tmp_path / "out.safetensors", dry_run=True)
    assert content(tmp_path) == before
    did = convert(run_pt, tmp_path / "out.safetensors")
    unlike = {"written", "bytes_written", "seconds"}
    told = [{k: v for k, v in each.to_json().items() if k not in unlike} for each in (would, did)]
    assert told[0] == told[1]
    assert (would.written, did.written) == (False, True)
    assert did.files == {did.destination: (tmp_path / "out.safetensors").stat().st_size}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_the_same_bytes_each_time_and_the_source_stays(
    suffix: str, run_pt: Path, tmp_path: Path
) -> None:
    before, times = run_pt.read_bytes(), run_pt.stat()
    written = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        out = tmp_path / folder / f"out{suffix}"
        convert(run_pt, out, dtype="bf16", to="cpu")
        written.append(out.read_bytes())
    assert written[0] == written[1]
    assert run_pt.read_bytes() == before
    assert run_pt.stat().st_mtime_ns == times.st_mtime_ns


class Canary:
    """Unpickled, it leaves a file behind in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


QUIET = """
import sys, os
import ckptmove
from ckptmove.cli import run
sys.path.insert(0, os.getcwd())
before = set(sys.modules)
for source, out in (("made.pt", "a.safetensors"), ("a.safetensors", "b.pt"), ("b.pt", "c.pt")):
    ckptmove.convert(source, out, trust_objects=out == "b.pt")
assert {"posix.system", "canary.canary"} <= set(ckptmove.inspect("b.pt").globals)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"canary", "torch", "numpy", "posix", "tests"}, new
assert not {"torch", "numpy", "tests"} & set(sys.modules)
"""


def test_nothing_in_a_file_is_run_or_imported(tmp_path: Path) -> None:
    def with_canary(data: bytes) -> bytes:
        """Name a module of its own beside."""
        return data.replace(
            b"X\x06\x00\x00\x00weight",
            b"X\x06\x00\x00\x00moduleccanary\ncanary\nX\x06\x00\x00\x00weight",
            1,
        )

    plain = tmp_path / "plain.pt"
    torch.save({"bad": Canary(), "weight": torch.ones(2)}, plain)
    rezip(plain, tmp_path / "made.pt", edit_pickle=with_canary)
    (tmp_path / "canary.py").write_text("open('canary', 'w')\ncanary = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()
    with pytest.MonkeyPatch.context() as patch:  # it would have: it is still there
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        load(tmp_path / "c.pt", weights_only=False)
        assert (tmp_path / "canary").exists()


@pytest.mark.slow
def test_plain_layouts_need_neither_torch_nor_numpy(run_pt: Path, tmp_path: Path) -> None:
    for out in ("run.safetensors", "back.pt", "back.safetensors --preset hf"):
        source = "run.pt" if out.startswith("run") else "run.safetensors"
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, "convert", source, *out.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert_shows_the_same(
        load(run_pt, weights_only=False), load(tmp_path / "back.pt", weights_only=False)
    )


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="limits and reads its address space")
@pytest.mark.parametrize("strided", [False, True])
def test_where_memory_is_too_little_to_cast_nothing_stays(strided: bool, tmp_path: Path) -> None:
    numbers = torch.ones(4, 6)
    torch.save({"w": numbers.t() if strided else numbers}, source := tmp_path / "run.pt")
    script = f"""
import resource
import ckptmove
from ckptmove.system import memory
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (memory.address_space() + (80 << 20),) * 2)
try:
    ckptmove.convert({str(source)!r}, {str(tmp_path / "out.safetensors")!r}, dtype="bf16")
except ckptmove.UnsupportedError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs more memory than this process can get" in done.stdout
    assert content(tmp_path).keys() == {"run.pt"}


def test_without_torch_what_must_be_gathered_is_refused_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "run.pt"
    torch.save({"strided": torch.zeros(4, 6).t()}, source)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "convert", source, tmp_path / "out.safetensors"],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "needs torch to write strided or cast tensors" in done.stderr
    assert content(tmp_path).keys() == {"run.pt"}


# -- presets -----------------------------------------------------------------------------------


def test_presets_are_the_options_that_help_shows(run_cli: RunCli) -> None:
    shown = run_cli("convert", "-h", exit=0).stdout
    for name, options in PRESETS.items():
        block = re.search(
            rf"--preset {name} .*?(?=--preset|\n\n|ckptmove convert)", shown, re.DOTALL
        )
        assert block is not None
        said = set(re.findall(r"--[a-z][a-z-]+", block[0])) - {"--preset"}
        assert said == {f"--{key.replace('_', '-')}" for key in options}


def training() -> dict[str, Any]:
    """What DistributedDataParallel around a compiled module saves."""
    torch.manual_seed(0)
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    model = OrderedDict((f"module._orig_mod.{key}", value) for key, value in state.items())
    model._metadata = OrderedDict(  # type: ignore[attr-defined]
        (f"module._orig_mod.{key}".rstrip("."), dict(value))
        for key, value in state._metadata.items()  # type: ignore[attr-defined]
    )
    model._metadata = OrderedDict(  # type: ignore[attr-defined]
        [("", {"version": 1}), ("module", {"version": 1}), *model._metadata.items()]  # type: ignore[attr-defined]
    )
    return {"model": model, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_preset_is_exactly_its_options(preset: str, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / "run.pt"
    saved = training()
    if preset == "lightning":
        saved["state_dict"] = OrderedDict(("model." + k, v) for k, v in saved.pop("model").items())
    torch.save(saved, source)
    folders = [tmp_path / each for each in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = (folder / f"out{suffix}" for folder in folders)
    convert(source, one, preset=preset)
    convert(source, two, **PRESETS[preset])
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("preset", ["hf", "deploy"])
def test_wrappers_leave_no_trace_in_names(preset: str, tmp_path: Path) -> None:
    names = {
        "module.a": "a",
        "_orig_mod.module.b": "b",
        "module._orig_mod.c.module.d": "c.module.d",
        "model.layers.0._orig_mod.e": "model.layers.0.e",
        "f_orig_mod.g": "f_orig_mod.g",
    }
    torch.save({"model": {name: torch.ones(1) for name in names}, "epoch": 1}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.safetensors", preset=preset)
    assert load_file(tmp_path / "out.safetensors").keys() == set(names.values())


def test_deploy_is_what_a_module_loads(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "run.pt")
    out = tmp_path / "model.safetensors"
    convert(tmp_path / "run.pt", out, preset="deploy")
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module.load_state_dict(load_file(out))
    wanted = training()["model"]
    assert {raw(each) for each in module.state_dict().values()} == set(map(raw, wanted.values()))


# -- selecting ---------------------------------------------------------------------------------


def tree() -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.ones(2), "a.bias": torch.zeros(1), "b.weight": torch.ones(3)},
        "optim": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "epoch": 3,
        "args": {"model": "big", "list": [1, 2, 3]},
    }


SELECTIONS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    "a name": ({"select": "epoch"}, lambda t: {"epoch": t["epoch"]}),
    "a name and below": ({"select": "model"}, lambda t: {"model": t["model"]}),
    "a section": ({"select": "optimizer"}, lambda t: {"optim": t["optim"]}),
    "stars match dots": (
        {"select": "m*weight"},
        lambda t: {"model": {k: v for k, v in t["model"].items() if k.endswith("weight")}},
    ),
    "without": (
        {"exclude_tensors": ["optim", "args.list.1"]},
        lambda t: {
            "model": t["model"],
            "epoch": 3,
            "args": {"model": "big", "list": [1, 3]},
        },
    ),
    "with and without": (
        {"select": ["model", "epoch"], "exclude_tensors": "*.bias"},
        lambda t: {
            "model": {k: v for k, v in t["model"].items() if k != "a.bias"},
            "epoch": 3,
        },
    ),
    "a section without": (
        {"exclude_tensors": "optimizer"},
        lambda t: {k: t[k] for k in ("model", "epoch", "args")},
    ),
    "a subtree": ({"root": "optim"}, lambda t: t["optim"]),
    "a subtree within": ({"root": "optim.state.0"}, lambda t: t["optim"]["state"][0]),
    "a leaf": ({"root": "model.a.weight"}, lambda t: t["model"]["a.weight"]),
    "a subtree, selected": (
        {"root": "optim", "select": "state.0.step"},
        lambda t: {"state": {0: {"step": t["optim"]["state"][0]["step"]}}},
    ),
}


@pytest.mark.parametrize("what", SELECTIONS)
@pytest.mark.parametrize("through", ["out.pt", "out.safetensors"])
def test_a_part_is_just_that(what: str, through: str, tmp_path: Path) -> None:
    torch.save(tree(), tmp_path / "run.pt")
    options, wanted = SELECTIONS[what]
    report = convert(tmp_path / "run.pt", tmp_path / through, **options)
    convert(tmp_path / through, tmp_path / "back.pt")
    assert_shows_the_same(wanted(tree()), load(tmp_path / "back.pt", weights_only=True))
    names = {each.name for each in inspect(tmp_path / "run.pt").tensors}
    root = options.get("root", "")
    inside = [each.path for each in inspect(tmp_path / "back.pt").tensors]
    kept = {".".join([*filter(None, [root]), *map(str, path)]) for path in inside}
    for name in names:
        left = any(name == out or name.startswith(f"{out}.") for out in report.left_out)
        assert left is (name not in kept), name


def test_a_model_alone_is_selected_whole(tmp_path: Path) -> None:
    llama = {"model.embed.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
    torch.save(llama, tmp_path / "run.pt")
    for select in ("model", "model.*"):
        convert(tmp_path / "run.pt", tmp_path / "out.safetensors", select=select, force=True)
        wanted = llama.keys() if select == "model" else {"model.embed.weight"}
        assert load_file(tmp_path / "out.safetensors").keys() == wanted


def test_a_selection_without_a_tensor_is_refused_unless_it_was_named(tmp_path: Path) -> None:
    path, out = tmp_path / "run.pt", tmp_path / "out.safetensors"
    saved = {"model": "resnet", "state_dict": tree()["model"], "epoch": 3, "lost": None}
    torch.save(saved, path)
    whose = r"weights of a model are under 'state_dict' \(3 tensors\)"
    asked: list[dict[str, Any]] = [
        {"root": "model"},
        {"root": "lost"},
        {"root": "epoch"},
        {"select": "e*"},
        {"exclude_tensors": ["state_dict"]},
        {"exclude_tensors": ["model"]},
        {"select": "epoch", "exclude_tensors": "*.weight"},
    ]
    for options in asked:
        with pytest.raises(RefusedError, match="leave out all of its 3 tensors") as refused:
            convert(path, out, **options)
        assert re.search(whose, str(refused.value))
        assert not out.exists()
    assert convert(path, out, select=["epoch", "lost"]).tensors == 0
    assert convert(path, out, select="model", force=True).tensors == 3


def test_what_is_beside_a_root_is_said_to_be_left_out(tmp_path: Path) -> None:
    torch.save(tree(), tmp_path / "run.pt")
    report = convert(tmp_path / "run.pt", tmp_path / "out.pt", root="optim.state.0", select="step")
    assert set(report.left_out) == {
        *("model", "epoch", "args"),
        "optim.param_groups",
        "optim.state.0.exp_avg",
    }


# -- renaming ----------------------------------------------------------------------------------

RENAMINGS: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "strip": ({"strip_prefix": "module"}, lambda key: key.removeprefix("module.")),
    "strip with a dot": ({"strip_prefix": "module."}, lambda key: key.removeprefix("module.")),
    "strip what is not there": ({"strip_prefix": "mod"}, lambda key: key),
    "add": ({"add_prefix": "net"}, lambda key: f"net.{key}"),
    "anchored": ({"rename": r"s/^module\./x./"}, lambda key: key.replace("module.", "x.", 1)),
    "in turn": ({"rename": ["s/module/a/", "s/a/b/"]}, lambda key: key.replace("module", "b")),
    "all of them, any case": ({"rename": "s/D/_/gi"}, lambda key: key.replace("d", "_")),
    "groups": (
        {"rename": r"s/(\d+)\.(\w+)$/\2.\1/"},
        lambda k: re.sub(r"(\d+)\.(\w+)$", r"\2.\1", k),
    ),
    "then the prefix": (
        {"rename": "s/module.//", "add_prefix": "m."},
        lambda key: "m." + key.replace("module.", ""),
    ),
    "another delimiter": ({"rename": "s|module.|m/|"}, lambda key: key.replace("module.", "m/")),
}


@pytest.mark.parametrize("what", RENAMINGS)
def test_keys_are_renamed_as_python_would(what: str, tmp_path: Path) -> None:
    plain = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).state_dict()
    torch.save({"model": plain, "names": {"module.x": 1}}, tmp_path / "run.pt")
    options, renamed = RENAMINGS[what]
    report = convert(tmp_path / "run.pt", tmp_path / "out.safetensors", **options)
    wanted = {renamed(key): raw(value) for key, value in plain.items()}
    assert {k: raw(v) for k, v in load_file(tmp_path / "out.safetensors").items()} == wanted
    convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    found: Any = load(tmp_path / "back.pt", weights_only=True)
    assert list(found["model"]) == list(wanted)
    assert found["names"] == {"module.x": 1}
    assert report.renamed == sum(renamed(key) != key for key in plain)


def test_what_a_state_dict_says_of_its_modules_is_renamed_too(tmp_path: Path) -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2)))
    wanted: Any = module.state_dict()
    torch.save(nn.DataParallel(module).state_dict(), tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "out.pt", strip_prefix="module")
    found: Any = load(tmp_path / "out.pt", weights_only=True)
    assert found._metadata == wanted._metadata
    assert_same_tree(dict(wanted), dict(found))
    convert(tmp_path / "out.pt", tmp_path / "again.pt", add_prefix="module")
    again: Any = load(tmp_path / "again.pt", weights_only=True)
    original: Any = nn.DataParallel(module).state_dict()
    assert again._metadata.items() >= {k: v for k, v in original._metadata.items() if k}.items()


# -- dtypes ------------------------------------------------------------------------------------


def numbers() -> dict[str, Any]:
    """What rounds, overflows and is no number; and what is never cast."""
    values = torch.tensor([0.1, -0.0, 65504.0, 65520.0, 1e-8, 3.4e38, float("inf"), float("nan")])
    return {
        "model": {
            "w": torch.cat([values, torch.randn(1000, generator=torch.manual_seed(0))]),
            "double": values.double(),
            "half": values.half(),
            "t": torch.randn(4, 6).t(),
            "zero": torch.tensor(0.5),
            "none": torch.empty(0, 3),
            "int": torch.arange(4),
            "bool": torch.tensor([True]),
            "complex": torch.randn(3, dtype=torch.complex64),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3)}},
            "param_groups": [{"lr": torch.tensor(0.1), "params": [0]}],
        },
        "rng": torch.get_rng_state(),
    }


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
DTYPES |= {"float8_e4m3fn": torch.float8_e4m3fn, "torch.float32": torch.float32}


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("deflated", [False, True])
def test_it_rounds_as_torch_does(dtype: str, suffix: str, deflated: bool, tmp_path: Path) -> None:
    saved = numbers()
    source, out = tmp_path / "run.pt", tmp_path / f"out{suffix}"
    torch.save(saved, source)
    if deflated:
        source = rezip(source, tmp_path / "deflated.pt", compress=lambda _: True)
    report = convert(source, out, dtype=dtype)
    model = saved["model"]
    floating = {key: each for key, each in model.items() if each.is_floating_point()}
    model.update({key: each.to(DTYPES[dtype]) for key, each in floating.items()})
    if dtype == "bf16":  # torch's NaN differs by processor, and by its place in the tensor
        model["w"].view(torch.int16)[floating["w"].isnan()] = 0x7FC0
    assert sum(report.cast.values()) == sum(
        numbers()["model"][key].dtype is not DTYPES[dtype] for key in floating
    )
    convert(out, tmp_path / "back.pt")
    assert_shows_the_same(saved, load(tmp_path / "back.pt", weights_only=True))


def test_globs_choose_dtypes_and_what_keeps_its_own(tmp_path: Path) -> None:
    torch.save(numbers(), tmp_path / "run.pt")
    out = tmp_path / "out.safetensors"
    convert(
        tmp_path / "run.pt",
        out,
        dtype={"": "bf16", "model.z*": "fp16", "optimizer.*": "bf16"},
        keep_dtype=["double", "*.exp_avg"],
    )
    found = load_file(out)
    dtypes = {name: each.dtype for name, each in found.items()}
    assert dtypes["model.w"] == torch.bfloat16
    assert dtypes["model.zero"] == torch.float16
    assert dtypes["model.double"] == torch.float64
    assert dtypes["optimizer.state.0.step"] == torch.bfloat16
    assert dtypes["optimizer.state.0.exp_avg"] == torch.float32
    assert dtypes["rng"] == torch.uint8
    assert dtypes["model.int"] == torch.int64


def test_patterns_of_dtypes_speak_of_what_is_below_and_of_sections(tmp_path: Path) -> None:
    model = {"norm.weight": torch.ones(2), "fc.weight": torch.ones(2)}
    moments = {"exp_avg": torch.ones(2)}
    optim = {"state": {0: moments}, "param_groups": [{"params": [0]}]}
    torch.save({"rng": torch.get_rng_state(), "net": model, "opt": optim}, tmp_path / "run.pt")
    out = tmp_path / "out.safetensors"
    given = {"": torch.bfloat16, "optimizer": torch.float16}
    convert(tmp_path / "run.pt", out, dtype=given, keep_dtype="norm")
    assert {name: each.dtype for name, each in load_file(out).items()} == {
        "net.norm.weight": torch.float32,
        "net.fc.weight": torch.bfloat16,
        "opt.state.0.exp_avg": torch.float16,
        "rng": torch.uint8,
    }
    convert(tmp_path / "run.pt", out, dtype=torch.float16, force=True)
    assert load_file(out)["net.norm.weight"].dtype == torch.float16


# -- devices -----------------------------------------------------------------------------------


def test_it_goes_where_relocate_would_put_it(run_pt: Path, tmp_path: Path) -> None:
    report = convert(run_pt, tmp_path / "out.pt", to="cuda:1")
    relocated = ckptmove.relocate(run_pt, tmp_path / "moved.pt", to="cuda:1")
    ours, theirs = (
        {each.name: each.device for each in inspect(tmp_path / name).tensors}
        for name in ("out.pt", "moved.pt")
    )
    assert ours == theirs
    assert [tuple(each) for each in report.kept] == [tuple(each) for each in relocated.kept]
    convert(run_pt, tmp_path / "there.safetensors", to="cuda:1")
    convert(tmp_path / "there.safetensors", tmp_path / "back.pt")
    back = {each.name: each.device for each in inspect(tmp_path / "back.pt").tensors}
    assert back == theirs


def test_any_safetensors_file_is_tagged(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.arange(3)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out.pt", to="cuda:3")
    assert inspect(tmp_path / "out.pt").verdict == "uniform cuda:3"
    found: Any = load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree({key: found[key] for key in "ab"}, {"a": torch.ones(2), "b": torch.arange(3)})


# -- shared bytes ------------------------------------------------------------------------------


def tied() -> dict[str, torch.Tensor]:
    base = torch.arange(12.0)
    return {"tail": base[6:], "all": base, "again": base, "t": base.view(3, 4).t(), "own": base + 1}


def test_shared_bytes_are_written_once_and_noted(tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == {"all", "own"}
    assert report.shared == {"tail": "all", "again": "all", "t": "all"}
    assert report.duplicates == ()
    convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    assert_shows_the_same(tied(), load(tmp_path / "back.pt", weights_only=True))


def test_shared_bytes_are_written_under_each_name(tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "in.pt")
    report = convert(tmp_path / "in.pt", tmp_path / "out.safetensors", shared="duplicate")
    found = load_file(tmp_path / "out.safetensors")
    assert {name: raw(each) for name, each in found.items()} == {
        name: raw(each) for name, each in tied().items()
    }
    assert set(report.duplicates) == {"tail", "again", "t"}
    convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    assert_shows_the_same(tied(), load(tmp_path / "back.pt", weights_only=True))


def test_shared_bytes_are_refused(tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "in.pt")
    with pytest.raises(RefusedError, match="share their bytes"):
        convert(tmp_path / "in.pt", tmp_path / "out.safetensors", shared="error")
    convert(tmp_path / "in.pt", tmp_path / "out.safetensors", shared="error", select="own")
    other: Any = "maybe"
    with pytest.raises(UsageError, match="shared is one of"):
        convert(tmp_path / "in.pt", tmp_path / "out.safetensors", shared=other)


# -- the header --------------------------------------------------------------------------------


def test_metadata_are_in_the_header(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "in.pt")
    out = tmp_path / "out.safetensors"
    convert(tmp_path / "in.pt", out, metadata={"author": "é", "format": "np"}, bare=True)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"author": "é", "format": "np"}
    with pytest.raises(UsageError, match="metadata must be strings"):
        convert(tmp_path / "in.pt", out, metadata={"n": 1}, force=True)  # type: ignore[dict-item]


def test_the_preset_of_hugging_face_writes_what_safetensors_does(tmp_path: Path) -> None:
    state = nn.TransformerEncoderLayer(8, 2, 16).state_dict()
    torch.save({"model": state, "epoch": 3}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "ours.safetensors", preset="hf")
    save_file(dict(state), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = (tmp_path / f"{each}.safetensors" for each in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_reports_are_plain_data(run_pt: Path, tmp_path: Path) -> None:
    report = convert(run_pt, tmp_path / "out.safetensors")
    assert isinstance(report, ConvertReport)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert report.tensors == len(load_file(tmp_path / "out.safetensors"))
