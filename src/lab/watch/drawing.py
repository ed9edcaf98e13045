"""A recording as GIF or MP4: each moment as a picture of the battle, beside what one agent sees and believes.

The pictures are drawn at twice their size and reduced, which smooths the edges. Positions: x to the right, y down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.frames import AGENTS, OPPONENTS
from omagd.lab.watch.panel import (
    FIELD,
    FOG,
    HEAL,
    LINE,
    MUTED,
    OUTLINES,
    PAGE,
    SHIELD,
    TEAMS,
    TEXT,
    TWICE,
    WALL,
    Panel,
    Point,
    around,
    fitted,
    font_of,
)  # fmt: skip
from omagd.run.recording.recording import Belief, Episode, Moment, Recording, is_drawable
from omagd.utils.errors import UserError
from omagd.utils.storage import make_folder
from omagd.utils.writing import atomic_file

WIDTH, HEADER, FOOTER, GAP = 860 * TWICE, 58 * TWICE, 90 * TWICE, 10 * TWICE
STRIP, NAMES = 46 * TWICE, 150 * TWICE
MS, LAST_MS = 160, 2000
COLOURS, KEPT_COLOURS = 64, (PAGE, FIELD, FOG, LINE, WALL, TEXT, MUTED, *TEAMS, HEAL, SHIELD)


def extent(episode: Episode) -> tuple[float, float, float, float]:
    """Return the part of the map that the pictures show: all places of units and of guesses with a margin."""
    scene = episode.scene
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
    curves = standings(episode)
    strip = _strip(episode, curves)
    for step in range(len(episode.moments)):
        image = Image.new("RGB", size, PAGE)
        for place, paint in enumerate((_truth, _belief)[: 1 + two]):
            panel = Panel(episode, box, (wide, high))
            paint(panel, step, agent)
            image.paste(panel.image, (GAP + place * (GAP + wide), HEADER))
        image.paste(strip, (GAP + NAMES, size[1] - STRIP - GAP))
        draw = ImageDraw.Draw(image)
        _words(draw, episode, step, agent, (wide, high, two))
        _now(draw, episode, curves, step, size[1] - STRIP - GAP)
        yield image.reduce(TWICE)


def _health(episode: Episode, moment: Moment, unit: int) -> tuple[float | None, float]:
    scene = episode.scene
    health = moment.health[unit] / scene.health_max[unit] if scene.health_max and scene.health_max[unit] else None
    shield = moment.shield[unit] / scene.shield_max[unit] if scene.shield_max and scene.shield_max[unit] else 0.0
    return health, shield


def _sight(panel: Panel, moment: Moment, agent: int) -> tuple[Point, float] | None:
    sight = panel.scene.sight[agent] if panel.scene.sight else 0.0
    shown = moment.alive[agent] and sight and panel.scene.bounds is not None
    return (panel.at(moment.x[agent], moment.y[agent]), sight * panel.scale) if shown else None


def _truth(panel: Panel, step: int, agent: int) -> None:
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
        panel.pick(where[agent])
    for unit in moment.marked:
        panel.draw.ellipse(around(where[unit], panel.radius + 2 * TWICE), outline=TEXT, width=3 * TWICE)


def _units(panel: Panel, moment: Moment, where: dict[int, Point]) -> None:
    for unit in where if moment.bodies else ():
        if moment.bodies[unit]:
            panel.body(moment.bodies[unit], TEAMS[panel.scene.teams[unit]])
    for unit, spot in where.items():
        panel.unit(unit, spot, *_health(panel.episode, moment, unit))


def _belief(panel: Panel, step: int, agent: int) -> None:
    """Draw what the agent sees, and hollow what it believes, with a line to the real place."""
    moment, scene = panel.episode.moments[step], panel.scene
    sight = _sight(panel, moment, agent)
    sees = int(moment.seen[agent] or "0", 16) if moment.alive[agent] else 0
    panel.ground(sight, fog=not moment.alive[agent] or sight is not None)
    seen = [unit for unit in range(len(scene.ids)) if sees >> unit & 1]
    guesses: list[Belief] = moment.beliefs[agent] if moment.beliefs else []
    known = [belief for belief in guesses if is_drawable(belief)]
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
    if broken := [scene.ids[belief[0]] for belief in guesses if not is_drawable(belief)]:
        panel.note(f"guesses that are not a number: {', '.join(broken)}", 0.95)


def _words(draw: Any, episode: Episode, step: int, agent: int, sizes: tuple[int, int, bool]) -> None:
    """Write the title, the names of the panels, and what the agent does; draw the time line."""
    wide, high, two = sizes
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
    doing = fitted(draw, _doing(episode, step, agent), 13, WIDTH - 2 * GAP)
    draw.text((GAP, HEADER + high + 8 * TWICE), doing, fill=TEXT, font=font_of(13 * TWICE))


def standings(episode: Episode) -> list[tuple[float, float]]:
    """Return what both teams have at each moment: the score, else the share of health and shield that is left.

    Empty where there is neither.
    """
    scene, teams = episode.scene, np.array(episode.scene.teams)
    if scene.score:
        return [(moment.score[0], moment.score[1]) for moment in episode.moments]
    most = np.array(scene.health_max or 0.0) + np.array(scene.shield_max or 0.0)
    most = np.array([(most * (teams == team)).sum() for team in (AGENTS, OPPONENTS)])
    if not most[AGENTS]:
        return []
    found = []
    for moment in episode.moments:
        left = (np.array(moment.health or 0.0) + np.array(moment.shield or 0.0)) * np.array(moment.alive)
        shares = [(left * (teams == team)).sum() / (most[team] or 1.0) for team in (AGENTS, OPPONENTS)]
        found.append((float(shares[0]), float(shares[1])))
    return found


def _across(step: int, last: int) -> float:
    """Return where in the time line a step is, in pixels."""
    return 4 * TWICE + (WIDTH - 2 * GAP - NAMES - 8 * TWICE) * step / max(1, last)


def _strip(episode: Episode, curves: list[tuple[float, float]]) -> Any:
    """Return the time line: what each team has at each moment (opponents dashed), and a mark for each death."""
    from PIL import Image, ImageDraw

    strip, last, teams = Image.new("RGB", (WIDTH - 2 * GAP - NAMES, STRIP), FIELD), episode.length, episode.scene.teams
    draw, highest = ImageDraw.Draw(strip), max([1e-9, *(value for pair in curves for value in pair)])
    for team in (OPPONENTS, AGENTS) if curves else ():
        shares = [min(max(pair[team] / highest, 0.0), 1.0) for pair in curves]
        points = [
            (_across(t, last), STRIP - 8 * TWICE - (STRIP - 14 * TWICE) * share) for t, share in enumerate(shares)
        ]
        if team == AGENTS:
            draw.line(points, fill=TEAMS[team], width=2 * TWICE)
        elif team in teams:
            _dashes(draw, points, TEAMS[team])
    for t in range(1, last + 1):
        for unit, (was, is_) in enumerate(zip(episode.moments[t - 1].alive, episode.moments[t].alive, strict=True)):
            if was and not is_ and teams[unit] in (AGENTS, OPPONENTS):
                x = _across(t, last)
                draw.rectangle((x - TWICE, STRIP - 6 * TWICE, x + TWICE, STRIP), fill=TEAMS[teams[unit]])
    return strip


def _dashes(draw: Any, points: Sequence[Point], colour: str) -> None:
    """Draw a line in dashes of equal length."""
    x, y = np.array(points).T
    way = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    for start in np.arange(0.0, way[-1], 10 * TWICE):
        ends = np.array([start, min(start + 6 * TWICE, way[-1])])
        part = np.concatenate([ends[:1], way[(way > ends[0]) & (way < ends[1])], ends[1:]])
        dash = np.stack([np.interp(part, way, x), np.interp(part, way, y)], 1)
        draw.line(dash.ravel().tolist(), fill=colour, width=2 * TWICE)


def _now(draw: Any, episode: Episode, curves: list[tuple[float, float]], step: int, top: int) -> None:
    """Mark the moment in the time line, and write what each team has."""
    x, names = GAP + NAMES + _across(step, episode.length), episode.scene.team_names
    draw.line((x, top, x, top + STRIP), fill=TEXT, width=2 * TWICE)
    draw.text(
        (GAP, top),
        "score" if episode.scene.score else "health left" if curves else "time",
        fill=MUTED,
        font=font_of(11 * TWICE),
    )
    for team in (AGENTS, OPPONENTS) if curves else ():
        if team not in episode.scene.teams:
            continue
        value, y = curves[step][team], top + (22 + 17 * team) * TWICE
        shape = OUTLINES[team == OPPONENTS] * 5 * TWICE + np.array([GAP + 5 * TWICE, y])
        draw.polygon(shape.ravel().tolist(), fill=TEAMS[team])
        shown = f" {value:g}" if episode.scene.score else f" {100 * value:.0f} %"
        room = NAMES - 24 * TWICE - draw.textlength(shown, font=font_of(12 * TWICE))
        text = fitted(draw, names[team], 12, room) + shown
        draw.text((GAP + 15 * TWICE, y), text, fill=TEXT, font=font_of(12 * TWICE), anchor="lm")


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
    order = sorted(rated, key=lambda pair: (isinstance(pair[0], str), -float(pair[0])))[:5]
    kind = "probability" if episode.values == "probabilities" else "Q"
    return f"{text}      {kind}: " + ",  ".join(f"{action_name(episode, agent, k)} {_word(v)}" for v, k in order)


def _word(value: float | str) -> str:
    """Return a value of an action in words."""
    return f"{value:.3g}" if not isinstance(value, str) else "not a number" if value == "NaN" else value.lower()


def _inside(scene: Any, x: float, y: float) -> Point:
    """Return a place on the map; on a torus, the same place within its bounds."""
    if not scene.torus:
        return x, y
    x0, y0, x1, y1 = scene.bounds
    return (x - x0) % (x1 - x0) + x0, (y - y0) % (y1 - y0) + y0


def write_gif(recording: Recording, path: Path, agent: int) -> Path:
    """Write all episodes, one after another, as an animation. Errors: OSError."""
    images: list[Any] = []
    durations: list[int] = []
    for episode in recording.episodes:
        made = list(pictures(episode, agent))
        images += made
        durations += [MS] * (len(made) - 1) + [LAST_MS]
    palette = _palette(images[len(images) // 2])
    flat = [_same_size(image, images[0].size).quantize(palette=palette, dither=0) for image in images]
    with atomic_file(path) as file:
        flat[0].save(file, "GIF", save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=False)
    return path


def _palette(image: Any) -> Any:
    """Return a palette for pictures such as `image`; it has the colours that mean something, however rare they are."""
    from PIL import Image, ImageColor

    common = image.quantize(COLOURS - len(KEPT_COLOURS), dither=0).getpalette()[: 3 * (COLOURS - len(KEPT_COLOURS))]
    palette = Image.new("P", (1, 1))
    palette.putpalette([*common, *(part for colour in KEPT_COLOURS for part in ImageColor.getrgb(colour))])
    return palette


def write_mp4(recording: Recording, path: Path, agent: int) -> Path:
    """Write all episodes, one after another, as a video. Errors: UserError without the extra; OSError."""
    try:
        ffmpeg: Any = import_module("imageio_ffmpeg")
    except ModuleNotFoundError:
        raise UserError('watch --format=mp4: needs the extra: pip install "omagd[watch]"') from None
    images = (image for episode in recording.episodes for image in _held(pictures(episode, agent)))
    first = next(images)
    beside = path.with_name(f".{path.stem}.tmp.mp4")
    make_folder(path.parent)
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
