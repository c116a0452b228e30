"""Servers on loopback that count requests and inject faults: a proxy, and files by HTTP.

front.faults.append(Fault("reset", times=2))
front.nbytes("run.pt"), front.asked("GET")
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_PIECE = 1 << 18
#: When each upload began, as moto says, and how to say when it was.
_MOTO_BEGAN = b"<Initiated>2010-11-10T20:48:33.000Z</Initiated>"
_BEGAN = "<Initiated>%Y-%m-%dT%H:%M:%S.000Z</Initiated>"
#: Seconds after which a request that is held is let go of, so that what waits for it ends: a test
#: asks for `still_holds` then, and fails.
HANG = 120.0
#: The environment of a client that would wait for an answer for ever.
PATIENT = {"FSSPEC_S3": '{"config_kwargs": {"connect_timeout": 3600, "read_timeout": 3600}}'}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


@dataclass
class Fault:
    """A fault to inject into answers.

    `reset`: close the connection. `cut`: end the answer after `value` bytes. `status`: answer with
    `value`. `slow`: wait `value` milliseconds. `held`: do not answer while the front holds the
    request. `stalled`: the same after `value` bytes. `shifted`: send another range. `whole`: ignore
    the range. `endless`: send more than announced. `none`: only call `act`, which is called before
    the answer is made.
    """

    kind: str
    value: int = 0
    method: str = "GET"
    path: str = ""  #: any part of the path
    skip: int = 0  #: how many such requests succeed first
    times: int = 1 << 30  #: how many fail
    act: Callable[[], object] | None = None
    first: range | None = None  #: where the ranges begin that fail; other requests do not

    def meets(self, method: str, path: str, wanted: str | None) -> bool:
        """Whether it applies to a request; ask once for each request."""
        if method != self.method or self.path not in path:
            return False
        if self.first is not None and _first_of(wanted) not in self.first:
            return False
        self.skip -= 1
        if self.skip >= 0 or not self.times:
            return False
        self.times -= 1
        return True


def _first_of(wanted: str | None) -> int:
    """The first byte of a requested range; -1 for the whole object."""
    return int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else -1


class Seen(NamedTuple):
    """A request, and the number of bytes of an object in its answer."""

    method: str
    path: str
    range: str | None
    nbytes: int


class Answer(NamedTuple):
    """An answer: its body may be only a part of what is there."""

    status: int
    headers: Mapping[str, str]
    body: Iterator[bytes]
    nbytes: int


class Front(ThreadingHTTPServer):
    """A server that answers with `answer`, counts requests and injects faults."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.connections = 0
        self.errors: list[BaseException | None] = []
        self.guard = threading.Lock()
        self.held = threading.Semaphore(0)  #: released once per held request
        self._freed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> Answer:
        raise NotImplementedError

    def asked(self, method: str = "GET", path: str = "") -> list[Seen]:
        """The requests of a method whose path contains a text."""
        return [each for each in self.seen if each.method == method and path in each.path]

    def nbytes(self, path: str = "") -> int:
        """The number of bytes of objects that were sent."""
        return sum(each.nbytes for each in self.asked(path=path))

    def reset(self) -> None:
        self.faults.clear()
        self.seen.clear()
        self.connections = 0

    def fault_for(self, method: str, path: str, wanted: str | None) -> Fault | None:
        """The fault that applies to a request."""
        with self.guard:
            return next((each for each in self.faults if each.meets(method, path, wanted)), None)

    def hold(self) -> None:
        """Wait until held requests are released."""
        self.held.release()
        if not self._freed.wait(HANG):
            self.free()

    def wait_for_held(self) -> None:
        """Return when one more request is held."""
        assert self.held.acquire(timeout=HANG), "no such request came"

    def free(self) -> None:
        """Release all held requests, and hold no more."""
        self._freed.set()

    @property
    def still_holds(self) -> bool:
        """Whether no held request was released: what ended did so without their answers."""
        return not self._freed.is_set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore that a client went away; any other error fails the test."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections += 1
        self.behind: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self.behind is not None:
            self.behind.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        fault = self.server.fault_for(self.command, self.path, wanted)
        kind = "" if fault is None else fault.kind
        value = 0 if fault is None else fault.value
        if fault is not None and fault.act is not None:
            fault.act()
        if kind == "slow":
            time.sleep(value / 1000)
        if kind == "held":
            self.server.hold()
        if kind == "reset":
            self.server.seen.append(Seen(self.command, self.path, wanted, 0))
            self._reset()
            return
        if kind == "status":
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            body = SLOW_DOWN if value == 503 else b""
            found = Answer(value, {}, iter([body]), len(body))
        else:
            if kind == "whole":
                del self.headers["Range"]
            if kind == "shifted" and wanted:
                start, _, end = wanted.removeprefix("bytes=").partition("-")
                del self.headers["Range"]
                self.headers["Range"] = f"bytes={int(start) + value}-{int(end) + value}"
            found = self.server.answer(self)
        self._send(found, kind, value, wanted)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _send(self, found: Answer, kind: str, value: int, wanted: str | None) -> None:
        self.send_response(found.status)
        for name, text in found.headers.items():
            self.send_header(name, text)
        if kind != "endless":
            self.send_header("Content-Length", str(found.nbytes))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        sent, most = 0, value if kind in ("cut", "stalled") else found.nbytes
        is_content, seen = found.status in (200, 206), False
        try:
            if self.command != "HEAD":
                for piece in found.body:
                    piece = piece[: most - sent]
                    if sent + len(piece) >= most and kind != "endless":
                        seen = self._see(wanted, most if is_content else 0)
                    self.wfile.write(piece)
                    sent += len(piece)
                    if sent >= most:
                        break
                while kind == "endless":
                    self.wfile.write(bytes(_PIECE))
                    sent += _PIECE
        finally:
            if not seen:
                self._see(wanted, sent if is_content else 0)
        if kind == "stalled":
            self.server.hold()
        if kind in ("cut", "stalled"):
            self._reset()

    def _see(self, wanted: str | None, nbytes: int) -> bool:
        """Count a request, before the client can know that it was answered."""
        self.server.seen.append(Seen(self.command, self.path, wanted, nbytes))
        return True

    def _reset(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


class Proxy(Front):
    """A server in front of another one."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind
        self.upload_age = 0.0  #: how many seconds ago uploads were begun, as it says

    def answer(self, handler: BaseHTTPRequestHandler) -> Answer:
        assert isinstance(handler, _Handler)
        if handler.behind is None:
            handler.behind = http.client.HTTPConnection(self.behind, timeout=60)
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length) if length else None
        headers = {name: text for name, text in handler.headers.items() if name != "Connection"}
        handler.behind.request(handler.command, handler.path, body, headers)
        answer = handler.behind.getresponse()
        told = {name: text for name, text in answer.getheaders() if name.lower() not in _HOP}
        if handler.command == "HEAD":
            answer.read()
            return Answer(answer.status, told, iter(()), int(answer.headers["Content-Length"] or 0))
        began = time.strftime(_BEGAN, time.gmtime(time.time() - self.upload_age))
        whole = answer.read().replace(_MOTO_BEGAN, began.encode())
        return Answer(answer.status, told, iter([whole]), len(whole))


class Files(Front):
    """The files of a folder, as web servers serve them."""

    def __init__(self, folder: Path, *, ranges: bool = True, etags: bool = True) -> None:
        super().__init__()
        self.folder, self.ranges, self.etags = folder, ranges, etags

    def put(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def answer(self, handler: BaseHTTPRequestHandler) -> Answer:
        path = self.folder / unquote(urlsplit(handler.path).path).lstrip("/")
        if not path.is_file():
            return Answer(404, {}, iter([b"no"]), 2)
        about = path.stat()
        headers = {"Content-Type": "application/octet-stream"}
        if self.etags:
            headers["ETag"] = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
        start, end, status = 0, about.st_size, 200
        wanted = handler.headers.get("Range")
        if self.ranges and wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last) + 1, about.st_size), 206
            if start >= about.st_size:
                return Answer(416, {}, iter(()), 0)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{about.st_size}"
        return Answer(status, headers, _read(path, start, end), end - start)


def _read(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            piece = file.read(min(_PIECE, end - start))
            start += len(piece)
            yield piece


@contextlib.contextmanager
def listening(front: Front) -> Iterator[Front]:
    thread = threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield front
    finally:
        front.free()
        front.shutdown()
        front.server_close()
        thread.join()
    assert not front.errors
