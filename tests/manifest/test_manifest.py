"""What a manifest adds up to, and what it says of everything beside the tensors."""

from __future__ import annotations

import _compat_pickle
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckptmove import CorruptError, Manifest, inspect
from ckptmove.torch_pickle.callables.allowlist import KNOWN
from tests.making.checkpoints import MAKERS, kept_on_cpu, rezip, save
from tests.oracles.census import children
from tests.oracles.readers import load, pid_locations, storage_records


def inspected(name: str, folder: Path, tag: str = "cuda:0", **options: Any) -> Manifest:
    """The manifest of a maker's file, as training on a device saves it."""
    saved = MAKERS[name]()
    return inspect(save(folder / "made.pt", saved, tag, keep_cpu=kept_on_cpu(saved), **options))


# -- values, objects, names --------------------------------------------------------------------


def device_values(node: object, path: tuple[object, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Paths of the strings and `torch.device`s that name a device."""
    names = ("cpu", "cuda", "cuda:0", "cuda:1", "cpu:0", "mps", "mps:0", "xpu:0")
    if isinstance(node, torch.device) or (isinstance(node, str) and node in names):
        yield path, str(node)
    elif not isinstance(node, torch.Tensor):
        for keys, child in children(node):
            yield from device_values(child, (*path, *keys))


@pytest.mark.parametrize(
    "name",
    [
        *("device_values", "adamw_training", "cpu_string_first", "cpu_string_last", "strings"),
        *("cpu_key_between", "whole_tied_module", "rng_state_file", "no_tensors", "sgd"),
    ],
)
def test_the_users_values_that_name_devices_are_listed(name: str, tmp_path: Path) -> None:
    manifest = inspected(name, tmp_path, "cpu")
    listed = [(value.path, value.value) for value in manifest.values_naming_devices]
    assert listed == list(device_values(load(tmp_path / "made.pt", weights_only=False)))


def test_a_value_knows_whether_it_is_a_string(tmp_path: Path) -> None:
    saved = {"text": "cuda:0", "value": torch.device("cuda", 0), "kind": torch.device("cuda")}
    listed = inspect(save(tmp_path / "made.pt", saved)).values_naming_devices
    assert [(each.name, each.value, each.kind) for each in listed] == [
        ("text", "cuda:0", "str"),
        ("value", "cuda:0", "torch.device"),
        ("kind", "cuda", "torch.device"),
    ]


def test_words_that_only_look_like_devices_are_not_listed(tmp_path: Path) -> None:
    words = ["meta", "gpu", "cuda_0", "cuda:x", "cuda0", "CPU", "cpus", "a cpu", "storage", ""]
    assert inspect(save(tmp_path / "made.pt", [*words, torch.ones(1)])).values_naming_devices == ()


@pytest.mark.parametrize(
    ("name", "objects"),
    [
        ("linear_state_dict", {}),
        ("device_values", {"torch.device": 6, "tests.making.objects.Settings": 1}),
        ("collections_kinds", {f"collections.{c}": 1 for c in ("defaultdict", "Counter", "deque")}),
        (
            "whole_tied_module",
            {
                "tests.making.modules.TiedNet": 1,
                "torch.nn.modules.sparse.Embedding": 1,
                "torch.nn.modules.linear.Linear": 1,
                "torch.device": 1,
            },
        ),
    ],
)
def test_objects_are_counted_by_kind(name: str, objects: dict[str, int], tmp_path: Path) -> None:
    assert inspected(name, tmp_path).objects == objects


class Recorder(pickle.Unpickler):
    """CPython's own unpickler: which names does it look up?"""

    names: list[str]

    def find_class(self, module: str, name: str) -> type:
        """Note the name as Python 3 would look it up; import nothing."""
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        self.names.append(f"{module}.{name}")
        return type(name, (Stub,), {})

    def persistent_load(self, pid: object) -> object:
        """A storage."""
        return Stub()


class Stub:
    """Takes whatever a pickle does to an object."""

    def __new__(cls, *_: object, **__: object) -> Stub:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, item: object) -> None: ...
    def add(self, item: object) -> None: ...


def looked_up(path: Path) -> list[str]:
    """The names that unpickling a checkpoint looks up, each once."""
    with zipfile.ZipFile(path) as archive, archive.open("made/data.pkl") as file:
        recorder = Recorder(file)
        recorder.names = []
        recorder.load()
        return list(dict.fromkeys(recorder.names))


@pytest.mark.sample(101)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_every_name_that_unpickling_looks_up_is_listed(
    name: str, protocol: int, tmp_path: Path
) -> None:
    manifest = inspected(name, tmp_path, pickle_protocol=protocol)
    assert list(manifest.globals) == looked_up(tmp_path / "made.pt")
    assert set(manifest.unknown_callables) == set(manifest.globals) - KNOWN


def test_what_weights_only_lets_in_is_known() -> None:
    assert set(_get_allowed_globals()) - KNOWN == set()


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__", "open", "compile"])
def test_what_could_do_harm_is_not_known(name: str) -> None:
    assert f"builtins.{name}" not in KNOWN


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("adamw_training", []),
        ("collections_kinds", []),
        ("dtensor_state_dict", []),
        ("numpy_values", []),
        ("sets", []),
        ("generator", []),
        ("nested_jagged", []),
        ("tensor_subclass", ["tests.making.subclasses.NamedTensor"]),
    ],
)
def test_callables_are_unknown_unless_harmless(
    name: str, unknown: list[str], tmp_path: Path
) -> None:
    assert list(inspected(name, tmp_path).unknown_callables) == unknown


# -- totals and judgement ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_totals_count_each_storage_once(name: str, tmp_path: Path) -> None:
    manifest = inspected(name, tmp_path)
    path = tmp_path / "made.pt"
    nbytes = {i.filename.partition("data/")[2]: i.file_size for i in storage_records(path)}
    by_device: dict[str, list[int]] = {}
    for key, location in dict(pid_locations(path)).items():
        by_device.setdefault(location, []).append(nbytes[key])
    for device, sizes in by_device.items():
        total = manifest.devices[device]
        assert (total.storages, total.nbytes) == (len(sizes), sum(sizes))
    for totals in (manifest.devices, manifest.sections, manifest.dtypes):
        assert sum(total.nbytes for total in totals.values()) == sum(nbytes.values())
        assert sum(total.storages for total in totals.values()) == len(nbytes)
        whole = [entry for entry in manifest.tensors if entry.part_of is None]
        assert sum(total.tensors for total in totals.values()) == len(whole)
        sizes = [total.nbytes for total in totals.values()]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("saved", "tags", "verdict"),
    [
        (None, {}, "no tensors"),
        ([torch.ones(2)], {}, "uniform cuda:0"),
        ([torch.empty(2, device="meta")], {}, "uniform meta"),
        ([torch.ones(3), torch.ones(1)], {4: "cpu"}, "mixed: cuda:0 75.0 %, cpu 25.0 %"),
        ([torch.ones(999), torch.ones(1)], {4: "mps"}, "mixed: cuda:0 99.9 %, mps 0.1 %"),
        ([torch.ones(2000), torch.ones(1)], {4: "mps"}, "mixed: cuda:0 99.9 %, mps <0.1 %"),
    ],
)
def test_the_verdict_is_one_line(
    saved: object, tags: dict[int, str], verdict: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "made.pt", saved, lambda s: tags.get(s.nbytes(), "cuda:0"))
    assert inspect(path).verdict == verdict


def test_the_verdict_explains_what_torch_keeps_on_the_cpu(tmp_path: Path) -> None:
    assert inspected("adamw_weights_only", tmp_path).verdict == (
        "mixed: cpu 90.1 % (6 optimizer steps, 1 RNG state), cuda:0 9.9 %"
    )
    assert inspected("adam_mixed_capturable", tmp_path).verdict == (
        "mixed: cuda:0 98.6 %, cpu 1.4 % (1 optimizer step)"
    )


def test_the_verdict_explains_nothing_that_a_plain_tensor_shares(tmp_path: Path) -> None:
    saved = {"rng": torch.get_rng_state(), "weight": torch.ones(1264)}
    path = save(tmp_path / "made.pt", saved, lambda s: "cpu")
    assert inspect(path).verdict == "uniform cpu"
    saved["other"] = torch.ones(2528)
    path = save(tmp_path / "made.pt", saved, lambda s: "cuda:0" if s.nbytes() > 10000 else "cpu")
    assert inspect(path).verdict == "mixed: cpu 50.0 %, cuda:0 50.0 %"


def test_elsewhere_is_what_does_not_belong(tmp_path: Path) -> None:
    manifest = inspected("adamw_weights_only", tmp_path)
    assert manifest.elsewhere("cuda:0") == ()
    assert len(manifest.elsewhere("cuda:1")) == 9 + 12
    assert {entry.device for entry in manifest.elsewhere("cpu")} == {"cuda:0"}
    moments = {entry.name for entry in manifest.elsewhere("cpu") if entry.section == "optimizer"}
    assert moments == {f"optimizer.state.{n}.exp_avg{m}" for n in range(6) for m in ("", "_sq")}


def test_select_takes_sections(tmp_path: Path) -> None:
    """Also where no name is that of the section."""
    path = tmp_path / "it.pt"
    torch.save({"net": {"w": torch.ones(2)}, "net_ema": {"w": torch.ones(2)}, "x": 1}, path)
    found = inspect(path)
    assert set(found.sections) == {"model", "ema"}
    for section in found.sections:
        (entry,) = found.select(section).tensors
        assert entry.section == section
        assert [each.name for each in inspect(path, select=section).tensors] == [entry.name]


def test_select_keeps_what_matches_and_counts_anew(tmp_path: Path) -> None:
    whole = inspected("adamw_training", tmp_path)
    part = whole.select(["model.head.*", "args.dev*"])
    assert [entry.name for entry in part.tensors] == ["model.head.weight", "model.head.bias"]
    assert set(part.storages) == {entry.storage for entry in part.tensors}
    assert part.verdict == "uniform cuda:0"
    assert [total.nbytes for total in part.devices.values()] == [(6 + 2) * 4]
    names = [value.name for value in part.values_naming_devices]
    assert names == ["args.device", "args.devices.0", "args.devices.1"]
    assert len(whole.tensors) == 29


def test_a_star_matches_dots_and_brackets_match_a_class(tmp_path: Path) -> None:
    manifest = inspected("adamw_training", tmp_path)
    assert len(manifest.select(["*"]).tensors) == len(manifest.tensors)
    assert len(manifest.select(["*.state.[01].*"]).tensors) == 6
    assert len(manifest.select(["MODEL.*"]).tensors) == 0
    assert manifest.select([]).tensors == ()


@pytest.mark.parametrize("name", MAKERS)
def test_json_is_as_designed(name: str, tmp_path: Path) -> None:
    manifest = inspected(name, tmp_path)
    said = manifest.to_json()
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert (said["schema"], said["path"]) == (1, str(tmp_path / "made.pt"))
    assert said["format"] == "torch-zip"
    assert said["nbytes"] == (tmp_path / "made.pt").stat().st_size
    for key in ("devices", "sections", "dtypes"):
        assert all(set(total) == {"tensors", "storages", "nbytes"} for total in said[key].values())
    assert set(said) >= {"objects", "values_naming_devices", "warnings"}
    assert len(said["tensors"]) == len(manifest.tensors)
    for entry in said["tensors"]:
        assert set(entry) >= {
            *("name", "path", "section", "dtype", "shape", "stride", "device", "nbytes"),
            *("storage", "shared_with", "requires_grad"),
        }
        of_modules = ("_modules", "_parameters", "_buffers")  # are not in names, as in state dicts
        keys = [str(key) for key in entry["path"] if key not in of_modules]
        assert entry["name"] == (".".join(keys) or "(root)") or None in entry["path"]
    for value in said["values_naming_devices"]:
        assert set(value) >= {"path", "value"}


@pytest.mark.parametrize(
    "made",
    [
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        torch.ones(3, dtype=torch.uint16),  # which names its dtype
        {"several": [torch.ones(3), torch.zeros(3)]},
    ],
    ids=["plain", "grad", "parameter", "buffer", "quantized", "v3", "several"],
)
def test_a_tensor_that_reaches_outside_its_storage_is_refused(made: Any, tmp_path: Path) -> None:
    """Its size is one more than was saved; its storage is as it was."""
    path, bad = save(tmp_path / "made.pt", made), tmp_path / "bad.pt"
    assert inspect(path).tensors
    size = b"K\3\x85"  # (3,)
    rezip(path, bad, lambda _: False, lambda data: data.replace(size, b"K\4\x85"))
    with pytest.raises(CorruptError, match="a tensor reaches outside its storage"):
        inspect(bad)
