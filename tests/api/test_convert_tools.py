"""What convert writes, as the tools of the field take it: they load it, and train on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn, optim

from ckptmove import convert
from tests.making.checkpoints import hf_trainer_folder, lightning_checkpoint
from tests.making.frameworks import regression, resumed_trainer, tiny_gpt2
from tests.oracles.readers import load
from tests.oracles.sameness import assert_same_tree

# -- safetensors -------------------------------------------------------------------------------


class Tied(nn.Module):
    """An output layer on the weights of an embedding, and a batch norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return logits


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


@pytest.mark.parametrize("options", [{}, {"bare": True}, {"shared": "duplicate"}], ids=str)
def test_a_model_is_loaded_with_its_tied_weights(options: dict[str, Any], tmp_path: Path) -> None:
    saved, fresh, tokens = tied(0), tied(1), torch.arange(7)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors", **options)
    assert not torch.equal(saved(tokens), fresh(tokens))
    if "shared" in options:
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    else:
        missing, unexpected = load_model(fresh, tmp_path / "model.safetensors")
        assert not missing
        assert not unexpected
    assert torch.equal(saved(tokens), fresh(tokens))


def test_what_the_library_reads_is_what_torch_saved(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).state_dict()
    torch.save(state, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert_same_tree(dict(sorted(state.items())), dict(sorted(found.items())))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(state)
        assert file.get_slice("0.weight")[1:3].shape == (2, 3, 3, 3)
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_preset_hf_writes_the_bytes_that_the_library_does(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 1)).to(dtype)
    state = {**layers.state_dict(), "z.step": torch.tensor(3), "mask": torch.tensor([True, False])}
    torch.save(state, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "ours.safetensors", preset="hf")
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = (tmp_path / f"{each}.safetensors" for each in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


# -- Hugging Face ------------------------------------------------------------------------------


def gpt2(transformers: Any) -> Any:
    return tiny_gpt2(transformers)


def llama(transformers: Any) -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0)
    )


def tied_llama(transformers: Any) -> Any:
    config = llama(transformers).config
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


def bert(transformers: Any) -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    return transformers.BertForMaskedLM(config)


@pytest.mark.sample(4)
@pytest.mark.parametrize("preset", [None, "hf", "deploy"])
@pytest.mark.parametrize("make", [gpt2, llama, tied_llama, bert])
def test_transformers_loads_it_and_computes_the_same(
    make: Callable[[Any], Any], preset: str | None, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(transformers).eval()
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model" / "model.safetensors", preset=preset)
    loaded, said = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)
    tied_ones = [each.get_output_embeddings().weight.data_ptr() for each in (model, loaded)]
    inputs = [each.get_input_embeddings().weight.data_ptr() for each in (model, loaded)]
    assert (tied_ones[0] == inputs[0]) == (tied_ones[1] == inputs[1])


def test_what_transformers_wrote_is_what_torch_loads(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = gpt2(transformers)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model" / "model.safetensors", tmp_path / "pytorch_model.bin")
    found: Any = load(tmp_path / "pytorch_model.bin", weights_only=True)
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    assert_same_tree({key: found[key] for key in sorted(found)}, dict(sorted(wanted.items())))


@pytest.mark.slow
def test_a_trainer_resumes_from_what_went_there_and_back(tmp_path: Path) -> None:
    folder = hf_trainer_folder(tmp_path / "run")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        source = (folder / name).rename(tmp_path / name)
        convert(source, tmp_path / f"{name}.safetensors")
        convert(
            tmp_path / f"{name}.safetensors", folder / name, format="torch-zip", trust_objects=True
        )
    resumed_trainer(folder, tmp_path / "more", 3)


# -- Lightning ---------------------------------------------------------------------------------


def test_lightning_loads_what_went_there_and_back(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")
    source = lightning_checkpoint(tmp_path / "last.ckpt")
    convert(source, tmp_path / "last.safetensors")
    convert(tmp_path / "last.safetensors", tmp_path / "back.ckpt")
    kind = type(regression(lightning))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (
            kind.load_from_checkpoint(path, weights_only=False)
            for path in (source, tmp_path / "back.ckpt")
        )
    assert_same_tree(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert ours.hparams == theirs.hparams
    inputs = torch.randn(4, 3)
    assert torch.equal(ours.layer(inputs), theirs.layer(inputs))


def test_a_bare_module_loads_what_the_preset_takes_from_lightning(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tied(0)

    torch.save({"state_dict": Wrapped().state_dict(), "epoch": 3}, tmp_path / "last.ckpt")
    convert(tmp_path / "last.ckpt", tmp_path / "model.safetensors", preset="lightning")
    fresh, tokens = tied(1), torch.arange(7)
    missing, unexpected = load_model(fresh, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(tied(0)(tokens), fresh(tokens))


# -- optimizers --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda parameters: optim.AdamW(parameters, amsgrad=True),
    "SGD": lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
    "RMSprop": lambda parameters: optim.RMSprop(parameters, centered=True, momentum=0.5),
    "LBFGS": lambda parameters: optim.LBFGS(parameters, max_iter=3),
    "NAdam": lambda parameters: optim.NAdam(parameters, decoupled_weight_decay=True),
    "groups": lambda parameters: optim.Adam(
        [
            {"params": [each], "lr": torch.tensor(0.1 / (n + 1)), "name": f"g{n}"}
            for n, each in enumerate(parameters)
        ]
    ),
}


class Training:
    """A model in training, which can go on from what it saved."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2))
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def steps(self, count: int) -> list[bytes]:
        """Train on; gives the bytes of all weights after each step."""
        seen = []
        for _ in range(count):
            inputs = torch.randn(3, 4)

            def loss(inputs: torch.Tensor = inputs) -> Any:
                self.optimizer.zero_grad()
                value = self.model(inputs).square().sum()
                value.backward()
                return value

            self.optimizer.step(loss)
            self.scheduler.step()
            seen.append(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters()))
        return seen

    def save(self, path: Path) -> None:
        """Everything that the next step depends on."""
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(saved, path)

    def resume(self, path: Path) -> None:
        """Go on from a file."""
        saved: Any = load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        training = Training(name)
        training.steps(5)
        training.save(tmp_path / "run.pt")
        wanted = training.steps(10)
        convert(tmp_path / "run.pt", tmp_path / "run.safetensors")
        convert(tmp_path / "run.safetensors", tmp_path / "back.pt")
        resumed = Training(name)
        assert resumed.steps(10) != wanted
        resumed = Training(name)
        resumed.resume(tmp_path / "back.pt")
        assert resumed.steps(10) == wanted
