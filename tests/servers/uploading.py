"""A real S3 server on loopback, with faults between it and who asks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import pytest

BUCKET = "bucket"
_Environ = dict[str, Any]
_Answer = Callable[[str, list[tuple[str, str]]], Any]


class Asked(NamedTuple):
    """A request of a client."""

    kind: str  #: `begin`, `part`, `copy`, `complete`, `abort`, `put`, or else its HTTP method
    key: str  #: the object
    environ: _Environ  #: of WSGI


#: What becomes of a request: nothing, or the status to answer with instead.
Fault = Callable[[Asked], int | None]


class Server:
    """The server; use `running` to run it."""

    def __init__(self) -> None:
        from moto import backends
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            create_backend_app,
        )
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, type: str, message: str, *args: Any) -> None: ...

        names = frozenset(backends.list_of_moto_modules())
        backends.list_of_moto_modules = lambda: names  # else each request looks at 200 folders
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.client = pytest.importorskip("boto3").client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.reset()

    def reset(self) -> None:
        self.asked = list[tuple[str, str]]()
        self.nbytes = 0  #: how many bytes of bodies came in and went out
        self.fault: Fault = lambda _: None  #: called before each request
        self.after: Fault = lambda _: None  #: called after each; with a status, the answer is lost

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        thread.join()
        self._server.server_close()
        self.client.close()

    def _answer(self, environ: _Environ, answer: _Answer) -> Iterable[bytes]:
        request = Asked(_kind(environ), environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"), environ)
        self.asked.append((request.kind, request.key))
        self.nbytes += int(environ.get("CONTENT_LENGTH") or 0)
        status = self.fault(request)
        if status is not None:
            read(request)
            return _refuse(status, answer)
        status_after = self.after(request)
        if status_after is not None:
            list(self._app(environ, lambda *_: None))
            return _refuse(status_after, answer)
        answered: Iterable[bytes] = self._app(environ, answer)
        return self._counted(answered)

    def _counted(self, answered: Iterable[bytes]) -> Iterable[bytes]:
        for piece in answered:
            self.nbytes += len(piece)
            yield piece


def read(request: Asked) -> bytes:
    data: bytes = request.environ["wsgi.input"].read(
        int(request.environ.get("CONTENT_LENGTH") or 0)
    )
    request.environ["wsgi.input"] = BytesIO(data)
    return data


def damage(request: Asked) -> None:
    data = bytearray(read(request))
    data[len(data) // 2] ^= 1
    request.environ["wsgi.input"] = BytesIO(data)


def _kind(environ: _Environ) -> str:
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    method: str = environ["REQUEST_METHOD"]
    if "uploads" in query and method == "POST":
        return "begin"
    if "uploadId" in query:
        method = "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else method
        kinds = {"PUT": "part", "COPY": "copy", "POST": "complete", "DELETE": "abort"}
        return kinds.get(method, method)
    return "put" if method == "PUT" else method


_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown", 501: "NotImplemented"}


def _refuse(status: int, answer: _Answer) -> list[bytes]:
    body = f"<Error><Code>{_CODES[status]}</Code><Message>no</Message></Error>".encode()
    answer(f"{status} no", [("Content-Length", str(len(body))), ("Content-Type", "text/xml")])
    return [body]


class Store(NamedTuple):
    """A bucket on the server."""

    server: Server
    client: Any

    def url(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def there(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self) -> list[str]:
        """The keys of unfinished uploads."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [each["Key"] for each in found]


@functools.cache
def _loader(path: str | None = None) -> Any:
    return pytest.importorskip("botocore.loaders").create_loader(path)


def describe_once(patched: pytest.MonkeyPatch) -> None:
    """Have all clients share one description of S3, which takes longer to read than most tests."""
    patched.setattr("botocore.session.create_loader", _loader)


@contextmanager
def bucket(server: Server, patched: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket, and the environment with which clients find it."""
    stores: Any = pytest.importorskip("s3fs").S3FileSystem
    for name, value in server.environment.items():
        patched.setenv(name, value)
    patched.setattr("ckptmove.sources.filesystem._PAUSES", (0.01, 0.01, 0.01))
    describe_once(patched)
    stores.clear_instance_cache()
    client = server.client
    client.create_bucket(Bucket=BUCKET)
    server.reset()
    store = Store(server, client)
    try:
        yield store
    finally:
        server.reset()
        for key in store.there():
            client.delete_object(Bucket=BUCKET, Key=key)
        for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            client.abort_multipart_upload(
                Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        client.delete_bucket(Bucket=BUCKET)
        stores.clear_instance_cache()
