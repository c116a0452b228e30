"""Object stores on loopback: S3, and the web, each behind a front of `fronts`.

The S3 server is moto's, in its own process.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.servers.fronts import Fault, Files, Proxy, listening
from tests.servers.uploading import describe_once

__all__ = ["ACCESS", "SERVER", "Fault", "Files", "Proxy", "Store", "listening"]

#: It is not checked, but somebody has to have signed.
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)


@dataclass
class Store:
    """A bucket of an S3 server, behind a front."""

    server: str  #: the address of the server itself
    front: Proxy  #: the server that clients connect to
    bucket: str = field(default_factory=lambda: f"b-{uuid.uuid4().hex[:12]}")

    @property
    def env(self) -> dict[str, str]:
        return {**ACCESS, "AWS_ENDPOINT_URL": self.front.url}

    def url(self, key: str) -> str:
        """The URL of an object, as users write it."""
        return f"s3://{self.bucket}/{key}"

    def put(self, key: str, content: bytes | Path) -> str:
        """Put an object into the bucket, not through the front; gives its URL."""
        data = content.read_bytes() if isinstance(content, Path) else content
        self.say("PUT", f"/{self.bucket}/{quote(key)}", data)
        return self.url(key)

    def put_folder(self, prefix: str, folder: Path) -> str:
        """Put all files of a folder below a prefix; gives its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
        return self.url(prefix)

    def say(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Send a request to the server itself."""
        connection = http.client.HTTPConnection(self.server, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"Authorization": _SIGNED})
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status < 300, (method, path, answer.status, told)
            return told


#: What a client needs besides an endpoint; no other configuration is to be found.
ACCESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


#: Listens at whatever port is free, and says which.
SERVER = """
from moto import backends
names = frozenset(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: names  # else each request looks at 200 folders
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert port, "the server ended"
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
def store(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket, which s3fs finds by the environment."""
    with listening(Proxy(s3_server)) as front:
        assert isinstance(front, Proxy)
        made = Store(s3_server, front)
        made.say("PUT", f"/{made.bucket}")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        describe_once(monkeypatch)
        forget_clients()
        yield made
        forget_clients()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Files]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with listening(Files(tmp_path)) as front:
        assert isinstance(front, Files)
        yield front
    forget_clients()


def forget_clients() -> None:
    """Drop cached clients of other servers."""
    import fsspec

    for protocol in ("s3", "http"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
