"""What every test of batches has: workers that begin at once."""

from __future__ import annotations

import subprocess

import pytest

from tests.servers.warm_python import WarmCommand


@pytest.fixture(autouse=True)
def warm_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process with the modules of the command line, but in `cold` tests."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(subprocess, "Popen", WarmCommand)
