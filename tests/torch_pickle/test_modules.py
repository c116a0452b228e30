"""Modules that were saved whole: they are called as their state dicts call them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptmove import RefusedError, convert, diff, inspect, relocate
from ckptmove.manifest.manifest import Manifest
from tests.making.expected import raw

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Block(nn.Module):
    """All that a module may hold and its state dict does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.cache = torch.arange(4.0)
        self.device = torch.device("cuda:0")


class Hook:
    """A hook that keeps a module, and a tensor."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen = torch.ones(5)

    def __call__(self, *_: object) -> None:
        """Do nothing."""


class Net(nn.Module):
    """Modules and parameters under several names, and in places where no state dict looks."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = self.block
        self.head = nn.Linear(3, 3)
        self.head.weight = self.block.linear.weight
        self.aside = [self.block.linear, nn.Linear(1, 1)]
        self.last = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.BatchNorm1d(2))
        self.block.register_forward_hook(Hook(self.last))


class Holder:
    """An object of the user's that has a model."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.epoch = 3


def compiled() -> nn.Module:
    from torch._dynamo import OptimizedModule

    eager: Any = torch._dynamo.optimize("eager")
    module: nn.Module = OptimizedModule(nn.Sequential(nn.Linear(2, 1)), eager)
    return module


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)))


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(2, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))
        )


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))
    module(torch.ones(1, 5))
    return module


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))  # type: ignore[no-any-return]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "vocab_size": 16}
    config = transformers.T5Config(**sizes, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    return transformers.ResNetForImageClassification(config)  # type: ignore[no-any-return]


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.3)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Buffers and parameters that share their bytes, or are one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        mean = torch.ones(2)
        self.register_buffer("mean", mean)
        self.register_buffer("same", mean)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "one": lambda: nn.Linear(3, 2),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True),
    "gru": lambda: nn.Sequential(nn.GRU(2, 3)),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "embedding": lambda: nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.EmbeddingBag(3, 2)}),
    "lists": lambda: nn.ModuleList(
        [
            nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1))]),
            nn.ParameterDict({"x": nn.Parameter(torch.ones(3)), "y": nn.Parameter(torch.ones(1))}),
        ]
    ),
    "parallel": lambda: nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "normed": normed,
    "lazy": lazy,
    "compiled": compiled,
    "traced": traced,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
    "pruned": pruned,
    "shared": Shared,
}


class Saved(NamedTuple):
    """A file, the module in it, and the name under which it is there."""

    path: Path
    module: nn.Module
    name: str


def to_zip(saved: object, path: Path) -> None:
    torch.save(saved, path)


def to_legacy(saved: object, path: Path) -> None:
    torch.save(saved, path, _use_new_zipfile_serialization=False)


def to_pickle(saved: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(saved))


WRITERS = {"zip": to_zip, "legacy": to_legacy, "pickle": to_pickle}
FILES = [
    *((name, "zip") for name in ZOO),
    *((n, w) for n in ("net", "bert") for w in WRITERS if w != "zip"),
]


def saved(name: str, writer: str, folder: Path, *, within: bool = False) -> Saved:
    torch.manual_seed(0)
    module, path = ZOO[name](), folder / "module.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WRITERS[writer]({"epoch": 3, "net": module} if within else module, path)
    return Saved(path, module, "net." if within else "")


def state_keys(manifest: Manifest) -> list[str]:
    return [entry.state_key for entry in manifest.tensors if entry.state_key is not None]


@pytest.mark.sample(10)
@pytest.mark.parametrize(("name", "writer"), FILES)
def test_the_names_are_those_of_the_state_dict(name: str, writer: str, tmp_path: Path) -> None:
    made = saved(name, writer, tmp_path, within=writer == "zip")
    manifest, state = inspect(made.path), made.module.state_dict()
    entries = [entry for entry in manifest.tensors if entry.state_key is not None]
    assert [entry.name for entry in entries] == [made.name + key for key in state]
    assert state_keys(manifest) == list(state)
    assert [entry.dtype for entry in entries] == [str(t.dtype)[6:] for t in state.values()]
    assert all(entry.beside for entry in manifest.tensors if entry.state_key is None)


@pytest.mark.sample(8)
@pytest.mark.parametrize("options", [{"select": "model"}, {"bare": True}, {"preset": "hf"}, {}])
@pytest.mark.parametrize("name", ZOO)
def test_what_is_converted_loads_strictly(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if name == "averaged" and {*options} & {"select", "preset"}:
        pytest.skip("these are averages, not the weights of a model")
    made, out = saved(name, "zip", tmp_path), tmp_path / "out.safetensors"
    state = made.module.state_dict()
    report = convert(made.path, out, shared="duplicate", **options)
    loaded = {key: each for key, each in load_file(out).items() if not key.endswith("~extra")}
    if options:
        assert len(loaded) == report.tensors
    if options == {"preset": "hf"} and name in ("parallel", "compiled", "averaged"):
        prefix = "_orig_mod." if name == "compiled" else "module."
        state = {key.removeprefix(prefix): each for key, each in state.items()}
    else:
        twin = ZOO[name]()
        assert not any(twin.load_state_dict(loaded, strict=True))
    assert loaded.keys() == state.keys()
    for key, tensor in state.items():
        assert raw(loaded[key].untyped_storage()) == raw(tensor.contiguous().untyped_storage()), key


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "writer"), FILES)
def test_the_way_back_is_the_whole_module(name: str, writer: str, tmp_path: Path) -> None:
    made = saved(name, writer, tmp_path, within=writer != "zip")
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pt"
    convert(made.path, there)
    convert(there, back, trust_objects=True)
    assert diff(made.path, back).equal
    before, after = inspect(made.path), inspect(back)
    assert [(e.name, e.path, e.state_key, e.beside) for e in before.tensors] == [
        (e.name, e.path, e.state_key, e.beside) for e in after.tensors
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = torch.load(back, weights_only=False)
    module = loaded["net"] if made.name else loaded
    if name != "traced":  # whose class is made anew each time
        assert type(module).__name__ == type(made.module).__name__
    for key, tensor in made.module.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor)


def test_what_no_state_dict_holds_has_a_name_too(tmp_path: Path) -> None:
    made = saved("net", "zip", tmp_path)
    manifest = inspect(made.path)
    beside = [entry.name for entry in manifest.tensors if entry.beside]
    assert {"block.mask", "block.cache", "aside.1.weight"} < set(beside)
    assert any(name.endswith(".seen") for name in beside)
    aliases = {alias.name: alias.of for alias in manifest.aliases}
    assert aliases["again"] == "block"
    assert aliases["aside.0"] == "block.linear"
    assert [(each.name, each.path) for each in manifest.values_naming_devices] == [
        ("block.device", ("_modules", "block", "device"))
    ]
    out = tmp_path / "out.safetensors"
    convert(made.path, out)
    extra = [key for key in load_file(out) if key.endswith("~extra")]
    assert "block.mask~extra" in extra
    assert not set(made.module.state_dict()) & set(extra)
    report = convert(made.path, out, select="model", force=True)
    assert {"block.mask", "block.cache", "aside.1.weight"} < set(report.left_out)
    assert not [key for key in load_file(out) if key.endswith("~extra")]


def test_patterns_speak_of_these_names(tmp_path: Path) -> None:
    made = saved("net", "zip", tmp_path, within=True)
    moved = tmp_path / "moved.pt"
    relocate(made.path, moved, to="cuda:0", place={"net.last.0.*": "cuda:1"})
    there = {e.name for e in inspect(moved).tensors if e.device == "cuda:1"}
    assert there == {"net.last.0.weight", "net.last.0.bias"}
    out = tmp_path / "out.safetensors"
    tried: list[tuple[dict[str, Any], list[str]]] = [
        ({"root": "net.last"}, ["0.bias", "0.weight"]),
        ({"select": "net.last.0"}, ["last.0.bias", "last.0.weight"]),
        ({"select": "net.last", "exclude_tensors": "net.last.2"}, ["last.0.bias", "last.0.weight"]),
        ({"select": "net.last.0.*", "strip_prefix": "last"}, ["0.bias", "0.weight"]),
    ]
    for options, wanted in tried:
        convert(made.path, out, force=True, **options)
        found = [key for key in load_file(out) if ".2." not in key and not key.startswith("2.")]
        assert sorted(found) == wanted
        if "root" not in options and "strip_prefix" not in options:
            convert(out, tmp_path / "back.pt", force=True, trust_objects=True)
            again = [e.name for e in inspect(tmp_path / "back.pt").tensors]
            assert again == ["net.last.0.weight", "net.last.0.bias"]
    with pytest.raises(RefusedError, match="_modules"):
        convert(made.path, out, force=True, select="net._modules.last")


def test_differences_are_told_by_these_names(tmp_path: Path) -> None:
    net: Any = Net()
    torch.save(net, tmp_path / "a.pt")
    with torch.no_grad():
        net.last[0].bias.add_(1)
    net.last[2].momentum = 0.5
    torch.save(net, tmp_path / "b.pt")
    told = {each.name for each in diff(tmp_path / "a.pt", tmp_path / "b.pt").differences}
    assert told == {"last.0.bias", "last.2.momentum"}


def test_a_module_and_its_state_dict_have_tensors_in_other_places(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    torch.save({"model": model}, tmp_path / "whole.pt")
    torch.save({"model": model.state_dict()}, tmp_path / "state.pt")
    found = diff(tmp_path / "whole.pt", tmp_path / "state.pt")
    assert not found.of("added")
    assert not found.of("removed")
    assert {each.new for each in found.of("renamed")} == {
        f"model.{name}" for name in model.state_dict()
    }
    assert all(each.name == each.old != each.new for each in found.of("renamed"))
    old = {each.new: each.old for each in found.of("renamed")}
    assert old["model.0.weight"] == "model._modules.0._parameters.weight"


def test_a_module_may_be_an_attribute(tmp_path: Path) -> None:
    torch.save({"best": Holder()}, tmp_path / "a.pt")
    names = [(e.name, e.state_key) for e in inspect(tmp_path / "a.pt").tensors]
    assert names == [("best.model.weight", "weight"), ("best.model.bias", "bias")]


@pytest.mark.slow
def test_modules_under_absurdly_many_names_are_listed_all_the_same(tmp_path: Path) -> None:
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(60):  # 2 ** 60 names
        module = nn.Sequential(module, module)
    torch.save(module, tmp_path / "a.pt")
    manifest = inspect(tmp_path / "a.pt")
    assert 2 < len(manifest.tensors) < 100_000
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    with pytest.raises(RefusedError, match="many names"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors", bare=True)


def test_a_module_that_holds_itself_is_listed_once(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module._modules["me"] = module
    torch.save(module, tmp_path / "a.pt")
    assert state_keys(inspect(tmp_path / "a.pt")) == ["0.weight", "0.bias"]
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", bare=True)
    assert sorted(load_file(tmp_path / "a.safetensors")) == ["0.bias", "0.weight"]
