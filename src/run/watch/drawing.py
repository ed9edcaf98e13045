"""A recording as GIF or MP4: each moment as a picture of the battle, beside what one agent sees and believes.

The pictures are drawn at twice their size and reduced, which smooths the edges. Positions: x to the right, y down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.frames import OPPONENTS, THINGS
from omagd.run.reporting.battle_plot import spread
from omagd.run.watch.recording import Belief, Episode, Moment, Recording
from omagd.utils.errors import UserError
from omagd.utils.writing import atomic_file

Point = tuple[float, float]
PAGE, FIELD, FOG, LINE, WALL, TEXT, MUTED = "#0b0f16", "#1a2635", "#0d131c", "#26364a", "#44566b", "#eef3f8", "#9fb0c3"
TEAMS, HEAL, SHIELD = ("#4cc9c0", "#ff8a5c", "#ffd166"), "#7bd88f", "#8fb4ff"
TWICE = 2
WIDTH, HEADER, FOOTER, GAP = 860 * TWICE, 58 * TWICE, 66 * TWICE, 10 * TWICE
MS, LAST_MS = 160, 2000
COLOURS, MOST_DASHES = 64, 2000


def extent(episode: Episode) -> tuple[float, float, float, float]:
    """Return the part of the map that the pictures show: all places of units with a margin, in cells."""
    scene = episode.scene
    if scene.bounds is None:
        return -1.0, -1.0, float(episode.n_agents), 1.0
    if scene.torus:
        return scene.bounds
    places = np.array([(x, y) for m in episode.moments for x, y, on in zip(m.x, m.y, m.alive, strict=True) if on])
    low, high = places.min(0), places.max(0)
    lack = np.maximum(0, 14 - (high - low)) / 2 + 2
    low = np.maximum(low - lack, np.array(scene.bounds[:2]) - 1.5)
    high = np.minimum(high + lack, np.array(scene.bounds[2:]) + 1.5)
    flat = max(0.0, 0.62 * (high[0] - low[0]) - (high[1] - low[1]))
    return float(low[0]), float(low[1] - flat / 2), float(high[0]), float(high[1] + flat / 2)


class _Panel:
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
        self.radius = self.scale * 0.42 if self.scene.torus else max(8 * TWICE, min(15 * TWICE, self.scale * 0.62))

    def at(self, x: float, y: float) -> Point:
        """Return the pixel of a place in cells."""
        return self._left + x * self.scale, self._low - y * self.scale

    def apart(self, places: Sequence[Point]) -> list[Point]:
        """Return `places` moved so that marks there do not hide each other."""
        if self.scene.torus or not places:
            return list(places)
        return [(x, y) for x, y in spread(np.array(places), 2 * self.radius, 1.6 * self.radius).tolist()]

    def ground(self, sight: tuple[Point, float] | None, fog: bool) -> None:
        """Draw the ground; with `fog`, bright only where the agent sees: (centre, radius in pixels)."""
        if fog:
            self.draw.rectangle((0, 0, *self.image.size), fill=FOG)
        if fog and sight is not None:
            self.draw.ellipse(_round(*sight), fill=FIELD)
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
            dx, dy = _nearest(other[0] - one[0], x1 - x0), _nearest(other[1] - one[1], y1 - y0)
            self.draw.line((self.at(*one), self.at(one[0] + dx, one[1] + dy)), fill=colour, width=thick)
            self.draw.ellipse(_round(self.at(*one), thick / 2), fill=colour)

    def unit(self, unit: int, where: Point, health: float | None, shield: float, guessed: bool = False) -> None:
        """Draw one unit. health, shield: shares; health None: no ring."""
        draw, r, team = self.draw, self.radius, self.scene.teams[unit]
        colour, inner = TEAMS[team], r * (0.95 if health is None else 0.74)
        fill = FOG if guessed else colour
        if team == THINGS:
            draw.ellipse(_round(where, 0.62 * r), fill=fill, outline=colour, width=TWICE)
            return
        if shield > 0:
            draw.ellipse(_round(where, r + 5 * TWICE), fill=WALL)
            draw.pieslice(_round(where, r + 5 * TWICE), -90, -90 + 360 * min(shield, 1), fill=SHIELD)
            draw.ellipse(_round(where, r + 2 * TWICE), fill=FIELD)
        if health is not None:
            draw.ellipse(_round(where, r + TWICE), fill=WALL)
            draw.pieslice(_round(where, r + TWICE), -90, -90 + 360 * min(max(health, 0), 1), fill=colour)
            draw.ellipse(_round(where, r - 2 * TWICE), fill=FOG if guessed else FIELD)
        if guessed:  # gaps in the ring
            self.dashed(where, r - TWICE / 2, FOG, 3, 5 * TWICE)
        shape = draw.rectangle if team == OPPONENTS else draw.ellipse
        shape(_round(where, inner * (0.9 if team == OPPONENTS else 1)), fill=fill, outline=colour, width=TWICE)
        name = self.scene.ids[unit]
        size = int(max(8 * TWICE, min(12 * TWICE, r * (0.68 if len(name) > 2 else 0.84))))
        draw.text(where, name, fill=colour if guessed else PAGE, font=_font(size), anchor="mm")

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


def aims(episode: Episode, step: int) -> list[int]:
    """Return whom each unit attacks or heals at a step, [U] or -1: agents by their action, others as they did."""
    scene, moment, n = episode.scene, episode.moments[step], episode.n_agents
    found = [*(moment.targets or [-1] * len(scene.ids))]
    for agent in range(n):
        action = moment.actions[agent] if moment.actions and step < episode.length else -1
        aim = action - len(scene.actions) + (0 if scene.heals and scene.heals[agent] else n)
        aimed = action >= len(scene.actions) and aim < len(scene.ids) and moment.alive[agent]
        found[agent] = aim if aimed else -1
    return found


def action_name(episode: Episode, agent: int, action: int) -> str:
    """Return the name of an agent's action."""
    scene = episode.scene
    if action < len(scene.actions):
        return scene.actions[action]
    heals = bool(scene.heals and scene.heals[agent])
    aim = action - len(scene.actions) + (0 if heals else episode.n_agents)
    return f"action {action}" if aim >= len(scene.ids) else f"{'heal' if heals else 'attack'} {scene.ids[aim]}"


def pictures(episode: Episode, agent: int) -> Iterator[Any]:
    """Yield a Pillow image for each moment of an episode, as `agent` sees it."""
    from PIL import Image, ImageDraw

    agent = min(agent, episode.n_agents - 1)  # as the player: episodes on other maps may have fewer
    box, two = extent(episode), bool(episode.moments[0].seen)
    wide = (WIDTH - 3 * GAP) // 2 if two else WIDTH - 2 * GAP
    high = int(min(wide * (box[3] - box[1]) / (box[2] - box[0]), (420 if two else 480) * TWICE))
    size = WIDTH, (HEADER + high + FOOTER + 7) // 8 * 8
    for step in range(len(episode.moments)):
        image = Image.new("RGB", size, PAGE)
        for place, paint in enumerate((_truth, _belief)[: 1 + two]):
            panel = _Panel(episode, box, (wide, high))
            paint(panel, step, agent)
            image.paste(panel.image, (GAP + place * (GAP + wide), HEADER))
        _words(ImageDraw.Draw(image), episode, step, agent, (wide, high, two))
        yield image.reduce(TWICE)


def _health(episode: Episode, moment: Moment, unit: int) -> tuple[float | None, float]:
    scene = episode.scene
    health = moment.health[unit] / scene.health_max[unit] if scene.health_max and scene.health_max[unit] else None
    shield = moment.shield[unit] / scene.shield_max[unit] if scene.shield_max and scene.shield_max[unit] else 0.0
    return health, shield


def _sight(panel: _Panel, moment: Moment, agent: int) -> tuple[Point, float] | None:
    sight = panel.scene.sight[agent] if panel.scene.sight else 0.0
    shown = moment.alive[agent] and sight and panel.scene.bounds is not None
    return (panel.at(moment.x[agent], moment.y[agent]), sight * panel.scale) if shown else None


def _truth(panel: _Panel, step: int, agent: int) -> None:
    """Draw the battle as it is."""
    episode, scene = panel.episode, panel.scene
    moment = episode.moments[step]
    panel.ground(_sight(panel, moment, agent), fog=False)
    there = [unit for unit, alive in enumerate(moment.alive) if alive]
    where = dict(zip(there, panel.apart([panel.at(moment.x[i], moment.y[i]) for i in there]), strict=True))
    for unit, aim in enumerate(aims(episode, step)):
        if unit in where and aim in where and aim != unit:
            colour = HEAL if scene.teams[unit] == scene.teams[aim] else TEAMS[scene.teams[unit]]
            panel.arrow(where[unit], where[aim], colour, (3 if unit == agent else 1) * TWICE)
    _units(panel, moment, where)
    if agent in where:
        panel.draw.ellipse(_round(where[agent], panel.radius + 6 * TWICE), outline=TEXT, width=2 * TWICE)
    for unit in moment.marked:
        panel.draw.ellipse(_round(where[unit], panel.radius + 2 * TWICE), outline=TEXT, width=3 * TWICE)


def _units(panel: _Panel, moment: Moment, where: dict[int, Point]) -> None:
    for unit in where if moment.bodies else ():
        if moment.bodies[unit]:
            panel.body(moment.bodies[unit], TEAMS[panel.scene.teams[unit]])
    for unit, spot in where.items():
        panel.unit(unit, spot, *_health(panel.episode, moment, unit))


def _belief(panel: _Panel, step: int, agent: int) -> None:
    """Draw what the agent sees, and hollow what it believes, with a line to the real place."""
    moment, scene = panel.episode.moments[step], panel.scene
    sight = _sight(panel, moment, agent)
    sees = int(moment.seen[agent] or "0", 16) if moment.alive[agent] else 0
    panel.ground(sight, fog=not moment.alive[agent] or sight is not None)
    seen = [unit for unit in range(len(scene.ids)) if sees >> unit & 1]
    guesses: list[Belief] = moment.beliefs[agent] if moment.beliefs else []
    inside = [(unit, *_inside(scene, x, y), health) for unit, x, y, health in guesses]
    places = [panel.at(moment.x[i], moment.y[i]) for i in seen] + [panel.at(x, y) for _, x, y, _ in inside]
    moved = panel.apart(places)
    guessed = [(unit, health, spot) for (unit, _, _, health), spot in zip(inside, moved[len(seen) :], strict=True)]
    for unit, _, spot in guessed:
        if moment.alive[unit]:
            real = panel.at(moment.x[unit], moment.y[unit])
            panel.draw.line((*spot, *real), fill=MUTED, width=TWICE)
            _cross(panel.draw, real)
    for unit, health, spot in guessed:
        panel.unit(unit, spot, health, 0.0, guessed=True)
        if not moment.alive[unit]:
            below = spot[0], spot[1] + panel.radius + 8 * TWICE
            panel.draw.text(below, "dead", fill=MUTED, font=_font(11 * TWICE), anchor="mm")
    _units(panel, moment, dict(zip(seen, moved[: len(seen)], strict=True)))
    if agent in seen:
        spot = moved[seen.index(agent)]
        panel.draw.ellipse(_round(spot, panel.radius + 6 * TWICE), outline=TEXT, width=2 * TWICE)


def _words(draw: Any, episode: Episode, step: int, agent: int, sizes: tuple[int, int, bool]) -> None:
    """Write the title, the names of the panels, and what the agent does; draw the time line."""
    wide, high, two = sizes
    moment, scene, last = episode.moments[step], episode.scene, episode.length
    over = f": {episode.outcome}" if step == last else ""
    draw.text((GAP, 8 * TWICE), episode.label, fill=TEXT, font=_font(17 * TWICE))
    moment_text = f"{episode.policy}   ·   step {step} of {last}{over}"
    draw.text((WIDTH - GAP, 10 * TWICE), moment_text, fill=MUTED, font=_font(13 * TWICE), anchor="ra")
    standing = ""
    if moment.score:
        standing = ": " + ", ".join(f"{scene.team_names[team]} {moment.score[team]:g}" for team in (0, 1))
    draw.text((GAP, 36 * TWICE), f"As it is{standing}", fill=MUTED, font=_font(13 * TWICE))
    if two:
        what = "sees and believes" if any(each.beliefs for each in episode.moments) else "sees"
        draw.text((2 * GAP + wide, 36 * TWICE), f"What {scene.ids[agent]} {what}", fill=MUTED, font=_font(13 * TWICE))
    top = HEADER + high + 8 * TWICE
    draw.text((GAP, top), _doing(episode, step, agent), fill=TEXT, font=_font(13 * TWICE))
    line = top + 40 * TWICE
    draw.line((GAP, line, WIDTH - GAP, line), fill=LINE, width=4 * TWICE)
    reached = GAP + (WIDTH - 2 * GAP) * step / max(1, last)
    draw.line((GAP, line, reached, line), fill=TEAMS[0], width=4 * TWICE)


def _doing(episode: Episode, step: int, agent: int) -> str:
    """Return what the agent does and the actions that it valued most."""
    moment, name = episode.moments[step], episode.scene.ids[agent]
    if not moment.alive[agent]:
        return f"{name} is dead"
    if step == episode.length or not moment.actions:
        return f"{name} lives" if episode.scene.health_max else name
    text = f"{name}: {action_name(episode, agent, moment.actions[agent])}"
    if not moment.values:
        return text
    rated = [(value, k) for k, value in enumerate(moment.values[agent]) if value is not None]
    best = sorted(rated, key=lambda pair: -pair[0])[:5]
    kind = "probability" if episode.values == "probabilities" else "Q"
    return f"{text}      {kind}: " + ",  ".join(f"{action_name(episode, agent, k)} {value:.3g}" for value, k in best)


def _inside(scene: Any, x: float, y: float) -> Point:
    """Return a place on the map; on a torus, the same place within its bounds."""
    if not scene.torus:
        return x, y
    x0, y0, x1, y1 = scene.bounds
    return (x - x0) % (x1 - x0) + x0, (y - y0) % (y1 - y0) + y0


def _nearest(gap: float, size: float) -> float:
    return gap - math.copysign(size, gap) if size and abs(gap) > size / 2 else gap


def _round(centre: Point, r: float) -> tuple[float, float, float, float]:
    r = max(r, 0.0)  # inner parts of the marks of a large map
    return centre[0] - r, centre[1] - r, centre[0] + r, centre[1] + r


def _cross(draw: Any, where: Point) -> None:
    (x, y), r = where, 4 * TWICE
    for side in (1, -1):
        draw.line((x - r, y - side * r, x + r, y + side * r), fill=TEXT, width=2 * TWICE)


@lru_cache(maxsize=64)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


def write_gif(recording: Recording, path: Path, agent: int) -> Path:
    """Write all episodes, one after another, as an animation. Errors: OSError."""
    images: list[Any] = []
    durations: list[int] = []
    for episode in recording.episodes:
        made = list(pictures(episode, agent))
        images += made
        durations += [MS] * (len(made) - 1) + [LAST_MS]
    palette = images[len(images) // 2].quantize(COLOURS, dither=0)
    flat = [_same_size(image, images[0].size).quantize(palette=palette, dither=0) for image in images]
    with atomic_file(path) as file:
        flat[0].save(file, "GIF", save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=False)
    return path


def write_mp4(recording: Recording, path: Path, agent: int) -> Path:
    """Write all episodes, one after another, as a video. Errors: UserError without the extra; OSError."""
    try:
        ffmpeg: Any = import_module("imageio_ffmpeg")
    except ModuleNotFoundError:
        raise UserError('watch --format=mp4: needs the extra: pip install "omagd[watch]"') from None
    images = (image for episode in recording.episodes for image in _held(pictures(episode, agent)))
    first = next(images)
    beside = path.with_name(f".{path.stem}.tmp.mp4")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ffmpeg.write_frames(str(beside), first.size, fps=1000 / MS, macro_block_size=4, ffmpeg_log_level="error")
    try:
        writer.send(None)
        for image in (first, *images):
            writer.send(_same_size(image, first.size).tobytes())
        writer.close()
        beside.replace(path)
    finally:
        writer.close()
        beside.unlink(missing_ok=True)
    return path


def _held(images: Iterator[Any]) -> Iterator[Any]:
    """Yield the images and then the last one for a while."""
    for image in images:
        yield image
    for _ in range(LAST_MS // MS):
        yield image


def _same_size(image: Any, size: tuple[int, int]) -> Any:
    """Return the image on a ground of `size`: episodes on other maps have other shapes."""
    if image.size == size:
        return image
    from PIL import Image, ImageOps

    whole = Image.new("RGB", size, PAGE)
    whole.paste(ImageOps.contain(image, size))
    return whole


WRITERS: dict[str, Callable[[Recording, Path, int], Path]] = {"gif": write_gif, "mp4": write_mp4}
