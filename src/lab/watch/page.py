"""The HTML player: one self-contained page that plays a recording."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from omagd.run.recording.recording import Recording
from omagd.utils.writing import replace_file

PAGE = Path(__file__).with_name("player.html")


def player_page(recording: Recording, agent: int = 0) -> str:
    """Return the page as text; it loads nothing else. agent: the one that it shows first."""
    data = base64.b64encode(recording.packed()).decode()
    title = html.escape(f"{recording.episodes[0].label}: {recording.episodes[0].policy}")
    page = PAGE.read_text(encoding="utf-8").replace("__TITLE__", title).replace("__AGENT__", str(agent))
    return page.replace("__DATA__", data)


def write_page(recording: Recording, path: Path, agent: int) -> Path:
    """Write the page to `path` and return it. agent: the one that it shows first. Errors: OSError."""
    replace_file(path, player_page(recording, agent).encode())
    return path
