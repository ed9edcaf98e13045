"""Replays: a game recorded step by step, written as a GIF and as one HTML page that plays it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.snakes.board import DOWN, HEIGHT, N_TEAM, RIGHT, START_LENGTH, WIDTH
from omagd.envs.snakes.engine import Engine
from omagd.utils.errors import UserError

PAGE = Path(__file__).with_name("replay.html")
TEAMS = (("#4cc9c0", "#37a8ce", "#8fe3a8"), ("#ff7b54", "#f0a33f", "#f26d8d"))
GROUND, LINES, BEAN, TEXT, MUTED = "#10161f", "#1b2532", "#ffd166", "#eef3f8", "#9fb0c3"
_CELL, _HEADER, _MS = 26, 44, 110
_COLOURS = {colour: i for i, colour in enumerate((*TEAMS[0], *TEAMS[1], GROUND, LINES, BEAN, TEXT, MUTED))}


@dataclass
class RecordedGame:
    """One game; a frame has bodies (six lists of cells, head first), beans, and the snakes that have just died."""

    team: int
    opponent: str
    frames: list[dict[str, Any]] = field(default_factory=list)

    def scores(self, frame: dict[str, Any]) -> tuple[int, int]:
        """Return the scores of the agents' team and of the other one."""
        each = [max(len(body), START_LENGTH) - START_LENGTH for body in frame["bodies"]]
        a, b = sum(each[:N_TEAM]), sum(each[N_TEAM:])
        return (a, b) if self.team == 0 else (b, a)

    @property
    def result(self) -> str:
        """The result in words."""
        own, other = self.scores(self.frames[-1])
        return "a draw" if own == other else f"agents {'won' if own > other else 'lost'}"


class GameRecorder:
    """Records the games of slot 0 and keeps the last complete one."""

    def __init__(self) -> None:
        self.last: RecordedGame | None = None
        self._now: RecordedGame | None = None
        self._moves: list[tuple[np.ndarray, ...]] = []

    def begin(self, engine: Engine, team: int, opponent: str) -> None:
        """Start recording a game in which the agents are `team`."""
        self._now, self._moves = RecordedGame(team, opponent), []
        self._capture(engine, np.zeros(6, bool))

    def stop(self) -> None:
        """Discard the game that is being recorded, because another one continues in its place."""
        self._now = None

    def record(self, engine: Engine, hit: np.ndarray, over: bool) -> None:
        """Record the step that was just played, in which the snakes `hit` [6] have died."""
        if self._now is None:
            return
        self._capture(engine, hit)
        if over:
            self._now.frames = [_frame(*moment) for moment in self._moves]
            self.last, self._now = self._now, None

    def save(self, folder: str) -> None:
        """Write snakes.gif and snakes.html, each atomically, since several processes may write them.

        Errors: UserError before the first game has ended.
        """
        if self.last is None:
            raise UserError("save_replay=True: no game of snakes_3v3 has ended yet")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, write in (("snakes.gif", write_gif), ("snakes.html", write_html)):
            beside = path / f".{os.getpid()}.{name}"
            write(self.last, beside)
            beside.replace(path / name)

    def _capture(self, engine: Engine, hit: np.ndarray) -> None:
        row = np.zeros(1, np.int64)
        lengths, beans = engine.board.lengths[0].copy(), engine.board.beans[0].copy()
        self._moves.append((engine.segments(row)[0], lengths, beans, hit.copy()))


def _frame(segments: np.ndarray, lengths: np.ndarray, beans: np.ndarray, hit: np.ndarray) -> dict[str, Any]:
    bodies = [segments[i, :length].tolist() for i, length in enumerate(lengths)]
    return {"bodies": bodies, "beans": beans[beans >= 0].tolist(), "died": np.flatnonzero(hit).tolist()}


def write_html(game: RecordedGame, path: Path) -> None:
    """Write a self-contained page that plays the game in a browser."""
    data = {
        "team": game.team,
        "opponent": game.opponent,
        "result": game.result,
        "frames": [[frame["bodies"], frame["beans"], frame["died"]] for frame in game.frames],
        "colours": [*TEAMS[0], *TEAMS[1]],
        "size": [HEIGHT, WIDTH],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(PAGE.read_text(encoding="utf-8").replace("__GAME__", text), encoding="utf-8")


def write_gif(game: RecordedGame, path: Path) -> None:
    """Write the game as an animation of about nine steps a second."""
    ground = _ground()
    pictures = [_picture(ground, game, step) for step in range(len(game.frames))]
    durations = [_MS] * (len(pictures) - 1) + [20 * _MS]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, disposal=1)


def _ground() -> Any:
    """Return the empty board as a Pillow image with the palette `_COLOURS`."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (WIDTH * _CELL, HEIGHT * _CELL + _HEADER), _COLOURS[GROUND])
    image.putpalette([int(colour[i : i + 2], 16) for colour in _COLOURS for i in (1, 3, 5)])
    draw = ImageDraw.Draw(image)
    for cell in range(HEIGHT * WIDTH):
        if (cell // WIDTH + cell % WIDTH) % 2:
            draw.rectangle(_box(cell, 0), fill=_COLOURS[LINES])
    return image


def _picture(ground: Any, game: RecordedGame, step: int) -> Any:
    """Return one frame as a Pillow image."""
    from PIL import ImageDraw

    frame, image = game.frames[step], ground.copy()
    draw = ImageDraw.Draw(image)
    _header(draw, game, frame, step)
    for bean in frame["beans"]:
        draw.ellipse(_box(bean, 6), fill=_COLOURS[BEAN])
    for i, body in enumerate(frame["bodies"]):
        _snake(draw, body, _COLOURS[TEAMS[i // N_TEAM][i % N_TEAM]], i in frame["died"])
    return image


def _header(draw: Any, game: RecordedGame, frame: dict[str, Any], step: int) -> None:
    from PIL import ImageFont

    own, other = game.scores(frame)
    font = ImageFont.load_default(size=16)
    names = ((game.team, f"agents: {own}", "la"), (1 - game.team, f"{game.opponent}: {other}", "ra"))
    for team, text, anchor in names:
        start, way = (10, 1) if anchor == "la" else (WIDTH * _CELL - 10, -1)
        draw.text((start, 12), text, fill=_COLOURS[TEAMS[team][0]], font=font, anchor=anchor)
        for i, colour in enumerate(TEAMS[team]):
            x = start + way * (int(draw.textlength(text, font)) + 14 + 14 * i)
            draw.ellipse((x - 5, 16, x + 5, 26), fill=_COLOURS[colour])
    over = step == len(game.frames) - 1
    text, colour = (f"step {step}: {game.result}", TEXT) if over else (f"step {step}", MUTED)
    draw.text((WIDTH * _CELL // 2, 12), text, fill=_COLOURS[colour], font=font, anchor="ma")


def _snake(draw: Any, body: list[int], colour: int, new: bool) -> None:
    """Draw the body as joined cells and the head with eyes; a snake that has just respawned has a rim."""
    for one, other in zip(body[1:], body, strict=False):
        _reach(draw, one, other, colour)
        _reach(draw, other, one, colour)
    for cell in body[1:]:
        draw.rounded_rectangle(_box(cell, 4), 4, fill=colour)
    for head in body[:1]:
        x0, y0, x1, y1 = _box(head, 1)
        draw.rounded_rectangle((x0, y0, x1, y1), 8, fill=colour, outline=_COLOURS[TEXT if new else GROUND], width=2)
        for x in (x0 + 7, x1 - 7):
            draw.ellipse((x - 3, y0 + 7, x + 3, y0 + 13), fill=_COLOURS[TEXT])
            draw.ellipse((x - 1, y0 + 9, x + 1, y0 + 11), fill=_COLOURS[GROUND])


def _reach(draw: Any, cell: int, neighbour: int, colour: int) -> None:
    """Draw the connection from `cell` to its neighbour, or to the edge if the neighbour is across it."""
    (x0, y0, x1, y1), dx, dy = _box(cell, 4), int(RIGHT[cell, neighbour]) * _CELL, int(DOWN[cell, neighbour]) * _CELL
    top = max(min(y0, y0 + dy), _HEADER)
    draw.rectangle((min(x0, x0 + dx), top, max(x1, x1 + dx), max(y1, y1 + dy)), fill=colour)


def _box(cell: int, margin: int) -> tuple[int, int, int, int]:
    """Return the corners of a cell in pixels."""
    x, y = cell % WIDTH * _CELL, cell // WIDTH * _CELL + _HEADER
    return x + margin, y + margin, x + _CELL - 1 - margin, y + _CELL - 1 - margin
