"""Checkpoints written into stores: the same bytes as on disk, there as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, InputError, RefusedError, WriteError
from ckptmove.sources import Missing, place_of
from ckptmove.writing.upload.destination import RemoteDestination
from tests.making.checkpoints import save
from tests.servers.uploading import BUCKET, Asked, Server, Store, bucket, damage

pytest.importorskip("moto")
pytest.importorskip("s3fs")
fsspec = pytest.importorskip("fsspec")

PART = 1 << 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1000)
        with Server().running() as server:
            yield server


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket; what has more than 64 KiB goes there in parts, and nothing is left unfinished."""
    monkeypatch.setattr("ckptmove.writing.upload.parts.PART_NBYTES", PART)
    monkeypatch.setattr("ckptmove.writing.upload.staged_object.PART_NBYTES", PART)
    monkeypatch.setattr("ckptmove.writing.upload.staged_prefix.PART_NBYTES", PART)
    with bucket(server, monkeypatch) as store:
        yield store
        server.reset()
        assert store.uploads() == []


def saved(folder: Path) -> Path:
    """A checkpoint of seven parts: dense and transposed tensors, and some that share."""
    both = torch.arange(60_000.0)
    model = {"dense": both, "part": both[100:200], "turned": torch.ones(90, 500).t(), "n": both[0]}
    return save(folder / "in.pt", {"model": model, "epoch": 3}, "cpu")


def small(folder: Path) -> Path:
    return save(folder / "in.pt", {"a": torch.arange(10.0)}, "cpu")


VERBS: dict[str, Any] = {
    "relocate": lambda src, dst, **more: ckptmove.relocate(src, dst, to="cuda:0", **more),
    "safetensors": lambda src, dst, **more: ckptmove.convert(
        src, dst, format="safetensors", **more
    ),
    "half": lambda src, dst, **more: ckptmove.convert(
        src, dst, format="safetensors", dtype={"*": "float16"}, **more
    ),
    "torch-zip": lambda src, dst, **more: ckptmove.convert(src, dst, format="torch-zip", **more),
    "half torch-zip": lambda src, dst, **more: ckptmove.convert(
        src, dst, format="torch-zip", dtype={"*": "bfloat16"}, **more
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [saved, small])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("there", ["here", "s3"])
def test_the_same_bytes_as_on_disk(
    make: Any, verb: str, there: str, store: Store, tmp_path: Path
) -> None:
    source: Any = make(tmp_path)
    VERBS[verb](source, tmp_path / "x")
    if there == "s3":
        store.put("in.pt", source.read_bytes())
        source = store.url("in.pt")
    told = list[int]()
    report = VERBS[verb](source, store.url("d/x"), progress=told.append)
    assert store.get("d/x") == (tmp_path / "x").read_bytes()
    assert sum(told) == report.bytes_written == len(store.get("d/x"))
    assert report.destination == store.url("d/x")
    kinds = [kind for kind, key in store.server.asked if key == "d/x"]
    assert ("complete" in kinds, "put" in kinds) == (make is saved, make is small)


def test_what_was_uploaded_is_what_torch_and_safetensors_read(store: Store, tmp_path: Path) -> None:
    source = saved(tmp_path)
    ckptmove.convert(source, store.url("x.safetensors"))
    ckptmove.convert(store.url("x.safetensors"), store.url("y.pt"))
    (tmp_path / "y.pt").write_bytes(store.get("y.pt"))
    wanted = torch.load(source, weights_only=True)
    got = torch.load(tmp_path / "y.pt", weights_only=True)
    tensors = load_safetensors(store.get("x.safetensors"))
    assert got["epoch"] == wanted["epoch"]
    for name in ("dense", "turned", "n", "part"):
        assert torch.equal(got["model"][name], wanted["model"][name])
    assert torch.equal(tensors["dense"], wanted["model"]["dense"])
    assert got["model"]["part"].data_ptr() - got["model"]["dense"].data_ptr() == 400


def test_any_store_that_has_transactions_will_do(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    source, seen = saved(tmp_path), list[bool]()
    ckptmove.relocate(source, tmp_path / "x.pt", to="cuda:0")
    url = "memory://there/x.pt"
    try:
        look = lambda _: seen.append(fs.exists("/there/x.pt"))  # noqa: E731
        assert ckptmove.relocate(source, url, to="cuda:0", progress=look).copied == "upload"
        assert not any(seen)
        assert seen
        assert fs.cat("/there/x.pt") == (tmp_path / "x.pt").read_bytes()
        with pytest.raises(RefusedError, match="exists"):
            ckptmove.relocate(source, url, to="cuda:1")
        ckptmove.relocate(url, to="cuda:1")
        assert fs.exists("/there/x.cuda-1.pt")
        with pytest.raises(RefusedError, match="source itself"):
            ckptmove.relocate(url, "memory:///there/x.pt", to="cuda:1", force=True)
    finally:
        fs.rm("/there", recursive=True)


def test_a_live_object_goes_there_too(store: Store, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(50_000.0)}
    ckptmove.save(tensors, store.url("a.safetensors"))
    ckptmove.save(tensors, tmp_path / "a.safetensors")
    assert store.get("a.safetensors") == (tmp_path / "a.safetensors").read_bytes()


def test_without_a_destination_it_is_beside_its_source(store: Store, tmp_path: Path) -> None:
    store.put("runs/a.b/in.pt", saved(tmp_path).read_bytes())
    report = ckptmove.relocate(store.url("runs/a.b/in.pt"), to="cuda:1")
    assert report.destination == store.url("runs/a.b/in.cuda-1.pt")
    assert "runs/a.b/in.cuda-1.pt" in store.there()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("make", [saved, small])
def test_what_is_there_is_replaced_only_if_asked_for(
    make: Any, dry_run: bool, store: Store, tmp_path: Path
) -> None:
    store.put("x.pt", b"theirs")
    with pytest.raises(RefusedError, match="exists") as caught:
        ckptmove.relocate(make(tmp_path), store.url("x.pt"), to="cuda:0", dry_run=dry_run)
    assert caught.value.path == store.url("x.pt")
    assert store.get("x.pt") == b"theirs"
    ckptmove.relocate(
        tmp_path / "in.pt", store.url("x.pt"), to="cuda:0", dry_run=dry_run, force=True
    )
    assert (store.get("x.pt") == b"theirs") is dry_run


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [saved, small])
@pytest.mark.parametrize("knows", [True, False])
def test_who_comes_first_keeps_the_name(
    make: Any, knows: bool, store: Store, tmp_path: Path
) -> None:
    """Whether the server knows conditions, or it has to be looked for right before."""
    source, theirs = make(tmp_path), b"theirs"

    def race(asked: Asked) -> None:
        if asked.kind == ("complete" if make is saved else "put") and asked.key == "x.pt":
            store.server.fault = lambda _: None
            store.put("x.pt", theirs)

    def ignore(asked: Asked) -> None:
        asked.environ.pop("HTTP_IF_NONE_MATCH", None)

    store.server.fault = race if knows else ignore
    with pytest.raises(RefusedError, match="exists"):
        ckptmove.relocate(
            source,
            store.url("x.pt"),
            to="cuda:0",
            progress=None if knows else lambda _: store.put("x.pt", theirs),
        )
    store.server.reset()
    assert store.get("x.pt") == theirs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://127.0.0.1:1/x.pt", "can't be written there"),
        ("s3://nobody-has-this/x.pt", "The specified bucket does not exist"),
        (f"s3://{BUCKET}", "is a directory"),
        (f"s3://{BUCKET}/", "is a directory"),
        (f"s3://{BUCKET}/d/", "is a directory"),
        (f"s3://{BUCKET}/d", "is a directory"),
        ("hf://me/model/x.pt", "can't be written there"),
        (f"simplecache::s3://{BUCKET}/x.pt", "can't be written there"),
        (f"zip://x.pt::s3://{BUCKET}/d/x.zip", "can't be written"),
    ],
)
def test_where_nothing_can_be_written(url: str, match: str, store: Store, tmp_path: Path) -> None:
    store.put("d/other", b"")
    with pytest.raises(RefusedError, match=match):
        ckptmove.relocate(saved(tmp_path), url, to="cuda:0", force=True)
    assert store.there() == ["d/other"]


def test_a_source_is_not_written_over(store: Store, tmp_path: Path) -> None:
    store.put("x.pt", saved(tmp_path).read_bytes())
    for url in ("s3://bucket/x.pt", "s3a://bucket/x.pt"):
        with pytest.raises(RefusedError, match="source itself"):
            ckptmove.relocate(store.url("x.pt"), url, to="cuda:0", force=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["begin", "part", "complete"])
def test_who_may_not_write_is_told_so(kind: str, store: Store, tmp_path: Path) -> None:
    store.server.fault = lambda asked: 403 if asked.kind == kind else None
    with pytest.raises(RefusedError, match="can't be written: access is denied"):
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
    assert store.there() == []


def test_who_has_no_credentials_is_told_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(RefusedError, match="there are no credentials for it"):
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [saved, small])
def test_damage_in_the_source_is_found_before_anything_is_seen(
    make: Any, store: Store, tmp_path: Path
) -> None:
    source = make(tmp_path)
    data = bytearray(source.read_bytes())
    data[len(data) // 2 if make is saved else data.index(b"\0\0\x80?")] ^= 1
    source.write_bytes(data)
    for verb in VERBS:
        with pytest.raises(CorruptError, match="damaged"):
            VERBS[verb](source, store.url("x"))
    with pytest.raises(CorruptError, match="damaged"):
        ckptmove.relocate(source, "memory://x.pt", to="cuda:0")
    assert not fsspec.filesystem("memory").exists("/x.pt")
    assert store.there() == []


def test_a_source_that_changes_meanwhile_is_not_uploaded(store: Store, tmp_path: Path) -> None:
    source = saved(tmp_path)
    store.put("in.pt", source.read_bytes())
    again = source.read_bytes()[::-1]
    with pytest.raises(CorruptError, match="was changed while it was read"):
        ckptmove.relocate(
            store.url("in.pt"),
            store.url("x.pt"),
            to="cuda:0",
            progress=lambda _: store.put("in.pt", again),
        )
    assert store.there() == ["in.pt"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["begin", "part", "complete", "put"])
@pytest.mark.parametrize("status", [500, 503])
def test_what_falters_is_asked_again(kind: str, status: int, store: Store, tmp_path: Path) -> None:
    left = [1, 1]
    source = small(tmp_path) if kind == "put" else saved(tmp_path)

    def falter(asked: Asked) -> int | None:
        return status if asked.kind == kind and left and left.pop() else None

    store.server.fault = falter
    ckptmove.relocate(source, store.url("x.pt"), to="cuda:0")
    assert not left
    ckptmove.relocate(source, tmp_path / "x.pt", to="cuda:0")
    assert store.get("x.pt") == (tmp_path / "x.pt").read_bytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["begin", "part", "complete", "put"])
def test_what_fails_for_good_leaves_nothing(kind: str, store: Store, tmp_path: Path) -> None:
    store.server.fault = lambda asked: 500 if asked.kind == kind else None
    source = small(tmp_path) if kind == "put" else saved(tmp_path)
    with pytest.raises(WriteError, match="writing failed") as caught:
        ckptmove.relocate(source, store.url("x.pt"), to="cuda:0")
    assert caught.value.path == store.url("x.pt")
    store.server.reset()
    assert store.there() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [saved, small])
@pytest.mark.parametrize("force", [True, False])
def test_an_answer_that_gets_lost_is_no_failure(
    make: Any, force: bool, store: Store, tmp_path: Path
) -> None:
    left = [1]

    def lose(asked: Asked) -> int | None:
        if asked.kind not in ("complete", "put"):
            return None
        store.server.fault = lambda asked: 500 if asked.kind in ("complete", "put") else None
        left.clear()
        return 500

    store.server.after = lose
    ckptmove.relocate(make(tmp_path), store.url("x.pt"), to="cuda:0", force=force)
    assert not left
    ckptmove.relocate(tmp_path / "in.pt", tmp_path / "x.pt", to="cuda:0")
    assert store.get("x.pt") == (tmp_path / "x.pt").read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("often", [1, 1000])
def test_a_part_that_arrives_damaged_is_sent_again(
    often: int, store: Store, tmp_path: Path
) -> None:
    left = [1] * often

    def harm(asked: Asked) -> None:
        if asked.kind == "part" and "partNumber=2" in asked.environ["QUERY_STRING"] and left:
            left.pop()
            damage(asked)

    store.server.fault = harm
    if often == 1:
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
        assert not left
        ckptmove.relocate(tmp_path / "in.pt", tmp_path / "x.pt", to="cuda:0")
        assert store.get("x.pt") == (tmp_path / "x.pt").read_bytes()
    else:
        with pytest.raises(WriteError, match="part 2 did not arrive as it was sent"):
            ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
        assert store.there() == []


@pytest.mark.parametrize("force", [True, False])
def test_what_is_there_in_the_end_and_is_not_what_was_sent_is_removed(
    force: bool, store: Store, tmp_path: Path
) -> None:
    store.server.fault = lambda asked: damage(asked) if asked.kind == "put" else None
    with pytest.raises(
        WriteError, match="ETag does not match the bytes that were sent; it was removed"
    ):
        ckptmove.relocate(small(tmp_path), store.url("x.pt"), to="cuda:0", force=force)
    assert store.there() == []


def test_what_somebody_else_put_there_right_after_is_left(store: Store, tmp_path: Path) -> None:
    def race(asked: Asked) -> None:
        if asked.kind == "HEAD" and "x.pt" in store.there():
            store.server.fault = lambda _: None
            store.put("x.pt", b"theirs")

    store.server.fault = race
    with pytest.raises(WriteError, match="another object replaced it"):
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
    assert store.get("x.pt") == b"theirs"


def test_parts_that_can_not_be_removed_are_told_of(store: Store, tmp_path: Path) -> None:
    store.server.fault = lambda asked: 500 if asked.kind in ("complete", "abort") else None
    with pytest.raises(WriteError, match="writing failed") as caught:
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
    assert "invisible parts of it are left in the store" in (caught.value.hint or "")
    store.server.reset()
    assert (store.there(), store.uploads()) == ([], ["x.pt"])
    (upload,) = store.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    store.client.abort_multipart_upload(Bucket=BUCKET, Key="x.pt", UploadId=upload["UploadId"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("status", "aborts"), [(500, 2), (501, 2), (403, 1)])
def test_parts_are_gone_once_the_store_says_so(
    status: int, aborts: int, store: Store, tmp_path: Path
) -> None:
    def fault(asked: Asked) -> int | None:
        if asked.kind == "GET" and "uploadId" in asked.environ["QUERY_STRING"]:
            return status
        return 500 if asked.kind == "complete" else None

    store.server.fault = fault
    with pytest.raises(WriteError, match="writing failed"):
        ckptmove.relocate(saved(tmp_path), store.url("x.pt"), to="cuda:0")
    assert store.server.asked.count(("abort", "x.pt")) == aborts


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("status", "kind", "match"),
    [
        (403, RefusedError, "can't be written: access is denied"),
        (500, WriteError, "writing failed"),
    ],
)
def test_a_small_object_that_can_not_be_put(
    status: int, kind: type[CkptmoveError], match: str, store: Store
) -> None:
    RemoteDestination(store.url("marks/a")).write_small(b"here")
    store.server.fault = lambda asked: status if asked.kind == "put" else None
    with pytest.raises(kind, match=match) as caught:
        RemoteDestination(store.url("marks/a")).write_small(b"there")
    assert (caught.value.hint is None) == (status == 403)
    store.server.reset()
    assert store.get("marks/a") == b"here"
    with pytest.raises(RefusedError, match="its bucket or container does not exist"):
        RemoteDestination("s3://nobucket/a").write_small(b"x")


def test_what_can_not_be_listed_is_not_taken_for_nothing(store: Store) -> None:
    store.server.fault = lambda _: 403
    with pytest.raises(InputError, match="access is denied") as caught:
        place_of(store.url("nothing")).files_below()
    assert not isinstance(caught.value, Missing)


def test_a_bucket_with_keys_of_its_own_has_other_etags(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moto.s3.models.md5_hash", lambda: hashlib.md5(b"salt"))
    asked = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", asked)
    for make in (saved, small):
        source = make(tmp_path)
        ckptmove.relocate(source, store.url("x.pt"), to="cuda:0", force=True)
        ckptmove.relocate(source, tmp_path / "x.pt", to="cuda:0", force=True)
        assert store.get("x.pt") == (tmp_path / "x.pt").read_bytes()


# -- folders ---------------------------------------------------------------------------------------


def sharded(source: Path, to: str | Path, **more: Any) -> list[str]:
    """The names of what it writes."""
    report = ckptmove.convert(source, to, max_shard_size="200kB", **more)
    return sorted(name.rpartition("/")[2] for name in report.files)


def test_a_folder_has_its_index_last(store: Store, tmp_path: Path) -> None:
    source = saved(tmp_path)
    names = sharded(source, store.url("out/"))
    assert names == sharded(source, tmp_path / "out")
    assert len(names) == 3
    for name in names:
        assert store.get(f"out/{name}") == (tmp_path / "out" / name).read_bytes()
    done = [key for kind, key in store.server.asked if kind in ("complete", "put")]
    assert sorted(done) == [f"out/{name}" for name in names]
    assert done[-1] == "out/model.safetensors.index.json"
    first = next(n for n, (kind, _) in enumerate(store.server.asked) if kind in ("complete", "put"))
    assert "part" not in [kind for kind, _ in store.server.asked[first:]]


def test_a_folder_goes_there_with_all_that_is_in_it(store: Store, tmp_path: Path) -> None:
    for name, data in {"model/config.json": b"{}", "model/sub/a.txt": b"abc"}.items():
        store.put(name, data)
    ckptmove.convert(saved(tmp_path), store.url("model/model.safetensors"), select="model")
    ckptmove.convert(store.url("model"), store.url("half"), dtype="float16")
    ckptmove.convert(store.url("model/"), tmp_path / "here", dtype="float16")
    there = {key.removeprefix("half/") for key in store.there() if key.startswith("half/")}
    assert there == {"config.json", "sub/a.txt", "model.safetensors"}
    for name in there:
        assert store.get(f"half/{name}") == (tmp_path / "here" / name).read_bytes()
    for inner in ("model/", "model/sub/", ""):
        with pytest.raises(RefusedError, match="source"):
            ckptmove.convert(store.url("model"), store.url(inner), dtype="float16", force=True)
    for source in (store.url("model"), store.url("model/model.safetensors")):
        with pytest.raises(RefusedError, match=r"is the source itself|the source is inside"):
            ckptmove.convert(source, f"s3a://{BUCKET}/model/", dtype="float16", force=True)


@pytest.mark.slow
def test_old_weights_go_and_nothing_else(store: Store, tmp_path: Path) -> None:
    source = saved(tmp_path)
    sharded(source, store.url("out/"))
    with pytest.raises(RefusedError, match="exists"):
        ckptmove.convert(source, store.url("out/"))
    store.put("out/notes.txt", b"mine")
    with pytest.raises(RefusedError, match=r"'notes.txt' in it would be gone"):
        ckptmove.convert(source, store.url("out/"), force=True)
    assert len(store.there()) == 4
    store.client.delete_object(Bucket=BUCKET, Key="out/notes.txt")
    store.server.reset()
    ckptmove.convert(source, store.url("out/"), force=True)
    assert store.there() == ["out/model.safetensors"]
    kinds = [(kind, key) for kind, key in store.server.asked if kind in ("DELETE", "complete")]
    assert kinds[0] == ("DELETE", "out/model.safetensors.index.json")
    assert kinds[1] == ("complete", "out/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["out/model.safetensors.index.json", "out/model-00001-of-00002"])
def test_a_folder_that_could_not_be_completed_has_no_index(
    key: str, store: Store, tmp_path: Path
) -> None:
    source = saved(tmp_path)
    store.server.fault = lambda asked: (
        500 if asked.kind in ("complete", "put") and asked.key.startswith(key) else None
    )
    with pytest.raises(WriteError, match="writing failed") as caught:
        sharded(source, store.url("out/"))
    store.server.reset()
    assert caught.value.hint is not None
    assert f"{len(store.there())} of 3 files are already there, complete" in caught.value.hint
    assert "out/model.safetensors.index.json" not in store.there()


def test_a_folder_is_not_begun_to_be_seen_before_all_of_it_was_sent(
    store: Store, tmp_path: Path
) -> None:
    store.server.fault = lambda asked: (
        500 if asked.kind == "part" and "00002-of-00002" in asked.key else None
    )
    with pytest.raises(WriteError, match="writing failed"):
        sharded(saved(tmp_path), store.url("out/"))
    store.server.reset()
    assert store.there() == []


def test_a_file_is_no_folder(store: Store, tmp_path: Path) -> None:
    store.put("out", b"theirs")
    with pytest.raises(RefusedError, match="exists and is not a directory"):
        sharded(saved(tmp_path), store.url("out"), force=True)
    with pytest.raises(ckptmove.UsageError, match="called like a file") as caught:
        sharded(saved(tmp_path), store.url("out.safetensors"))
    assert caught.value.hint == f"name one, e.g. {store.url('out')}/"


def test_the_report_names_urls(store: Store, tmp_path: Path) -> None:
    report = ckptmove.convert(saved(tmp_path), store.url("out/"), dry_run=True)
    assert list(report.files) == [store.url("out/model.safetensors")]
    assert json.loads(json.dumps(report.to_json()))["destination"] == store.url("out/")
    assert store.there() == []


@pytest.mark.usefixtures("store")
def test_neither_a_version_nor_a_whole_bucket_is_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(RefusedError, match="version"):
        ckptmove.relocate(path, f"s3://{BUCKET}/x.pt?versionId=null", to="cpu", force=True)
    with pytest.raises(RefusedError, match="whole bucket"):
        ckptmove.convert(path, f"s3://{BUCKET}/", force=True)
