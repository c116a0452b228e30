"""Reports of models and tensors of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ckptmove
from ckptmove import UsageError
from tests.conftest import ROOT
from tests.making.living import (
    LanguageModel,
    entries,
    nbytes,
    registered,
    row,
    transformers_model,
)

# -- kinds of models -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers(kind: str) -> None:
    model = transformers_model(kind)
    report = ckptmove.report(model)
    assert registered(report) == list(model.state_dict())
    assert report.nbytes == nbytes([*model.parameters(), *model.buffers()])
    layers = "transformer.h.{0..2}" if kind == "gpt2" else "model.layers.{0..2}"
    wte = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    assert row(report, layers)[1] == "cpu"
    assert row(report, "lm_head") == ["lm_head", "cpu", f"tied to {wte}"]
    assert report.warnings == ()


def lightning_model() -> nn.Module:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    return Lit()


def scripted() -> nn.Module:
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert isinstance(module, nn.Module)
    return module


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    nn.utils.parametrizations.weight_norm(model[1])
    return model


def deep(layers: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1))
    for _ in range(layers):
        model = nn.Sequential(model)
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Conv1d(3, 3, 1)),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2),
    "lightning": lightning_model,
    "compiled": lambda: torch.compile(LanguageModel(2)),
    "scripted": scripted,
    "parametrized": parametrized,
    "parallel": lambda: nn.DataParallel(LanguageModel(2)),
    "many layers": lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000))),
    "half": lambda: LanguageModel(1).to(torch.bfloat16),
    "frozen": lambda: LanguageModel(1).requires_grad_(False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_told(kind: str) -> None:
    model: Any = KINDS[kind]()
    report = ckptmove.report(model)
    assert registered(report) == list(model.state_dict())
    assert report.nbytes == nbytes([*model.parameters(), *model.buffers()])
    assert report.warnings == ()
    assert len(str(report).splitlines()) < 40
    assert [e.requires_grad for e in entries(report, "parameter").values()] == [
        v.requires_grad for v in model.state_dict(keep_vars=True).values() if is_parameter(v)
    ]


def is_parameter(value: object) -> bool:
    return isinstance(value, nn.Parameter)


def test_modules_within_modules_may_be_deeper_than_python_recurses() -> None:
    report = ckptmove.report(deep(1500))
    assert [e.name for e in report.tensors] == ["0." * 1501 + "weight", "0." * 1501 + "bias"]
    assert report.verdict == "uniform cpu"
    assert "cpu" in str(report)


def test_weights_that_are_computed_are_no_mistake() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old way is what is tested
        nn.utils.weight_norm(model[0])
    nn.utils.spectral_norm(model[1])
    prune.random_unstructured(model[2], "weight", 0.5)
    with torch.no_grad():
        model(torch.ones(1, 2))
    report = ckptmove.report(model)
    assert list(entries(report, "attribute")) == ["0.weight", "1.weight", "2.weight"]
    assert report.warnings == ()


def test_packed_weights_are_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, in several ways
        model = torch.ao.quantization.quantize_dynamic(LanguageModel(1), {nn.Linear})
    (told,) = ckptmove.report(model).warnings
    assert "'layers.0.inner._packed_params._packed_params'" in told
    assert told in ckptmove.move(model, place={"*": "cpu"}).warnings
    assert ckptmove.move(model, "cpu").warnings == ()


def test_a_ring_of_modules_ends() -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parents = [parent]
            self.weight = nn.Parameter(torch.ones(2))
            object.__setattr__(self, "parent", parent)

    model = nn.Sequential(nn.Linear(2, 2))
    model.append(Child(model))
    assert registered(ckptmove.report(model)) == list(model.state_dict())
    assert ckptmove.report(model).warnings == ()
    model[1].up = model  # a state dict would never end
    assert registered(ckptmove.report(model)) == ["0.weight", "0.bias", "1.weight"]


@pytest.mark.slow
def test_a_model_of_many_parameters() -> None:
    model = nn.Module()
    for n in range(20_000):
        model.register_parameter(f"p{n}", nn.Parameter(torch.zeros(1)))
    assert ckptmove.report(model).sections["model"].tensors == 20_000


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a dict is not a torch\.nn\.Module") as raised:
        ckptmove.report({})  # type: ignore[arg-type]
    assert raised.value.hint == "pass the model itself"
    with pytest.raises(UsageError, match=r"a str is not a torch\.nn\.Module") as raised:
        ckptmove.report("model.pt")  # type: ignore[arg-type]
    assert raised.value.hint == "for files, use ckptmove.inspect"
    with pytest.raises(UsageError, match=r"an int is not a torch\.optim\.Optimizer"):
        ckptmove.report(nn.Identity(), [3])  # type: ignore[list-item]
    empty = ckptmove.report(nn.Identity())
    assert (empty.verdict, empty.inputs, empty.tensors) == ("no tensors", "", ())
    assert str(empty).startswith("no tensors\nIdentity: live model, 0 B")


# -- kinds of tensors ------------------------------------------------------------------------------


def test_composite_tensors_have_parts() -> None:
    model = nn.Module()
    coo = torch.eye(3).to_sparse()
    model.sparse = nn.Parameter(coo)
    model.register_buffer("csr", torch.eye(3).to_sparse_csr())
    per_channel = torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
    )
    model.register_buffer("q", per_channel)
    pair = [torch.ones(2, 3), torch.ones(4, 3)]
    model.register_buffer("nested", torch.nested.nested_tensor(pair))
    model.register_buffer("jagged", torch.nested.nested_tensor(pair, layout=torch.jagged))
    model.register_buffer("mkldnn", torch.ones(3, 4).to_mkldnn())
    found = {e.name: e for e in ckptmove.report(model).tensors}
    assert {k: (e.part_of, e.nbytes) for k, e in found.items() if "sparse" in k} == {
        "sparse": (None, 48 + 12),
        "sparse.indices": ("sparse", 48),
        "sparse.values": ("sparse", 12),
    }
    assert (found["sparse"].layout, found["sparse"].kind) == ("sparse_coo", "parameter")
    assert (found["sparse"].storage, found["sparse"].shape) == (None, (3, 3))
    assert found["sparse.values"].storage is not None
    assert [k for k in found if k.startswith("csr.")] == [
        f"csr.{part}" for part in ("crow_indices", "col_indices", "values")
    ]
    assert (found["q"].nbytes, found["q"].storage is None) == (6, False)
    assert found["q.scales"].part_of == "q"
    assert (found["nested"].layout, found["nested"].shape) == ("nested", (2, -1, -1))
    assert found["nested.values"].nbytes == found["nested"].nbytes == 18 * 4
    assert found["jagged"].shape == (2, -1, 3)
    assert found["jagged.values"].nbytes == 18 * 4
    assert (found["mkldnn"].layout, found["mkldnn"].nbytes) == ("_mkldnn", 48)


def test_a_nested_tensor_that_is_a_plain_attribute_has_the_same_parts() -> None:
    model = nn.Module()
    pair = [torch.ones(2, 3), torch.ones(4, 3)]
    model.register_buffer("buffer", torch.nested.nested_tensor(pair))
    model.plain = torch.nested.nested_tensor(pair)
    names = [each.name for each in ckptmove.report(model).tensors]
    parts = {name.partition(".")[2] for name in names if name.startswith("buffer")}
    assert {name.partition(".")[2] for name in names if name.startswith("plain")} == parts


@pytest.mark.parametrize("name", ["sparse", "csr", "q", "nested"])
def test_composites_are_told_as_in_a_file(name: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "q": lambda: torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    }
    model = nn.Module()
    model.register_buffer(name, made[name]())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    ours = ckptmove.report(model).tensors
    theirs = ckptmove.inspect(tmp_path / "model.pt").tensors
    fields = ("name", "kind", "layout", "dtype", "shape", "stride", "nbytes", "part_of", "role")
    assert [[getattr(e, f) for f in fields] for e in ours] == [
        [getattr(e, f) for f in fields] for e in theirs
    ]


class Wrapper(torch.Tensor):
    """One whose part nobody tells."""

    @staticmethod
    def __new__(cls: Any, held: torch.Tensor) -> Any:
        """Of the shape of what is in it."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(str(func))


class Flat(Wrapper):
    """One that tells its parts."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None


class Named(torch.Tensor):
    """One with bytes of its own."""


def test_subclasses_of_tensors() -> None:
    model = nn.Module()
    model.register_buffer("flat", Flat(torch.ones(3)))
    model.register_buffer("wrapper", Wrapper(torch.ones(5)))
    model.register_buffer("named", torch.ones(7).as_subclass(Named))
    report = ckptmove.report(model)
    told = [(e.name, e.kind.rpartition(".")[2], e.nbytes, e.held, e.part_of, e.says_device,
             e.storage is not None) for e in report.tensors]  # fmt: skip
    assert told == [
        ("flat", "Flat", 12, "buffer", None, True, False),
        ("flat.held", "tensor", 12, "buffer", "flat", False, True),
        ("wrapper", "Wrapper", 20, "buffer", None, True, False),
        ("named", "Named", 28, "buffer", None, False, True),
        ("wrapper.held", "tensor", 20, "attribute", None, False, True),
    ]
    assert (report.nbytes, report.warnings) == (12 + 20 + 28, ())


def test_what_hangs_on_a_parameter_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model[0].weight)["main_grad"] = torch.zeros(2, 2)  # as Megatron does
    report = ckptmove.report(model)
    assert list(entries(report, "attribute")) == ["0.weight.main_grad"]
    assert report.warnings == (
        "0.weight.main_grad is not registered, so model.to leaves it behind. Fix: "
        "set it again after the model is moved",
    )


def test_a_parameter_without_a_shape_is_told_of() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    report = ckptmove.report(model)
    entry = entries(report, "parameter")["0.weight"]
    assert (entry.shape, entry.nbytes, entry.storage) == ((), 0, None)
    assert entry.kind == "torch.nn.parameter.UninitializedParameter"
    assert report.warnings[0].startswith("'0.weight', '0.bias': no shape yet")


FSDP = """
import json, torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
import ckptmove
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
report = ckptmove.report(model, optimizer)
local = {n: p.to_local().nbytes for n, p in model.named_parameters()}
flat = FSDP(nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"))
old = [list(ckptmove.report(flat).warnings)]
with torch.no_grad():
    flat(torch.ones(2, 4))
old.append(list(ckptmove.report(flat).warnings))
print(json.dumps([report.to_json(), report.meshes, local, old]))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_parameters_have_local_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FSDP],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, meshes, local, old = json.loads(done.stdout)
    found = {e["name"]: e for e in told["tensors"]}
    assert found["0.weight"]["kind"] == "torch.distributed.tensor.DTensor"
    assert (found["0.weight"]["storage"], found["0.weight"]["shape"]) == (None, [4, 4])
    assert found["0.weight._local_tensor"]["part_of"] == "0.weight"
    assert {n: found[n]["nbytes"] for n in local} == local
    assert found["optimizer.state.0.weight.exp_avg"]["kind"].endswith(".DTensor")
    assert found["0.weight.grad._local_tensor"]["held"] == "gradient"
    assert meshes == ["cpu"]
    assert told["sections"]["model"]["nbytes"] == 2 * sum(local.values())
    assert (told["warnings"], told["verdict"]) == ([], "uniform cpu")
    assert old == [[], []]
