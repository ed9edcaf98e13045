"""Pictures of runs: drawing one takes half a second, and few tests look at it."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from omagd.run.reporting import plots
from omagd.utils.storage import STORAGE

curves, evaluation = plots.curves, plots.evaluation  # as they are drawn


@cache
def white() -> bytes:
    """Return a white picture."""
    picture = io.BytesIO()
    Figure(figsize=(4, 3), facecolor="white").savefig(picture, format="png")
    return picture.getvalue()


def leave_pictures_empty() -> None:
    """Let runs of this process, and of those that it forks, write a white picture in the place of each."""
    white()

    def empty(_: object, out_png: str | Path) -> Path:
        STORAGE.write(Path(out_png), white())
        return Path(out_png)

    plots.curves = plots.evaluation = empty
