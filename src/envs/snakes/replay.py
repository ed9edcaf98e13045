"""A game to look at afterwards: recorded step by step, written as a GIF and as one HTML file."""

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

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>3v3 snakes</title>
<style>
 body { margin: 0; background: #0b0f16; color: #eef3f8; font: 15px/1.5 system-ui, sans-serif; }
 main { max-width: 960px; margin: 0 auto; padding: 20px; }
 header { display: flex; justify-content: space-between; align-items: baseline; font-size: 20px; font-weight: 600; }
 #step { color: #9fb0c3; font-size: 15px; font-weight: 400; }
 canvas { width: 100%; border-radius: 8px; margin: 10px 0; display: block; }
 .bar { display: flex; gap: 12px; align-items: center; }
 .bar input[type=range] { flex: 1; }
 button, select { background: #1d2a3a; color: inherit; border: 1px solid #3a4b60; border-radius: 6px; padding: 5px 14px;
   font: inherit; cursor: pointer; }
 #chart { height: 90px; } p { color: #9fb0c3; font-size: 13px; }
</style></head><body><main>
<header><span id="own"></span><span id="step"></span><span id="other"></span></header>
<canvas id="board"></canvas>
<div class="bar"><button id="play">Pause</button><input id="at" type="range" min="0" value="0">
 <select id="speed"><option value="220">slow</option><option value="110" selected>normal</option>
 <option value="40">fast</option></select></div>
<canvas id="chart"></canvas>
<p>Space: play or pause. Arrow keys: one step. Below the board: both teams' scores over the game. A white rim: the snake
has just died and returned.</p>
</main><script>
const game = __GAME__, [rows, cols] = game.size, unit = 48;
const $ = id => document.getElementById(id), board = $("board"), chart = $("chart");
board.width = cols * unit; board.height = rows * unit; chart.width = 1920; chart.height = 180;
const paint = board.getContext("2d"), line = chart.getContext("2d"), last = game.frames.length - 1;
const total = bodies => bodies.reduce((sum, body) => sum + Math.max(body.length, 3) - 3, 0);
const scores = game.frames.map(([bodies]) => [total(bodies.slice(0, 3)), total(bodies.slice(3))]);
const mine = game.team, theirs = 1 - game.team, colour = t => game.colours[3 * t];
$("at").max = last; $("own").style.color = colour(mine); $("other").style.color = colour(theirs);
let at = 0, running = true, timer = 0;
const middle = cell => [(cell % cols + .5) * unit, (Math.floor(cell / cols) + .5) * unit];
const shorter = (gap, size) => Math.abs(gap) > size / 2 ? gap - Math.sign(gap) * size : gap;
// From a cell to its neighbour, or out over the edge behind which that one lies.
function reach(cell, neighbour) {
  const [x, y] = middle(cell), [u, v] = middle(neighbour);
  paint.beginPath(); paint.moveTo(x, y);
  paint.lineTo(x + shorter(u - x, cols * unit), y + shorter(v - y, rows * unit) + .01); paint.stroke();
}
function snake(body, fill, died) {
  paint.strokeStyle = paint.fillStyle = fill; paint.lineWidth = unit * .66; paint.lineCap = "round";
  for (let i = 1; i < body.length; i++) { reach(body[i], body[i - 1]); reach(body[i - 1], body[i]); }
  if (!body.length) return;
  const [x, y] = middle(body[0]);
  paint.beginPath(); paint.arc(x, y, unit * .46, 0, 7); paint.fill();
  if (died) { paint.lineWidth = 4; paint.strokeStyle = "#fff"; paint.stroke(); }
  for (const side of [-1, 1]) {
    paint.fillStyle = "#fff"; paint.beginPath(); paint.arc(x + side * 9, y - 5, 7, 0, 7); paint.fill();
    paint.fillStyle = "#10161f"; paint.beginPath(); paint.arc(x + side * 9, y - 5, 3, 0, 7); paint.fill();
  }
}
function curves() {
  line.clearRect(0, 0, chart.width, chart.height);
  const top = Math.max(4, ...scores.flat()), x = t => 4 + t / Math.max(1, last) * 1912, y = s => 172 - s / top * 160;
  for (const team of [theirs, mine]) {
    line.strokeStyle = colour(team); line.lineWidth = 4; line.beginPath();
    scores.forEach((s, t) => line.lineTo(x(t), y(s[team]))); line.stroke();
  }
  line.strokeStyle = "#eef3f8"; line.lineWidth = 2; line.beginPath();
  line.moveTo(x(at), 0); line.lineTo(x(at), 180); line.stroke();
}
function show() {
  const [bodies, beans, died] = game.frames[at];
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) {
    paint.fillStyle = (r + c) % 2 ? "#1b2532" : "#10161f"; paint.fillRect(c * unit, r * unit, unit, unit);
  }
  paint.fillStyle = "#ffd166";
  for (const bean of beans) { paint.beginPath(); paint.arc(...middle(bean), unit * .27, 0, 7); paint.fill(); }
  bodies.forEach((body, i) => snake(body, game.colours[i], died.includes(i)));
  $("own").textContent = "agents: " + scores[at][mine];
  $("other").textContent = game.opponent + ": " + scores[at][theirs];
  $("step").textContent = "step " + at + " of " + last + (at == last ? ": " + game.result : "");
  $("at").value = at; curves();
}
function go(to) { at = Math.min(Math.max(to, 0), last); show(); }
function tick() {
  clearTimeout(timer);
  if (running && at < last) { go(at + 1); timer = setTimeout(tick, +$("speed").value); }
  else run(false);
}
function run(on) { running = on; $("play").textContent = on ? "Pause" : "Play"; }
function toggle() {
  run(!running); if (running && at == last) go(0);
  tick();
}
function jump(to) { run(false); go(to); }
$("play").onclick = toggle; $("at").oninput = event => { jump(+event.target.value); };
$("speed").onchange = tick;
document.onkeydown = event => {
  if (event.key == " ") { event.preventDefault(); toggle(); }
  if (event.key == "ArrowRight") { event.preventDefault(); jump(at + 1); }
  if (event.key == "ArrowLeft") { event.preventDefault(); jump(at - 1); }
};
show(); timer = setTimeout(tick, 400);
</script></body></html>
"""


TEAMS = (("#4cc9c0", "#37a8ce", "#8fe3a8"), ("#ff7b54", "#f0a33f", "#f26d8d"))
GROUND, LINES, BEAN, TEXT, MUTED = "#10161f", "#1b2532", "#ffd166", "#eef3f8", "#9fb0c3"
_CELL, _HEADER, _MS = 26, 44, 110
_COLOURS = {colour: i for i, colour in enumerate((*TEAMS[0], *TEAMS[1], GROUND, LINES, BEAN, TEXT, MUTED))}


@dataclass
class Game:
    """One game: `frames` hold bodies (six lists of cells, head first), beans, and who has just died."""

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
        """How the game has ended, in words."""
        own, other = self.scores(self.frames[-1])
        return "a draw" if own == other else f"agents {'won' if own > other else 'lost'}"


class Tape:
    """Records slot 0; keeps its last whole game."""

    def __init__(self) -> None:
        self.last: Game | None = None
        self._now: Game | None = None
        self._moves: list[tuple[np.ndarray, ...]] = []

    def begin(self, engine: Engine, team: int, opponent: str) -> None:
        """Start recording a game in which the agents are `team`."""
        self._now, self._moves = Game(team, opponent), []
        self._take(engine, np.zeros(6, bool))

    def stop(self) -> None:
        """Forget the game that is being recorded: another one goes on in its place."""
        self._now = None

    def note(self, engine: Engine, hit: np.ndarray, over: bool) -> None:
        """Record the step that was just played; who was `hit` [6] has died in it."""
        if self._now is None:
            return
        self._take(engine, hit)
        if over:
            self._now.frames = [_frame(*moment) for moment in self._moves]
            self.last, self._now = self._now, None

    def save(self, folder: str) -> None:
        """Write snakes.gif and snakes.html; of several that write there at once, one's stay whole.

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

    def _take(self, engine: Engine, hit: np.ndarray) -> None:
        row = np.zeros(1, np.int64)
        lengths, beans = engine.board.lengths[0].copy(), engine.board.beans[0].copy()
        self._moves.append((engine.segments(row)[0], lengths, beans, hit.copy()))


def _frame(segments: np.ndarray, lengths: np.ndarray, beans: np.ndarray, hit: np.ndarray) -> dict[str, Any]:
    bodies = [segments[i, :length].tolist() for i, length in enumerate(lengths)]
    return {"bodies": bodies, "beans": beans[beans >= 0].tolist(), "died": np.flatnonzero(hit).tolist()}


def write_html(game: Game, path: Path) -> None:
    """Write a page that plays the game; it needs nothing but a browser."""
    data = {
        "team": game.team,
        "opponent": game.opponent,
        "result": game.result,
        "frames": [[frame["bodies"], frame["beans"], frame["died"]] for frame in game.frames],
        "colours": [*TEAMS[0], *TEAMS[1]],
        "size": [HEIGHT, WIDTH],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(PAGE.replace("__GAME__", text), encoding="utf-8")


def write_gif(game: Game, path: Path) -> None:
    """Write the game as an animation, about nine steps a second."""
    ground = _ground()
    pictures = [_picture(ground, game, step) for step in range(len(game.frames))]
    durations = [_MS] * (len(pictures) - 1) + [20 * _MS]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, disposal=1)


def _ground() -> Any:
    """Return the empty board as a Pillow image with a palette: its colours are numbers, `_COLOURS` says of what."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (WIDTH * _CELL, HEIGHT * _CELL + _HEADER), _COLOURS[GROUND])
    image.putpalette([int(colour[i : i + 2], 16) for colour in _COLOURS for i in (1, 3, 5)])
    draw = ImageDraw.Draw(image)
    for cell in range(HEIGHT * WIDTH):
        if (cell // WIDTH + cell % WIDTH) % 2:
            draw.rectangle(_box(cell, 0), fill=_COLOURS[LINES])
    return image


def _picture(ground: Any, game: Game, step: int) -> Any:
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


def _header(draw: Any, game: Game, frame: dict[str, Any], step: int) -> None:
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
    """Draw the body as joined cells and the head with eyes; one that has just returned has a rim."""
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
    """Draw from `cell` to its neighbour, or to the edge behind which that one lies."""
    (x0, y0, x1, y1), dx, dy = _box(cell, 4), int(RIGHT[cell, neighbour]) * _CELL, int(DOWN[cell, neighbour]) * _CELL
    top = max(min(y0, y0 + dy), _HEADER)
    draw.rectangle((min(x0, x0 + dx), top, max(x1, x1 + dx), max(y1, y1 + dy)), fill=colour)


def _box(cell: int, margin: int) -> tuple[int, int, int, int]:
    """Return the corners of a cell's drawing."""
    x, y = cell % WIDTH * _CELL, cell // WIDTH * _CELL + _HEADER
    return x + margin, y + margin, x + _CELL - 1 - margin, y + _CELL - 1 - margin
