"""Whatever unpickling a file would run: no verb runs it, `inspect` lists it, `strict` refuses it.

What a file would run is not for us to say: torch and pickle load each of them, in a process of its
own, and whether something ran is what counts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copyreg
import datetime
import decimal
import fractions
import importlib
import io
import itertools
import json
import pathlib
import pickle
import re
import struct
import sys
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.package.package_exporter import PackageExporter

import ckptmove
from ckptmove import CheckFailed, CkptmoveError, CorruptError, InputError, UntrustedError
from ckptmove.batches.options import VerbName
from ckptmove.pickles.opcodes.machine import Machine
from ckptmove.torch_pickle.callables.allowlist import KNOWN
from ckptmove.torch_pickle.callables.uses import not_surely_harmless
from tests.conftest import some
from tests.making.bombs import zipped
from tests.making.carriers import CARRIERS, FOLDERS, runs
from tests.making.payload_families import FAMILIES, LASTING, OF_OLD
from tests.making.payloads import CANARY, LEGACY, Family, called, given, legacy_of, name, text

Verb = Callable[[bool], object]
#: Where the payload of hardly any family fits, or nothing is run by Python.
_RARE = {"tar, named": 3, "script": 0}


class Case(NamedTuple):
    """A file with a payload.

    Attributes:
        family, carrier: what it is made of.
        path: what is handed to the verbs.
        runs: whether to load it runs the payload.
    """

    family: str
    carrier: str
    path: Path
    runs: bool

    def __str__(self) -> str:
        return f"{self.family} in {self.carrier}"


PAIRS = list(itertools.product(FAMILIES, CARRIERS))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """A file of each family in each carrier."""
    return made(PAIRS, tmp_path_factory)


@pytest.fixture(scope="module")
def few_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Each family in a few carriers, in turn."""
    turns = [pair for n, pair in enumerate(PAIRS) if not (n + n // len(CARRIERS)) % 17]
    return made(turns, tmp_path_factory)


def made(pairs: Sequence[tuple[str, str]], making: pytest.TempPathFactory) -> list[Case]:
    """A file of each family in that carrier, and whether loading it runs something."""
    folder = making.mktemp("payloads")
    found, loaded = list[tuple[str, str, Path]](), list[tuple[Path, bool]]()
    for family, carrier in pairs:
        own = folder / str(len(found))
        own.mkdir()
        files = CARRIERS[carrier](FAMILIES[family])
        for file, data in files.items():
            (own / file).write_bytes(data)
        first = own / next(iter(files))
        whole = own if carrier in FOLDERS else first
        whole = own / list(files)[-1] if carrier == "sharded" else whole
        found.append((family, carrier, whole))
        loaded.append((own / "2.bin" if carrier == "sharded" else first, family in LASTING))
    ran = runs(loaded, making.mktemp("ran"))
    return [Case(*each, did) for each, did in zip(found, ran, strict=True)]


class Watch:
    """What Python's audit tells of unpickling, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.found: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Note a name that an unpickler looks up, or what most payloads do."""
        looked_up = event == "pickle.find_class"
        if self.on and (looked_up or (event == "os.mkdir" and Path(args[0]).name == CANARY)):
            self.found.append(f"{event} {args!r:.200}")


_WATCH = Watch()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, in which nothing is run and made."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _WATCH.found.clear()
    _WATCH.on = True
    yield tmp_path
    _WATCH.on = False
    assert _WATCH.found == []
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_the_payloads_run(cases: list[Case]) -> None:
    families, carriers = Counter[str](), Counter[str]()
    for case in cases:
        families[case.family] += case.runs
        carriers[case.carrier] += case.runs
    idle = [family for family in FAMILIES if not families[family]]
    assert not idle
    assert len(families) >= 60
    scarce = {key: count for key, count in carriers.items() if count < _RARE.get(key, 100)}
    assert not scarce


def test_the_watch_sees_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _WATCH.found.clear()
    _WATCH.on = True
    pickle.loads(FAMILIES["a function"].beside(b""))
    _WATCH.on = False
    assert {each.partition(" ")[0] for each in _WATCH.found} == {"pickle.find_class", "os.mkdir"}


@pytest.mark.slow
def test_inspect_lists_what_would_run(cases: list[Case], watched: Path) -> None:
    unseen = []
    for case in cases:
        try:
            seen = bool(ckptmove.inspect(case.path).unknown_callables)
        except InputError:
            continue
        if case.runs and not seen:
            unseen.append(str(case))
    assert not unseen


def _refuses(verb: Verb, *, strict: bool) -> bool:
    """Whether a verb refuses its input, or says that it failed a check."""
    try:
        verb(strict)
    except (InputError, CheckFailed):
        return True
    except CkptmoveError as error:
        if strict or error.exit_code != 4:
            raise
    return False


@pytest.mark.slow
def test_relocate_refuses_them_all(cases: list[Case], watched: Path) -> None:
    def relocate(path: Path) -> Verb:
        return lambda strict: ckptmove.relocate(path, watched / "x", to="cpu", strict=strict)

    passed = [
        str(case) for case in cases if case.runs and not _refuses(relocate(case.path), strict=True)
    ]
    assert not passed
    assert not (watched / "x").exists()


def _verbs(path: Path, plain: Path, out: Path) -> list[Verb]:
    return [
        lambda strict: ckptmove.relocate(path, out / "r", to="meta", force=True, strict=strict),
        lambda strict: ckptmove.convert(path, out / "c.safetensors", force=True, strict=strict),
        lambda strict: ckptmove.inspect(path, strict=strict),
        lambda strict: ckptmove.load(path, map_location="cpu", strict=strict),
        lambda strict: ckptmove.diff(path, plain, strict=strict),
        lambda strict: ckptmove.diff(plain, path, strict=strict),
        lambda strict: ckptmove.validate(path, strict=strict).raise_if_failed(),
        lambda strict: ckptmove.validate(plain, against=path, strict=strict).raise_if_failed(),
    ]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint that runs nothing."""
    (tmp_path / "out").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "out" / "plain.pt")
    return tmp_path / "out" / "plain.pt"


def test_no_verb_runs_them(few_cases: list[Case], watched: Path, plain: Path) -> None:
    passed = []
    for case in some([case for case in few_cases if case.runs], 20):
        for number, verb in enumerate(_verbs(case.path, plain, watched / "out")):
            if not _refuses(verb, strict=True):
                passed.append(f"{case}, verb {number}")
            _refuses(verb, strict=False)
    assert not passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["inspect", "relocate", "convert", "validate"])
def test_no_batch_runs_them(verb: VerbName, few_cases: list[Case], watched: Path) -> None:
    tree = watched / "tree"
    for n, case in enumerate(few_cases):
        if n % 2 == 0 and case.runs and case.path.is_file() and case.carrier != "sharded":
            (tree / str(n)).mkdir(parents=True)
            (tree / str(n) / case.path.name).symlink_to(case.path)
    options: dict[str, Any] = {"to": "meta"} if verb == "relocate" else {}
    for strict in (True, False):
        writes = verb != "inspect"
        copied = strict and writes and verb != "validate"
        with ThreadPoolExecutor(1) as executor:
            to = watched / f"out {strict}" if writes else None
            batch = ckptmove.batch(
                verb,
                tree,
                to,
                executor=executor,
                copy_rest=copied,
                **options | {"strict": strict},
            )
            outcomes = Counter(result.outcome for result in batch)
        assert outcomes
        assert not strict or not outcomes.keys() & {"done", "copied"}, outcomes


@pytest.mark.parametrize("family", OF_OLD)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_only_other_versions_run(family: str, carrier: str, watched: Path) -> None:
    files = CARRIERS[carrier](OF_OLD[family])
    for file, data in files.items():
        (watched / file).write_bytes(data)
    path = watched if carrier in FOLDERS else watched / list(files)[-1]
    if carrier in ("tar, named", "script"):
        pytest.skip("it does not fit, or libtorch reads it")
    with contextlib.suppress(InputError):
        assert ckptmove.inspect(path).unknown_callables


@pytest.mark.parametrize("kind", ["pickle", "torch-zip", "cut"])
def test_records_that_torch_passes_over_are_looked_into(kind: str, tmp_path: Path) -> None:
    """Whoever put them there may load them, as libraries do that add files to a zip of torch."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1)}, path)
    evil = b"\x80\2}X\1\0\0\0acos\nsystem\nX\4\0\0\0true\x85Rs."
    held = {"pickle": evil, "torch-zip": zipped(evil), "cut": evil[:-1]}[kind]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/extra/more.pkl", held)
    assert ckptmove.inspect(path).unknown_callables == ("os.system",)
    with pytest.raises(UntrustedError, match=r"os\.system"):
        ckptmove.inspect(path, strict=True)


def test_records_that_are_not_looked_into_may_hold_anything(tmp_path: Path) -> None:
    """One that is compressed too tightly to be inflated, and a zip that contradicts itself."""
    path, evil = tmp_path / "x.pt", FAMILIES["a function"].beside(b"")
    broken = zipped(evil).replace(b"archive/data.pkl", b"archive/data.PKL", 1)
    for held in (evil.ljust(4 << 20, b"\0"), broken):
        torch.save({"w": torch.ones(1)}, path)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x/extra/more.pkl", held)
        assert ckptmove.inspect(path).unknown_callables == ("(in the record 'extra/more.pkl')",)


@pytest.mark.slow
def test_records_of_very_many_pickles_are_not_all_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand that follow others are, of all records together: the rest may hold anything."""
    path, walks = tmp_path / "x.pt", list[int]()
    for content in (b"N.", b"\x80\2N."):
        torch.save({"w": torch.ones(1)}, path)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            for n in range(4):
                archive.writestr(f"x/more{n}", content * 4000)
        run, walks = Machine.run, list[int]()
        monkeypatch.setattr(Machine, "run", lambda self, r=run, w=walks: (w.append(1), r(self))[1])
        found = ckptmove.inspect(path).unknown_callables
        monkeypatch.undo()
        assert found[-1] == "(in the record 'more3')"
        assert len(walks) <= 10_010


def test_zips_within_records_are_opened_eight_deep(tmp_path: Path) -> None:
    path, held = tmp_path / "x.pt", b""
    for _ in range(300):
        torch.save({"w": torch.ones(1)}, path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x/more", held)
        held = path.read_bytes()
    assert ckptmove.inspect(path).unknown_callables == ("(in the record 'more')",)


@pytest.mark.parametrize(
    ("file", "payload"),
    [
        ("opaque_obj_0", {"use_pickle": False}),
        ("tensor_0", {"use_pickle": True, "tensor_meta": None}),
    ],
)
def test_constants_of_a_program_that_torch_unpickles(
    file: str, payload: dict[str, object], tmp_path: Path
) -> None:
    """By its name, whatever its description says it is; and by that, without any of a tensor."""
    path = tmp_path / "x.pt2"
    made = CARRIERS["program"](FAMILIES["a function"])["x.pt2"]
    sizes = {"sizes": [{"as_int": 8}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}}
    device = {"type": "cpu", "index": None}
    meta = {"dtype": 1, **sizes, "device": device, "layout": 7, "requires_grad": False}
    with zipfile.ZipFile(io.BytesIO(made)) as old, zipfile.ZipFile(path, "w") as new:
        for each in old.namelist():
            content = old.read(each)
            if each.endswith("constants_config.json"):
                described = {"path_name": file, "is_param": False, "tensor_meta": meta, **payload}
                content = json.dumps({"config": {"x": described}}).encode()
            new.writestr(each.replace("opaque_obj_0", file), content)
    assert ckptmove.inspect(path).unknown_callables == ("os.mkdir",)


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_beside_the_object_a_legacy_file_holds_no_names(at: int, tmp_path: Path) -> None:
    """Not even harmless ones: torch writes none."""
    for fragment, harmless in ((called(name("collections", "OrderedDict")), False), (b"N", True)):
        pickled = Family(fragment).within(LEGACY[at], b"0.")
        (tmp_path / "x.pt").write_bytes(legacy_of(at, pickled))
        if harmless:
            assert ckptmove.inspect(tmp_path / "x.pt").format == "torch-legacy"
            continue
        with pytest.raises(CorruptError, match=r"names 'collections\.OrderedDict', which torch"):
            ckptmove.inspect(tmp_path / "x.pt")


_NAMESPACE = called(name("argparse", "Namespace"))
_EMPTY = dict.fromkeys(
    ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"), b"}"
)
_FLATTEN = name("torch.nn.modules.flatten", "Flatten") + b")\x81"
_FLATTEN = given(_FLATTEN, start_dim=text("cpu"), end_dim=b"](K\0e", **_EMPTY)
#: `Flatten` hands it two values of the file's choice.
_MESH = given(_NAMESPACE, flatten=name("torch.distributed.device_mesh", "DeviceMesh"))
CALLING = {
    "append": given(_NAMESPACE, append=_FLATTEN) + _MESH + b"a",
    "extend": given(_NAMESPACE, extend=_FLATTEN) + b"(" + _MESH + b"e",
    "add": given(_NAMESPACE, add=_FLATTEN) + b"(" + _MESH + b"\x90",
    "keys": called(name("builtins", "dict"), given(_NAMESPACE, keys=_FLATTEN)),
    "keys in the state": given(
        _NAMESPACE, a=called(name("collections", "OrderedDict"), given(_NAMESPACE, keys=_FLATTEN))
    ),
    "text": called(name("builtins", "str"), given(_NAMESPACE, _get_args=_FLATTEN)),
    "replace": called(name("uuid", "UUID"), given(_NAMESPACE, replace=_FLATTEN)),
    "detach": called(name("torch.nn.parameter", "Parameter"), given(_NAMESPACE, detach=_FLATTEN)),
    "detach, reconstructed": called(
        name("torch.nn.parameter", "Parameter"),
        given(
            called(
                name("copyreg", "_reconstructor"),
                name("argparse", "Namespace"),
                name("builtins", "object"),
                b"N",
            ),
            detach=_FLATTEN,
        ),
    ),
}


@pytest.mark.parametrize("what", CALLING)
def test_attributes_that_unpickling_calls_are_unknown(what: str, tmp_path: Path) -> None:
    """All names are known; a module that is called runs its `forward`, and that what it likes."""
    path, ran = tmp_path / "x.pkl", list[object]()
    path.write_bytes(Family(CALLING[what], 4).beside(b""))
    assert ckptmove.inspect(path).unknown_callables
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: ran.append(module)
    )
    with hook, contextlib.suppress(Exception):
        pickle.loads(path.read_bytes())
    assert ran


def test_a_line_of_text_as_long_as_the_file(tmp_path: Path) -> None:
    """A header whose length starts like UNICODE may be followed by no newline, or one far away."""
    for data, refused in ((b"", False), (b"\n" + b"0cos\nmkdir\n(V" + b"canary\ntR.", True)):
        filled = data.rjust(3 << 20, b"\0")
        entry = {"dtype": "U8", "shape": [len(filled)], "data_offsets": [0, len(filled)]}
        header = json.dumps({"w": entry}).encode().ljust(0x100 + ord("V"))
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + filled)
        if refused:
            with pytest.raises(CorruptError, match=r"it would run 'os\.mkdir'"):
                ckptmove.inspect(path)
        else:
            assert ckptmove.inspect(path).tensors[0].nbytes == len(filled)


def test_a_package_may_bring_modules_of_known_names(tmp_path: Path) -> None:
    """`collections` of the package is not that of Python."""
    source = "open('canary', 'w').close()\nfrom builtins import dict as OrderedDict\n"
    path, made = tmp_path / "x.pt", called(name("collections", "OrderedDict"))
    with PackageExporter(path) as exporter:
        exporter.save_source_string("collections", source)
        exporter.save_binary("model", "data.pkl", b"\x80\x02" + made + b".")
    assert ckptmove.inspect(path).unknown_callables == ("collections.OrderedDict",)


class Tagged(torch.Tensor):
    """A tensor that is rebuilt from its type."""


class Old:
    """A class that protocol 1 reconstructs."""

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (argparse.Namespace, object, None), {"a": 1}  # type: ignore[attr-defined]


def ordinary() -> dict[str, Any]:
    """What checkpoints are made of, by names that are harmless as they are used."""
    fields = np.dtype([("a", "f4"), ("b", "O"), ("c", [("d", "i8")], (2,))])
    return {
        "bytes": b"\x00\xff" * 9,
        "bytes like a pickle": pickle.dumps({"a": list(range(99))}, 4),
        "bytearray": bytearray(b"\x00\xff"),
        "empty": (b"", bytearray(), "", (), frozenset()),
        "generator": np.random.default_rng(1).bit_generator.state,
        "numbers": (np.float32(1.5), np.int64(2), np.float64("nan"), np.bool_(True)),
        "times": (np.datetime64("2020-01-01"), np.array(["2020"], "M8[D]")),
        "structured": np.zeros(2, fields),
        "objects": np.array([None, "a", [1]], object),
        "texts": np.array(["a", "b"]),
        "classes": (dict, str, float, pathlib.PurePosixPath, np.float32, torch.float16),
        "containers": (
            collections.defaultdict(list, a=[1]),
            collections.Counter("aab"),
            collections.deque([1], 3),
            collections.OrderedDict(a=1),
        ),
        "values": (
            datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
            decimal.Decimal("1.5"),
            fractions.Fraction(1, 3),
            uuid.UUID(int=3),
            pathlib.PurePosixPath("a/b"),
            argparse.Namespace(lr=1, kind=dict),
            slice(1, 2),
            complex(1, 2),
        ),
        "old": Old(),
        "devices": (torch.device("cpu"), torch.Size([1, 2])),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("key", ordinary())
@pytest.mark.parametrize("protocol", range(6))
def test_what_picklers_write_is_known(key: str, protocol: int, tmp_path: Path) -> None:
    value = {"value": ordinary()[key], "w": torch.ones(1)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    allowed = {"numpy.bool", "numpy.bool_"}
    assert set(ckptmove.inspect(tmp_path / "x.pkl").unknown_callables) <= allowed
    if protocol >= 2:
        torch.save(value, tmp_path / "x.pt", pickle_protocol=protocol)
        assert set(ckptmove.inspect(tmp_path / "x.pt").unknown_callables) <= allowed


#: Functions that run nothing that an argument names, whatever they are given. Every other one that
#: is known has a check of its uses.
HARMLESS = re.compile(
    r"torch\._utils\._rebuild_.*|torch\.nested\._internal\.nested_tensor\._rebuild_njt|"
    r"torch\.serialization\._get_layout|typing\.\w+|array\._array_reconstructor|"
    r"numpy\._?core\.(multiarray\._reconstruct|numeric\._frombuffer)"
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")  # the names that old files have
def test_every_known_function_was_looked_at() -> None:
    unseen = []
    for qualname in sorted(KNOWN):
        module, _, own = qualname.rpartition(".")
        try:
            known = getattr(importlib.import_module(module), own)
        except (ImportError, AttributeError):  # of another version
            continue
        checked = qualname in list(not_surely_harmless([qualname]))
        if callable(known) and not isinstance(known, type) and not checked:
            unseen += [] if HARMLESS.fullmatch(qualname) else [qualname]
    assert not unseen


def test_a_tensor_of_a_subclass_names_only_that(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2).as_subclass(Tagged)}, tmp_path / "x.pt")
    found = ckptmove.inspect(tmp_path / "x.pt").unknown_callables
    assert found == ("tests.whole.test_payloads.Tagged",)
