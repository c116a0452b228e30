"""The README's picture: the map and the table of the page of `inspect`, in a real browser.

Usage: python scripts/picture.py     (needs torch, aiohttp and chromium; writes scripts/inspect.png)
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))
_WIDTH, _HEIGHT = 1040, 1600  # of the window
_ROWS = 4  # of the table below the map, that are shown
_PLACE = f"""(() => {{
  const top = document.querySelector("select").getBoundingClientRect().top - 28;
  const rows = document.querySelectorAll("section tbody tr");
  return [top, rows[{_ROWS}].getBoundingClientRect().top - 18];
}})()"""


async def take(page: Path, profile: Path) -> bytes:
    """The picture of a page as PNG."""
    from tests.oracles.browser import open_tab

    async with open_tab(page, profile) as tab:
        size = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await asyncio.sleep(1)  # it draws the map anew for this width
        top, bottom = await tab.run(_PLACE)
        clip = {"x": 0, "y": top, "width": _WIDTH, "height": bottom - top, "scale": 1}
        shot = await tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(shot["data"])


def main() -> None:
    """Make a checkpoint, its page, and the picture of that."""
    import ckptmove

    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder, "run.pt"), Path(folder, "run.html")
        demo = PROJECT / "scripts" / "demo_checkpoint.py"
        subprocess.run([sys.executable, demo, run], check=True)
        page.write_text(ckptmove.inspect(run).to_html("run.pt"))
        (PROJECT / "scripts" / "inspect.png").write_bytes(
            asyncio.run(take(page, Path(folder, "profile")))
        )


if __name__ == "__main__":
    main()
