"""URLs: what is one, what lies under one, and what of it nobody is to see."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import InputError, UsageError
from ckptmove.sources import mask_secrets, place_of
from ckptmove.sources.place import is_url
from tests.conftest import RunCli
from tests.servers.object_store import Fault, Files, Store

IS_URL = {
    "s3://b/k": True,
    "memory://x": True,
    "S3A://b/k": True,
    "file:///x": True,
    "simplecache::s3://b/k": True,
    "zip://a.pt::s3://b/k.zip": True,
    "https://h:8080/a.pt?x=1#y": True,
    "C:\\x": False,
    "C:/x": False,
    "c://x": False,
    "a::b": False,
    "run::1.pt": False,
    "run.pt": False,
    "s3:/b/k": False,
    "//b/k": False,
    "://b": False,
    "": False,
    "3s://x": False,
    "ü://x": False,
}


@pytest.mark.parametrize(("text", "expected"), IS_URL.items())
def test_what_is_a_url(text: str, expected: bool) -> None:
    assert is_url(text) is expected
    assert not is_url(Path(text))


def test_names_in_urls() -> None:
    assert place_of("s3://b/dir/").child("a b.pt").path == "s3://b/dir/a b.pt"
    assert place_of("https://h/dir").child("a b#?.pt").path == "https://h/dir/a%20b%23%3F.pt"
    assert place_of("dir").child("a.pt").path == os.path.join("dir", "a.pt")  # noqa: PTH118 - of text
    assert place_of("s3://b/dir/a#?.pt").parent.path == "s3://b/dir"
    assert place_of("https://u:p@h/dir/a.pt?to=/x/y").parent.path == "https://u:p@h/dir"
    assert place_of("s3://b/dir/a%20b.pt").name == "a%20b.pt"
    assert place_of("https://h/dir/a%20b.pt?sig=x/y#z").name == "a b.pt"
    assert place_of("s3://b/dir/").name == "dir"


MASKED = {
    "https://me:secret@host/a.pt": "https://***@host/a.pt",
    "at http://me:se:cret@host:80/x, or": "at http://***@host:80/x, or",
    "http://h/a?X-Amz-Signature=abc&X-Amz-Date=1": "http://h/a?X-Amz-Signature=***&X-Amz-Date=1",
    "http://h/a?x=1&sig=a%2Bb": "http://h/a?x=1&sig=***",
    "('http://h/a?X-Amz-Security-Token=abc')": "('http://h/a?X-Amz-Security-Token=***')",
    "s3://b/me:x/a@b.pt": "s3://b/me:x/a@b.pt",
    "mail me@host: http://h/a?signal=3": "mail me@host: http://h/a?signal=3",
}


@pytest.mark.parametrize(("text", "expected"), MASKED.items())
def test_secrets_are_masked(text: str, expected: str) -> None:
    assert mask_secrets(text) == expected


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inspect", "validate", "relocate"])
def test_secrets_are_printed_nowhere(
    verb: str, web: Files, tmp_path: Path, run_cli: RunCli
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "run.pt")
    url = web.put("run.pt").replace("http://", "http://me:hush@") + "?X-Amz-Signature=hush"
    more = ["-o", "new.pt", "--to", "cuda:0", "--force"] if verb == "relocate" else []
    runs = [run_cli(verb, url, *more, exit=0), run_cli(verb, url, "--json", *more, exit=0)]
    assert json.loads(runs[-1].stdout)
    for method in ("HEAD", "GET"):
        web.faults.append(Fault("status", 403, method=method))
    runs.append(run_cli(verb, url, *more, exit=3))
    assert "http://***@127.0.0.1" in runs[-1].stderr
    assert "?X-Amz-Signature=***" in runs[-1].stderr
    told = "".join(run.stdout + run.stderr for run in runs)
    assert "hush" not in told


def test_secrets_are_in_no_message(web: Files, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "run.pt")
    url = web.put("run.pt") + "?X-Amz-Signature=hush"
    assert "hush" not in str(ckptmove.inspect(url))
    web.faults.append(Fault("status", 400, method="GET"))
    with pytest.raises(InputError) as caught:
        ckptmove.inspect(url)
    assert "hush" not in str(caught.value)


KEYS = ["a b/run 1.pt", "100%/50%20.pt", "ünï/模型.pt", "a#b.pt", "a?b.pt", "a+b&c=d.pt", "[x]*.pt"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", KEYS)
def test_keys_may_be_called_anything(key: str, store: Store, web: Files, tmp_path: Path) -> None:
    path = tmp_path / key
    path.parent.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(3)}, path)
    for url in (store.put(key, path), web.put(key)):
        found = ckptmove.inspect(url)
        assert (found.path, found.nbytes) == (url, path.stat().st_size)
        assert torch.equal(ckptmove.load(url)["w"], torch.ones(3))


def test_a_version_may_be_named(store: Store, tmp_path: Path) -> None:
    rule = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    store.say("PUT", f"/{store.bucket}?versioning", rule)
    versions = []
    for n in range(2):
        torch.save({"w": torch.full((3,), float(n))}, tmp_path / "run.pt")
        store.put("run.pt", tmp_path / "run.pt")
        listed = store.say("GET", f"/{store.bucket}?versions").decode()
        found = [part.partition("<")[0] for part in listed.split("<VersionId>")[1:]]
        versions += [each for each in found if each not in versions]
    loaded = [ckptmove.load(f"{store.url('run.pt')}?versionId={each}")["w"] for each in versions]
    assert [float(each[0]) for each in loaded] == [0.0, 1.0]
    assert float(ckptmove.load(store.url("run.pt"))["w"][0]) == 1.0


def test_index_files_on_the_web_may_be_called_anything(web: Files, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "a b%20?#.safetensors")
    index = {"weight_map": {"w": "a b%20?#.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = ckptmove.inspect(web.put("model.safetensors.index.json"))
    assert [each.name for each in found.tensors] == ["w"]


def test_a_missing_part_is_named(store: Store) -> None:
    index = json.dumps({"weight_map": {"w": "none.safetensors"}})
    url = store.put("model.safetensors.index.json", index.encode())
    with pytest.raises(InputError, match=r"its file 'none.safetensors' is missing"):
        ckptmove.inspect(url)


def test_a_bucket_is_a_folder(store: Store) -> None:
    store.put("a/b/run.pt", b"x")
    assert place_of(f"s3://{store.bucket}").is_folder()


def test_what_is_no_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a URL of a local file"):
        ckptmove.inspect(f"file://{tmp_path}/x.pt")
    with pytest.raises(UsageError, match=r"is not a URL that can be opened: .*Protocol not known"):
        ckptmove.inspect("nobody://x.pt")
    with pytest.raises(InputError) as caught:
        ckptmove.inspect(Path("s3://b/run.pt"))
    assert caught.value.hint == "a URL must be a string with two slashes"
    with pytest.raises(InputError) as caught:
        ckptmove.inspect("a::b")
    assert caught.value.hint is None
