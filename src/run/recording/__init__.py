"""Recordings of battles that a run writes. `WRITERS` maps formats to functions that show a recording in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omagd.utils.registry import Registry

# A writer is called as write(recording, path, agent) and returns the path; agent: the one whose view is shown.
WRITERS: Registry[Callable[..., Path]] = Registry(
    "format",
    "omagd.recording_formats",
    lazy={
        "html": "omagd.lab.watch.formats:write_page",
        "gif": "omagd.lab.watch.formats:write_gif",
        "png": "omagd.lab.watch.formats:write_png",
    },
)
