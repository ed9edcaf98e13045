"""One moment of an episode for people to look at: all units, as recordings and the player show them.

Plain Python values, so that a frame can be sent between processes and written as JSON. Shapes: n agents, U units; the
agents come first, in their order, then the units that the other actions aim at, in the order of these actions.
"""

from __future__ import annotations

import base64
import io
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

AGENTS, OPPONENTS, THINGS = 0, 1, 2
"""Teams: the agents of the environment, those who play against them, and what plays for nobody."""

LARGEST_PICTURE = 480
"""Width and height, in pixels."""

COMPASS = ("north", "south", "east", "west")


@dataclass(frozen=True)
class Scene:
    """What stays the same during an episode.

    Attributes:
        ids: name of each unit, [U], for example `a0`, `e3`. teams: [U] of `AGENTS`, `OPPONENTS`, `THINGS`.
        kinds: type of each unit in words, [U]. team_names: name of each team that occurs, by its number.
        actions: names of the actions that aim at no unit; action `len(actions) + i` aims at unit `n + i`.
        health_max, shield_max: [U], 0 for units without. heals: [U], whether it aims at the i-th agent instead.
        sight, reach: of each agent in cells, [n], 0 where unknown or without a limit.
        bounds: (x0, y0, x1, y1) of the map in cells, y up; None where units have no place.
        torus: whether the map's edges are joined. walls: (x0, y0, x1, y1) of parts that cannot be entered.
        score: what `Frame.score` counts, or "" where there is none.
    """

    ids: tuple[str, ...]
    teams: tuple[int, ...]
    kinds: tuple[str, ...]
    team_names: tuple[str, ...]
    actions: tuple[str, ...] = ()
    health_max: tuple[float, ...] = ()
    shield_max: tuple[float, ...] = ()
    heals: tuple[bool, ...] = ()
    sight: tuple[float, ...] = ()
    reach: tuple[float, ...] = ()
    bounds: tuple[float, float, float, float] | None = None
    torus: bool = False
    walls: tuple[tuple[float, float, float, float], ...] = ()
    score: str = ""


@dataclass(frozen=True)
class Frame:
    """All units at one moment, lists [U] unless said otherwise.

    Attributes:
        scene: what does not change. x, y: position in cells. alive: whether the unit is there. health, shield: points.
        targets: index of the unit that it attacks or heals; -1 for none or unknown.
        bodies: [x, y, x, y, ...] of all parts of a unit that covers several cells, head first; empty for others.
        marked: units to which something has just happened, such as a death after which it has returned.
        score: of the agents and of their opponents, where the scene has one.
        picture: drawn by the environment itself, a PNG in base64; then it is shown instead of places.
    """

    scene: Scene
    x: list[float]
    y: list[float]
    alive: list[bool]
    health: list[float] = field(default_factory=list)
    shield: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    bodies: list[list[float]] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    picture: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def unit_names(n_agents: int, n_opponents: int) -> tuple[str, ...]:
    """Return the names of units: agents `a0`, `a1`, ..., then opponents `e0`, `e1`, ..."""
    return *(f"a{i}" for i in range(n_agents)), *(f"e{i}" for i in range(n_opponents))


def without_place(n_agents: int, picture: str = "") -> Frame:
    """Return the frame of an environment whose agents have no place: only their names, in a row, or a picture."""
    scene = Scene(unit_names(n_agents, 0), (AGENTS,) * n_agents, ("agent",) * n_agents, ("agents",))
    return Frame(scene, [float(i) for i in range(n_agents)], [0.0] * n_agents, [True] * n_agents, picture=picture)


def drawn(pixels: Any) -> str:
    """Return `Frame.picture` of pixels [height, width, 3] uint8, made smaller. Errors: ValueError for anything else."""
    from PIL import Image

    if not isinstance(pixels, np.ndarray) or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"render() returned {type(pixels).__name__}, not pixels")
    image, file = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE))
    image.quantize(64, dither=Image.Dither.NONE).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def rounded(values: Any) -> list[float]:
    """Return an array [U] as a list of rounded numbers."""
    return np.round(np.asarray(values, np.float64), 2).tolist()
