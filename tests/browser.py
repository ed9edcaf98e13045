"""Opens pages in a headless Chromium and notes what they complain about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def installed() -> str:
    """Return the path of a browser; without one skip the test, or fail it where CI promises one."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail(f"none of {', '.join(NAMES)} is installed, although CI=true")
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


@contextmanager
def opened(path: Path, fragment: str = "", *, dark: bool = False, wide: int = 1240) -> Iterator[tuple[Any, list[str]]]:
    """Yield the page of a file and a list of its complaints: errors, console messages, requests to anything else."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = installed()
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        size = {"width": wide, "height": 844}
        page = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.extend([request.url] * (not request.url.startswith("file:"))))
        page.goto(f"{path.as_uri()}{fragment}")
        yield page, complaints
        browser.close()
