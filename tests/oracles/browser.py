"""A real browser without a window, driven over its debugging protocol.

Chrome DevTools Protocol, domains Page, Runtime, Network and Log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE = 120  # seconds: a guard against hanging


class Tab:
    """A page in the browser, and what it complained of or asked the network for."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; gives its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            said = await self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]

    async def open(self, path: Path) -> None:
        """Open a file, and wait until all of it is loaded and its script has run."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=path.resolve().as_uri())
        while (await self._next()).get("method") != "Page.loadEventFired":
            pass

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def _next(self) -> dict[str, Any]:
        said: dict[str, Any] = await self._socket.receive_json(timeout=_PATIENCE)
        kind, params = said.get("method"), said.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif kind == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif kind == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        return said


@contextlib.asynccontextmanager
async def open_tab(path: Path, profile: Path) -> AsyncIterator[Tab]:
    """A tab that shows a file, in a browser of its own."""
    import aiohttp

    assert PROGRAM is not None
    switches = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
        "--disable-extensions --disable-background-networking --remote-debugging-port=0"
    )
    process = subprocess.Popen(
        [PROGRAM, *switches.split(), f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port_of(profile, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json()
            address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.open(path)
                yield tab
    finally:
        process.kill()
        process.wait()


async def _port_of(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser listens on, which it writes into its profile."""
    told = profile / "DevToolsActivePort"
    for _ in range(_PATIENCE * 10):
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(told.read_text().split()[0])
        assert process.poll() is None, "the browser ended"
        await asyncio.sleep(0.1)
    raise AssertionError("the browser does not answer")
