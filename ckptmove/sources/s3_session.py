"""A session of S3's client that keeps 10 MB less in memory.

botocore describes all services in files of JSON, and keeps what it read, with the documentation.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Mapping
from typing import Any

#: The services whose endpoints are kept: that of objects, and those that give credentials.
_SERVICES = {"s3", "s3-control", "s3-outposts", "sts", "portal.sso", "oidc", "signin"}


def concise_session(options: Mapping[str, Any]) -> Any:
    """Return a session of aiobotocore with these options."""
    from aiobotocore.session import AioSession  # type: ignore[import-untyped, unused-ignore]

    session = AioSession(**options)
    loader = session.get_component("data_loader")
    if not isinstance(loader.file_loader, _ConciseFiles):  # sessions may share a loader
        loader.file_loader = _ConciseFiles(loader.file_loader)
    return session


class _ConciseFiles:
    """Reads descriptions of services as botocore does, and keeps what requests need."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def exists(self, path: str) -> bool:
        """Whether there is such a description."""
        return bool(self._files.exists(path))

    def load_file(self, path: str) -> Any:
        """Read a description; None if it is not there."""
        for opened, suffix in ((open, ".json"), (gzip.open, ".json.gz")):
            with contextlib.suppress(FileNotFoundError), opened(path + suffix, "rb") as file:
                return json.load(file, object_hook=_concise)
        return self._files.load_file(path)


def _concise(read: dict[str, Any]) -> dict[str, Any]:
    """Remove documentation, and the endpoints of other services, from an object of JSON."""
    if isinstance(read.get("documentation"), str):
        read["documentation"] = ""
    if "regionRegex" in read and isinstance(read.get("services"), dict):  # endpoints by partition
        read["services"] = {key: read["services"][key] for key in _SERVICES & {*read["services"]}}
    return read
