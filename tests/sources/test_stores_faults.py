"""Reading from stores that falter, lie, refuse or change: the right result, or one clear error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import CkptmoveError, CorruptError, InputError, UnsupportedError
from ckptmove.sources import filesystem, place_of, range_request
from ckptmove.sources.fetch_pool import map_parallel
from ckptmove.sources.remote_object import RemoteObject
from tests.conftest import ROOT, RunCli
from tests.servers.fronts import HANG, PATIENT
from tests.servers.object_store import Fault, Files, Store

PASSING = {
    "reset": Fault("reset", times=2),
    "reset before it is known": Fault("reset", method="HEAD", times=2),
    "cut": Fault("cut", 5000, times=2),
    "cut in the middle": Fault("cut", 1 << 20, skip=4, times=3),
    "503": Fault("status", 503, times=2),
    "500 later": Fault("status", 500, skip=3, times=2),
    "429": Fault("status", 429, times=1),
    "another range": Fault("shifted", 64, times=1),
    "another range later": Fault("shifted", -640, skip=4, times=1),
    "endless": Fault("endless", times=1),
    "slow": Fault("slow", 300, skip=3, times=1),
}
NOISE = ("Traceback", "Unclosed", "never retrieved", "Task was destroyed", "Warning")


def saved(folder: Path, elements: int = 6_000_000) -> Path:
    path = folder / "run.pt"
    torch.save({"w": torch.arange(elements, dtype=torch.float32), "n": torch.tensor(3)}, path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses between tries."""
    monkeypatch.setattr(filesystem, "_PAUSES", (0.01, 0.01, 0.01))


def again(fault: Fault) -> Fault:
    """A fault of the same kind, that has not yet befallen anything."""
    return replace(fault)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_outlasted(name: str, store: Store, tmp_path: Path) -> None:
    path, url = saved(tmp_path), ""
    url = store.put("run.pt", path)
    ckptmove.relocate(path, tmp_path / "here.pt", to="cuda:0")
    store.front.faults.append(again(PASSING[name]))
    ckptmove.relocate(url, tmp_path / "there.pt", to="cuda:0")
    assert store.front.faults[0].times == 0, "it did happen"
    assert (tmp_path / "there.pt").read_bytes() == (tmp_path / "here.pt").read_bytes()


@pytest.mark.sample(2)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_on_the_web_is_outlasted(name: str, web: Files, tmp_path: Path) -> None:
    path = saved(tmp_path)
    ckptmove.relocate(path, tmp_path / "here.pt", to="cuda:0")
    fault = again(PASSING[name])
    web.faults.append(fault)
    if fault.method == "HEAD":  # fsspec asks by GET then
        web.faults.append(Fault("reset", times=1))
    ckptmove.relocate(web.put("run.pt"), tmp_path / "there.pt", to="cuda:0")
    assert fault.times == 0, "it did happen"
    assert (tmp_path / "there.pt").read_bytes() == (tmp_path / "here.pt").read_bytes()


LASTING = {
    "reset": (Fault("reset"), "connect"),
    "reset before it is known": (Fault("reset", method="HEAD"), "connect"),
    "cut": (Fault("cut", 500), "payload is not completed"),
    "cut later": (Fault("cut", 500, skip=4), "payload is not completed"),
    "503": (Fault("status", 503), "rate"),
    "500 before it is known": (Fault("status", 500, method="HEAD"), "Internal Server Error"),
    "another range": (Fault("shifted", 64), "was answered to"),
    "endless": (Fault("endless"), "more than"),
    "403": (Fault("status", 403), "access is denied"),
    "404 later": (Fault("status", 404, skip=3), "there is no such object"),
}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_is_an_error(name: str, store: Store, tmp_path: Path) -> None:
    fault, said = LASTING[name]
    url = store.put("run.pt", saved(tmp_path))
    store.front.faults.append(again(fault))
    with pytest.raises(InputError, match=said) as caught:
        ckptmove.relocate(url, tmp_path / "out.pt", to="cuda:0")
    assert caught.value.path == url
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["run.pt"]
    if fault.value == 403:
        assert len(store.front.asked("GET")) <= 1, "there is no use in trying again"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("status", "said"),
    [(503, "Service Unavailable"), (403, "access is denied"), (404, "there is no such object")],
)
def test_what_the_web_says_is_told(status: int, said: str, web: Files, tmp_path: Path) -> None:
    url = web.put(saved(tmp_path, 10).name)
    web.faults += [Fault("status", status, method=method) for method in ("HEAD", "GET")]
    with pytest.raises(InputError, match=f"can't be read: .*{said}"):
        ckptmove.inspect(url)
    assert (len(web.seen) > 4) == (status == 503), "only this may pass"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["503", "cut later"])
def test_the_command_line_gives_up_in_a_line(
    name: str, store: Store, tmp_path: Path, run_cli: RunCli
) -> None:
    fault, said = LASTING[name]
    url = store.put("run.pt", saved(tmp_path))
    store.front.faults.append(again(fault))
    done = run_cli("relocate", url, tmp_path / "out.pt", "--to", "cuda:0", exit=3)
    assert done.stderr.startswith(f"ckptmove: {url}: can't be read: ")
    assert said in done.stderr
    assert done.stderr.endswith("(ckptmove tried 5 times)\n")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert names(tmp_path) == ["run.pt"]


REFUSALS = {
    "there is no such object": ("none.pt", None, 2),
    "there is no such bucket": ("s3://nobody-has-this/run.pt", None, 2),
    "there are no credentials for it": ("run.pt", None, 0),
    "access is denied (PermissionError: Forbidden)": (
        "run.pt",
        Fault("status", 403, method="HEAD"),
        1,
    ),
    "access is denied": ("run.pt", Fault("status", 403), 1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("said", REFUSALS)
def test_a_refusal_is_not_asked_for_again(
    said: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fault, most = REFUSALS[said]
    url = store.put("run.pt", saved(tmp_path, 10))
    if fault is not None:
        store.front.faults.append(again(fault))
    if "credentials" in said:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match=rf"^can't be read: {re.escape(said)}") as caught:
        ckptmove.inspect(name if "://" in name else url.replace("run.pt", name))
    assert caught.value.hint is None, "nor does it tell of tries"
    assert "\n" not in str(caught.value)
    method = "HEAD" if fault is None else fault.method
    assert len(store.front.asked(method)) <= most, store.front.seen


@pytest.mark.sample(1)
@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_what_is_not_installed_is_named(missing: str, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None; from ckptmove.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", "s3://b/run.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    assert done.returncode == 2
    assert done.stderr == (
        "ckptmove: s3://b/run.pt: the package that opens s3:// is not installed "
        "(pip install 'ckptmove[s3]')\n"
    )


# -- objects that change -----------------------------------------------------------------------


VERBS: dict[str, Callable[[str, Path], object]] = {
    "relocate": lambda url, path: ckptmove.relocate(url, path.with_suffix(".new"), to="cuda:0"),
    "convert": lambda url, path: ckptmove.convert(url, path.with_suffix(".safetensors")),
    "inspect": lambda url, path: ckptmove.inspect(url),
    "load": lambda url, path: ckptmove.load(url),
    "diff": lambda url, path: ckptmove.diff(path, url),
    "validate": lambda url, path: ckptmove.validate(url).raise_if_failed(),
}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("verb", "skip"),
    [(verb, n) for verb in VERBS for n in (1, 2, 4) if n == 1 or verb != "inspect"],
)
def test_an_object_that_is_replaced_is_an_error(
    verb: str, skip: int, store: Store, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    url = store.put("run.pt", path)
    other = bytearray(path.read_bytes())
    other[-1000] ^= 1
    replaced = Fault("none", times=1, skip=skip, act=lambda: store.put("run.pt", bytes(other)))
    store.front.faults.append(replaced)
    with pytest.raises(CkptmoveError, match="the object was changed while it was read"):
        VERBS[verb](url, path)
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["shorter", "removed", "longer"])
def test_an_object_of_another_size_is_an_error(kind: str, store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path)
    url, content = store.put("run.pt", path), path.read_bytes()
    acts = {
        "shorter": lambda: store.put("run.pt", content[:1000]),
        "longer": lambda: store.put("run.pt", content + bytes(100)),
        "removed": lambda: store.say("DELETE", f"/{store.bucket}/run.pt"),
    }
    store.front.faults.append(Fault("none", times=1, skip=3, act=acts[kind]))
    with pytest.raises(InputError, match=r"was (changed|removed) while it was read|no such object"):
        ckptmove.relocate(url, tmp_path / "out.pt", to="cuda:0")
    assert names(tmp_path) == ["run.pt"]


def test_a_file_of_the_web_that_is_replaced_is_an_error(web: Files, tmp_path: Path) -> None:
    path = saved(tmp_path)

    def touch() -> None:
        os.utime(path, (1, 1))

    web.faults.append(Fault("none", times=1, skip=3, act=touch))
    with pytest.raises(CorruptError, match="was changed while it was read"):
        ckptmove.relocate(web.put("run.pt"), tmp_path / "out.pt", to="cuda:0")


@pytest.mark.slow
def test_a_truncated_object_is_corrupt(store: Store, tmp_path: Path) -> None:
    content = saved(tmp_path).read_bytes()
    with pytest.raises(CorruptError, match="truncated or damaged"):
        ckptmove.inspect(store.put("cut.pt", content[: len(content) // 2]))
    with pytest.raises(UnsupportedError, match="is empty"):
        ckptmove.inspect(store.put("empty.pt", b""))


def test_damage_is_found_while_it_comes(store: Store, tmp_path: Path) -> None:
    content = bytearray(saved(tmp_path).read_bytes())
    content[len(content) // 2] ^= 1
    url = store.put("damaged.pt", bytes(content))
    with pytest.raises(CorruptError, match="its checksum is wrong"):
        ckptmove.relocate(url, tmp_path / "out.pt", to="cuda:0")
    assert names(tmp_path) == ["run.pt"]


# -- servers that don't play by the rules ------------------------------------------------------


@pytest.mark.parametrize("verb", ["inspect", "relocate"])
def test_a_server_without_ranges_is_refused_before_all_comes(
    verb: str, web: Files, tmp_path: Path
) -> None:
    saved(tmp_path, 20_000_000)
    web.ranges = False
    with pytest.raises(UnsupportedError, match="its server can't send a part of it") as caught:
        VERBS[verb](web.put("run.pt"), tmp_path / "run.pt")
    assert caught.value.hint == "download it, and give the file"
    assert web.nbytes() < 40_000_000, "nor was it all sent"


def test_a_small_file_needs_no_ranges(web: Files, tmp_path: Path) -> None:
    saved(tmp_path, 10)
    web.ranges = False
    assert len(ckptmove.inspect(web.put("run.pt")).tensors) == 2


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("where", ["s3", "web"])
def test_a_server_that_falls_silent_is_given_up(
    where: str, store: Store, web: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "PATIENCE", 0.3)
    monkeypatch.setattr(range_request, "PATIENCE", 0.3)
    path = saved(tmp_path)
    url = store.put("run.pt", path) if where == "s3" else web.put("run.pt")
    for front in (store.front, web):
        front.faults.append(Fault("stalled", 500))
    with pytest.raises(InputError, match=r"can't be read: .*(?i:time)"):
        ckptmove.inspect(url)
    assert store.front.still_holds
    assert web.still_holds


MIB = 1 << 20


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_no_request(
    number: signal.Signals, store: Store, tmp_path: Path
) -> None:
    url = store.put("run.pt", saved(tmp_path, 20_000_000))
    store.front.faults.append(Fault("held", first=range(MIB, 80 * MIB), skip=1))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmove", "relocate", url, "out.pt", "--to", "cuda:0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **PATIENT, "PYTHONPATH": os.fspath(ROOT)},
    )
    for _ in range(3):
        store.front.wait_for_held()
    process.send_signal(number)
    told, said = process.communicate(timeout=HANG)
    assert store.front.still_holds
    assert process.returncode == -number
    assert (told, said.strip()) == ("", "")
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.slow
def test_an_error_waits_for_no_other_request(store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    """A piece of the tensors is refused while the one before it is still being waited for."""
    url = store.put("run.pt", saved(tmp_path, 20_000_000))
    store.front.faults += [
        Fault("held", first=range(2 * MIB, 6 * MIB)),
        Fault("status", 403, first=range(6 * MIB, 10 * MIB), act=store.front.wait_for_held),
    ]
    done = run_cli("relocate", url, tmp_path / "out.pt", "--to", "cuda:0", exit=3, env=PATIENT)
    assert store.front.still_holds
    assert "access is denied" in done.stderr
    assert not any(each in done.stderr for each in NOISE)
    assert done.stderr.count("\n") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["expected", "read in a row", "asked about"])
def test_what_is_fetched_ahead_and_refused_is_told_at_once(way: str, store: Store) -> None:
    """As above, in whatever else asks for several things at a time: the first of two is held."""
    urls = [store.put(name, bytes(8 * MIB)) for name in ("a.pt", "b.pt")]
    held, refused = Fault("held", first=range(MIB)), Fault("status", 403, first=range(MIB, 8 * MIB))
    if way == "asked about":
        held, refused = Fault("held", path="a.pt"), Fault("status", 403, path="b.pt")
        held.method = refused.method = "HEAD"
    refused.act = store.front.wait_for_held
    with RemoteObject(urls[0]) as source:
        store.front.faults += [held, refused]
        if way == "read in a row":
            source.expect([(0, 8 * MIB)])
        ask: Callable[[], object] = {
            "asked about": lambda: list(
                map_parallel(lambda url: place_of(url).size_and_stamp(), urls)
            ),
            "expected": lambda: source.expect([(0, 9), (4 * MIB, 9)]),
            "read in a row": lambda: source.read(0, 9),
        }[way]
        with pytest.raises(InputError, match="access is denied"):
            ask()
    assert store.front.still_holds
