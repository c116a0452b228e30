"""Salvage: no byte of a broken file is ever called right that is not as it was.

The oracle is the object that was saved: every tensor that is called whole is compared with it, byte
by byte, as the safetensors library reads it from what was written. Where bytes are only missing,
that goes for tensors that are called unproven too.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch.package.package_exporter import PackageExporter

import ckptmove
from ckptmove import Fate, SalvageReport
from tests.conftest import corpus_folder, examples
from tests.making.tar import save_tar

Tensors = Mapping[str, torch.Tensor]


def saved(numel: int = 9) -> dict[str, torch.Tensor]:
    """A few tensors, each with bytes of its own; among them some that share, are 0-d and empty."""
    generator = torch.Generator().manual_seed(numel)
    state = {
        f"layer{n}": torch.randint(1, 2**31, (numel,), dtype=torch.int32, generator=generator)
        for n in range(3)
    }
    state["halves"] = torch.rand(numel, generator=generator).half() + 1
    state["count"] = torch.tensor(7)
    state["empty"] = torch.empty(0, 2)
    state["tied"] = state["layer0"]
    state["view"] = state["layer1"][2:5]
    return state


def torch_zip(state: Tensors) -> bytes:
    made = io.BytesIO()
    torch.save(state, made)
    return made.getvalue()


def torch_legacy(state: Tensors) -> bytes:
    made = io.BytesIO()
    torch.save(state, made, _use_new_zipfile_serialization=False)
    return made.getvalue()


def plain_safetensors(state: Tensors) -> bytes:
    return safetensors_bytes({name: each.clone() for name, each in state.items()})


def deflated(state: Tensors) -> bytes:
    """What torch.save wrote, compressed by another program."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_zip(state))) as old, zipfile.ZipFile(made, "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return made.getvalue()


def torch_tar(state: Tensors) -> bytes:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "run.pt"
        save_tar(dict(state), path, lambda _: "cpu")
        return path.read_bytes()


def nemo(state: Tensors) -> bytes:
    """The weights between other files, as NeMo packs them."""
    made = io.BytesIO()
    files = {"model_config.yaml": b"target: a.Model\n", "model_weights.ckpt": torch_zip(state)}
    with tarfile.open(fileobj=made, mode="w:") as tar:
        for name, content in {**files, "vocab.txt": b"a\nb\n"}.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def torchscript(state: Tensors) -> bytes:
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, tensor)
    made = io.BytesIO()
    torch.jit.save(torch.jit.script(module), made)
    return made.getvalue()


def torch_package(state: Tensors) -> bytes:
    made = io.BytesIO()
    with PackageExporter(made) as exporter:
        exporter.save_pickle("weights", "state.pkl", dict(state))
    return made.getvalue()


def torch_export(state: Tensors) -> bytes:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, each in state.items():
                self.register_buffer(name, each.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    made = io.BytesIO()
    torch.export.save(torch.export.export(Holder(), (torch.ones(2),)), made)
    return made.getvalue()


def old_torch_export(state: Tensors) -> bytes:
    """As torch 2.1 to 2.7 laid it out: files of torch.save in a zip of Python's."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", torch_zip(state))
        archive.writestr("serialized_constants.pt", torch_zip({}))
        archive.writestr("serialized_example_inputs.pt", torch_zip(((torch.ones(2),), {})))  # type: ignore[arg-type]
        archive.writestr("version", "8.1")
    return made.getvalue()


def torchscript_v1(state: Tensors) -> bytes:
    """A module of torch 1.3 with buffers, of which two tensors share a record."""
    kinds = {torch.int32: "INT32", torch.float16: "FLOAT16", torch.int64: "INT64"}
    records, table, buffers = dict[str, bytes](), [], []
    keys: dict[int, str] = {}
    for n, (name, each) in enumerate(state.items()):
        storage = each.untyped_storage()
        key = keys.setdefault(storage.data_ptr() or -n, f"tensors/{len(keys)}")
        records[key] = bytes(storage.tolist())
        shape, stride = ([str(d) for d in dims] for dims in (each.shape, each.stride()))
        kind = {"dataType": kinds.get(each.dtype, "FLOAT"), "data": {"key": key}, "device": "cpu"}
        table.append(
            {"dims": shape, "strides": stride, "offset": str(each.storage_offset())} | kind
        )
        buffers.append({"isBuffer": True, "tensorId": str(n), "name": name})
    root = {"mainModule": {"name": "m", "parameters": buffers}, "tensors": table}
    records["model.json"] = json.dumps({"protoVersion": "6", **root}).encode()
    made = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(made)
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return made.getvalue()


def bundle(state: Tensors) -> bytes:
    """Two checkpoints in a zip, as stable-baselines3 saves them."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("data", '{"policy": 1}')
        archive.writestr("policy.pth", torch_zip(state))
        archive.writestr("policy.optimizer.pth", torch_zip({"step": torch.tensor(3)}))
        archive.writestr("_stable_baselines3_version", "2.3.2")
    return made.getvalue()


#: Not all of these has a checksum.
UNPROVEN = ("torch-legacy", "safetensors", "pickle", "pickle 2", "torch-tar", "nemo")

FORMATS: dict[str, Callable[[Tensors], bytes]] = {
    "torch-zip": torch_zip,
    "deflated": deflated,
    "torch-legacy": torch_legacy,
    "safetensors": plain_safetensors,
    "pickle": pickle.dumps,
    "pickle 2": lambda state: pickle.dumps(state, protocol=2),
    "torch-tar": torch_tar,
    "nemo": nemo,
    "torchscript": torchscript,
    "torchscript-v1": torchscript_v1,
    "torch-package": torch_package,
    "torch-export": torch_export,
    "old torch-export": old_torch_export,
    "zip-bundle": bundle,
}

#: What packs records of other formats, zip, tar and pickle, which are cut everywhere.
PACKED = list(FORMATS)[7:]

#: What names of tensors start with, where they lie in records that are named.
STARTS = {"torch-package": "weights/state.pkl.", "zip-bundle": "policy.pth."}
#: What is there besides, and the formats whose names lie behind their tensors.
BESIDE: dict[str, dict[str, torch.Tensor]] = {
    "torch-export": {"sample_inputs.0.0": torch.ones(2)},
    "old torch-export": {"sample_inputs.0.0": torch.ones(2)},
    "zip-bundle": {"policy.optimizer.pth.step": torch.tensor(3)},
}
NAMED_LAST = ("torch-export", "torchscript-v1")


def made(format: str, numel: int = 9) -> tuple[bytes, Tensors]:
    """A file, and its tensors by the names that they have in it."""
    state = saved(numel)
    named = {STARTS.get(format, "") + name: each for name, each in state.items()}
    return FORMATS[format](state), {**named, **BESIDE.get(format, {})}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def salvaged(broken: Path, **options: object) -> SalvageReport | None:
    """What is left; None if nothing in it names a tensor."""
    try:
        return ckptmove.salvage(broken, broken.with_name("out.safetensors"), force=True, **options)  # type: ignore[arg-type]
    except ckptmove.InputError:
        return None


def check(report: SalvageReport | None, state: Tensors, *, unproven: bool = True) -> None:
    """All that is called whole is as it was, and nothing is whole as such that is not."""
    if report is None:
        return
    right = {Fate.WHOLE, Fate.UNPROVEN} if unproven else {Fate.WHOLE}
    known = (id(state), unproven, report.complete, report.tensors, _digest(report))
    if known in _CHECKED:  # many cuts leave the same
        return
    expected = {name: raw(tensor) for name, tensor in state.items()}
    assert not report.complete or {each.name for each in report.tensors} == set(state)
    kept = [each for each in report.tensors if each.fate in right and each.written]
    if not kept:
        return
    loaded = ckptmove.load(report.destination)
    with safe_open(report.destination, "pt") as plain:
        names = set(plain.keys())
        for each in kept:
            if each.name.startswith(("data/", "tensors/")):  # storages whose names are lost
                assert raw(loaded[each.name]) in expected.values(), each
                continue
            assert raw(loaded[each.name]) == expected[each.name], each
            assert loaded[each.name].dtype == state[each.name].dtype
            if each.name in names:
                assert raw(plain.get_tensor(each.name)) == expected[each.name], each
    _CHECKED[known] = state


#: What was found to be right, with its tensors, so that no others get their number.
_CHECKED: dict[object, Tensors] = {}


def _digest(report: SalvageReport) -> str:
    """The bytes that were written."""
    if report.destination is None or not Path(report.destination).exists():
        return ""
    return hashlib.sha256(Path(report.destination).read_bytes()).hexdigest()


def points(nbytes: int, few: int) -> list[int]:
    """The first, the last and some lengths between."""
    found = random.Random(nbytes).sample(range(1, nbytes - 1), min(few, nbytes - 2))
    return sorted({1, nbytes - 1, *found})


def everywhere(content: bytes, step: int = 1) -> list[int]:
    """Every length, or each so many; within the padding, a run of one byte, only each sixteenth.

    All beside the start of a record are among them.
    """
    last = len(content) - 1
    starts = {n for found in re.finditer(rb"PK..|ustar", content) for n in range(*found.span())}
    return [
        n
        for n in range(len(content))
        if n < 2
        or n > last - 2
        or n % 16 == 0
        or n in starts
        or (n % step == 0 and len({*content[n - 2 : n + 3]}) > 1)
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_was_cut_short(format: str, tmp_path: Path) -> None:
    content, named = made(format)
    cut_at(format, content, named, points(len(content), 12), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_large_file_that_was_cut_short(format: str, tmp_path: Path) -> None:
    content, named = made(format, 100_000)
    cut_at(format, content, named, points(len(content), examples(120)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_was_cut_short_anywhere(format: str, tmp_path: Path) -> None:
    content, named = made(format)
    step = 4 if format in PACKED else 1
    cut_at(format, content, named, everywhere(content, step), tmp_path)


def cut_at(format: str, content: bytes, named: Tensors, lengths: list[int], folder: Path) -> None:
    broken = folder / "run.pt"
    best = 0
    for nbytes in lengths:
        broken.write_bytes(content[:nbytes])
        report = salvaged(broken)
        check(report, named)
        if report is not None:
            best = max(best, sum(each.written and each.name in named for each in report.tensors))
    if format not in NAMED_LAST or len(lengths) > 1000:
        assert best >= len(named) - 2, "all but the last are there when the end is missing"


@pytest.mark.sample(3)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_that_were_flipped(format: str, tmp_path: Path) -> None:
    content, named = made(format, 200)
    chance = random.Random(format)
    broken = tmp_path / "run.pt"
    for _ in range(examples(100)):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 1, 3))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged) // 2, len(damaged)) :]
        broken.write_bytes(damaged)
        check(salvaged(broken), named, unproven=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("format", FORMATS)
def test_parts_that_were_overwritten(format: str, tmp_path: Path) -> None:
    """With chance, with zeros, or with what another save has there."""
    content, named = made(format, 200)
    over = made(format, 201)[0]
    chance = random.Random(format)
    broken = tmp_path / "run.pt"
    for n in range(examples(60)):
        damaged = bytearray(content)
        start = chance.randrange(len(damaged))
        nbytes = chance.randrange(1, 2000)
        other = (chance.randbytes(nbytes), bytes(nbytes), over[start : start + nbytes])[n % 3]
        damaged[start : start + nbytes] = other
        broken.write_bytes(damaged[: len(content)])
        report = salvaged(broken)
        if n % 3 < 2:  # else bytes of the other save are right too
            check(report, named, unproven=False)


def test_the_names_of_a_program_are_told(tmp_path: Path) -> None:
    """They lie behind its tensors: of a file that is cut there, all of them are known."""
    for format, end in (("torch-export", b"sample_inputs"), ("torchscript-v1", b"PK\1\2")):
        content, named = made(format)
        for cut in (content.rindex(end), content.index(b"PK\3\4", 4)):
            (tmp_path / "run.pt").write_bytes(content[:cut])
            report = salvaged(tmp_path / "run.pt")
            check(report, named)
            assert report is not None
            found = {each.name for each in report.tensors if each.written}
            if cut < len(content) // 2:
                assert not found & named.keys()
                assert found
                continue
            assert report.format == format
            assert found == set(named)


def test_a_flipped_name_of_a_record_is_noticed(tmp_path: Path) -> None:
    """A checksum is of the content alone, so a record could pass for another of the same size."""
    state = {f"w{n}": torch.full((50,), n) for n in range(4)}
    content = torch_zip(state)
    end = content.index(b"PK\1\2")
    for n in range(4):
        at = content.index(f"data/{n}".encode(), 1)
        for bit in range(3):
            damaged = bytearray(content[: end if bit else len(content)])
            damaged[at + 5] ^= 1 << bit
            broken = tmp_path / "run.pt"
            broken.write_bytes(damaged)
            check(salvaged(broken), state, unproven=False)


def test_a_flipped_name_is_noticed_where_the_other_record_is_missing(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((50,), n) for n in range(4)}
    content = bytearray(torch_zip(state))
    content[content.index(b"data/1") + 5] ^= 2  # 1 → 3
    (tmp_path / "run.pt").write_bytes(
        content[: content.rindex(b"PK\3\4", 0, content.index(b"data/2"))]
    )
    report = salvaged(tmp_path / "run.pt")
    assert report is not None
    check(report, state, unproven=False)


def test_the_names_in_a_pickle_that_was_cut_are_told(tmp_path: Path) -> None:
    content = torch_legacy(saved())
    (tmp_path / "run.pt").write_bytes(content[: content.index(b"layer2") + 3])
    report = salvaged(tmp_path / "run.pt")
    assert report is not None
    assert {each.name for each in report.tensors} >= {"layer0"}
    assert {each.fate for each in report.tensors} == {Fate.LOST}


def test_what_is_missing_is_zeros_if_asked(tmp_path: Path) -> None:
    state = saved(1000)
    content = torch_zip(state)
    broken = tmp_path / "run.pt"
    broken.write_bytes(content[: len(content) // 2])
    report = salvaged(broken, partial="zeros")
    assert report is not None
    [part] = [each for each in report.tensors if each.fate is Fate.PART]
    assert part.written
    assert 0 < part.present_nbytes < part.nbytes
    there = raw(ckptmove.load(report.destination)[part.name])
    assert there[: part.present_nbytes] == raw(state[part.name])[: part.present_nbytes]
    assert there[part.present_nbytes :] == bytes(part.nbytes - part.present_nbytes)
    beside = json.loads(Path(f"{report.destination}.salvage.json").read_text())
    assert beside["counts"] == dict(report.counts)
    assert not beside["complete"]


def test_all_of_an_intact_file_is_whole(tmp_path: Path) -> None:
    for format in FORMATS:
        content, named = made(format)
        (tmp_path / "run.pt").write_bytes(content)
        report = salvaged(tmp_path / "run.pt")
        check(report, named)
        assert report is not None
        assert len(report.tensors) == len(named)
        assert report.complete == (format not in UNPROVEN), format


def test_each_file_of_an_intact_folder_is_proven_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"state": {"m": torch.arange(4.0)}}, folder / "optimizer.pt")
    torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    whole = ckptmove.salvage(folder, tmp_path / "whole.safetensors")
    assert whole.complete
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(plain_safetensors({"w": torch.ones(3)}))
    part = ckptmove.salvage(folder, tmp_path / "part.safetensors")
    assert {each.name: each.fate for each in part.tensors} == {
        "model.w": Fate.UNPROVEN,
        "optimizer.state.m": Fate.WHOLE,
    }
    assert not part.complete


@pytest.mark.slow
def test_of_many_small_tensors_all_but_the_last_are_found(tmp_path: Path) -> None:
    """The search begins anew behind each record; what it does not read is not charged."""
    state = {f"w{n}": torch.full((3,), float(n)) for n in range(2000)}
    content = torch_zip(state)
    directory = content.index(b"PK\x01\x02")
    (tmp_path / "many.pt").write_bytes(content[:directory])
    report = salvaged(tmp_path / "many.pt")
    assert report is not None
    fates = [each.fate for each in report.tensors]
    assert len(fates) == 2000
    assert fates.count(Fate.WHOLE) >= 1990
    check(report, state)


def test_a_shard_that_is_missing_and_one_that_is_cut(tmp_path: Path) -> None:
    state = {f"w{n}": torch.rand(300) for n in range(6)}
    folder = tmp_path / "model"
    ckptmove.save(state, f"{folder}/", max_shard_size=2400)
    first, second, third = sorted(folder.glob("*.safetensors"))
    second.unlink()
    third.write_bytes(third.read_bytes()[:-100])
    for index in (True, False):
        for source in (folder, *folder.glob("*.index.json")):
            report = ckptmove.salvage(source, tmp_path / "out.safetensors", force=True)
            check(report, state)
            fates = {each.name: each.fate for each in report.tensors}
            lost = [each.name for each in report.tensors if second.name in each.why]
            assert len(lost) == 2 * index
            assert not report.complete
            assert list(fates.values()).count(Fate.UNPROVEN) == 3
            assert list(fates.values()).count(Fate.PART) == 1
            assert report.names_complete == index
        for each in folder.glob("*.index.json"):
            each.unlink()
    assert first.exists()


def test_hostile_files_stay_within_bounds(tmp_path: Path) -> None:
    local = b"PK\3\4" + bytes(2) + b"\x08\x08" + bytes(18) + b"\1\0\0\0a"
    headers = b'{"w":{"dtype":"F32","shape":[4611686018427387903],"data_offsets":[0,'
    for content in (
        local * 40_000,  # records without an end, each of which could be looked for to the end
        local + b"PK\7\10" * 200_000,
        local + b"PK\1\2" * 200_000,
        (len(headers) + 100).to_bytes(8, "little") + headers + b"9" * 100_000,
        bytes([0xFF] * 7 + [0]) + headers * 2000,
        b'\0\0\0\0\0\0\0\0{"' + b'"' * 500_000 + b'"data_offsets"',
        b"\x80\x04" + b"(" * 200_000,
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}." + b"]" * 300_000,
        b"PK\3\4" + bytes(26),
    ):
        (tmp_path / "run.pt").write_bytes(content)
        salvaged(tmp_path / "run.pt")


def salvaged_apart(broken: Path) -> None:
    """Salvage in another process, which takes a second, and not more than ten minutes."""
    code = "import sys; from tests.whole.test_salvage import *; salvaged(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(broken)], timeout=60, check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_overlapping_entries_of_a_directory_do_not_hang(tmp_path: Path) -> None:
    """Each entry claims the longest extra fields: short ones, made of the entries behind it."""
    local = b"PK\3\4" + bytes(22) + b"\x08\0\0\0x/data.p" + bytes(64)
    entry = b"PK\1\2" + bytes(5) + b"\3" + bytes(20) + b"\xff\xff" + bytes(16) + b"\3" + bytes(3)
    directory = entry * 200_000 + bytes(1 << 16)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(local), 0)
    (tmp_path / "run.pt").write_bytes(local + directory + end)
    salvaged_apart(tmp_path / "run.pt")


ESCAPED = b'\\"' * 10_000  # each quote of which could begin a string


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_escaped_quotes_in_an_index_do_not_hang(tmp_path: Path) -> None:
    pair = b'"a": "model-00001-of-00002.safetensors", "'
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b'{"weight_map": {' + (pair + ESCAPED) * 800)
    salvaged_apart(index)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_escaped_quotes_in_a_header_do_not_hang(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"'
    header = b"{" + (entry + ESCAPED) * 800
    (tmp_path / "run.safetensors").write_bytes((1 << 26).to_bytes(8, "little") + header)
    salvaged_apart(tmp_path / "run.safetensors")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.name) for p in sorted(corpus_folder().glob("*")) if p.is_file()]
    or [pytest.param(None, marks=pytest.mark.skip(reason="no corpus"))],
)
def test_public_files_that_were_cut_short(path: Path, tmp_path: Path) -> None:
    """What is written of a part of a file is in the whole of it, under the same name."""
    content = path.read_bytes()
    if len(content) > 20 << 20 or len(content) < 3:
        pytest.skip("too long, or too short")
    try:
        whole = ckptmove.salvage(path, tmp_path / "whole.safetensors")
    except ckptmove.CkptmoveError:
        whole = None
    broken = tmp_path / "run.pt"
    for nbytes in points(len(content), examples(10)):
        broken.write_bytes(content[:nbytes])
        report = salvaged(broken)
        if whole is None or report is None or not whole.written or not report.written:
            continue
        before, after = (read_back(Path(each.destination)) for each in (whole, report))
        for each in report.tensors:
            if each.fate in (Fate.WHOLE, Fate.UNPROVEN) and {each.name} <= before.keys():
                assert after.get(each.name, before[each.name]) == before[each.name], each


def read_back(path: Path) -> dict[str, bytes]:
    with safe_open(path, "pt") as plain:
        return {name: raw(plain.get_tensor(name)) for name in plain.keys()}  # noqa: SIM118


def test_values_are_those_that_torch_reads(tmp_path: Path) -> None:
    """Tensors that torch conjugates or negates when it reads them, of a file that is cut short."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conj": numbers.conj(),
        "parameter": torch.nn.Parameter(numbers.conj()),
        "imag": numbers.clone().conj().imag,
        "neg": torch._neg_view(torch.tensor([3.0, 4.0])),
        "plain": numbers,
        "__metadata__": torch.ones(3),
    }
    content = torch_zip(state)
    for name, broken in (("whole.pt", content), ("cut.pt", content[:-200])):
        (tmp_path / name).write_bytes(broken)
        report = ckptmove.salvage(tmp_path / name, tmp_path / f"{name}.safetensors")
        assert report.counts["whole"] == len(state)
        assert any("'__metadata__~'" in each for each in report.warnings)
        with safe_open(tmp_path / f"{name}.safetensors", "pt") as found:
            for key in found.keys() & state.keys():  # others share bytes with one that is written
                assert torch.equal(found.get_tensor(key), state[key].resolve_conj()), key
        ckptmove.salvage(tmp_path / name, tmp_path / f"saved-{name}")
        loaded = torch.load(tmp_path / f"saved-{name}", weights_only=True)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_numbers_keep_their_scale(tmp_path: Path) -> None:
    state = {"q": torch.quantize_per_tensor(torch.arange(4.0), 0.1, 2, torch.qint8)}
    (tmp_path / "q.pt").write_bytes(torch_zip(state))
    ckptmove.salvage(tmp_path / "q.pt", tmp_path / "q.safetensors")
    with safe_open(tmp_path / "q.safetensors", "pt") as found:
        scale, zero = found.get_tensor("q.scale"), found.get_tensor("q.zero_point")
        assert torch.equal(found.get_tensor("q"), state["q"].int_repr())
    assert (scale.item(), zero.item()) == (state["q"].q_scale(), state["q"].q_zero_point())
