"""inspect of what lies in stores: directories, headers and pickles are fetched, no tensors."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from tests.api.test_diff import sparse_safetensors
from tests.conftest import RunCli
from tests.making.checkpoints import sparse_zip64
from tests.servers.fronts import HANG
from tests.servers.object_store import Fault, Files, Store

BIG = 6_000_000  # elements of a tensor that nobody is to fetch


def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(BIG, dtype=torch.float32),
        "b": torch.arange(3),
        "n": torch.tensor(1.5),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1500, 1500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


def legacy(folder: Path) -> Path:
    torch.save(tensors(), folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def zipped(folder: Path) -> Path:
    torch.save(tensors(), folder / "run.pt")
    return folder / "run.pt"


def safetensors(folder: Path) -> Path:
    save_file(tensors(), folder / "model.safetensors")
    return folder / "model.safetensors"


def script(folder: Path) -> Path:
    torch.jit.save(torch.jit.script(Model()), folder / "script.pt")
    return folder / "script.pt"


def exported(folder: Path) -> Path:
    program = torch.export.export(Model(), (torch.zeros(2, 1500),))
    torch.export.save(program, folder / "program.pt2")
    return folder / "program.pt2"


def sharded(folder: Path) -> Path:
    where = {}
    for n, (name, tensor) in enumerate(tensors().items()):
        file = f"model-{n + 1:05}-of-00003.safetensors"
        save_file({name: tensor}, folder / file)
        where[name] = file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def model_folder(folder: Path) -> Path:
    sharded(folder)
    (folder / "config.json").write_text("{}")
    return folder


#: Makers, and the most requests for bytes that each may take: of a file there are the head, the
#: end, and what is beside its content.
KINDS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "zip": (zipped, 5),
    "legacy": (legacy, 5),
    "safetensors": (safetensors, 1),
    "sharded": (sharded, 4),
    "folder": (model_folder, 4),
    "torchscript": (script, 6),
    "pt2": (exported, 8),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_told_is_fetched(kind: str, store: Store, tmp_path: Path) -> None:
    make, most = KINDS[kind]
    path = make(tmp_path)
    if path.is_dir():
        url, total = store.put_folder("a/b", path), sum(f.stat().st_size for f in path.iterdir())
    elif kind == "sharded":
        store.put_folder("a", tmp_path)
        url, total = store.url(f"a/{path.name}"), sum(f.stat().st_size for f in tmp_path.iterdir())
    else:
        url, total = store.put(f"a/{path.name}", path), path.stat().st_size
    found, here = ckptmove.inspect(url), ckptmove.inspect(path)
    assert found.path == (url if kind != "folder" else f"{url}/model.safetensors.index.json")
    assert [(t.name, t.shape, t.dtype, t.device) for t in found.tensors] == [
        (t.name, t.shape, t.dtype, t.device) for t in here.tensors
    ]
    assert {key: each.extent for key, each in found.storages.items()} == {
        key: each.extent for key, each in here.storages.items()
    }
    gets = store.front.asked("GET", "/a/")
    assert found.fetched == (store.front.nbytes("/a/"), len(gets))
    assert 0 < len(gets) <= most, gets
    assert store.front.nbytes("/a/") < min(300_000, total // 20)
    assert len(store.front.asked("HEAD", "/a/")) <= 3 * (4 if kind in ("sharded", "folder") else 1)
    assert here.fetched is None
    assert "fetched" not in here.to_json()


@pytest.mark.slow
def test_a_giant_is_read_in_a_few_requests(web: Files, tmp_path: Path, run_cli: RunCli) -> None:
    sparse_zip64(tmp_path / "giant.pt", 100)
    url = web.put("giant.pt")
    done = run_cli("inspect", url, exit=0)
    count = len(web.asked("GET"))
    assert web.nbytes() < 400_000
    assert count <= 6
    told = re.search(r"^fetched ([\d.]+) kB of 107\.4 GB in (\d) requests$", done.stdout, re.M)
    assert told, done.stdout
    assert int(told[2]) == count
    assert abs(float(told[1]) * 1000 - web.nbytes()) < 60
    assert done.stderr.count("\n") == 1, "what it says of any such file"
    said = json.loads(run_cli("inspect", url, "--json", exit=0).stdout)
    assert said["fetched"]["requests"] == count


def test_a_giant_of_safetensors_takes_one_request(web: Files, tmp_path: Path) -> None:
    sparse_safetensors(tmp_path / "giant.safetensors", 100 << 30)
    found = ckptmove.inspect(web.put("giant.safetensors"))
    assert found.tensors[0].shape == (25 << 30,)
    assert found.fetched == (1 << 15, 1)
    assert web.nbytes() == 1 << 15
    assert "fetched 32.8 kB of 107.4 GB in 1 request" in str(found)
    assert "fetched 32.8 kB" in found._repr_html_()


def test_what_is_between_many_tensors_is_fetched_together(store: Store, tmp_path: Path) -> None:
    torch.save({f"t{n}": torch.zeros(500) for n in range(2000)}, tmp_path / "many.pt")
    url = store.put("many.pt", tmp_path / "many.pt")
    found = ckptmove.inspect(url)
    assert len(found.tensors) == 2000
    assert len(store.front.asked("GET", "many.pt")) <= 7


@pytest.mark.slow
def test_headers_far_apart_are_fetched_several_at_a_time(store: Store, tmp_path: Path) -> None:
    torch.save({f"t{n}": torch.zeros(100_000) for n in range(40)}, tmp_path / "apart.pt")
    url = store.put("apart.pt", tmp_path / "apart.pt")
    two = threading.Barrier(2, timeout=HANG)  # which are asked for at the same time
    far = range(1 << 20, 15 << 20)
    store.front.faults.append(Fault("none", act=two.wait, times=2, first=far))
    found = ckptmove.inspect(url)
    assert len(found.tensors) == 40
    assert store.front.nbytes() < 300_000
    assert 1 < store.front.connections <= 12


def test_connections_are_used_again(store: Store, tmp_path: Path) -> None:
    url = store.put_folder("m", model_folder(tmp_path))
    ckptmove.inspect(url)
    assert store.front.connections == 1


def test_memory_and_other_stores(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/stores/run.pt", zipped(tmp_path).read_bytes())
    try:
        found = ckptmove.inspect("memory://stores/run.pt")
        assert found.fetched is not None
        assert found.fetched.nbytes < 300_000
        assert [t.name for t in found.tensors] == ["w", "b", "n"]
        chained = ckptmove.inspect(f"zip://run.pt::{packed(tmp_path)}")
        assert chained.tensors == found.tensors
    finally:
        fs.rm("/stores", recursive=True)


def packed(folder: Path) -> str:
    import zipfile

    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        archive.write(folder / "run.pt", "run.pt")
    return str(folder / "all.zip")
