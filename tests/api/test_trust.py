"""No pickle is written that runs what a source could only name: safetensors run nothing."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pickle
import re
import subprocess
import sys
import types
import uuid
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import RefusedError, UntrustedError, formats
from ckptmove.api.conversion.trust import unknown_callables
from ckptmove.formats.torch.zip import TorchZip
from ckptmove.formats.writing import WriteOptions, WritePlan
from ckptmove.torch_pickle.callables.allowlist import KNOWN
from ckptmove.torch_pickle.callables.reviewed_names import REVIEWED
from tests.conftest import RunCli
from tests.oracles.readers import loads_safely

SYSTEM: dict[str, Any] = {"$": "name", "of": "os:system"}
TOUCH = ["touch canary"]


def call(of: Any, args: Any = (), **more: Any) -> dict[str, Any]:
    return {"$": "call", "of": of, "args": list(args), **more}


def of(kind: str, *items: Any) -> dict[str, Any]:
    return {"$": kind, "of": list(items)}


def content(data: bytes) -> dict[str, Any]:
    return {"$": "bytes", "of": b64encode(data).decode()}


class Runs:
    """What makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.system, tuple(TOUCH)


RUN = call("os:system", TOUCH)
#: A callable in every form that terms have; and what is told of it.
FORMS: dict[str, tuple[Any, str]] = {
    "reduce": (RUN, "os.system"),
    "newobj": (call("subprocess:Popen", TOUCH, how="NEWOBJ"), "subprocess.Popen"),
    "newobj_ex": (
        call("subprocess:Popen", TOUCH, how="NEWOBJ_EX", kwargs={"shell": True}),
        "subprocess.Popen",
    ),
    "inst": (call("os:system", TOUCH, how="INST"), "os.system"),
    "obj": (call("os:system", TOUCH, how="OBJ"), "os.system"),
    "name": (SYSTEM, "os.system"),
    "dotted": ({"$": "name", "of": "os:path.join"}, "os.path.join"),
    "dotted_as_known": (
        {"$": "name", "of": "torch:nn.parameter.Parameter"},
        "torch.nn.parameter.Parameter",
    ),
    "dotted_call": (call("importlib:util.find_spec", ["os"]), "importlib.util.find_spec"),
    "getattr": (call("builtins:getattr", [{"$": "name", "of": "os:path"}, "join"]), "os.path"),
    "getattr_of_known": (
        call(call("builtins:getattr", [{"$": "name", "of": "torch:Size"}, "__new__"])),
        "torch.Size.__new__",
    ),
    "called_by_a_call": (call(call("os:getenv", ["HOME"])), "os.getenv"),
    "function_is_a_name": (call(SYSTEM, TOUCH), "os.system"),
    "in_args": (call("builtins:list", [of("tuple", RUN)]), "os.system"),
    "in_kwargs": (
        call("builtins:dict", [], how="NEWOBJ_EX", kwargs={"a": RUN}),
        "os.system",
    ),
    "shared_args": (
        call("builtins:list") | {"args": {"$": "shared", "of": of("tuple", RUN), "as": 0}},
        "os.system",
    ),
    "in_items": (call("collections:deque", items=[RUN]), "os.system"),
    "in_a_set": (of("set", RUN), "os.system"),
    "in_a_frozenset": (of("frozenset", RUN), "os.system"),
    "as_a_key": (of("dict", [RUN, 1]), "os.system"),
    "as_a_key_of_pairs": (call("collections:OrderedDict", pairs=[[RUN, 1]]), "os.system"),
    "as_a_state": (call("argparse:Namespace", state=RUN), "os.system"),
    "as_a_factory": (call("collections:defaultdict", [SYSTEM]), "os.system"),
    "module_with_its_source": (
        {"$": "persistent", "of": of("tuple", "module", SYSTEM, "f.py", "source")},
        "os.system",
    ),
    "hooks": (
        call(
            "torch._utils:_rebuild_parameter",
            [
                {"$": "tensor", "of": "weight"},
                True,
                call("collections:OrderedDict", pairs=[[1, SYSTEM]]),
            ],
        ),
        "os.system",
    ),
    "another_codec": (call("_codecs:encode", ["x", "idna"]), "_codecs.encode"),
    "loaded_from_bytes": (
        call("torch.storage:_load_from_bytes", [content(pickle.dumps(Runs()))]),
        "torch.storage._load_from_bytes",
    ),
    "loaded_from_bytes_made_first": (
        call("torch.storage:_load_from_bytes")
        | {"args": call("builtins:tuple", [[content(pickle.dumps(Runs()))]])},
        "torch.storage._load_from_bytes",
    ),
    "bare_loader": (
        {"$": "name", "of": "torch.storage:_load_from_bytes"},
        "torch.storage._load_from_bytes",
    ),
    "base_that_is_called": (
        call(
            "copyreg:_reconstructor",
            [
                {"$": "name", "of": "builtins:dict"},
                {"$": "name", "of": "torch.storage:UntypedStorage"},
                1,
            ],
        ),
        "copyreg._reconstructor",
    ),
    "more_than_made": (
        call("omegaconf.dictconfig:DictConfig", [{"a": 1}]),
        "omegaconf.dictconfig.DictConfig",
    ),
    "bytes": (content(pickle.dumps(Runs())), "posix.system"),
    "bytearray": (call("builtins:bytearray", [content(pickle.dumps(Runs()))]), "posix.system"),
}


def tree(path: Path, root: Any) -> Path:
    """A file of safetensors, in whose header a tree is told."""
    said = json.dumps({"version": 1, "root": root})
    save_file({"weight": torch.arange(3.0)}, path, {"format": "pt", "ckptmove": said})
    return path


def held(form: str) -> dict[str, Any]:
    return {"model": {"weight": {"$": "tensor", "of": "weight"}}, "more": {"x": FORMS[form][0]}}


def loaded_by_torch(path: Path) -> None:
    """Load it in a process of its own, which may make a file beside it."""
    code = "import sys, torch; torch.load(sys.argv[1], weights_only=False)"
    subprocess.run([sys.executable, "-c", code, path], cwd=path.parent, check=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_in_a_header_gives_no_pickle_that_runs_code(form: str, tmp_path: Path) -> None:
    source, out = tree(tmp_path / "in.safetensors", held(form)), tmp_path / "out.pt"
    for options in ({}, {"dry_run": True}, {"drop": "model"}, {"drop": "<metadata>"}):
        with pytest.raises(RefusedError) as raised:
            ckptmove.convert(source, out, **options)
        assert FORMS[form][1] in str(raised.value)
        assert "'more.x'" in str(raised.value)
        assert "--trust-objects" in str(raised.value.hint)
        assert len(str(raised.value)) + len(str(raised.value.hint)) < 260
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_dropped_is_left_out(form: str, tmp_path: Path) -> None:
    source, out = tree(tmp_path / "in.safetensors", held(form)), tmp_path / "out.pt"
    report = ckptmove.convert(source, out, drop="more.x")
    assert [(loss.name, FORMS[form][1] in loss.why) for loss in report.dropped] == [
        ("more.x", True)
    ]
    assert report.unknown_callables == ()
    assert ckptmove.inspect(out).unknown_callables == ()
    assert loads_safely(out)
    made = torch.load(out, weights_only=True)
    assert list(made) == ["model", "more"]
    assert made["more"] == {}
    assert made["model"]["weight"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_in_a_header_is_listed_and_strictly_refused(form: str, tmp_path: Path) -> None:
    source = tree(tmp_path / "in.safetensors", held(form))
    if form in ("bytes", "bytearray"):  # data, until somebody makes a checkpoint of them
        return
    named = "builtins.getattr" if form == "getattr_of_known" else FORMS[form][1]
    assert named in ckptmove.inspect(source).unknown_callables
    for run in (
        lambda: ckptmove.convert(source, tmp_path / "out.safetensors", strict=True),
        lambda: ckptmove.load(source, strict=True),
        lambda: ckptmove.diff(source, source, strict=True),
        lambda: ckptmove.validate(source, strict=True),
    ):
        with pytest.raises(UntrustedError, match=re.escape(named)) as raised:
            run()
        assert "a pickle made of it would run them" in str(raised.value.hint)


@pytest.mark.usefixtures("warm")
def test_what_is_trusted_is_written(tmp_path: Path) -> None:
    source, out = tree(tmp_path / "in.safetensors", held("reduce")), tmp_path / "out.pt"
    report = ckptmove.convert(source, out, trust_objects=True)
    assert report.unknown_callables == ("os.system",)
    assert ckptmove.inspect(out).unknown_callables == ("os.system",)
    assert not (tmp_path / "canary").exists()
    loaded_by_torch(out)
    assert (tmp_path / "canary").exists()


def test_what_is_not_written_does_not_count(tmp_path: Path) -> None:
    root = held("reduce")
    root["more"]["w"] = {"$": "tensor", "of": "weight"}
    source = tree(tmp_path / "in.safetensors", root)
    for n, options in enumerate(
        (
            {"root": "model"},
            {"select": "model"},
            {"exclude_tensors": "more"},
            {"preset": "hf"},
            {"preset": "deploy"},
            {"format": "safetensors"},
        )
    ):
        report = ckptmove.convert(source, tmp_path / f"{n}.pt", **options)  # type: ignore[arg-type]
        assert report.unknown_callables == ()
    with pytest.raises(RefusedError, match=r"os\.system at 'x'"):
        ckptmove.convert(source, tmp_path / "out.pt", root="more")
    with pytest.raises(RefusedError, match=r"os\.system"):
        ckptmove.convert(source, tmp_path / "out.pt", bare=True)
    with pytest.raises(RefusedError, match=r"os\.system"):
        ckptmove.convert(source, tmp_path / "out.pt", preset="lightning", root="more")


def test_all_there_is_can_not_be_dropped(tmp_path: Path) -> None:
    source = tree(tmp_path / "in.safetensors", call("os:system", [{"$": "tensor", "of": "weight"}]))
    with pytest.raises(RefusedError, match=r"harmless: os\.system$"):
        ckptmove.convert(source, tmp_path / "out.pt")
    with pytest.raises(RefusedError, match="nothing would be left"):
        ckptmove.convert(source, tmp_path / "out.pt", drop="*")


def test_an_object_in_two_places_goes_from_both_or_none(tmp_path: Path) -> None:
    weight = {"$": "tensor", "of": "weight"}
    shared, again = {"$": "shared", "of": RUN, "as": 0}, {"$": "again", "as": 0}
    root = {"weight": weight, "a": [1, shared, 2], "b": of("tuple", again, 3)}
    source, out = tree(tmp_path / "in.safetensors", root), tmp_path / "out.pt"
    with pytest.raises(RefusedError, match=r"os\.system at 'a\.1', os\.system at 'b\.0'$"):
        ckptmove.convert(source, out)
    with pytest.raises(RefusedError, match=r"harmless: os\.system at 'b\.0'$"):
        ckptmove.convert(source, out, drop="a.1")
    ckptmove.convert(source, out, drop=["a.1", "b.*"])
    made = torch.load(out, weights_only=True)
    assert (made["a"], made["b"]) == ([1, 2], (3,))


def test_attributes_are_left_out_alone(tmp_path: Path) -> None:
    weight = {"$": "tensor", "of": "weight"}
    arguments = call("argparse:Namespace", state={"lr": 1, "run": RUN, "also": [RUN]})
    source, out = (
        tree(tmp_path / "in.safetensors", {"w": weight, "args": arguments}),
        tmp_path / "out.pt",
    )
    report = ckptmove.convert(source, out, drop="args.*")
    assert [loss.name for loss in report.dropped] == ["args.run", "args.also.0"]
    made = torch.load(out, weights_only=False)
    assert vars(made["args"]) == {"lr": 1, "also": []}


def test_circles_come_to_an_end(tmp_path: Path) -> None:
    weight = {"$": "tensor", "of": "weight"}
    circle = {"$": "shared", "of": [{"$": "again", "as": 0}, RUN, {"w": weight}], "as": 0}
    source, out = tree(tmp_path / "in.safetensors", {"c": circle}), tmp_path / "out.pt"
    with pytest.raises(RefusedError, match=r"os\.system at 'c\.1'$"):
        ckptmove.convert(source, out)
    ckptmove.convert(source, out, drop="c.1")
    made = ckptmove.load(out)["c"]
    assert made[0] is made


@pytest.mark.slow
def test_many_places_take_linear_time(tmp_path: Path) -> None:
    """Objects within each other, each in the next, and many in one."""
    deep: Any = RUN
    for _ in range(200):
        deep = {"a": deep, "b": {"$": "name", "of": "os:getenv"}}
    wide = [{"$": "name", "of": "os:system"}] * 50_000
    root = {"w": {"$": "tensor", "of": "weight"}, "deep": deep, "wide": wide}
    source, out = tree(tmp_path / "in.safetensors", root), tmp_path / "out.pt"
    with pytest.raises(RefusedError, match=r"and 50,1\d\d more$"):
        ckptmove.convert(source, out)
    report = ckptmove.convert(source, out, drop=["deep.*", "wide"])
    assert len(report.dropped) == 50_201


def test_shards_and_folders_are_sources_that_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    saved = {"a": torch.ones(100), "b": torch.ones(100), "more": Runs()}
    torch.save(saved, tmp_path / "made.pt")
    ckptmove.convert(tmp_path / "made.pt", folder, max_shard_size=500)
    assert len(list(folder.glob("*.safetensors"))) == 2
    for source in (folder, next(folder.glob("*.json"))):
        for to in ("out.pt", "out/"):
            with pytest.raises(RefusedError, match=r"system at 'more'"):
                ckptmove.convert(source, f"{tmp_path}/{to}", format="torch-zip")
            assert not (tmp_path / to).exists()
    ckptmove.convert(folder, tmp_path / "out.pt", drop="more")
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == ["a", "b"]
    assert ckptmove.convert(folder, f"{tmp_path}/again/", format="safetensors").written


@pytest.mark.parametrize("beside", ["none", "a pickle", "a pickle that runs another"])
def test_files_of_a_folder_that_run_nothing(beside: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    torch.save({"w": torch.ones(1), "more": Runs()}, tmp_path / "made.pt")
    ckptmove.convert(tmp_path / "made.pt", folder / "model.safetensors")
    (folder / "trainer_state.json").write_text("{}")
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    if beside == "a pickle that runs another":
        state["own"] = argparse.ArgumentParser
    if beside != "none":
        torch.save(state, folder / "optimizer.pt")
    for to in ("out.pt", "dcp"):
        with pytest.raises(RefusedError, match=r"system at '(model\.)?more'"):
            ckptmove.convert(folder, tmp_path / to, format="dcp" if to == "dcp" else None)
        assert not (tmp_path / to).exists()
    report = ckptmove.convert(folder, tmp_path / "out.pt", drop=["*more"])
    assert any(name.endswith("more") for name, _ in report.dropped)
    assert not any("system" in name for name in report.unknown_callables)
    assert bool(report.unknown_callables) == (beside == "a pickle that runs another")
    assert ckptmove.convert(folder, tmp_path / "all.pt", trust_objects=True).unknown_callables


@pytest.mark.parametrize("form", ["dotted_call", "getattr_of_known", "loaded_from_bytes", "bytes"])
def test_what_is_named_otherwise_when_it_is_written(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    tree(folder / "model.safetensors", held(form))
    (folder / "trainer_state.json").write_text("{}")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    with pytest.raises(RefusedError, match="not known to be harmless"):
        ckptmove.convert(folder, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    assert ckptmove.convert(folder, tmp_path / "out.pt", drop=["*more*"]).unknown_callables == ()


def planned(path: Path) -> WritePlan:
    """How a checkpoint is written as torch-zip."""
    with formats.open_checkpoint(path) as found:
        return TorchZip().plan_write(found.draft(), WriteOptions("out"))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_sure_to_be_harmless_is_so_when_it_is_read(form: str, tmp_path: Path) -> None:
    plan = planned(tree(tmp_path / "in.safetensors", held(form)))
    assert unknown_callables(plan.pickle, "out.pt")
    assert not plan.is_harmless


def test_a_training_is_sure_to_be_harmless(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(saved, tmp_path / "in.pt")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "in.safetensors")
    plan = planned(tmp_path / "in.safetensors")
    assert plan.is_harmless
    assert unknown_callables(plan.pickle, "out.pt") == ()


def test_a_call_of_attributes_is_not_sure_to_be_harmless(tmp_path: Path) -> None:
    ordered = {"$": "name", "of": "collections:OrderedDict"}
    filled = call(ordered, [call(ordered, state={"keys": 1})])  # it calls `keys` of its argument
    plan = planned(tree(tmp_path / "in.safetensors", [{"$": "tensor", "of": "weight"}, filled]))
    assert unknown_callables(plan.pickle, "out.pt") == ("collections.OrderedDict",)
    assert not plan.is_harmless


def test_the_command_line(tmp_path: Path, run_cli: RunCli) -> None:
    tree(tmp_path / "in.safetensors", held("reduce"))
    done = run_cli("convert", "in.safetensors", "out.pt", exit=4)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert len(done.stderr.encode()) <= 300
    assert "os.system at 'more.x' (--trust-objects writes" in done.stderr
    done = run_cli("convert", "in.safetensors", "out.pt", "--drop", "more.x", exit=0)
    assert "dropped: more.x, which is made by os.system, which is not known to" in done.stdout
    assert done.stderr == ""
    done = run_cli("convert", "in.safetensors", "out.pt", "--force", "--trust-objects", exit=0)
    assert done.stderr == (
        "ckptmove: in.safetensors: names 1 unknown callable, which loading runs: os.system\n"
    )
    assert not (tmp_path / "canary").exists()


def test_from_a_pickle_to_a_pickle_it_is_told(tmp_path: Path, run_cli: RunCli) -> None:
    torch.save({"w": torch.ones(1), "more": Runs()}, tmp_path / "in.pt")
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "out.pt")
    assert report.unknown_callables == ("posix.system",)
    assert report.to_json()["unknown_callables"] == ["posix.system"]
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "w.pt", select="w")
    assert report.unknown_callables == ()
    report = ckptmove.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert report.unknown_callables == ()
    done = run_cli("convert", "in.pt", "again.pt", exit=0)
    assert done.stderr.count("\n") == 1
    assert "posix.system" in done.stderr
    assert run_cli("convert", "in.pt", "again.pt", "--force", "-q", exit=0).stderr == ""
    assert not (tmp_path / "canary").exists()


def test_a_batch_refuses_the_item(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "in").mkdir()
    tree(tmp_path / "in" / "bad.safetensors", held("reduce"))
    save_file({"w": torch.ones(1)}, tmp_path / "in" / "good.safetensors")
    command = ["batch", "convert", "in", "out", "--format", "torch-zip", "--jobs", "1"]
    done = run_cli(*command, exit=1)
    assert "refused bad.safetensors: would write callables" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").glob("*.pt")) == ["good.pt"]
    run_cli(*command, "--drop", "more.x", exit=0)
    assert ckptmove.inspect(tmp_path / "out" / "bad.pt").unknown_callables == ()
    (tmp_path / "out" / "bad.pt").unlink()
    done = run_cli(*command, "--trust-objects", "-v", exit=0)
    assert "names 1 unknown callable, which loading runs: os.system" in done.stdout
    assert ckptmove.inspect(tmp_path / "out" / "bad.pt").unknown_callables == ("os.system",)


# -- one's own checkpoints, there and back without a flag ------------------------------------------


def shown(self: object) -> str:
    """What an object holds, but for what holds it."""
    return f"{type(self).__name__}({[each for each in vars(self).items() if each[0] != '_parent']})"


def made_like(name: str) -> Any:
    """A class as a library that need not be there has it."""
    module, _, simple = name.rpartition(".")
    kind = type(simple, (), {"__module__": module, "__repr__": shown})
    sys.modules.setdefault(module, types.ModuleType(module))
    setattr(sys.modules[module], simple, kind)
    return kind


def like_omegaconf() -> object:
    """A config as omegaconf 2 pickles it: objects made empty that are given a state."""
    dict_config, list_config, metadata, node = (
        made_like(f"omegaconf.{name}")
        for name in (
            *("dictconfig.DictConfig", "listconfig.ListConfig"),
            *("base.ContainerMetadata", "nodes.AnyNode"),
        )
    )
    about, leaf, items, config = metadata(), node(), list_config(), dict_config()
    vars(about).update(ref_type=Any, object_type=dict, key_type=Any, element_type=Any, flags={})
    vars(about).update(resolver_cache=collections.defaultdict(dict))
    vars(leaf).update(_parent=config, _content=1e-3)
    vars(items).update(_parent=config, _content=[leaf])
    vars(config).update(_metadata=about, _parent=None, _content={"lr": leaf, "layers": items})
    return config


OWN: dict[str, Callable[[], object]] = {
    "namespace": lambda: argparse.Namespace(lr=1, path=Path("a"), sub=argparse.Namespace()),
    "omegaconf": like_omegaconf,
    "numpy": lambda: [
        np.float32(1),
        np.int64(2),
        np.bool_(True),
        np.complex128(1j),
        np.dtype("float32"),
        np.float16,
        np.array([1, 2]),
        np.str_("text"),
    ],
    "standard": lambda: [
        datetime.datetime.now(datetime.timezone.utc),
        datetime.timedelta(1),
        Path("a/b"),
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=5),
        collections.deque([1], 3),
        collections.Counter("aab"),
        collections.defaultdict(list, {1: [2]}),
        collections.UserDict(a=1),
        collections.UserList([1]),
        collections.ChainMap({}, {1: 2}),
        types.SimpleNamespace(a=1),
        array.array("i", [1, 2]),
        *(range(3), slice(1, 2), complex(1, 2), frozenset((1,)), b"bytes", bytearray(b"more")),
    ],
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_data_comes_back_without_a_flag(
    kind: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", ".dictconfig", ".listconfig", ".base", ".nodes"):
        monkeypatch.setitem(sys.modules, f"omegaconf{name}", types.ModuleType(f"omegaconf{name}"))
    saved = {"w": torch.ones(1), "own": OWN[kind]()}
    torch.save(saved, tmp_path / "in.pt", pickle_protocol=protocol)
    assert ckptmove.inspect(tmp_path / "in.pt").unknown_callables == ()
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "x.safetensors", strict=True)
    report = ckptmove.convert(tmp_path / "x.safetensors", tmp_path / "out.pt")
    assert report.unknown_callables == ()
    made = torch.load(tmp_path / "out.pt", weights_only=False)
    assert repr(made["own"]) == repr(saved["own"])


class Kind(enum.Enum):
    """A class whose code nobody has read."""

    ONE = 1


@dataclasses.dataclass
class Settings:
    """Another."""

    lr: float = 1.0


@pytest.mark.parametrize("own", [Kind.ONE, Settings()], ids=["enum", "dataclass"])
def test_classes_of_ones_own_need_a_flag(own: object, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "own": own}, tmp_path / "in.pt")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "x.safetensors")
    with pytest.raises(RefusedError, match=f"{type(own).__name__} at 'own'") as raised:
        ckptmove.convert(tmp_path / "x.safetensors", tmp_path / "out.pt")
    assert "classes of your own" in str(raised.value.hint)
    ckptmove.convert(tmp_path / "x.safetensors", tmp_path / "out.pt", trust_objects=True)
    assert torch.load(tmp_path / "out.pt", weights_only=False)["own"] == own


def test_each_reviewed_name_has_its_reason() -> None:
    for name, reason in REVIEWED.items():
        assert name in KNOWN
        assert len(reason.split()) >= 6, name
