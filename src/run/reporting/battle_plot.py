"""Draws one moment of a battle in three panels: as one agent sees it, as reconstructed, as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.run.reporting.plots import save

Nodes = Sequence[Mapping[str, Any]]
TYPES = ("self", "ally", "enemy")
MARKS = {"self": "*", "ally": "o", "enemy": "D"}
COLOURS = {"self": "#ffd166", "ally": "#4cc9c0", "enemy": "#ff7b54"}
BACKGROUND, FOG, SEEN, LINE, TEXT, MUTED = "#10161f", "#0b0f16", "#1d2a3a", "#3a4b60", "#eef3f8", "#9fb0c3"
GUESS_RING = (0, (0.9, 0.5))
PANELS = ("as seen", "as reconstructed", "as it was")


@dataclass(frozen=True)
class _View:
    """Extent of the panels and size of a unit, both in cells."""

    limit: float
    radius: float
    sight: float


def battle_nodes(nodes: np.ndarray, layout: EntityLayout, guessed: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Return the units that `battle_moment` draws, from one agent's graph: nodes [N, D], guessed [N] bool."""
    own_health = 4 + layout.move_dim if layout.own_dim else -1  # behind [1, 0, 0, 0 | move features]
    found: list[dict[str, Any]] = []
    slots = [0, 0, 0]
    for i, (kind, node) in enumerate(zip(layout.node_types, nodes, strict=True)):
        x, y = (0.0 if kind == 0 else float(node[column]) * layout.sight for column in layout.position)
        column = own_health if kind == 0 else layout.health
        health = float(node[column]) if column >= 0 else None
        unit = {"type": TYPES[kind], "slot": slots[kind], "x": x, "y": y, "health": health}
        found.append({**unit, "present": bool(np.any(node)), "guessed": guessed is not None and bool(guessed[i])})
        slots[kind] += 1
    return found


def battle_moment(
    out_png: str | Path, seen: Nodes, reconstructed: Nodes, truth: Nodes, info: Mapping[str, Any]
) -> Path:
    """Draw one moment around one agent and return the path of the picture.

    Args:
        out_png: the picture. seen, reconstructed, truth: the same units in the same order, each
            `{type: self | ally | enemy, slot, x, y, health, present, guessed}`: x and y in cells relative to the agent,
            health 0 to 1 or None, present False for absent units, guessed True for reconstructed ones. Slots of allies
            are in the order of agents, without the observer; those of enemies are their numbers.
        info: `label` (environment and map), `step`, `agent` (the observer), `sight` in cells; optionally `errors`,
            numbers by name.

    Errors: ValueError if the three lists differ in their units.
    """
    from matplotlib.figure import Figure

    if not [_who(n) for n in seen] == [_who(n) for n in reconstructed] == [_who(n) for n in truth]:
        raise ValueError("the three panels do not list the same units")
    view = _view([*seen, *reconstructed, *truth], float(info["sight"]))
    figure = Figure(figsize=(15.6, 7.0), dpi=110, facecolor=BACKGROUND)
    axes = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.015, right=0.985, top=0.815, bottom=0.105, wspace=0.02)
    notes = _notes(seen, reconstructed, truth)
    for axis, nodes, name, note in zip(axes, (seen, reconstructed, truth), PANELS, notes, strict=True):
        _ground(axis, view)
        _heading(axis, name, note)
        if nodes is reconstructed:
            _error_lines(axis, reconstructed, truth, view)
        present = sorted((n for n in nodes if n["present"]), key=lambda n: -math.hypot(n["x"], n["y"]))
        for depth, node in enumerate(present):
            _unit(axis, node, _id(node, int(info["agent"])), view, 4.0 + depth / len(present))
    _title(figure, info)
    _legend(figure, f"a{info['agent']}: the observer")
    return save(figure, out_png)


def _who(node: Mapping[str, Any]) -> tuple[str, int]:
    return node["type"], node["slot"]


def _id(node: Mapping[str, Any], observer: int) -> str:
    """Return a unit's number among all agents, as in `a1`, or among all enemies, as in `e3`."""
    slot = int(node["slot"])
    if node["type"] == "enemy":
        return f"e{slot}"
    return f"a{observer if node['type'] == 'self' else slot + (slot >= observer)}"


def _view(nodes: Nodes, sight: float) -> _View:
    """Return the smallest view that holds all units and the sight circle, at most 3.2 sight ranges to each side."""
    reach = [max(abs(n["x"]), abs(n["y"])) for n in nodes if n["present"]]
    limit = min(max([sight * 1.1, *(r * 1.08 + 0.6 for r in reach)]), 3.2 * sight)
    return _View(limit, 0.052 * limit, sight)


def _notes(seen: Nodes, reconstructed: Nodes, truth: Nodes) -> tuple[str, str, str]:
    """Return the line below each panel's name, with counts over all units except the agent."""
    alive = [n for n in truth if n["present"] and n["type"] != "self"]
    in_sight = [n for n in seen if n["present"] and n["type"] != "self"]
    guesses = [n for n in reconstructed if n["guessed"] and n["present"]]
    off = [math.hypot(g["x"] - t["x"], g["y"] - t["y"]) for g, t in _pairs(reconstructed, truth)]
    right = f", off by {np.mean(off):.1f} cells" if off else ""
    false_alive = len(guesses) - len(off)
    ghosts = f", {false_alive} of them dead" if false_alive else ""
    guess_note = f"{len(guesses)} unseen believed alive{right}{ghosts}" if guesses else "nothing to fill in"
    dead = len(truth) - 1 - len(alive)
    return f"{len(in_sight)} of {len(alive)} living units in sight", guess_note, f"{len(alive)} alive, {dead} dead"


def _pairs(reconstructed: Nodes, truth: Nodes) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return [(g, t) for g, t in zip(reconstructed, truth, strict=True) if g["guessed"] and g["present"] and t["present"]]


def _ground(axis: Any, view: _View) -> None:
    """Draw fog, the area in sight, and rings at equal distances."""
    from matplotlib.patches import Circle

    extent = (-view.limit, view.limit)
    axis.set(facecolor=FOG, xlim=extent, ylim=extent, aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set(color=LINE, linewidth=0.8)
    for share in np.linspace(1.0, 0.25, 10):  # brighter towards the agent
        axis.add_patch(Circle((0, 0), view.sight * share, facecolor=SEEN, alpha=0.16 if share < 1 else 0.55, lw=0))
    for ring in np.arange(5.0, view.limit * 1.4, 5.0):
        axis.add_patch(Circle((0, 0), ring, fill=False, edgecolor=LINE, lw=0.5, alpha=0.45))
    axis.axhline(0, color=LINE, lw=0.5, alpha=0.45)
    axis.axvline(0, color=LINE, lw=0.5, alpha=0.45)
    axis.add_patch(Circle((0, 0), view.sight, fill=False, edgecolor="#7fa6d6", lw=1.3, ls=(0, (5, 3)), alpha=0.9))
    axis.text(
        0, -view.sight - 0.012 * view.limit, f"sight {view.sight:g}", color="#7fa6d6", fontsize=8, ha="center", va="top"
    )


def _heading(axis: Any, name: str, note: str) -> None:
    axis.text(0.5, 1.075, name, transform=axis.transAxes, color=TEXT, fontsize=14, weight="bold", ha="center")
    axis.text(0.5, 1.022, note, transform=axis.transAxes, color=MUTED, fontsize=10.5, ha="center")


def _error_lines(axis: Any, reconstructed: Nodes, truth: Nodes, view: _View) -> None:
    """Draw a line from every guess to the real position; mark guesses of dead units."""
    for guess, real in _pairs(reconstructed, truth):
        colour = COLOURS[guess["type"]]
        axis.plot([guess["x"], real["x"]], [guess["y"], real["y"]], color=colour, lw=1.1, ls=":", alpha=0.9, zorder=3)
        axis.plot(real["x"], real["y"], marker="x", color=TEXT, ms=6, mew=1.5, zorder=8)
    for guess, real in zip(reconstructed, truth, strict=True):
        if guess["guessed"] and guess["present"] and not real["present"]:
            low = guess["y"] - 1.35 * view.radius
            axis.text(guess["x"], low, "dead", color=MUTED, fontsize=9, style="italic", ha="center", va="top", zorder=7)


def _unit(axis: Any, node: Mapping[str, Any], name: str, view: _View, depth: float) -> None:
    """Draw one unit: shape and colour by type, hollow if guessed, health as a ring around it; `name` in or below it.

    depth: drawing order; units near the agent are on top.
    """
    from matplotlib.patches import Arc, Circle
    from matplotlib.patheffects import withStroke

    x, y, r, colour, guessed = node["x"], node["y"], view.radius, COLOURS[node["type"]], node["guessed"]
    body = _body(node["type"], x, y, r * 0.76, guessed)
    body.set_zorder(depth)
    axis.add_patch(body)
    if node["health"] is not None:
        share = min(max(float(node["health"]), 0.0), 1.0)
        axis.add_patch(Circle((x, y), r, fill=False, edgecolor=LINE, lw=2.6, zorder=depth))
        arc = Arc((x, y), 2 * r, 2 * r, theta1=90 - 360 * share, theta2=90, color=colour, lw=2.6, zorder=depth)
        arc.set_linestyle(GUESS_RING if guessed else "-")
        axis.add_patch(arc)
    own = node["type"] == "self"  # a star is too small for text
    ground = [withStroke(linewidth=1.6, foreground=BACKGROUND if guessed or own else colour)]
    axis.text(
        x, y - 1.2 * r if own else y, name, color=colour if guessed or own else BACKGROUND,
        fontsize=9.5 if own else 8.5 if len(name) < 3 else 7, weight="bold",
        ha="center", va="top" if own else "center_baseline", zorder=depth, clip_on=True, path_effects=ground,
    )  # fmt: skip


def _body(kind: str, x: float, y: float, r: float, guessed: bool) -> Any:
    """Return the shape of a unit, hollow for a guess."""
    from matplotlib.patches import Circle, Polygon, RegularPolygon

    colour = COLOURS[kind]
    style: dict[str, Any] = {"fc": BACKGROUND if guessed else colour, "ec": colour, "lw": 1.3 if guessed else 0.8}
    if kind == "ally":
        return Circle((x, y), r, **style)
    if kind == "enemy":
        return RegularPolygon((x, y), 4, radius=r * 1.08, **style)
    turns = np.arange(10) * math.pi / 5 + math.pi / 2
    radii = np.where(np.arange(10) % 2 == 0, r * 1.05, r * 0.48)
    return Polygon(np.stack([x + radii * np.cos(turns), y + radii * np.sin(turns)], axis=1), **style)


def _title(figure: Any, info: Mapping[str, Any]) -> None:
    title = f"What agent {info['agent']} believes"
    figure.text(0.017, 0.945, title, color=TEXT, fontsize=18, weight="bold", va="center")
    moment = f"{info['label']}  ·  step {info['step']}"
    figure.text(0.983, 0.945, moment, color=MUTED, fontsize=13, ha="right", va="center")
    errors = info.get("errors") or {}
    if errors:
        text = "   ·   ".join(f"{name} {value:.3g}" for name, value in errors.items())
        figure.text(0.983, 0.052, text, color=MUTED, fontsize=10.5, ha="right", va="center")


def _legend(figure: Any, observer: str) -> None:
    """Draw the legend in one line at the lower left."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    def mark(kind: str, guessed: bool = False) -> Any:
        style: dict[str, Any] = {"mfc": BACKGROUND if guessed else COLOURS[kind], "mec": COLOURS[kind], "mew": 1.4}
        return Line2D([], [], ls="", marker=MARKS[kind], ms=9, **style)

    handles: dict[str, Any] = {
        observer: mark("self"),
        "agent": mark("ally"),
        "enemy": mark("enemy"),
        "hollow, dashed: guess": (mark("ally", True), mark("enemy", True)),
        "real position": Line2D([], [], ls=":", color=MUTED, marker="x", mec=TEXT, ms=7, mew=1.6),
        "ring: health": Line2D([], [], ls="-", color=MUTED, lw=2.6),
    }
    figure.legend(
        list(handles.values()), list(handles), handler_map={tuple: HandlerTuple(ndivide=None)}, loc="center left",
        bbox_to_anchor=(0.008, 0.052), ncol=len(handles), frameon=False, labelcolor=TEXT, fontsize=10.5,
        handletextpad=0.5, columnspacing=1.6,
    )  # fmt: skip
