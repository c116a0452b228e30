"""The layouts of folders that libraries write, and the meaning of the file names in them.

A rule maps a pattern of names (relative to the folder, with `/`) to the section of everything in
the file, and to its keys in the tree of the folder. In a template, keys are separated by `/`, and
keys of digits are numbers: `rng_state_1.pth` is at `("rng", 1)`. With the section OTHER, the
content of the file decides. The first layout with a mark in the folder applies. Names without a
rule in it follow the rules of `ANY`, and otherwise the name of the file gives the key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import NamedTuple

from ...manifest.manifest import Section
from ...manifest.paths import Key, Path
from .weight_names import FAMILIES, INDEX


class Rule(NamedTuple):
    """The meaning of the file names that match a pattern."""

    pattern: str
    section: Section
    keys: str  #: a template that uses the groups of the pattern


class Layout(NamedTuple):
    """The layout of the folders that one library writes."""

    name: str
    #: Patterns of file or folder names directly in the folder; one of them has to match.
    marks: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    #: Whether the marks alone show that it holds more than the weights of one model.
    is_several: bool = True
    #: Whether its subfolders may hold separate models.
    has_folders: bool = False
    #: Usual names of the files that training always saves. If `weights` is empty, missing files are
    #: not reported.
    weights: str = ""
    optimizer: str = "optimizer.pt"
    rng: str = ""
    #: Files that only this library writes; one of them shows that it wrote the whole folder.
    witnesses: tuple[str, ...] = ()


_WHOLE = r"(?:\.safetensors|\.bin)(?:\.index\.json)?"
#: The weights of one model, in the order in which libraries prefer them.
WEIGHTS = tuple(
    f"{re.escape(whole)}(?:{re.escape(INDEX)})?" for family in FAMILIES for whole in family
)
_NUMBER = r"(_\d+)?"
_MODELS = tuple(Rule(each, Section.MODEL, "model") for each in WEIGHTS)
_COMPONENTS = (
    *(Rule(rf"([^/]+)/{each}", Section.MODEL, r"\1") for each in WEIGHTS),
    # diffusers: variants, `unet/diffusion_pytorch_model.fp16.safetensors`
    Rule(rf"([^/]+)/(?:diffusion_pytorch_)?model\.\w+{_WHOLE}", Section.MODEL, r"\1"),
)

#: A folder of torch.distributed.checkpoint; a file with this name could be anything.
_DISTRIBUTED_OPTIMIZERS = (
    Rule(r"optimizer(?:_0)?", Section.OPTIMIZER, "optimizer"),
    Rule(r"optimizer(_\d+)", Section.OPTIMIZER, r"optimizer\1"),
)
#: File names with the same meaning in every library.
ANY = (
    *_MODELS,
    # accelerate/utils/fsdp_utils.py: a folder of torch.distributed.checkpoint, or the whole
    Rule(r"pytorch_model_fsdp(?:_0)?(?:\.bin)?", Section.MODEL, "model"),
    Rule(r"pytorch_model_fsdp(_\d+)(?:\.bin)?", Section.MODEL, r"model\1"),
    Rule(rf"optimizer{_NUMBER}\.(?:pt|pth|bin)", Section.OPTIMIZER, r"optimizer\1"),
    *_DISTRIBUTED_OPTIMIZERS,
    Rule(rf"(?:lr_)?scheduler{_NUMBER}\.(?:pt|pth|bin)", Section.SCHEDULER, r"scheduler\1"),
    Rule(r"rng_state\.pth", Section.RNG, "rng"),
    Rule(r"rng_state_(\d+)\.pth", Section.RNG, r"rng/\1"),
    Rule(r"random_states_(\d+)\.pkl", Section.RNG, r"rng/\1"),
    Rule(rf"scaler{_NUMBER}\.(?:pt|pth|bin)", Section.OTHER, r"scaler\1"),
    Rule(r"training_args\.bin", Section.OTHER, "training_args"),
    *_COMPONENTS,
)

LAYOUTS: tuple[Layout, ...] = (
    # skorch/net.py, `save_params`; callbacks/training.py, `Checkpoint`.
    Layout(
        "skorch",
        (r"(.*_)?params\.(pt|safetensors)", r"(.*_)?criterion\.(pt|safetensors)"),
        (
            Rule(r"(.*_)?params\.(?:pt|safetensors)", Section.MODEL, r"\1model"),
            Rule(r"(.*_)?optimizer\.(?:pt|safetensors)", Section.OPTIMIZER, r"\1optimizer"),
            Rule(r"(.*_)?criterion\.(?:pt|safetensors)", Section.OTHER, r"\1criterion"),
        ),
        is_several=False,
        weights="params.pt",
    ),
    # transformers/trainer.py, `_save_checkpoint`, `_save_optimizer_and_scheduler`.
    Layout(
        "Hugging Face Trainer",
        (r"optimizer\.pt", r"scheduler\.pt", r"rng_state(_\d+)?\.pth"),
        weights="model.safetensors",
        rng="rng_state.pth",
        witnesses=("trainer_state.json", "training_args.bin"),
    ),
    # accelerate/checkpointing.py, `save_accelerator_state`; utils/constants.py.
    Layout(
        "accelerate",
        (
            rf"optimizer{_NUMBER}\.bin",
            rf"scheduler{_NUMBER}\.bin",
            r"random_states_\d+\.pkl",
            r"custom_checkpoint_\d+\.pkl",
            r"(model|pytorch_model)_[1-9]\d*\.(safetensors|bin)",
            r"pytorch_model_fsdp(_\d+)?(\.bin)?",
        ),
        (
            Rule(r"model(_\d+)\.safetensors(?:\.index\.json)?", Section.MODEL, r"model\1"),
            Rule(r"pytorch_model(_\d+)\.bin(?:\.index\.json)?", Section.MODEL, r"model\1"),
            Rule(rf"sampler{_NUMBER}\.bin", Section.OTHER, r"sampler\1"),
            Rule(rf"dl_state_dict{_NUMBER}\.bin", Section.OTHER, r"dl_state_dict\1"),
            Rule(r"custom_checkpoint_(\d+)\.pkl", Section.OTHER, r"custom_checkpoint/\1"),
        ),
        weights="model.safetensors",
        optimizer="optimizer.bin",
        rng="random_states_0.pkl",
    ),
    # diffusers/pipelines/pipeline_utils.py, `save_pretrained`.
    Layout("diffusers pipeline", (r"model_index\.json",)),
    # sentence_transformers/SentenceTransformer.py, `save`.
    Layout("sentence-transformers", (r"modules\.json",), is_several=False, has_folders=True),
    # peft/peft_model.py, `save_pretrained`: adapters with a name have a folder each.
    Layout("peft", (r"adapter_config\.json",), is_several=False, has_folders=True),
    # Meta's llama, `save`; torchtune/training/checkpointing/_checkpointer.py.
    Layout(
        "Meta",
        (r"consolidated\.(?!00\.)\d+\.pth",),
        (Rule(r"consolidated\.(\d+)\.pth", Section.MODEL, r"consolidated/\1"),),
    ),
    Layout(
        "torchtune",
        (r"recipe_state\.pt", r"recipe_state"),
        (
            Rule(r"(?:recipe_state/)?recipe_state\.pt", Section.OTHER, "recipe_state"),
            Rule(r"((?:hf_|meta_)?model_\d+(?:_\d+)?)\.pt", Section.MODEL, r"\1"),
            Rule(r"(adapter_\d+)\.pt", Section.MODEL, r"\1"),
            Rule(r"(epoch_\d+)/model-0+1-of-0+1\.(?:bin|safetensors)", Section.MODEL, r"\1"),
            Rule(r"(epoch_\d+)/adapter_model\.(?:pt|bin)", Section.MODEL, r"\1_adapter"),
        ),
        weights="the model",
    ),
    # lightning/pytorch/trainer/connectors/checkpoint_connector.py; loggers/csv_logs.py.
    Layout(
        "Lightning",
        (r"hparams\.yaml", r"checkpoints"),
        (Rule(r"(?:checkpoints/)?(.+)\.ckpt", Section.OTHER, r"\1"),),
        is_several=False,
    ),
    # fairseq/checkpoint_utils.py, `save_checkpoint`.
    Layout(
        "fairseq",
        (r"checkpoint_(last|best)\.pt",),
        (Rule(r"(checkpoint[\w.-]*)\.pt", Section.OTHER, r"\1"),),
        is_several=False,
    ),
    # mmengine/hooks/checkpoint_hook.py.
    Layout(
        "MMEngine",
        (r"last_checkpoint",),
        (Rule(r"(.+)\.pth", Section.OTHER, r"\1"),),
        is_several=False,
    ),
    # ignite/handlers/checkpoint.py, `Checkpoint`.
    Layout(
        "ignite",
        (r"(\w+_)?checkpoint_\d+\.pt",),
        (Rule(r"(.+)\.pt", Section.OTHER, r"\1"),),
        is_several=False,
    ),
)

#: Files of training, not of the model; one of them makes the folder a training-folder.
_OF_TRAINING = tuple(
    rule.pattern
    for rule in (*ANY, *(rule for layout in LAYOUTS for rule in layout.rules))
    if rule.section in (Section.OPTIMIZER, Section.SCHEDULER, Section.RNG)
    and rule not in _DISTRIBUTED_OPTIMIZERS
)
#: `convert` writes `optimizer.pt` as `optimizer.pt.safetensors`.
_CONVERTED = re.compile(r"(.+\.(?:pt|pth|bin|ckpt|pkl))\.safetensors", re.DOTALL)
_OF_FSDP = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)")
_SUFFIX = re.compile(r"(\.(safetensors|bin|pt|pth|ckpt|pkl|tar|pt2|index\.json))+$")


class NameMeaning(NamedTuple):
    """The meaning of the name of a file or folder."""

    rank: int  #: of the rule: among names with the same keys, the lowest rank is preferred
    section: Section
    keys: Path
    is_known: bool  #: whether the name alone shows that it is a checkpoint


def layout_of(names: Collection[str]) -> Layout | None:
    """The layout of a folder, by the names directly in it."""
    return next((each for each in LAYOUTS if _any(each.marks, names)), None)


def layout_below(names: Collection[str]) -> tuple[str, Layout | None]:
    """The layout of a folder by all names in it, and where it begins: `state/` if all is in there.

    If the folder itself has a layout, the layout begins there. Otherwise it may begin in the
    innermost folder that has all files; `("", None)` if that has no layout either.
    """
    layout = layout_of(_right_in("", names))
    start = common_folder(names)
    inner = None if layout is not None or not start else layout_of(_right_in(start, names))
    return ("", layout) if inner is None else (start, inner)


def common_folder(names: Collection[str]) -> str:
    """The innermost folder that has all the files in it, with a final `/`; or an empty string."""
    folders = {tuple(name.split("/")[:-1]) for name in names} or {()}
    same = takewhile(lambda pair: pair[0] == pair[1], zip(min(folders), max(folders), strict=False))
    return "".join(f"{each}/" for each, _ in same)


def _right_in(folder: str, names: Collection[str]) -> set[str]:
    return {name.removeprefix(folder).partition("/")[0] for name in names}


def is_several(names: Collection[str]) -> bool:
    """Whether the names directly in a folder prove that it has more than one model's weights."""
    found = layout_of(names)
    return (found is not None and found.is_several) or _any(_OF_TRAINING, names)


def has_components(names: Collection[str]) -> bool:
    """Whether subfolders of a folder hold models."""
    return _any([rule.pattern for rule in _COMPONENTS], names)


def says(name: str, layout: Layout | None) -> NameMeaning:
    """The meaning of a name in a folder of this layout."""
    rules = (*(layout.rules if layout else ()), *ANY)
    name = before_convert(name)
    for rank, rule in enumerate(rules):
        match = re.fullmatch(rule.pattern, name)
        if match is not None:
            keys = _path(match.expand(rule.keys))
            return NameMeaning(rank, rule.section, keys, is_known="/" not in name)
    return NameMeaning(len(rules), Section.OTHER, (stem_of(name),), is_known=False)


def before_convert(name: str) -> str:
    """The original name of a file that `convert` wrote as safetensors."""
    match = _CONVERTED.fullmatch(name)
    return name if match is None else match[1]


def name_as_file(folder: str) -> str:
    """The name that the file would have if one rank had saved everything in this folder."""
    match = _OF_FSDP.fullmatch(folder)
    if match is None:
        return folder
    stem, number = match.groups()
    return f"{stem.removesuffix('_fsdp')}{'' if number == '_0' else number}.bin"


def stem_of(name: str) -> str:
    """A name without its checkpoint suffixes."""
    return _SUFFIX.sub("", name) or name


def _path(keys: str) -> Path:
    return tuple(map(_key, keys.split("/")))


def _key(text: str) -> Key:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _any(patterns: Iterable[str], names: Collection[str]) -> bool:
    one_of = re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.DOTALL)
    return any(one_of.fullmatch(before_convert(name)) for name in names)
