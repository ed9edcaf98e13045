"""Recordings of battles that a run writes. `WRITERS` maps formats to functions that show a recording in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    import numpy as np

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

# Called as draw(frame); returns pixels, [height, width, 3] uint8.
RENDER_MODES: Registry[Callable[..., np.ndarray]] = Registry(
    "render_mode", "omagd.render_modes", lazy={"rgb_array": "omagd.lab.watch.drawing:pixels"}
)
