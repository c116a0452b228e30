"""Pickles that a zip keeps as base64 in JSON: stable-baselines3 unpickles what is in its agents."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import RefusedError, UntrustedError, inspect
from tests.conftest import RunCli


class Runs:
    """Unpickling it calls a function."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return eval, ("1",)


def spelled(content: bytes) -> str:
    return json.dumps(
        {"policy": {":type:": "x", ":serialized:": base64.b64encode(content).decode()}}
    )


def escaped(content: bytes) -> str:
    """The same text, each character of key and value as an escape of JSON."""
    key, value = (
        "".join(f"\\u{ord(c):04x}" for c in text)
        for text in (":serialized:", base64.b64encode(content).decode())
    )
    return f'{{"policy": {{"{key}": "{value}"}}}}'


def spaced(content: bytes) -> str:
    """With characters that base64 passes over."""
    text = base64.b64encode(content).decode()
    return json.dumps(
        {"policy": {":serialized:": "\n".join(text[n : n + 3] for n in range(0, len(text), 3))}}
    )


def deep(content: bytes) -> str:
    return json.dumps({"a": [[{"b": json.loads(spelled(content))}]], "c": 1}, indent=4)


def bare(content: bytes) -> str:
    """Under a key that stable-baselines3 does not know."""
    return json.dumps([base64.b64encode(content).decode()])


def agent(path: Path, text: str, method: int = zipfile.ZIP_STORED) -> Path:
    policy = io.BytesIO()
    torch.save({"w": torch.ones(2)}, policy)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("data", text)
        archive.writestr("policy.pth", policy.getvalue())
    return path


def unpickled(text: str) -> list[object]:
    """What `json_to_data` of stable-baselines3 unpickles."""
    found, todo = [], [json.loads(text)]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            if ":serialized:" in each:
                found.append(pickle.loads(base64.b64decode(each[":serialized:"].encode())))
            todo.extend(each.values())
        elif isinstance(each, list):
            todo.extend(each)
    return found


@pytest.mark.sample(20)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("spell", [spelled, escaped, spaced, deep, bare])
def test_their_callables_are_listed_and_refused(
    spell: Callable[[bytes], str], protocol: int, method: int, tmp_path: Path
) -> None:
    if spell is bare and protocol < 2:
        pytest.skip("text that nothing tells from any other")
    text = spell(pickle.dumps(Runs(), protocol))
    assert spell is bare or unpickled(text) == [1]
    path = agent(tmp_path / "agent.zip", text, method)
    assert any(each.endswith(".eval") for each in inspect(path).unknown_callables)
    with pytest.raises(UntrustedError, match="eval"):
        ckptmove.relocate(path, tmp_path / "out.zip", to="cuda:0", strict=True)
    with pytest.raises(UntrustedError, match="eval"):
        ckptmove.convert(path, tmp_path / "out.pt", strict=True)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_they_count_after_white_space_of_any_length(method: int, tmp_path: Path) -> None:
    text = " \t\n\r" * 2000 + spelled(pickle.dumps(Runs()))
    assert unpickled(text) == [1]
    path = agent(tmp_path / "agent.zip", text, method)
    assert inspect(path).unknown_callables == ("builtins.eval",)


@pytest.mark.sample(3)
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("spell", [spelled, escaped, spaced, deep, bare])
def test_safetensors_become_no_bundle_that_runs_them(
    spell: Callable[[bytes], str], protocol: int, tmp_path: Path, run_cli: RunCli
) -> None:
    if spell is bare and protocol < 2:
        pytest.skip("text that nothing tells from any other")
    text = " " * 600 + spell(pickle.dumps(Runs(), protocol))
    source, out = agent(tmp_path / "agent.zip", text), tmp_path / "out.zip"
    there = tmp_path / "there.safetensors"
    ckptmove.convert(source, there)
    done = run_cli("convert", there, out, "--format", "zip-bundle", exit=4)
    assert ".eval at 'data'" in done.stderr
    assert "--trust-objects" in done.stderr
    with pytest.raises(RefusedError, match=r"\.eval at 'data'"):
        ckptmove.save(ckptmove.load(there), out)
    assert not out.exists()
    report = ckptmove.convert(there, out, drop="data")
    assert [loss.name for loss in report.dropped] == ["data"]
    assert inspect(out).unknown_callables == ()
    for path, trust in ((there, True), (source, False)):
        report = ckptmove.convert(path, out, trust_objects=trust, force=True)
        assert [name.rpartition(".")[2] for name in report.unknown_callables] == ["eval"]
        assert inspect(out).unknown_callables == report.unknown_callables
    ckptmove.save(ckptmove.load(there), out, trust_objects=True, force=True)


def test_a_bundle_with_plain_data_as_text_needs_no_leave(tmp_path: Path) -> None:
    path = agent(tmp_path / "agent.zip", spelled(pickle.dumps({"a": [1, 2.5, torch.Size([1])]})))
    ckptmove.convert(path, tmp_path / "there.safetensors")
    ckptmove.convert(tmp_path / "there.safetensors", tmp_path / "back.zip")
    assert ckptmove.diff(path, tmp_path / "back.zip").equal


def test_nested_bytes_count_too(tmp_path: Path) -> None:
    inner = pickle.dumps({"kept": pickle.dumps({"w": torch.ones(1), "x": Runs()})})
    path = agent(tmp_path / "agent.zip", spelled(inner))
    assert "builtins.eval" in inspect(path).unknown_callables


@pytest.mark.parametrize(
    "content", [b"", b"\x80", pickle.dumps(Runs())[:-1], b"cos\nsystem\n(S'x'\ntR"]
)
def test_what_breaks_off_counts_as_far_as_it_goes(content: bytes, tmp_path: Path) -> None:
    path = agent(tmp_path / "agent.zip", spelled(content))
    assert bool(inspect(path).unknown_callables) == (len(content) > 1)


@pytest.mark.parametrize("value", [{"a": [1, 2]}, [1.5, None, "x"], torch.Size([1])])
def test_plain_data_is_harmless(value: Any, tmp_path: Path, run_cli: RunCli) -> None:
    path = agent(tmp_path / "agent.zip", spelled(pickle.dumps(value)))
    manifest = inspect(path)
    assert not manifest.unknown_callables
    assert any("'data' keeps 1 pickle as base64 text" in each for each in manifest.warnings)
    ckptmove.relocate(path, tmp_path / "out.zip", to="cuda:0", strict=True)
    done = run_cli("inspect", str(path), exit=0)
    assert "as base64 text" in done.stderr


def test_other_text_counts_for_nothing(tmp_path: Path) -> None:
    for text in ("", "{", '{"a": "gAV"}', "not a checkpoint", '["' + "\\" * 99, "[" * 100_000):
        assert not inspect(agent(tmp_path / "agent.zip", text)).unknown_callables


def test_what_is_too_large_to_be_looked_into_is_not_trusted(tmp_path: Path) -> None:
    text = spelled(pickle.dumps(Runs())) + " " * (9 << 20)
    path = agent(tmp_path / "agent.zip", text, zipfile.ZIP_DEFLATED)
    with pytest.raises(UntrustedError, match="in the record 'data'"):
        ckptmove.relocate(path, tmp_path / "out.zip", to="cuda:0", strict=True)


def test_a_real_agent(tmp_path: Path) -> None:
    library = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    agent = library.PPO(
        "MlpPolicy", "CartPole-v1", n_steps=8, learning_rate=lambda left: 1e-3 * left
    )
    agent.save(tmp_path / "agent.zip")
    found = inspect(tmp_path / "agent.zip").unknown_callables
    assert "stable_baselines3.common.policies.ActorCriticPolicy" in found
    assert "cloudpickle.cloudpickle._make_function" in found
