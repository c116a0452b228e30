"""A graph whose tensors are compact says and becomes what one does whose tensors are not."""

from __future__ import annotations

import random
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove import formats
from ckptmove.errors import CkptmoveError
from ckptmove.formats.writing import WriteOptions
from ckptmove.graph.plain_tensors import is_plain
from ckptmove.graph.traversal import nodes_of
from ckptmove.pickles.emit import emit
from ckptmove.pickles.opcodes.plain_tensors import PlainTensor, StorageReference, is_compact
from tests.conftest import examples
from tests.pickles.test_plain_tensors import MAKERS


def outcome(path: Path, *, expand: bool) -> object:
    """What the graph of a file says, and the pickle and the header that are made of it."""
    try:
        with formats.open_checkpoint(path) as found:
            for stream in found.whole.streams if expand else ():
                for node in (*stream.pickle.calls, *stream.pickle.persistents):
                    assert node.args if isinstance(node, PlainTensor) else True
                    assert node.pid if isinstance(node, StorageReference) else True
            draft = found.draft()
            plain = [node for node in nodes_of(draft.graph.root) if is_plain(node)]
            assert not (expand and any(map(is_compact, plain)))
            said = draft.list_contents()
            told = [emit(draft.graph.root), said.tensors, said.objects]
            target = formats.writable("safetensors")
            written = target.plan_write(draft, WriteOptions("stem")).files[""]
            return told, written.writes, written.copies, written.gathers
    except CkptmoveError as error:
        return type(error), str(error)


def assert_same(path: Path) -> None:
    assert outcome(path, expand=False) == outcome(path, expand=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("legacy", [False, True])
def test_graphs_of_torch_s_own_files(name: str, legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save(MAKERS[name](), path, _use_new_zipfile_serialization=not legacy)
    assert_same(path)
    if legacy:  # whose ids of storages have more to say
        return
    with formats.open_checkpoint(path) as found:
        nodes = [node for node in nodes_of(found.draft().graph.root) if is_plain(node)]
        assert sum(map(is_compact, nodes)) > 20, "the fast way was not taken"


def with_pickle(saved: bytes, change: random.Random) -> bytes:
    """A file of torch whose pickle has another byte, or several."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(saved)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            content = bytearray(old.read(name))
            for _ in range(change.choice([1, 1, 2, 4]) if name.endswith("data.pkl") else 0):
                at, length = change.randrange(len(content)), change.choice([1, 2, 5, 80])
                start = change.randrange(len(content))
                if change.random() < 0.6:
                    content[at] = change.choice([*range(8), *b"((hjqrKMJtQR)e.bs0a"])
                elif change.random() < 0.5:
                    content[at:at] = content[start : start + length]
                else:
                    content[at : at + length] = content[start : start + length]
            new.writestr(name, bytes(content))
    return made.getvalue()


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(MAKERS)))
@settings(
    max_examples=examples(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_graphs_of_mutated_files(tmp_path: Path, dice: random.Random, name: str) -> None:
    path, saved = tmp_path / "mutated.pt", BytesIO()
    torch.save(MAKERS[name](), saved)
    path.write_bytes(with_pickle(saved.getvalue(), dice))
    assert_same(path)
