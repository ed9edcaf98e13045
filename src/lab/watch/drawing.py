"""Moments of a recorded battle as pictures: the battle as it is, beside what one agent sees and believes.

The pictures are drawn at twice their size and reduced, which smooths the edges. Positions: x to the right, y down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from omagd.envs.frames import Frame
from omagd.lab.watch.panel import (
    FOG,
    HEAL,
    MUTED,
    PAGE,
    TEAMS,
    TEXT,
    TWICE,
    Panel,
    Point,
    around,
    fitted,
    font_of,
)  # fmt: skip
from omagd.run.recording.recording import Belief, Episode, Moment, is_drawable

WIDTH, HEADER, GAP = 860 * TWICE, 58 * TWICE, 10 * TWICE
SHEET, HEADINGS, LEGEND = 1320 * TWICE, 60 * TWICE, 30 * TWICE


def extent(episode: Episode) -> tuple[float, float, float, float]:
    """Return the part of the map that the pictures show: all places of units and of guesses with a margin."""
    scene = episode.scene
    if episode.moments[0].picture:
        return 0.0, 0.0, 4.0, 3.0
    if scene.bounds is None:
        return -1.0, -0.4, float(episode.n_agents), 0.4
    if scene.torus:
        return scene.bounds
    lived = [(x, y) for m in episode.moments for x, y, on in zip(m.x, m.y, m.alive, strict=True) if on]
    guesses = [(x, y) for m in episode.moments for agent in m.beliefs for _, x, y, _ in agent
               if not isinstance(x, str) and not isinstance(y, str)]  # fmt: skip
    places = np.array([*lived, *guesses])
    low, high = places.min(0), places.max(0)
    lack = np.maximum(0, 14 - (high - low)) / 2 + 2
    low = np.maximum(low - lack, np.array(scene.bounds[:2]) - 1.5)
    high = np.minimum(high + lack, np.array(scene.bounds[2:]) + 1.5)
    flat = max(0.0, 0.62 * (high[0] - low[0]) - (high[1] - low[1]))
    return float(low[0]), float(low[1] - flat / 2), float(high[0]), float(high[1] + flat / 2)


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


def pictures(episode: Episode, agent: int) -> Iterator[Any]:
    """Yield a Pillow image for each moment of an episode, as `agent` sees it."""
    from PIL import Image, ImageDraw

    agent = min(agent, episode.n_agents - 1)  # as the player: episodes on other maps may have fewer
    box, two = extent(episode), bool(episode.moments[0].seen)
    wide = (WIDTH - 3 * GAP) // 2 if two else WIDTH - 2 * GAP
    high = int(min(wide * (box[3] - box[1]) / (box[2] - box[0]), (420 if two else 480) * TWICE))
    size = WIDTH, (HEADER + high + GAP + 7) // 8 * 8
    for step in range(len(episode.moments)):
        image = Image.new("RGB", size, PAGE)
        for place, paint in enumerate((_truth, _belief)[: 1 + two]):
            panel = Panel(episode, box, (wide, high))
            paint(panel, step, agent)
            image.paste(panel.image, (GAP + place * (GAP + wide), HEADER))
        _words(ImageDraw.Draw(image), episode, step, agent, wide, two)
        yield image.reduce(TWICE)


def pixels(frame: Frame) -> np.ndarray:
    """Return the picture of one moment, [height, width, 3] uint8: the whole map as it is."""
    parts = {name: value for name, value in frame.to_dict().items() if name != "scene"}
    moment = Moment.model_construct(**parts, actions=[], values=[], seen=[], beliefs=[])
    episode = Episode.model_construct(env="", map_name="", seed=0, scene=frame.scene, moments=[moment])
    box = frame.scene.bounds or extent(episode)
    wide = WIDTH // 2
    panel = Panel(episode, box, (wide, int(wide * (box[3] - box[1]) / (box[2] - box[0]))))
    _truth(panel, 0, -1)
    return np.asarray(panel.image.reduce(TWICE))


def sheet(episode: Episode, agent: int, steps: Sequence[int]) -> Any:
    """Return a Pillow image of moments below each other: as an agent sees them, as it believes them, as they were.

    steps: at which the agent lives. Teams without beliefs have no panel of them.
    """
    from PIL import Image, ImageDraw

    box = extent(episode.model_copy(update={"moments": [episode.moments[step] for step in steps]}))
    name, believes = episode.scene.ids[agent], any(moment.beliefs for moment in episode.moments)
    views = [(f"As {name} sees it", _seen), (f"As {name} believes it is", _belief), ("As it was", _truth)]
    views = [view for view, on in zip(views, (episode.moments[0].seen, believes, True), strict=True) if on]
    wide = (SHEET - 4 * GAP) // 3
    width = GAP + len(views) * (wide + GAP)
    high = int(wide * min(1.0, (box[3] - box[1]) / (box[2] - box[0])))
    image = Image.new("RGB", (width, len(steps) * (HEADINGS + high) + LEGEND), PAGE)
    draw = ImageDraw.Draw(image)
    for top, step in zip(range(0, image.height, HEADINGS + high), steps, strict=False):
        about = " · ".join(part for part in (episode.label, episode.policy, f"step {step}") if part)
        draw.text((GAP, top + 8 * TWICE), fitted(draw, about, 15, width - 2 * GAP), fill=TEXT, font=font_of(15 * TWICE))
        for place, (head, paint) in enumerate(views):
            panel, left = Panel(episode, box, (wide, high)), GAP + place * (GAP + wide)
            paint(panel, step, agent)
            image.paste(panel.image, (left, top + HEADINGS))
            draw.text((left, top + 36 * TWICE), fitted(draw, head, 13, wide), fill=TEXT, font=font_of(13 * TWICE))
    guess = " · hollow: guess, with a line to where the unit really was" * believes
    legend = f"white ring: {name}{guess} · ring: health"
    draw.text((GAP, image.height - 22 * TWICE), legend, fill=MUTED, font=font_of(13 * TWICE))
    return image.reduce(TWICE)


def _health(episode: Episode, moment: Moment, unit: int) -> tuple[float | None, float]:
    scene = episode.scene
    health = moment.health[unit] / scene.health_max[unit] if scene.health_max and scene.health_max[unit] else None
    shield = moment.shield[unit] / scene.shield_max[unit] if scene.shield_max and scene.shield_max[unit] else 0.0
    return health, shield


def _sight(panel: Panel, moment: Moment, agent: int) -> tuple[Point, float] | None:
    sight = panel.scene.sight[agent] if panel.scene.sight and agent >= 0 else 0.0
    shown = moment.alive[agent] and sight and panel.scene.bounds is not None
    return (panel.at(moment.x[agent], moment.y[agent]), sight * panel.scale) if shown else None


def _truth(panel: Panel, step: int, agent: int) -> None:
    """Draw the battle as it is."""
    episode, scene = panel.episode, panel.scene
    moment = episode.moments[step]
    if moment.picture:
        panel.show(moment.picture)
        return
    panel.ground(_sight(panel, moment, agent), fog=False)
    there = [unit for unit, alive in enumerate(moment.alive) if alive]
    where = dict(zip(there, panel.apart([panel.at(moment.x[i], moment.y[i]) for i in there]), strict=True))
    for unit, aim in enumerate(aims(episode, step)):
        if unit in where and aim in where and aim != unit:
            colour = HEAL if scene.teams[unit] == scene.teams[aim] else TEAMS[scene.teams[unit]]
            panel.arrow(where[unit], where[aim], colour, (3 if unit == agent else 1) * TWICE)
    _units(panel, moment, where)
    if agent in where:
        panel.pick(where[agent])
    for unit in where.keys() & set(moment.marked):
        panel.draw.ellipse(around(where[unit], panel.radius + 2 * TWICE), outline=TEXT, width=3 * TWICE)


def _units(panel: Panel, moment: Moment, where: dict[int, Point]) -> None:
    for unit in where if moment.bodies else ():
        if moment.bodies[unit]:
            panel.body(moment.bodies[unit], TEAMS[panel.scene.teams[unit]])
    for unit, spot in where.items():
        panel.unit(unit, spot, *_health(panel.episode, moment, unit))


def seen_by(moment: Moment, agent: int) -> list[int]:
    """Return the units that an agent sees, itself among them; none if it is dead."""
    bits = int(moment.seen[agent] or "0", 16) if moment.alive[agent] else 0
    return [unit for unit in range(len(moment.x)) if bits >> unit & 1]


def _seen(panel: Panel, step: int, agent: int) -> None:
    """Draw what the agent sees."""
    _belief(panel, step, agent, guesses=False)


def _belief(panel: Panel, step: int, agent: int, guesses: bool = True) -> None:
    """Draw what the agent sees, and with `guesses` hollow what it believes, with a line to the real place."""
    moment, scene = panel.episode.moments[step], panel.scene
    sight, seen = _sight(panel, moment, agent), seen_by(moment, agent)
    panel.ground(sight, fog=not moment.alive[agent] or sight is not None)
    believed: list[Belief] = moment.beliefs[agent] if guesses and moment.beliefs else []
    known = [belief for belief in believed if is_drawable(belief)]
    inside = [(unit, *_inside(scene, float(x), float(y)), health) for unit, x, y, health in known]
    places = [panel.at(moment.x[i], moment.y[i]) for i in seen] + [panel.at(x, y) for _, x, y, _ in inside]
    moved = panel.apart(places)
    guessed = [(unit, health, spot) for (unit, _, _, health), spot in zip(inside, moved[len(seen) :], strict=True)]
    for unit, _, spot in guessed:
        if moment.alive[unit]:
            real = panel.at(moment.x[unit], moment.y[unit])
            panel.draw.line((*spot, *real), fill=MUTED, width=TWICE)
            panel.cross(real)
    for unit, health, spot in guessed:
        panel.unit(unit, spot, None if health is None else float(health), 0.0, guessed=True)
    _units(panel, moment, dict(zip(seen, moved[: len(seen)], strict=True)))
    for unit, _, (x, y) in guessed:  # above the marks: in a crowd they would hide it
        if not moment.alive[unit]:
            font, edge = font_of(10 * TWICE), {"stroke_width": 2 * TWICE, "stroke_fill": FOG}
            panel.draw.text((x, y + panel.radius + 7 * TWICE), "dead", fill=MUTED, font=font, anchor="mm", **edge)
    if agent in seen:
        spot = moved[seen.index(agent)]
        panel.pick(spot)
    if not moment.alive[agent]:
        panel.note(f"{scene.ids[agent]} is dead and sees nothing", 0.5)
    if broken := [scene.ids[belief[0]] for belief in believed if not is_drawable(belief)]:
        panel.note(f"guesses that are not a number: {', '.join(broken)}", 0.95)


def _words(draw: Any, episode: Episode, step: int, agent: int, wide: int, two: bool) -> None:
    """Write the title and the names of the panels. wide: of a panel. two: whether there are two."""
    moment, scene, last = episode.moments[step], episode.scene, episode.length
    over = f": {episode.outcome}" if step == last else ""
    step_text = f"   ·   step {step} of {last}{over}"
    room = WIDTH - 2 * GAP - draw.textlength(step_text, font=font_of(13 * TWICE))
    title = fitted(draw, episode.label, 17, 0.6 * room)
    policy = fitted(draw, episode.policy, 13, room - draw.textlength(title, font=font_of(17 * TWICE)) - 2 * GAP)
    draw.text((GAP, 8 * TWICE), title, fill=TEXT, font=font_of(17 * TWICE))
    draw.text((WIDTH - GAP, 10 * TWICE), policy + step_text, fill=MUTED, font=font_of(13 * TWICE), anchor="ra")
    standing = ""
    if moment.score:
        standing = ": " + ", ".join(f"{scene.team_names[team]} {moment.score[team]:g}" for team in (0, 1))
    draw.text((GAP, 36 * TWICE), f"As it is{standing}", fill=MUTED, font=font_of(13 * TWICE))
    if two:
        what = "sees and believes" if any(each.beliefs for each in episode.moments) else "sees"
        draw.text((2 * GAP + wide, 36 * TWICE), f"What {scene.ids[agent]} {what}", fill=MUTED, font=font_of(13 * TWICE))


def _inside(scene: Any, x: float, y: float) -> Point:
    """Return a place on the map; on a torus, the same place within its bounds."""
    if not scene.torus:
        return x, y
    x0, y0, x1, y1 = scene.bounds
    return (x - x0) % (x1 - x0) + x0, (y - y0) % (y1 - y0) + y0
