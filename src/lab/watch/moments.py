"""Moments of a recorded battle as one picture: what an agent sees, what it believes, what is true."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omagd.envs.frames import AGENTS, THINGS
from omagd.run.recording.recording import Belief, Episode, Moment, Recording, is_drawable
from omagd.run.reporting.battle_plot import Shown, battle_moments
from omagd.utils.errors import UserError

MOMENTS = 3
REMEMBERED, HIDDEN, SEEN = 10, 2, 3
"""Worth of a moment to look at, for each living unit: hidden now and seen before, hidden, seen (three at most)."""


def write_png(recording: Recording, path: Path, agent: int | None = None, steps: Sequence[int] = ()) -> Path:
    """Draw moments of the first episode of a recording.

    Args:
        agent: whose view; None: of whom there is most to see. steps: empty: one of each third of the agent's life.
    Errors: UserError where observations have no units, for a step that the battle has not, or a dead agent.
    """
    episode = recording.episodes[0]
    if not episode.moments[0].seen or not episode.scene.sight:
        raise UserError("--format=png: shows what an agent sees of units, and here observations have none. Use html")
    if over := [step for step in steps if step > episode.length]:
        raise UserError(f"--steps={over[0]}: the battle has steps 0 to {episode.length}")
    agents = range(episode.n_agents) if agent is None else [min(agent, episode.n_agents - 1)]
    found = [(each, *_chosen(episode, each, steps)) for each in agents]
    whose, chosen, _ = max(found, key=lambda each: each[2])
    if not chosen:
        raise UserError("--format=png: the agent is dead at all of these steps. Give another --agent or other --steps")
    return battle_moments(path, [shown(episode, step, whose) for step in chosen])


def _chosen(episode: Episode, agent: int, steps: Sequence[int]) -> tuple[list[int], float]:
    """Return the steps to show of an agent, and what they are worth together."""
    worth, before = {}, set[int]()
    for step, moment in enumerate(episode.moments):
        now = _seen(episode, step, agent)
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


def _seen(episode: Episode, step: int, agent: int) -> set[int]:
    bits = int(episode.moments[step].seen[agent] or "0", 16)
    return {unit for unit in range(len(episode.scene.ids)) if bits >> unit & 1} - {agent}


def shown(episode: Episode, step: int, agent: int) -> Shown:
    """Return a moment as `battle_moments` draws it."""
    scene, moment = episode.scene, episode.moments[step]
    seen, beliefs = (
        _seen(episode, step, agent),
        {each[0]: each for each in (moment.beliefs or [[]] * (agent + 1))[agent]},
    )
    views: list[list[dict[str, Any]]] = [[], [], []]
    for unit, name in enumerate(scene.ids):
        team = scene.teams[unit]
        kind = "self" if unit == agent else "ally" if team == AGENTS else "thing" if team == THINGS else "enemy"
        most = scene.health_max[unit] if scene.health_max else 0.0
        health = moment.health[unit] / most if most else None
        true = {"id": name, "type": kind, "x": moment.x[unit] - moment.x[agent], "y": moment.y[unit] - moment.y[agent],
                "health": health, "present": moment.alive[unit], "guessed": False, "finite": True}  # fmt: skip
        visible = {**true, "present": moment.alive[unit] and (unit == agent or unit in seen)}
        guess = {**visible, **(_guess(beliefs[unit], moment, agent) if unit in beliefs and unit not in seen else {})}
        for view, node in zip(views, (visible, guess, true), strict=True):
            view.append(node)
    teams = dict(zip(("ally", "enemy", "thing"), scene.team_names, strict=False))
    info = {
        "label": episode.label,
        "step": step,
        "agent": scene.ids[agent],
        "sight": scene.sight[agent],
        "teams": teams,
    }
    return views[0], views[1], views[2], info


def _guess(belief: Belief, moment: Moment, agent: int) -> dict[str, Any]:
    """Return what a belief changes in what an agent sees of a unit; what is no number is not drawn."""
    if not is_drawable(belief):
        return {"guessed": True, "present": False, "finite": False}
    _, x, y, health = belief
    return {"x": float(x) - moment.x[agent], "y": float(y) - moment.y[agent], "guessed": True, "present": True,
            "health": None if health is None else float(health)}  # fmt: skip
