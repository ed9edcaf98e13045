"""Draws one moment of a battle in three panels: as one agent sees it, as reconstructed, as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.frames import THINGS, Scene
from omagd.run.reporting.plots import save

Nodes = Sequence[Mapping[str, Any]]
Shown = tuple[Nodes, Nodes, Nodes, Mapping[str, Any]]
"""A moment: units as seen, as reconstructed, as they were, and what `battle_moments` says about them."""

TYPES = ("self", "ally", "enemy")
MARKS = {"self": "*", "ally": "o", "enemy": "D", "thing": "o"}
COLOURS = {"self": "#ffd166", "ally": "#4cc9c0", "enemy": "#ff7b54", "thing": "#b9c46a"}
NO_UNIT = -1
BACKGROUND, FOG, SEEN, LINE, TEXT, MUTED = "#10161f", "#0b0f16", "#1d2a3a", "#3a4b60", "#eef3f8", "#9fb0c3"
GUESS_RING = (0, (0.9, 0.5))
PANELS = ("as seen", "as reconstructed", "as it was")


@dataclass(frozen=True)
class _View:
    """Extent of the panels and size of a unit, both in cells."""

    limit: float
    radius: float
    sight: float


def units_of_nodes(layout: EntityLayout, n_agents: int) -> np.ndarray:
    """Return the unit that each node of each agent's graph is, [n, N] int64; -1 for agents that a map does not have.

    Units: the agents, then what actions aim at, as in `omagd.envs.frames`.
    """
    agent, ally = np.arange(n_agents)[:, None], np.arange(layout.n_allies)[None]
    others = ally + (ally >= agent)
    others = np.where(others < n_agents, others, NO_UNIT)
    enemies = np.broadcast_to(n_agents + np.arange(layout.n_enemies), (n_agents, layout.n_enemies))
    return np.concatenate([agent, others, enemies], 1)


def battle_nodes(
    nodes: np.ndarray, layout: EntityLayout, scene: Scene, agent: int, guessed: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return the units that `battle_moment` draws, from the graph of `agent`: nodes [N, D], guessed [N] bool.

    scene: names the units; where it knows only the agents, the others are called `e0`, `e1`, ...
    """
    own_health = 4 + layout.move_dim if layout.own_dim else -1  # behind [1, 0, 0, 0 | move features]
    n = layout.n_allies + 1
    found: list[dict[str, Any]] = []
    for i, (unit, kind, node) in enumerate(
        zip(units_of_nodes(layout, n)[agent], layout.node_types, nodes, strict=True)
    ):
        known = unit < len(scene.ids)
        x, y = (0.0 if kind == 0 else float(node[column]) * layout.sight for column in layout.position)
        column = own_health if kind == 0 else layout.health
        has_health = column >= 0 and (not known or not scene.health_max or scene.health_max[unit] > 0)
        health = float(node[column]) if has_health else None
        finite = all(map(math.isfinite, (x, y, health or 0.0)))  # the guesses of a diverged model are not
        found.append({
            "id": scene.ids[unit] if known else f"e{unit - n}",
            "type": "thing" if known and scene.teams[unit] == THINGS else TYPES[kind],
            "x": x if finite else 0.0, "y": y if finite else 0.0, "health": health if finite else None,
            "present": finite and bool(np.any(node)), "guessed": guessed is not None and bool(guessed[i]),
            "finite": finite,
        })  # fmt: skip
    return found


def battle_moment(
    out_png: str | Path, seen: Nodes, reconstructed: Nodes, truth: Nodes, info: Mapping[str, Any]
) -> Path:
    """Draw one moment around one agent and return the path of the picture: `battle_moments` with one row."""
    return battle_moments(out_png, [(seen, reconstructed, truth, info)], (15.6, 7.0))


def battle_moments(out_png: str | Path, shown: Sequence[Shown], size: tuple[float, float] = (11.7, 5.4)) -> Path:
    """Draw moments of a battle below each other, on one scale, and return the path of the picture.

    Args:
        out_png: the picture. shown: of each moment `(seen, reconstructed, truth, info)`.
            seen, reconstructed, truth: the same units in the same order, each
            `{id, type: self | ally | enemy | thing, x, y, health, present, guessed, finite}`: x and y in cells relative
            to the agent, health 0 to 1 or None, present False for absent units, guessed True for reconstructed ones,
            finite False (default: True) for guesses that are not numbers, which are counted and not drawn.
            info: `label` (environment and map), `step`, `agent` (the observer's id), `sight` in cells; optionally
            `errors`, numbers by name, and `teams`, names by type.
        size: inches of one moment; text keeps its size.

    Errors: ValueError if the three lists of a moment differ in their units.
    """
    from matplotlib.figure import Figure

    for seen, reconstructed, truth, _ in shown:
        if not [n["id"] for n in seen] == [n["id"] for n in reconstructed] == [n["id"] for n in truth]:
            raise ValueError("the three panels do not list the same units")
    nodes = [node for moment in shown for part in moment[:3] for node in part]
    view = _view(nodes, float(shown[0][3]["sight"]))
    figure = Figure(figsize=(size[0], size[1] * len(shown)), dpi=110, facecolor=BACKGROUND)
    parts = figure.subfigures(len(shown), 1, squeeze=False).ravel() if len(shown) > 1 else [figure]
    for part, moment in zip(parts, shown, strict=True):
        part.set_facecolor(BACKGROUND)
        _moment(part, view, *moment)
    return save(figure, out_png)


def _moment(figure: Any, view: _View, seen: Nodes, reconstructed: Nodes, truth: Nodes, info: Mapping[str, Any]) -> None:
    """Draw one moment into a figure or a part of one."""
    axes = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.015, right=0.985, top=0.815, bottom=0.105, wspace=0.02)
    notes = _notes(seen, reconstructed, truth)
    for axis, nodes, name, note in zip(axes, (seen, reconstructed, truth), PANELS, notes, strict=True):
        _ground(axis, view)
        _heading(axis, name, note)
        places = _apart(nodes, view)
        if nodes is reconstructed:
            _error_lines(axis, places, truth, view)
        _units(axis, [node for node in places if node["present"]], view)
    _title(figure, info)
    kinds = {node["type"] for node in truth} | {node["type"] for node in reconstructed if node["present"]}
    _legend(figure, info, kinds, any(node["health"] is not None for node in truth))


def _apart(nodes: Nodes, view: _View) -> list[dict[str, Any]]:
    """Return the nodes with places `at_x`, `at_y` at which their marks do not hide each other."""
    present = [i for i, node in enumerate(nodes) if node["present"]]
    places = np.array([[node["x"], node["y"]] for node in nodes], np.float64).reshape(-1, 2)
    edge = view.limit - 1.1 * view.radius
    apart = spread(places[present], 2.15 * view.radius, 1.7 * view.radius)
    inside = (np.abs(places[present]) < view.limit).all(1, keepdims=True)
    places[present] = np.where(inside, apart.clip(-edge, edge), apart)
    return [{**node, "at_x": x, "at_y": y} for node, (x, y) in zip(nodes, places.tolist(), strict=True)]


def _units(axis: Any, nodes: Nodes, view: _View) -> None:
    """Draw the units, those near the agent on top; a moved mark has a line to its place."""
    ordered = sorted(nodes, key=lambda node: -math.hypot(node["x"], node["y"]))
    for depth, node in enumerate(ordered):
        if math.hypot(node["at_x"] - node["x"], node["at_y"] - node["y"]) > 0.4 * view.radius and not node["guessed"]:
            colour = COLOURS[node["type"]]
            axis.plot([node["x"], node["at_x"]], [node["y"], node["at_y"]], color=colour, lw=0.8, zorder=3.5)
            axis.plot(node["x"], node["y"], marker=".", color=colour, ms=3, zorder=3.6)
        _unit(axis, node, view, 4.0 + depth / len(ordered))


def spread(points: np.ndarray, gap: float, most: float) -> np.ndarray:
    """Return `points` [k, 2] moved apart, so that marks of diameter `gap` there do not hide each other.

    No point moves further than `most`, so that dense crowds may still overlap; equal points part in different
    directions.
    """
    moved = np.array(points, np.float64)
    turn = 2.4 * np.arange(1, len(moved) + 1)
    aside, itself = np.stack([np.cos(turn), np.sin(turn)], 1), np.eye(len(moved), dtype=bool)
    for _ in range(24):
        way = moved[:, None] - moved[None]
        away = np.hypot(way[..., 0], way[..., 1])
        same = (away < 1e-3) & ~itself
        way[same] = (aside[:, None] - aside[None])[same]
        length = np.maximum(np.hypot(way[..., 0], way[..., 1]), 1e-9)
        push = np.where(itself, 0, np.maximum(gap - away, 0)) / 2 / length
        if not push.any():
            break
        moved += 0.8 * (way * push[..., None]).sum(1).clip(-gap, gap)
        shift = moved - points
        far = np.hypot(shift[:, 0], shift[:, 1])
        moved = points + shift * np.minimum(1, most / np.maximum(far, 1e-9))[:, None]
    return moved


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
    if broken := sum(not n.get("finite", True) for n in reconstructed):
        guess_note = f"{broken} guesses are not a number" + (f"; {guess_note}" if guesses else "")
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
        axis.plot(
            [guess["at_x"], real["x"]], [guess["at_y"], real["y"]], color=colour, lw=1.1, ls=":", alpha=0.9, zorder=3
        )
        axis.plot(real["x"], real["y"], marker="x", color=TEXT, ms=6, mew=1.5, zorder=3.8)
    for guess, real in zip(reconstructed, truth, strict=True):
        if guess["guessed"] and guess["present"] and not real["present"]:
            low = guess["at_y"] - 1.35 * view.radius
            axis.text(
                guess["at_x"], low, "dead", color=MUTED, fontsize=9, style="italic", ha="center", va="top", zorder=7
            )


def _unit(axis: Any, node: Mapping[str, Any], view: _View, depth: float) -> None:
    """Draw one unit: shape and colour by type, hollow if guessed, health as a ring around it; its id in or below it.

    depth: drawing order.
    """
    from matplotlib.patches import Arc, Circle
    from matplotlib.patheffects import withStroke

    x, y, r, colour, guessed = node["at_x"], node["at_y"], view.radius, COLOURS[node["type"]], node["guessed"]
    name = node["id"]
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
    if kind in {"ally", "thing"}:
        return Circle((x, y), r if kind == "ally" else 0.8 * r, **style)
    if kind == "enemy":
        return RegularPolygon((x, y), 4, radius=r * 1.08, **style)
    turns = np.arange(10) * math.pi / 5 + math.pi / 2
    radii = np.where(np.arange(10) % 2 == 0, r * 1.05, r * 0.48)
    return Polygon(np.stack([x + radii * np.cos(turns), y + radii * np.sin(turns)], axis=1), **style)


def _title(figure: Any, info: Mapping[str, Any]) -> None:
    title = f"What {info['agent']} believes"
    figure.text(0.017, 0.945, title, color=TEXT, fontsize=18, weight="bold", va="center")
    moment = f"{info['label']}  ·  step {info['step']}"
    figure.text(0.983, 0.945, moment, color=MUTED, fontsize=13, ha="right", va="center")
    errors = info.get("errors") or {}
    if errors:
        text = "   ·   ".join(f"{name} {value:.3g}" for name, value in errors.items())
        figure.text(0.983, 0.052, text, color=MUTED, fontsize=10.5, ha="right", va="center")


def _legend(figure: Any, info: Mapping[str, Any], kinds: set[str], health: bool) -> None:
    """Draw the legend in one line at the lower left: of the types that occur, and of health if units have any."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    def mark(kind: str, guessed: bool = False) -> Any:
        style: dict[str, Any] = {"mfc": BACKGROUND if guessed else COLOURS[kind], "mec": COLOURS[kind], "mew": 1.4}
        return Line2D([], [], ls="", marker=MARKS[kind], ms=9, **style)

    names = {"ally": "agents", "enemy": "enemies", "thing": "things", **(info.get("teams") or {})}
    others = [kind for kind in ("ally", "enemy", "thing") if kind in kinds]
    handles: dict[str, Any] = {f"{info['agent']}: the observer": mark("self")}
    handles |= {names[kind]: mark(kind) for kind in others}
    handles["hollow, dashed: guess"] = tuple(mark(kind, True) for kind in others)
    handles["real position"] = Line2D([], [], ls=":", color=MUTED, marker="x", mec=TEXT, ms=7, mew=1.6)
    if health:
        handles["ring: health"] = Line2D([], [], ls="-", color=MUTED, lw=2.6)
    figure.legend(
        list(handles.values()), list(handles), handler_map={tuple: HandlerTuple(ndivide=None)}, loc="center left",
        bbox_to_anchor=(0.008, 0.052), ncol=len(handles), frameon=False, labelcolor=TEXT, fontsize=10.5,
        handletextpad=0.5, columnspacing=1.6,
    )  # fmt: skip
