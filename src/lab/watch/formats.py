"""Writes recordings for people: an HTML page that plays them, a GIF, or a PNG with moments of a battle."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omagd.lab.watch.drawing import pictures, seen_by, sheet
from omagd.lab.watch.panel import FIELD, FOG, HEAL, LINE, MUTED, PAGE, SHIELD, TEAMS, TEXT, WALL
from omagd.run.recording.recording import Episode, Recording
from omagd.utils.errors import UserError
from omagd.utils.storage import STORAGE, atomic_file, replace_file

PLAYER = Path(__file__).with_name("player.html")
MS, LAST_MS = 160, 2000
COLOURS, KEPT_COLOURS = 64, (PAGE, FIELD, FOG, LINE, WALL, TEXT, MUTED, *TEAMS, HEAL, SHIELD)
MOMENTS = 3
REMEMBERED, HIDDEN, SEEN = 10, 2, 3
"""Worth of a moment to look at, for each living unit: hidden now and seen before, hidden, seen (three at most)."""


def player_page(recording: Recording, agent: int = 0) -> str:
    """Return the page as text; it loads nothing else. agent: the one that it shows first."""
    data = base64.b64encode(recording.packed()).decode()
    title = html.escape(f"{recording.episodes[0].label}: {recording.episodes[0].policy}")
    page = PLAYER.read_text(encoding="utf-8").replace("__TITLE__", title).replace("__AGENT__", str(agent))
    return page.replace("__DATA__", data)


def write_page(recording: Recording, path: Path, agent: int) -> Path:
    """Write the page to `path` and return it. agent: the one that it shows first. Errors: OSError."""
    replace_file(path, player_page(recording, agent).encode())
    return path


def write_png(recording: Recording, path: Path, agent: int | None = None, steps: Sequence[int] = ()) -> Path:
    """Draw moments of the first episode of a recording.

    Args:
        agent: whose view; None: of whom there is most to see. steps: empty: one of each third of the agent's life.
    Errors: UserError where observations have no units, for a step that the battle has not, or a dead agent.
    """
    episode = recording.episodes[0]
    if not episode.moments[0].picture and not (episode.moments[0].seen and episode.scene.sight):
        raise UserError("--format=png: shows what an agent sees of units, and here observations have none. Use html")
    if over := [step for step in steps if step > episode.length]:
        raise UserError(f"--steps={over[0]}: the battle has steps 0 to {episode.length}")
    agents = range(episode.n_agents) if agent is None else [min(agent, episode.n_agents - 1)]
    found = [(each, *_chosen(episode, each, steps)) for each in agents]
    whose, chosen, _ = max(found, key=lambda each: each[2])
    if not chosen:
        raise UserError("--format=png: the agent is dead at all of these steps. Give another --agent or other --steps")
    picture = io.BytesIO()
    sheet(episode, whose, chosen).save(picture, "PNG")
    STORAGE.write(path, picture.getvalue())
    return path


def _chosen(episode: Episode, agent: int, steps: Sequence[int]) -> tuple[list[int], float]:
    """Return the steps to show of an agent, and what they are worth together."""
    worth, before = {}, set[int]()
    for step, moment in enumerate(episode.moments):
        now = set(seen_by(moment, agent)) - {agent} if moment.seen else set[int]()
        living = {unit for unit, alive in enumerate(moment.alive) if alive} - {agent}
        hidden = living - now
        if moment.alive[agent]:
            all_of = REMEMBERED * len(hidden & before) + HIDDEN * len(hidden) + min(SEEN, len(living & now))
            worth[step] = float(all_of) if hidden else 0.0
        before |= now
    at = list(worth)
    parts = [at[len(at) * i // MOMENTS : len(at) * (i + 1) // MOMENTS] for i in range(MOMENTS)]
    chosen = [step for step in steps if step in worth] if steps else [max(p, key=worth.__getitem__) for p in parts if p]
    return chosen, sum(worth[step] for step in chosen)


def write_gif(recording: Recording, path: Path, agent: int) -> Path:
    """Write all episodes, one after another, as an animation. Errors: OSError."""
    from PIL import Image, ImageOps

    images: list[Any] = []
    durations: list[int] = []
    for episode in recording.episodes:
        made = list(pictures(episode, agent))
        images += made
        durations += [MS] * (len(made) - 1) + [LAST_MS]
    palette = _palette(images[len(images) // 2])
    # Episodes on other maps have other shapes.
    even = (ImageOps.pad(image, images[0].size, color=PAGE, centering=(0, 0)) for image in images)
    flat = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in even]
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
