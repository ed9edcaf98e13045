"""One view of the map in the pictures of a battle: ground, sight, units, arrows.

Everything is drawn at `TWICE` its size and reduced, which smooths the edges. Positions: x to the right, y down.
"""

from __future__ import annotations

import base64
import io
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from omagd.envs.frames import OPPONENTS, THINGS
from omagd.run.recording.recording import Episode

Point = tuple[float, float]
PAGE, FIELD, FOG, LINE, WALL, TEXT, MUTED = "#0b0f16", "#1a2635", "#0d131c", "#26364a", "#44566b", "#eef3f8", "#9fb0c3"
TEAMS, HEAL, SHIELD = ("#4cc9c0", "#ff8a5c", "#ffd166"), "#7bd88f", "#8fb4ff"
TWICE, MOST_DASHES = 2, 2000
PARTS, DASH = 96, 3


def _outlines() -> tuple[np.ndarray, np.ndarray]:
    """Return a circle and a square of about the same area, [PARTS + 1, 2]: from the top clockwise, closed."""
    turn = 2 * np.pi * np.arange(PARTS + 1) / PARTS
    corners, way = [0, 1, 3, 5, 7, 8], 8 * np.arange(PARTS + 1) / PARTS
    square = np.interp(way, corners, [0, 1, 1, -1, -1, 0]), np.interp(way, corners, [-1, -1, 1, 1, -1, -1])
    return np.stack([np.sin(turn), -np.cos(turn)], 1), 0.88 * np.stack(square, 1)


OUTLINES = _outlines()
"""Shapes of agents and of opponents: teams differ in more than their colour."""


class Panel:
    """One view of the map, an image of its own.

    Args:
        episode: what is drawn. box: the part of the map. size: of the image in pixels.
    """

    def __init__(self, episode: Episode, box: Sequence[float], size: tuple[int, int]) -> None:
        from PIL import Image, ImageDraw

        wide, high = size
        self.image = Image.new("RGB", size, FIELD)
        self.draw: Any = ImageDraw.Draw(self.image)
        self.episode, self.scene = episode, episode.scene
        self.scale = min(wide / (box[2] - box[0]), high / (box[3] - box[1]))
        self._left = (wide - self.scale * (box[2] - box[0])) / 2 - box[0] * self.scale
        self._low = high - (high - self.scale * (box[3] - box[1])) / 2 + box[1] * self.scale
        self._box = box
        self.radius = self.scale * 0.42 if self.scene.torus else max(9 * TWICE, min(15 * TWICE, self.scale * 0.62))

    def at(self, x: float, y: float) -> Point:
        """Return the pixel of a place in cells."""
        return self._left + x * self.scale, self._low - y * self.scale

    def show(self, picture: str) -> None:
        """Show a PNG in base64. Errors: OSError for one that is damaged."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(base64.b64decode(picture)), formats=("PNG",)) as found:
            self.image.paste(ImageOps.pad(found.convert("RGB"), self.image.size, color=FIELD))

    def apart(self, places: Sequence[Point]) -> list[Point]:
        """Return `places` moved so that marks there do not hide each other."""
        if self.scene.torus or not places:
            return list(places)
        whole = self.radius + (6 if any(self.scene.shield_max) else 2) * TWICE
        return [(x, y) for x, y in spread(np.array(places), 2 * whole, 1.6 * whole).tolist()]

    def ground(self, sight: tuple[Point, float] | None, fog: bool) -> None:
        """Draw the ground; with `fog`, bright only where the agent sees: (centre, radius in pixels)."""
        if fog:
            self.draw.rectangle((0, 0, *self.image.size), fill=FOG)
        if fog and sight is not None:
            self.draw.ellipse(around(*sight), fill=FIELD)
        every, (x0, y0, x1, y1) = (1 if self.scene.torus else 5), self._box
        if self.scene.bounds is not None:
            for x in range(math.ceil(x0 / every) * every, math.floor(x1) + 1, every):
                self.draw.line((self.at(x, y0), self.at(x, y1)), fill=LINE, width=TWICE)
            for y in range(math.ceil(y0 / every) * every, math.floor(y1) + 1, every):
                self.draw.line((self.at(x0, y), self.at(x1, y)), fill=LINE, width=TWICE)
        for wx0, wy0, wx1, wy1 in self.scene.walls:
            (u, v), (w, z) = self.at(wx0, wy1), self.at(wx1, wy0)
            self.draw.rectangle((u, v, w, z), fill=WALL)
        if sight is not None:
            self.dashed(*sight, MUTED, 7)

    def dashed(self, centre: Point, radius: float, colour: str, step: int, width: int = TWICE) -> None:
        """Draw a dashed circle; `step`: length of a dash in pixels of the result."""
        parts = min(max(8, int(math.pi * radius / (step * TWICE))), MOST_DASHES)
        turn = 2 * math.pi * (np.arange(parts)[:, None] + np.array([0.0, 0.28, 0.55])) / parts
        dashes = np.stack([centre[0] + radius * np.cos(turn), centre[1] + radius * np.sin(turn)], -1)
        for dash in dashes.reshape(parts, -1).tolist():
            self.draw.line(dash, fill=colour, width=width)

    def body(self, parts: list[float], colour: str) -> None:
        """Draw a unit that covers several cells as a thick line, which may leave the map and come back."""
        joints, (x0, y0, x1, y1) = list(zip(parts[::2], parts[1::2], strict=True)), self.scene.bounds or (0, 0, 0, 0)
        thick = int(self.scale * 0.6)
        for one, other in (*zip(joints[1:], joints, strict=False), *zip(joints, joints[1:], strict=False)):
            dx, dy = nearest(other[0] - one[0], x1 - x0), nearest(other[1] - one[1], y1 - y0)
            self.draw.line((self.at(*one), self.at(one[0] + dx, one[1] + dy)), fill=colour, width=thick)
            self.draw.ellipse(around(self.at(*one), thick / 2), fill=colour)

    def unit(self, unit: int, where: Point, health: float | None, shield: float, guessed: bool = False) -> None:
        """Draw one unit. health, shield: shares; health None: no ring."""
        draw, r, team = self.draw, self.radius, self.scene.teams[unit]
        colour, inner = TEAMS[team], 0.95 * r if health is None else r - 2.5 * TWICE
        if team == THINGS:
            draw.ellipse(around(where, 0.62 * r), fill=FOG if guessed else colour, outline=colour, width=TWICE)
            return
        if health is not None:  # between marks that touch; a snake has its body there
            edge = OUTLINES[team == OPPONENTS] * (r + (6.5 if shield > 0 else 2) * TWICE) + np.array(where)
            draw.polygon(edge.ravel().tolist(), fill=FOG if guessed else FIELD)
        if shield > 0:
            self.ring(team, where, r + 2.5 * TWICE, WALL)
            self.ring(team, where, r + 2.5 * TWICE, SHIELD, shield)
        if health is not None:
            self.ring(team, where, r - 1.5 * TWICE, WALL)
            self.ring(team, where, r - 1.5 * TWICE, colour, health, dashed=guessed)
        shape = OUTLINES[team == OPPONENTS] * max(inner, 0.0) + np.array(where)
        draw.polygon(shape.ravel().tolist(), fill=FOG if guessed else colour)
        if guessed and health is None:
            self.ring(team, where, inner - 2 * TWICE, colour, dashed=True)
        name = self.scene.ids[unit]
        size = int(max(8 * TWICE, min(12 * TWICE, r * (0.68 if len(name) > 2 else 0.84))))
        draw.text(where, name, fill=colour if guessed else PAGE, font=font_of(size), anchor="mm")

    def ring(
        self, team: int, where: Point, inner: float, colour: str, share: float = 1.0, dashed: bool = False
    ) -> None:
        """Draw a share of a ring around a unit, from the top clockwise: a square one around opponents."""
        outline, last = OUTLINES[team == OPPONENTS], round(min(max(share, 0.0), 1.0) * PARTS)
        step = DASH if dashed else max(last, 1)
        for start in range(0, last, 2 * step):
            part = outline[start : min(start + step, last) + 1]
            points = np.concatenate([part * (max(inner, 0.0) + 2.5 * TWICE), part[::-1] * max(inner, 0.0)])
            self.draw.polygon((points + np.array(where)).ravel().tolist(), fill=colour)

    def pick(self, where: Point) -> None:
        """Mark the agent whose view is shown."""
        away = (10 if any(self.scene.shield_max) else 6) * TWICE
        self.draw.ellipse(around(where, self.radius + away), outline=TEXT, width=2 * TWICE)

    def cross(self, where: Point) -> None:
        """Draw a cross."""
        (x, y), r = where, 4 * TWICE
        for side in (1, -1):
            self.draw.line((x - r, y - side * r, x + r, y + side * r), fill=TEXT, width=2 * TWICE)

    def note(self, text: str, place: float) -> None:
        """Write a line in the middle of the view; `place`: share of the height."""
        wide, high = self.image.size
        words = fitted(self.draw, text, 14, wide - 8 * TWICE)
        self.draw.text((wide / 2, high * place), words, fill=TEXT, font=font_of(14 * TWICE), anchor="mm")

    def arrow(self, start: Point, end: Point, colour: str, width: int) -> None:
        """Draw an arrow between the marks of two units."""
        dx, dy = end[0] - start[0], end[1] - start[1]
        away = math.hypot(dx, dy)
        if away <= 2 * self.radius:
            return
        u, v, r, head = dx / away, dy / away, self.radius * 1.15, 7 * TWICE
        tip = end[0] - u * r, end[1] - v * r
        self.draw.line((start[0] + u * r, start[1] + v * r, *tip), fill=colour, width=width)
        sides = [(tip[0] - u * head + w * v * head / 2, tip[1] - v * head - w * u * head / 2) for w in (1, -1)]
        self.draw.polygon((tip, *sides), fill=colour)


def spread(points: np.ndarray, gap: float, most: float) -> np.ndarray:
    """Return `points` [k, 2] moved apart, so that marks of diameter `gap` there do not hide each other.

    No point moves further than `most`, so that dense crowds may still overlap; equal points part in different
    directions.
    """
    turn = 2.4 * np.arange(1, len(points) + 1)
    moved = points + 1e-3 * np.stack([np.cos(turn), np.sin(turn)], 1)
    for _ in range(24):
        way = moved[:, None] - moved
        away = np.maximum(np.hypot(way[..., 0], way[..., 1]), 1e-9)
        push = np.maximum(gap - away, 0) / 2 / away
        shift = moved + 0.8 * (way * push[..., None]).sum(1).clip(-gap, gap) - points
        moved = points + shift * np.minimum(1, most / np.maximum(np.hypot(*shift.T), 1e-9))[:, None]
    return moved


def nearest(gap: float, size: float) -> float:
    """Return a way between two places of a torus: the shorter one."""
    return gap - math.copysign(size, gap) if size and abs(gap) > size / 2 else gap


def around(centre: Point, r: float) -> tuple[float, float, float, float]:
    """Return the box of a circle."""
    r = max(r, 0.0)  # inner parts of the marks of a large map
    return centre[0] - r, centre[1] - r, centre[0] + r, centre[1] + r


@lru_cache(maxsize=64)
def font_of(size: int) -> Any:
    """Return a font by its size in pixels."""
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


def fitted(draw: Any, text: str, size: int, width: float) -> str:
    """Return a text, cut where it is wider than `width` in a font of `size` pixels of the result."""
    font = font_of(size * TWICE)
    if draw.textlength(text[:500], font=font) <= width and len(text) <= 500:
        return text
    fits = bisect_right(range(min(len(text), 500)), width, key=lambda k: draw.textlength(f"{text[:k]}…", font=font))
    return f"{text[: max(fits - 1, 0)].rstrip()}…"
