"""Rehearsals of models of transformers and diffusers, from their configurations alone."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

import ckptmove
from ckptmove.errors import UnsupportedError, UsageError
from ckptmove.trial.trial import run_trial
from tests.making import model_folders
from tests.making import trial_models as rehearsing
from tests.servers.warm_python import WarmModels, WarmPopen

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def warm_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have torch before they begin; those of slow tests, which are many, models too."""
    slow = request.node.get_closest_marker("slow") is not None
    monkeypatch.setattr(subprocess, "Popen", WarmModels if slow else WarmPopen)


SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "intermediate_size": 32}),
    "BertForMaskedLM": ("BertConfig", {**SMALL, "intermediate_size": 32}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**SMALL, "intermediate_size": 32, "image_size": 8, "patch_size": 4},
    ),
}


def saved(kind: str, folder: Path) -> tuple[Path, Path]:
    """A folder with a config.json, and a checkpoint of a training as its Trainer groups it."""
    config_kind, options = CONFIGS[kind]
    torch.manual_seed(0)
    extra = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, config_kind)(**options, **extra, architectures=[kind])
    config.save_pretrained(folder)
    model = getattr(transformers, kind)._from_config(config)
    plain = [n for n, _ in model.named_parameters() if "bias" in n or "norm" in n.lower()]
    own = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in own.items() if n not in plain], "weight_decay": 0.1},
        {"params": [p for n, p in own.items() if n in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    for parameter in own.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = folder / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return folder, path


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_from_their_configurations_pass(kind: str, tmp_path: Path) -> None:
    folder, path = saved(kind, tmp_path)
    found = run_trial(path, model=folder, step="train", against=path)
    assert [each.outcome for each in found.findings] == ["passed"] * 3, found
    step = found.of("step")
    assert step.data["loss"] == "the model's own loss"
    assert step.data["against"]["equal"]
    assert "with labels" in step.data["input"]


@pytest.mark.slow
def test_models_from_their_configurations_pass_simulated(tmp_path: Path) -> None:
    requests = {}
    for kind in CONFIGS:
        folder = tmp_path / kind
        folder.mkdir()
        _, path = saved(kind, folder)
        moved = folder / "moved.pt"
        ckptmove.relocate(path, moved, to="cuda:0")
        requests[kind] = {"path": str(moved), "model": str(folder), "inputs": []}
    for kind, findings in rehearsing.simulated(requests).items():
        assert [each["outcome"] for each in findings.values()] == ["passed"] * 3, (kind, findings)
        trace = findings["trace"]["data"]
        assert trace["operations"]["cuda:0"] > 50
        assert not [each for each in trace["happenings"] if each["kind"] == "stray"]


BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

_WATCHED = """
import json, resource, sys
from ckptmove.trial.trial import run_trial
found = run_trial(sys.argv[1], model=sys.argv[2], step="train", device="cuda:0", simulate=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([[each.outcome for each in found.findings], peak]))
"""


@pytest.mark.slow
def test_a_billion_parameters_are_simulated_in_little_memory(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**BILLION, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    path = tmp_path / "run.pt"
    with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        model = transformers.LlamaForCausalLM._from_config(config)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert path.stat().st_size > 16 * 10**9  # of which the disk holds next to nothing
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, path, tmp_path],
        cwd=rehearsing.PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes, peak = json.loads(done.stdout)
    assert outcomes == ["passed"] * 3
    assert peak < 2 * 10**9


@pytest.mark.slow
def test_weights_alone_as_safetensors_train(tmp_path: Path) -> None:
    folder, path = saved("GPT2LMHeadModel", tmp_path)
    weights = tmp_path / "model.safetensors"
    ckptmove.convert(path, weights, preset="hf")
    found = run_trial(weights, model=str(folder), step="train", optimizer="torch.optim:SGD")
    assert [each.outcome for each in found.findings] == ["passed"] * 3, found


@pytest.mark.slow
@pytest.mark.cold
def test_a_folder_is_its_own_model(tmp_path: Path) -> None:
    folder, path = saved("LlamaForCausalLM", tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(
        None,
        config=transformers.AutoConfig.from_pretrained(folder),
        state_dict=torch.load(path)["model"],
    )
    path.unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    for named in (folder, None):
        found = run_trial(folder, model=named, step="train")
        assert [each.outcome for each in found.findings] == ["passed"] * 3, found


@pytest.mark.slow
def test_transformers_own_adafactor_is_recognised(tmp_path: Path) -> None:
    folder, path = saved("BertForMaskedLM", tmp_path)
    model = transformers.BertForMaskedLM._from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    optimizer = transformers.optimization.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = run_trial(path, model=folder, step="train")
    assert [each.outcome for each in found.findings] == ["passed"] * 3, found
    assert "clip_threshold" in found.of("step").data["optimizer"]


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize("names", [None, [1], ["OfAnotherVersion"]])
def test_a_folder_that_names_no_class_makes_the_base_model(names: Any, tmp_path: Path) -> None:
    folder, path = saved("BertForMaskedLM", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "architectures": names}))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.save(transformers.BertModel(config).state_dict(), path)
    found = ckptmove.validate(path, model=folder, step="forward")
    assert found.ok, found


@pytest.mark.slow
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder, path = saved("BertForMaskedLM", tmp_path)
    file = folder / "config.json"
    said = json.loads(file.read_bytes())
    said |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.M"}}
    file.write_text(json.dumps(said))
    (folder / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(UnsupportedError, match="never run"):
        run_trial(path, model=folder)
    file.unlink()
    with pytest.raises(UsageError, match=r"without a config\.json"):
        run_trial(path, model=folder)


# -- diffusers -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_model_of_diffusers_takes_its_weights_from_the_pipeline(
    own: bool, tmp_path: Path
) -> None:
    """It finds them among those of all models in it, as it does in its own folder."""
    pipeline = model_folders.copy_of("diffusers", tmp_path / "pipe", "cuda:0")
    unet = pipeline / "unet"
    model: Any = unet
    if own:
        diffusers = pytest.importorskip("diffusers")
        said = json.loads((unet / "config.json").read_bytes())
        model = partial(diffusers.UNet2DModel.from_config, said)
    inputs = ["sample=float32[2,2,8,8]", "timestep=int64[2]"]
    for path in (pipeline, unet):
        found = ckptmove.validate(path, model=model, input=inputs, step="forward")
        assert found.ok, found
        kinds = {each.check: each for each in found.checks}
        assert kinds["model"].title.startswith("UNet2DModel accepts all 114 tensors")
        assert kinds["step"].outcome == "passed"
        assert found.device == "cpu"  # there is no cuda:0


def test_a_folder_that_makes_no_model_says_which_does(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.ones(2)}, path)
    for name in ("unet", "scheduler", "vae"):
        (tmp_path / "pipe" / name).mkdir(parents=True)
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    (tmp_path / "pipe" / "unet" / "config.json").write_text("{}")
    (tmp_path / "pipe" / "vae" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="a pipeline of diffusers") as caught:
        ckptmove.validate(path, model=tmp_path / "pipe")
    assert caught.value.hint == f"name the folder of one: --model {tmp_path / 'pipe' / 'unet'}"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"without a config\.json") as caught:
        ckptmove.validate(path, model=adapter)
    assert "PeftModel" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ({"_class_name": "DDIMScheduler"}, UsageError, "no model 'DDIMScheduler'"),
        ({"_class_name": "utils"}, UsageError, "no model 'utils'"),
        ({"_class_name": "No" * 200}, UsageError, "no model 'NoNo"),
        (
            {"_class_name": "UNet2DModel", "attn_implementation": "somebody/kernels"},
            UnsupportedError,
            "code elsewhere",
        ),
    ],
)
def test_a_configuration_names_only_models_of_diffusers(
    said: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    pytest.importorskip("diffusers")
    path = tmp_path / "w.pt"
    torch.save({"a": torch.ones(2)}, path)
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(error, match=match):
        ckptmove.validate(path, model=tmp_path)
