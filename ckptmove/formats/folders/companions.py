"""The files beside the checkpoints of a folder: configurations, states, and lists of files.

    *.json                         JSON, or a value on each line of it
    *.yaml, *.yml                  text of whole lines; the last that a person wrote may have no end
    trainer_state.json             an object: global_step is a number, log_history a list
    adapter_config.json            peft: the weights are in adapter_model.* beside it
    model_index.json               diffusers: {COMPONENT: [LIBRARY, CLASS], …}, a folder for each
    modules.json                   sentence-transformers: [{"path": FOLDER, "type": CLASS}, …]
    *.index.json                   its weight_map names files beside it
    latest, last_checkpoint        DeepSpeed, MMEngine: the name of a folder or file

Sources: transformers/trainer_callback.py (`TrainerState`), peft/config.py, diffusers'
pipelines/pipeline_utils.py (`save_pretrained`), sentence_transformers/SentenceTransformer.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cached_property
from typing import NamedTuple

from ...display.phrases import short
from ...errors import CorruptError, InputError
from ...sources.place import EntryKind, FolderEntry, folders_above
from ..safetensors.header import Json, read_json
from .training_folder import FolderCheckpoint
from .weight_names import usual_name

_MOST_NBYTES = 64 << 20  # the most bytes of a file; tokenizers are large
_LONGEST_CLASS = 200  # characters; the time of the patterns grows with the square of the length
_MOST_NAMED = 1 << 10  # the most bytes of a file that contains the name of another
_NAMING = ("latest", "last_checkpoint")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
#: A line of YAML without indentation, by its start or its key; brackets may hold other lines.
_YAML = re.compile(r"[\s#\]})%{\[]|-(?:\s|\Z)|---|\.\.\.")
_YAML_KEY = re.compile(r":(?:\s|\Z)")
_OBJECTS = (
    *("config.json", "generation_config.json", "trainer_state.json", "adapter_config.json"),
    *("model_index.json", "scheduler_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("preprocessor_config.json", "processor_config.json", "params.json"),
)
#: YAML files that only libraries write, with a newline at the end.
_YAML_OF_LIBRARIES = ("hparams.yaml",)
#: Components of a pipeline without weights, by their class, and the file that each has.
_WITHOUT_WEIGHTS = (
    (re.compile(r".*Scheduler\w*"), "scheduler_config.json"),
    (re.compile(r".*Tokenizer\w*"), "tokenizer_config.json"),
    (re.compile(r".*(FeatureExtractor|ImageProcessor)\w*"), "preprocessor_config.json"),
    (re.compile(r".*Processor\w*"), ""),
)
#: Modules of a sentence-transformer that have weights, and those that may have no file.
_WITH_WEIGHTS = (
    *("Transformer", "Dense", "CNN", "LSTM", "LayerNorm", "WeightedLayerPooling"),
    *("StaticEmbedding", "WordEmbeddings"),
)
_WITHOUT_FILES = ("Normalize", "Dropout")


#: Suffixes of the weights of other runtimes.
_OTHER_WEIGHTS = (".onnx", ".h5", ".msgpack", ".gguf", ".xml", ".tflite")


class Companions(NamedTuple):
    """The result of checking the files that are not checkpoints."""

    faults: list[str]
    not_checked: list[str]  #: names of files in a form that ckptmove does not know
    without_end: list[str]  #: names of user-written files whose last line may be cut short


def check_companions(found: FolderCheckpoint) -> Companions:
    """Check each configuration file of a folder; skip files in an unknown form."""
    faults, not_checked = list[str](), list[str]()
    folder = _Folder(found)
    for each in found.others:
        name = each.name.rpartition("/")[2]
        check = _check_of(name)
        if each.kind is EntryKind.FOLDER or (each.kind is EntryKind.FOLDER_LINK and check is None):
            continue
        if check is None:
            not_checked.append(each.name)
            continue
        try:
            content = found.read_other(each, _MOST_NBYTES)
            faults += (f"{each.name}: {fault}" for fault in check(content, each, folder))
        except InputError as error:
            faults.append(f"{each.name}: {error}")
    return Companions(faults, not_checked, folder.without_end)


class _Folder:
    """The names in a folder, and those of its checkpoints."""

    def __init__(self, found: FolderCheckpoint) -> None:
        self.files = {each.name for each in found.others if each.kind is EntryKind.FILE}
        self.parts = {each.name for each in found.parts}
        self.unread = {each.name for each in found.not_looked_at}
        self._names = self.files | self.parts | self.unread | set(found.source_names)
        self._folders = {folder for name in self._names for folder in folders_above(name)}
        self.without_end = list[str]()  # filled as files are checked
        self._weights = dict[str, bool]()  # the folders that were asked about so far

    def has(self, name: str) -> bool:
        """Whether a file exists, or a folder with files in it."""
        return name in self._names or self.has_files_in(name)

    def has_files_in(self, folder: str) -> bool:
        return folder in self._folders

    def has_weights_in(self, folder: str) -> bool:
        """Whether a folder has a checkpoint.

        For the top folder "", only files directly in it count.
        """
        if folder not in self._weights:
            self._weights[folder] = self._find_weights(folder)
        return self._weights[folder]

    def _find_weights(self, folder: str) -> bool:
        start = f"{folder}/" if folder else ""
        names = (*self.parts, *self.unread, *self.files)
        found = [name.removeprefix(start) for name in names if name.startswith(start)]
        if any(name.endswith(_OTHER_WEIGHTS) for name in found):
            return True
        found = [name for name in found if start + name not in self.files]
        return any(folder or "/" not in name for name in found)

    @cached_property
    def configured(self) -> Set[str]:
        """The folders with a configuration in them or below them."""
        names = (name for name in self.files if name.endswith("config.json"))
        return {folder for name in names for folder in folders_above(name)}


_Check = Callable[[bytes, FolderEntry, _Folder], Iterator[str]]


def _check_of(name: str) -> _Check | None:
    if name.endswith(".json"):
        return _json_faults
    if name.endswith((".yaml", ".yml")):
        return _yaml_faults
    return _named_faults if name in _NAMING else None


def _json_faults(content: bytes, entry: FolderEntry, folder: _Folder) -> Iterator[str]:
    inside, _, name = entry.name.rpartition("/")
    try:
        said = read_json(content, "it", constants=True)
    except CorruptError:
        if not content.strip() or name in (*_OBJECTS, "modules.json") or not _are_lines(content):
            raise
        return
    if name in _OBJECTS and not isinstance(said, dict):
        yield "it is not an object of JSON"
        return
    if isinstance(said, dict) and isinstance(said.get("weight_map"), dict):
        files = dict.fromkeys(each for each in said["weight_map"].values() if type(each) is str)
        yield from (
            f"it names {short(f)}, which is missing" for f in files if not _is(f, inside, folder)
        )
    if name in _STRUCTURES:
        yield from _STRUCTURES[name](said, inside, folder)


def _is(file: str, inside: str, folder: _Folder) -> bool:
    return folder.has(f"{inside}/{file}" if inside else file)


def _are_lines(content: bytes) -> bool:
    """Whether each line is a JSON value, as in the logs of MMEngine and others."""
    lines = [line for line in content.splitlines() if line.strip()]
    try:
        for line in lines:
            read_json(line, "it", constants=True)
    except CorruptError:
        return False
    return len(lines) > 1


def _trainer_state_faults(said: Json, inside: str, folder: _Folder) -> Iterator[str]:
    del inside, folder
    if type(said.get("global_step")) is not int:
        yield "its global_step is not a number"
    if not isinstance(said.get("log_history", []), list):
        yield "its log_history is not a list"


def _adapter_faults(said: Json, inside: str, folder: _Folder) -> Iterator[str]:
    if not isinstance(said.get("peft_type"), str):
        yield "its peft_type is not told"
    names = (each.rpartition("/") for each in (*folder.parts, *folder.unread))
    own = (name for within, _, name in names if within == inside)
    if not any((known := usual_name(n)) and known.stem.startswith("adapter_model") for n in own):
        yield "the weights of the adapter, adapter_model.safetensors, are missing"


def _pipeline_faults(said: Json, inside: str, folder: _Folder) -> Iterator[str]:
    for name, what in said.items():
        if name.startswith("_") or not _is_component(what):
            continue
        where, kind = f"{inside}/{name}" if inside else name, what[1][-_LONGEST_CLASS:]
        known = next((file for each, file in _WITHOUT_WEIGHTS if each.fullmatch(kind)), None)
        if not folder.has_files_in(where):
            file = f"{where}/{known}" if known else where
            yield f"{file} is missing, its component {short(name)}"
        elif known is None and not folder.has_weights_in(where):
            yield f"the weights of its component {short(name)} are missing"
        elif known != "" and not folder.has(f"{where}/{known or 'config.json'}"):
            yield f"{where}/{known or 'config.json'} is missing"


def _is_component(what: object) -> bool:
    return isinstance(what, list) and len(what) == 2 and all(type(each) is str for each in what)


def _modules_faults(said: Json, inside: str, folder: _Folder) -> Iterator[str]:
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        yield "it is not a list of modules"
        return
    for each in said:
        path, kind = each.get("path"), each.get("type")
        if type(path) is not str or type(kind) is not str:
            yield "it does not give the path and the type of each module"
            return
        kind = kind.rpartition(".")[2]
        path = path.strip("/")
        where = "/".join(filter(None, (inside, path)))
        if path and not folder.has_files_in(where):
            if kind not in _WITHOUT_FILES:
                yield f"its module {short(path)} is missing"
        elif kind in _WITH_WEIGHTS and not folder.has_weights_in(where):
            yield f"the weights of its module {short(path or kind)} are missing"
        elif path and kind not in _WITHOUT_FILES and where not in folder.configured:
            yield f"{where}/config.json is missing"


_STRUCTURES: Mapping[str, Callable[[Json, str, _Folder], Iterator[str]]] = {
    "trainer_state.json": _trainer_state_faults,
    "adapter_config.json": _adapter_faults,
    "model_index.json": _pipeline_faults,
    "modules.json": _modules_faults,
}


def _yaml_faults(content: bytes, entry: FolderEntry, folder: _Folder) -> Iterator[str]:
    text = _text(content)
    if not text.strip():
        yield "it is empty"
        return
    lines = text.splitlines()
    strange = (n for n, each in enumerate(lines, 1) if not _is_yaml(each))
    first = next(strange, None)
    if text.endswith("\n"):
        if first is not None:
            yield f"its line {first:,} is not YAML"
    elif first == len(lines) or entry.name.rpartition("/")[2] in _YAML_OF_LIBRARIES:
        yield "its last line is cut short"
    elif first is not None:
        yield f"its line {first:,} is not YAML"
    else:
        folder.without_end.append(entry.name)


def _is_yaml(line: str) -> bool:
    return not line or bool(_YAML.match(line) or _YAML_KEY.search(line))


def _named_faults(content: bytes, entry: FolderEntry, folder: _Folder) -> Iterator[str]:
    """Check a file that contains the name of a file beside it."""
    if len(content) > _MOST_NAMED:
        yield "it is too long for a name"
        return
    name = _text(content).strip().rpartition("/")[2]
    if not name:
        yield "it is empty"
    elif not _is(name, entry.name.rpartition("/")[0], folder):
        yield f"it names {short(name)}, which is missing"


def _text(content: bytes) -> str:
    if _CONTROL.search(content):
        raise CorruptError("it is not text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError("it is not text in UTF-8") from error
