"""A real S3 server on loopback, with faults between it and who asks."""

from __future__ import annotations

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
    """A request.

    Attributes:
        kind: `begin`, `part`, `complete`, `abort`, `put`, or else its method.
        key: the object.
        environ: as WSGI has it.
    """

    kind: str
    key: str
    environ: _Environ


#: What becomes of a request: nothing, or the status to answer with instead.
Fault = Callable[[Asked], int | None]


class Server:
    """The server. Used as a context, it runs.

    Attributes:
        url: where it listens.
        environment: what leads others there.
        client: of boto3's.
        asked: the requests so far, by kind and key.
        fault: asked before each request.
        after: asked once it was carried out, whose answer is lost if this gives a status.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            create_backend_app,
        )
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, type: str, message: str, *args: Any) -> None: ...

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
        """No faults any more, and nothing asked."""
        self.asked = list[tuple[str, str]]()
        self.fault: Fault = lambda _: None
        self.after: Fault = lambda _: None

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Run it."""
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
        status = self.fault(request)
        if status is not None:
            read(request)
            return _refuse(status, answer)
        status_after = self.after(request)
        if status_after is not None:
            list(self._app(environ, lambda *_: None))
            return _refuse(status_after, answer)
        answered: Iterable[bytes] = self._app(environ, answer)
        return answered


def read(request: Asked) -> bytes:
    """The body of a request, which is there to be read again."""
    data: bytes = request.environ["wsgi.input"].read(
        int(request.environ.get("CONTENT_LENGTH") or 0)
    )
    request.environ["wsgi.input"] = BytesIO(data)
    return data


def damage(request: Asked) -> None:
    """Have other bytes arrive."""
    data = bytearray(read(request))
    data[len(data) // 2] ^= 1
    request.environ["wsgi.input"] = BytesIO(data)


def _kind(environ: _Environ) -> str:
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    method: str = environ["REQUEST_METHOD"]
    if "uploads" in query and method == "POST":
        return "begin"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, method)
    return "put" if method == "PUT" else method


_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown", 501: "NotImplemented"}


def _refuse(status: int, answer: _Answer) -> list[bytes]:
    body = f"<Error><Code>{_CODES[status]}</Code><Message>no</Message></Error>".encode()
    answer(f"{status} no", [("Content-Length", str(len(body))), ("Content-Type", "text/xml")])
    return [body]


class Store(NamedTuple):
    """A bucket on it.

    Attributes:
        server: which may be told to falter.
        client: of boto3's.
    """

    server: Server
    client: Any

    def url(self, key: str) -> str:
        """The URL of an object."""
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        """The content of an object."""
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        """Have an object there."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def there(self) -> list[str]:
        """The objects that are there."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self) -> list[str]:
        """The objects in the making."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [each["Key"] for each in found]


@contextmanager
def bucket(server: Server, patched: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket, and the environment that leads there."""
    stores: Any = pytest.importorskip("s3fs").S3FileSystem
    for name, value in server.environment.items():
        patched.setenv(name, value)
    patched.setattr("ckptmove.sources.filesystem._PAUSES", (0.01, 0.01, 0.01))
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
