"""Links in the folder of a model: those that lead out of it are followed for whoever insists."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import CkptmoveError, UnsupportedError, convert
from ckptmove.sources import place_of
from tests.conftest import RunCli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights, and a folder in it."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"a": torch.arange(3.0)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def _elsewhere(model: Path, name: str, tmp_path: Path) -> None:
    """Have a file of a model be a link to what is not in its folder."""
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    (model / name).rename(tmp_path / "elsewhere" / name)
    (model / name).symlink_to(tmp_path / "elsewhere" / name)


def test_weights_that_lead_out_are_refused_by_every_verb(
    model: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    _elsewhere(model, "model.safetensors", tmp_path)
    out = tmp_path / "out.pt"
    verbs: list[Callable[[bool], object]] = [
        lambda follow: ckptmove.inspect(model, follow_links=follow),
        lambda follow: ckptmove.load(model, follow_links=follow),
        lambda follow: ckptmove.diff(model, model, follow_links=follow),
        lambda follow: ckptmove.convert(model, out, force=True, follow_links=follow),
        lambda follow: ckptmove.validate(model, follow_links=follow).raise_if_failed(),
    ]
    for verb in verbs:
        with pytest.raises(CkptmoveError, match="leads outside its folder"):
            verb(False)
        verb(True)
    for verb_, others, code in (
        ("inspect", [], 3),
        ("convert", [out, "--force"], 3),
        ("diff", [model], 3),
        ("validate", [], 1),
    ):
        done = run_cli(verb_, model, *others, exit=code)
        assert "leads outside its folder" in done.stderr + done.stdout
        run_cli(verb_, model, *others, "--follow-links", exit=0)


@pytest.mark.parametrize("where", ["secret", "sub/secret"])
def test_what_lies_beside_and_leads_out_is_refused(where: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of its reader")
    (model / where).symlink_to(tmp_path / "secret")
    with pytest.raises(UnsupportedError, match="leads outside its folder") as raised:
        convert(model, tmp_path / "out")
    assert raised.value.path == str(model / where)
    assert not (tmp_path / "out").exists()
    convert(model, tmp_path / "out", follow_links=True)
    assert (tmp_path / "out" / where).read_text() == "of its reader"


def test_a_batch_refuses_links_that_lead_out(model: Path, tmp_path: Path) -> None:
    _elsewhere(model, "model.safetensors", tmp_path)
    (tmp_path / "runs").mkdir()
    model.rename(tmp_path / "runs" / "model")
    for follow, outcome in ((False, "refused"), (True, "done")):
        with ThreadPoolExecutor(1) as executor:
            (result,) = ckptmove.batch(
                "convert",
                tmp_path / "runs",
                tmp_path / "out",
                executor=executor,
                follow_links=follow,
            )
        assert str(result.outcome) == outcome, result


@pytest.mark.parametrize(
    ("target", "follows"),
    [
        ("../../blobs/1", True),
        ("../../blobs/../../secret", False),
        ("../../blobs/link", False),
        ("../../blobs/deep/1", False),
        ("../../../secret", False),
        ("../other/config.json", False),
    ],
)
def test_only_blobs_of_the_cache_may_be_led_to(
    target: str, follows: bool, model: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs" / "deep").mkdir(parents=True)
    (repository / "snapshots" / "other").mkdir(parents=True)
    model.rename(snapshot)
    (tmp_path / "secret").write_text("x")
    for path in ("blobs/1", "blobs/deep/1", "snapshots/other/config.json"):
        (repository / path).write_text("x")
    (repository / "blobs" / "link").symlink_to(tmp_path / "secret")
    (snapshot / "more").symlink_to(target)
    (snapshot / "sub" / "more").symlink_to(f"../{target}")
    if follows:
        convert(snapshot, tmp_path / "out")
        assert (tmp_path / "out" / "sub" / "more").read_text() == "x"
    else:
        with pytest.raises(UnsupportedError, match="leads outside its folder"):
            convert(snapshot, tmp_path / "out")


def test_what_was_opened_is_what_was_checked(model: Path, tmp_path: Path) -> None:
    """A link that is turned round between the two leads nowhere."""
    (tmp_path / "secret").write_text("x")
    (model / "file").symlink_to(tmp_path / "secret")
    with place_of(model / "file").open() as source:
        (model / "file").unlink()
        (model / "file").write_text("x")
        with pytest.raises(UnsupportedError, match="leads outside its folder"):
            place_of(model / "file").check_link(place_of(model), source)
