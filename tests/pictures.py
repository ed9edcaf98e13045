"""Pictures of runs: drawing one takes a second, and few tests look at it."""

from __future__ import annotations

from matplotlib.figure import Figure

from omagd.run.reporting import plots

DRAWN = plots.save
"""What writes a picture as it is drawn."""


def leave_pictures_empty() -> None:
    """Let runs of this process write a white picture in the place of each."""
    plots.save = lambda figure, out_png: DRAWN(Figure(figsize=(4, 3), facecolor="white"), out_png)
