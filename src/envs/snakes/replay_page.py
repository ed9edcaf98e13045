"""The page of a replay; `__GAME__` stands for the game."""

from __future__ import annotations

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
