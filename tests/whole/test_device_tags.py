"""Whatever device a checkpoint or a user names, every verb answers, or refuses in a line."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptmove
from ckptmove import CkptmoveError
from ckptmove.batches.options import VerbName
from ckptmove.cli import run
from tests.conftest import examples, some
from tests.making.checkpoints import save_tagged

#: What torch.device may be of, in any build of torch; and what some backends rename it to.
KINDS = (
    *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga"),
    *("maia", "xla", "lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone", "npu"),
)
ODD = (
    *("", ":", ":0", "cuda:", "cuda:00", "CUDA:0", "cuda:-1", "cuda:128", "cuda:0:1", "cuda:0\n"),
    *("npu:1", "foo:1", "a b", "\x1b[31mcuda", "cuda:٣", "🎉:0", "cuda:\x00", "\ud800", "cpu:7"),
    *("lazy:3", "meta:0", "hpu:", "x" * 5000, "cuda:" + "9" * 5000),
)
TAGS = (*KINDS, *(f"{kind}:127" for kind in KINDS), *ODD)
CODES = range(6)  # 70 is a bug


class Called:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.said = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.said


class Mesh:
    """Pickled as a device mesh that says no more than its kind of device."""

    def __init__(self, kind: str) -> None:
        self.device_type = kind

    def __reduce__(self) -> Any:
        return torch.distributed.device_mesh.DeviceMesh, (), vars(self)


def tree() -> dict[str, Any]:
    """A model and its optimizer after a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def with_values(path: Path, *values: object) -> None:
    torch.save({**tree(), "extra": values}, path)


def of_subclass(tag: str) -> Called:
    device = Called(torch.device, tag)
    args = (torch.Tensor, torch.float32, (2,), (1,), 0, torch.strided, device, False)
    return Called(torch._utils._rebuild_wrapper_subclass, *args)


def of_numpy(tag: str) -> Called:
    function = torch._utils._rebuild_device_tensor_from_numpy
    return Called(function, np.zeros(2, "f4"), torch.float32, tag, False)


PLACES: dict[str, Callable[[Path, str], object]] = {
    "a storage": lambda path, tag: save_tagged(tree(), path, tag),
    "a storage of old": lambda path, tag: save_tagged(
        tree(), path, tag, _use_new_zipfile_serialization=False
    ),
    "a string": lambda path, tag: with_values(path, tag),
    "a device": lambda path, tag: with_values(path, Called(torch.device, tag)),
    "a device and its index": lambda path, tag: with_values(
        path, Called(torch.device, tag.partition(":")[0], 999)
    ),
    "a subclass": lambda path, tag: with_values(path, of_subclass(tag)),
    "an array": lambda path, tag: with_values(path, of_numpy(tag)),
    "a mesh": lambda path, tag: with_values(path, Mesh(tag)),
}
IN_FILES = (
    "inspect SRC",
    "inspect SRC --json",
    "inspect SRC --tensors --tree",
    "relocate SRC -o OUT --to cuda:0 --force",
    "relocate SRC -o OUT --to cpu --all --values --force",
    "convert SRC OUT.safetensors --force",
    "diff SRC PLAIN --ignore-devices",
    "validate SRC",
    "validate SRC --against PLAIN",
)
OF_USERS = (
    "inspect SRC --require TAG",
    "relocate SRC -o OUT --to TAG --force",
    "relocate SRC -o OUT --map TAG=cpu --force",
    "relocate SRC -o OUT --map cpu=TAG --force",
    "relocate SRC -o OUT --place *=TAG --force",
    "relocate SRC --to TAG --in-place",
    "validate SRC --device TAG",
    "doctor --device TAG",
)


@pytest.fixture
def collected() -> Iterator[None]:
    """The command line turns the collector of garbage off, for its process ends soon."""
    yield
    gc.enable()


def answer(command: str, tag: str, folder: Path) -> int:
    """The exit code of a command in this process."""
    words = {"SRC": folder / "made.pt", "PLAIN": folder / "plain.pt", "OUT": folder / "out.pt"}
    args = [str(words.get(each, each)).replace("TAG", tag) for each in command.split()]
    return run([each.replace("OUT", str(folder / "out")) for each in args])


def check(commands: tuple[str, ...], tag: str, folder: Path, capsys: Any) -> None:
    for command in commands:
        code = answer(command, tag, folder)
        said = capsys.readouterr()
        assert code in CODES, (command, tag, said.err)
        assert "Traceback" not in said.err
        assert "\x1b" not in said.err + said.out
        if code > 1:
            assert said.err.count("\n") == 1, (command, tag, said.err)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("place", PLACES)
def test_any_tag_in_a_file_is_answered(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tree(), tmp_path / "plain.pt")
    for tag in some(TAGS if place == "a storage" else TAGS[1::3], 15):
        PLACES[place](tmp_path / "made.pt", tag)
        check(IN_FILES if place == "a storage" else IN_FILES[::2], tag, tmp_path, capsys)


@pytest.mark.usefixtures("collected")
def test_any_tag_of_a_user_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in some(TAGS, 25):
        save_tagged(tree(), tmp_path / "made.pt", "cuda:0")
        check(OF_USERS, tag, tmp_path, capsys)


TEXTS = st.one_of(
    st.text(max_size=12),
    st.builds("{}:{}".format, st.sampled_from(KINDS), st.integers() | st.text(max_size=3)),
    st.binary(max_size=8).map(lambda each: each.decode("utf-8", "surrogateescape")),
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tag=TEXTS)
def test_any_text_is_answered(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(tree(), tmp_path / "plain.pt")
    save_tagged(tree(), tmp_path / "made.pt", tag)
    try:
        check((*IN_FILES[:4], "validate SRC"), tag, tmp_path, capsys)
        if "\0" not in tag:  # which no argument holds
            check(("relocate SRC -o OUT --to TAG --force",), tag, tmp_path, capsys)
    finally:
        gc.enable()


def test_load_answers_with_tensors_or_one_of_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    for tag in TAGS:
        save_tagged({"a": torch.ones(2)}, path, tag)
        for where in (None, tag, {tag: "cpu"}, "cpu"):
            absurd = len(tag) > 1000  # for the location of a storage
            with contextlib.suppress(CkptmoveError):
                loaded = ckptmove.load(path, map_location=where)
                assert loaded["a"].is_meta or loaded["a"].tolist() == [1, 1]
                continue
            assert absurd or where not in ("cpu", {tag: "cpu"}), (tag, where)


@pytest.mark.slow
def test_a_batch_answers_too(tmp_path: Path) -> None:
    for n, tag in enumerate(TAGS):
        (tmp_path / "in").mkdir(exist_ok=True)
        save_tagged({"a": torch.ones(2)}, tmp_path / "in" / f"{n}.pt", tag)
    verbs: dict[VerbName, dict[str, Any]] = {
        "relocate": {"to": "hpu:0"},
        "validate": {},
        "convert": {},
    }
    for verb, options in verbs.items():
        to = [] if verb == "validate" else [tmp_path / verb]
        results = list(ckptmove.batch(verb, tmp_path / "in", *to, jobs=1, **options))
        assert len(results) == len(TAGS)
        assert not [each.reason for each in results if "a bug in" in each.reason]


#: Tags of which torch would say that the device is there, or that could not be simulated.
NOT_PLACES = ("cpu:7", "meta:0", "cuda:0:1", "xla:0", "foo:1", "\x1b", "cuda:" + "9" * 50)


@pytest.mark.parametrize("tag", NOT_PLACES)
def test_what_is_no_device_is_run_on_the_cpu(tag: str, tmp_path: Path) -> None:
    keep = {"model": tree()["model"]}
    save_tagged(keep, tmp_path / "made.pt", tag)
    found = ckptmove.validate(
        tmp_path / "made.pt",
        model="tests.whole.test_device_tags:linear",
        input="float32[2,2]",
        step="forward",
        simulate=True,
    )
    assert (found.device, found.simulated, found.ok) == ("cpu", False, True)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("tag", ["hpu", "privateuseone:0"])
def test_a_device_whose_backend_is_missing_is_not_there(tag: str, tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    save_tagged(tree(), path, tag)
    assert ckptmove.validate(path).of("reload").outcome == "passed"
    found = ckptmove.validate(path, device=tag).of("reload")
    assert (found.outcome, found.title[:14]) == ("skipped", "there is no " + tag[:2])
    with pytest.raises(ckptmove.DeviceError, match="does not find it on this machine"):
        ckptmove.validate(path, model=linear, step="forward", input="float32[2,2]", device=tag)


@pytest.mark.usefixtures("collected")
def test_numbers_of_absurd_length_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tree(), tmp_path / "made.pt")
    path, digits = str(tmp_path / "made.pt"), "9" * 5000
    rehearsed = ("validate", path, "--model", "torch.nn:Identity", "--step", "forward")
    batch = ("batch", "convert", str(tmp_path), str(tmp_path / "out"))
    for command in (
        (*rehearsed, "--input", f"float32[{digits},2]"),
        (*rehearsed, "--input", f"int64[2]<{digits}"),
        (*batch, "--shard-of", f"1/{digits}"),
        (*batch, "--jobs", digits),
        ("convert", path, str(tmp_path / "out"), "--max-shard-size", digits),
        ("inspect", path, "--require", f"cuda:{digits}"),
    ):
        assert run(list(command)) == 2, command
        assert capsys.readouterr().err.count("\n") == 1


def test_the_mesh_is_seen(tmp_path: Path) -> None:
    with_values(tmp_path / "made.pt", Mesh("hpu"))
    assert ckptmove.inspect(tmp_path / "made.pt").meshes == ("hpu",)
