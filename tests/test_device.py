"""The grammar of devices is torch's own, and what is wrong is said so that it can be mended."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove import DeviceError, UsageError, inspect, relocate
from ckptmove.manifest.device import TagMap, kind_of, parse
from ckptmove.pickles.device_tags import names_device
from tests.making.checkpoints import save
from tests.oracles.readers import labels, pid_locations

KINDS = ("cpu", "cuda", "mps", "meta", "xpu", "hpu", "mtia", "privateuseone")
TAGS = (
    *("cpu", "mps", "meta", "cuda", "cuda:0", "cuda:1", "cuda:7", "cuda:15", "cuda:127"),
    *("xpu:0", "hpu:3", "mtia:1", "privateuseone:0", "privateuseone:15", "xpu", "privateuseone"),
)


def registered(tag: str) -> bool:
    """Whether one of torch's own deserializers takes a storage with that tag for its own.

    They raise, rather than pass on, for a device that they know and this machine lacks.
    """
    storage = torch.UntypedStorage(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.serialization.default_restore_location(storage, tag)
        except RuntimeError as error:
            return "don't know how to restore data location" not in str(error)
        except (AssertionError, AttributeError, ValueError):
            return True
    return True


def parsed_by_torch(text: str) -> str | None:
    """What `torch.device` makes of it, or None."""
    with contextlib.suppress(RuntimeError):
        return str(torch.device(text))
    return None


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_we_take_is_one_of_torchs(tag: str) -> None:
    assert parse(tag) == tag
    assert registered(tag)
    assert parsed_by_torch(tag) == tag


def test_every_kind_that_torch_registers_is_taken() -> None:
    """The taggers of torch's registry, in order of priority."""
    priorities = [priority for priority, _, _ in torch.serialization._package_registry]
    assert priorities == [10, 20, 21, 22, 23, 24, 25, 26], "torch knows other devices now"
    for kind in KINDS:
        assert registered(kind), kind
        assert parse(kind) == kind


@pytest.mark.parametrize("tag", ["cpu", "meta"])
def test_torch_loads_what_can_be_tried_here(tag: str, tmp_path: Path) -> None:
    relocate(save(tmp_path / "a.pt", torch.ones(2)), tmp_path / "b.pt", to=tag)
    assert str(torch.load(tmp_path / "b.pt").device) == tag


@pytest.mark.parametrize("tag", [tag for tag in TAGS if ":" in tag or tag in ("cpu", "meta")])
def test_torch_reads_the_label_that_we_write(tag: str, tmp_path: Path) -> None:
    relocate(save(tmp_path / "a.pt", torch.ones(2), "cuda:9"), tmp_path / "b.pt", to=tag)
    assert pid_locations(tmp_path / "b.pt") == [("0", tag)]
    assert labels(tmp_path / "b.pt") == {"": tag}


@pytest.mark.parametrize("tag", ["npu:0", "npu:7", "mlu:0", "musa:1"])
def test_tags_of_renamed_backends_are_taken(tag: str, tmp_path: Path) -> None:
    """privateuseone under the name that torch_npu and its like give it."""
    relocate(save(tmp_path / "a.pt", torch.ones(2)), tmp_path / "b.pt", to=tag)
    assert inspect(tmp_path / "b.pt").verdict == f"uniform {tag}"


def test_mps_is_written_without_its_index() -> None:
    assert parse("mps:0") == "mps"
    assert registered("mps:0")


WRONG = {
    "cuda:x": "the index must be a plain number",
    "cuda:": "the index must be a plain number",
    "cuda:-1": "the index must be a plain number",
    "cuda:+1": "the index must be a plain number",
    "cuda:01": "the index must be a plain number",
    "cuda:0 ": "the index must be a plain number",
    "cuda:1.0": "the index must be a plain number",
    "cuda:0:1": "the index must be a plain number",
    "cuda:٣": "the index must be a plain number",
    "cuda:\uff10": "the index must be a plain number",
    "cuda:999": "only up to 127",
    "cuda:128": "only up to 127",
    "cpu:0": "the tag cpu takes no index",
    "cpu:1": "the tag cpu takes no index",
    "meta:0": "the tag meta takes no index",
    "mps:1": "the tag mps takes no index",
    "xla:0": "as CPU tensors",
    "maia:0": "as CPU tensors",
    "": "is not a device type of torch",
    " ": "is not a device type of torch",
    "gpu": "is not a device type of torch",
    "gpu:0": "is not a device type of torch",
    "CUDA:0": "is not a device type of torch",
    "Cpu": "is not a device type of torch",
    "cuda0": "is not a device type of torch",
    "0": "is not a device type of torch",
    ":0": "is not a device type of torch",
    "disk": "is not a device type of torch",
    "cuda:0\n": "the index must be a plain number",
    "cpu\n": "is not a device",
    " cuda:0": "is not a device type of torch",
    "\u0441uda:0": "is not a device type of torch",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_device_is_said_to_be_none(text: str) -> None:
    with pytest.raises(DeviceError, match=WRONG[text]) as raised:
        parse(text)
    assert isinstance(raised.value, (UsageError, ValueError))
    assert raised.value.exit_code == 2
    assert f"'{text}'" in str(raised.value)


@pytest.mark.parametrize("text", sorted(WRONG.keys() - {"mps:1", "maia:0"}))
def test_torch_would_not_load_what_is_refused(text: str) -> None:
    """Its loaders know no such tag, or none of its devices is spelled so."""
    assert not registered(text) or parsed_by_torch(text) != text


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gpu", "did you mean cuda:0?"),
        ("gpu:1", "did you mean cuda"),
        ("CUDA:0", "did you mean cuda:0?"),
        ("CPU", "did you mean cpu?"),
        ("rocm", "did you mean cuda:0?"),
        ("cuda:x", "did you mean cuda:0?"),
        ("cpu:0", "did you mean cpu?"),
        ("mps:1", "did you mean mps?"),
        ("xla:0", "use --to cpu"),
        ("elsewhere", "devices are written like cpu, cuda:0,"),
    ],
)
def test_the_hint_is_what_was_meant(text: str, hint: str) -> None:
    with pytest.raises(DeviceError) as raised:
        parse(text)
    assert (raised.value.hint or "").startswith(hint)


@given(st.text(alphabet="abcdumpsxeti:0129 \n-", max_size=12) | st.text(max_size=8))
def test_any_text_is_a_device_of_torchs_or_a_clear_error(text: str) -> None:
    try:
        tag = parse(text)
    except DeviceError:
        return
    assert registered(tag) or kind_of(tag) not in KINDS  # a backend that torch hasn't loaded
    assert parse(tag) == tag


@pytest.mark.parametrize(
    "call",
    [
        lambda path, text: relocate(path, to=text),
        lambda path, text: relocate(path, map={"cuda:0": text}),
        lambda path, text: relocate(path, place={"*": text}),
        lambda path, text: relocate(path, device_map={"": text}),
    ],
    ids=["to", "map", "place", "device_map"],
)
@pytest.mark.parametrize("text", ["gpu", "cpu:0", "cuda:x", ""])
def test_every_rule_minds_the_grammar(
    text: str, call: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    path = save(tmp_path / "made.pt", torch.ones(2))
    with pytest.raises(DeviceError):
        call(path, text)
    assert [each.name for each in tmp_path.iterdir()] == ["made.pt"]


@pytest.mark.parametrize(("tag", "kind"), [("cuda:1", "cuda"), ("cpu", "cpu"), ("npu:0", "npu")])
def test_the_kind_of_a_tag(tag: str, kind: str) -> None:
    assert kind_of(tag) == kind


def test_which_strings_name_devices() -> None:
    named = ["cpu", "cuda", "cuda:0", "cpu:0", "mps", "mps:0", "npu:1", "xla:0", "cuda:999"]
    assert [text for text in named if not names_device(text)] == []
    others = ["", "meta", "cuda:", "CUDA", "gpu", "cuda:01", "cuda:00000000000000000000", "step"]
    assert [text for text in others if names_device(text)] == []


# -- maps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "tag", "new"),
    [
        ([("cuda:1", "cuda:0")], "cuda:1", "cuda:0"),
        ([("cuda:1", "cuda:0")], "cuda:10", None),
        ([("cuda:1", "cuda:0")], "cuda", None),
        ([("cuda", "cpu")], "cuda:0", None),
        ([("cuda:*", "cpu")], "cuda:12", "cpu"),
        ([("cuda*", "cpu")], "cuda", "cpu"),
        ([("*", "cpu")], "anything", "cpu"),
        ([("*", "cpu"), ("cuda:1", "cuda:0")], "cuda:1", "cuda:0"),
        ([("cuda:1", "cuda:0"), ("*", "cpu")], "mps", "cpu"),
        ([("cuda:*", "cuda:0"), ("*", "cpu")], "cuda:3", "cuda:0"),
        ([("*", "cpu"), ("cuda:*", "cuda:0")], "cuda:3", "cpu"),
        ([("*:1", "cuda:0")], "xpu:1", "cuda:0"),
        ([("cuda:[01]", "cpu")], "cuda:0", None),
        ([("cuda:?", "cpu")], "cuda:0", None),
        ([("c[u]da*", "cpu")], "cuda:0", None),
        ([("CUDA*", "cpu")], "cuda:0", None),
        ([], "cpu", None),
    ],
)
def test_exact_tags_win_then_the_order(
    rules: list[tuple[str, str]], tag: str, new: str | None
) -> None:
    assert TagMap(tuple(rules)).of(tag) == new
