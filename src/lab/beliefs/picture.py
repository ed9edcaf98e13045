"""A picture of some moments: units as an agent sees them, as they are reconstructed, and as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.envs.frames import AGENTS, OPPONENTS, Frame, Scene, unit_names
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes, units_of_nodes
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
from omagd.run.recording import WRITERS
from omagd.run.recording.recorder import Views, seen_and_believed
from omagd.run.recording.recording import Episode, Moment, Recording
from omagd.run.training.stages.base import Session
from omagd.utils.packing import PackedBatch, last_actions

OWN_HEALTH = 4
"""Column of an agent's own health in its own node, behind [1, 0, 0, 0 | move features]."""

FARTHEST_SHOWN = 3.2
"""Ranges of sight to each side of an agent that a picture can show."""


Fills = Callable[[PackedBatch, int], tuple[Tensor, Tensor]]
"""Returns an episode's observations [T, n, obs_dim] filled in, and where [T, n, N] bool."""


def filled_by(reconstructor: Reconstructor, batch: PackedBatch, episode: int) -> tuple[Tensor, Tensor]:
    """Return what a reconstructor, which remembers, fills in step by step. See `Fills`."""
    obs = batch.packing.pad(batch["obs"])[episode]
    actions = torch.full(obs.shape[:2], -1, device=obs.device)
    if "actions" in batch:
        actions = batch.packing.pad(last_actions(batch["actions"], batch.packing), -1)[episode]
    reconstructor.begin(1)
    made = [
        reconstructor.step(obs[t][None], torch.tensor([t]), None, actions[t][None])
        for t in range(batch.packing.lengths[episode])
    ]
    return torch.cat([each.obs for each in made]), torch.cat([each.guessed for each in made])


def picture(session: Session, fills: Fills, batch: PackedBatch, name: str) -> Path:
    """Draw moments of an episode of `batch` to `plots/<name>.png`: as an agent sees, as reconstructed, as they were."""
    layout, info = session.info.layout, session.info
    assert layout is not None
    obs, full = batch.packing.pad(batch["obs"]), batch.packing.pad(batch["full_obs"])
    episode, agent = _best_view(obs, full, layout)
    made, guessed = fills(batch, episode)
    scene, moments = _scene(session, layout, agent), []
    for t in range(batch.packing.lengths[episode]):
        seen, filled, truth = (
            obs_to_nodes(each, layout).cpu().numpy() for each in (obs[episode, t], made[t], full[episode, t])
        )
        moments.append(_moment(layout, (seen, filled, guessed[t].cpu().numpy()), truth[agent], scene, agent))
    drawn = Episode.model_construct(
        env=info.name, map_name=info.map_name, seed=0, policy="", values="Q-values", results={}, scene=scene,
        moments=moments,
    )  # fmt: skip
    path = WRITERS.get("png")(Recording.model_construct(episodes=[drawn]), session.folder.plots / f"{name}.png", agent)
    session.logger.picture(name, path)
    return path


def _moment(layout: EntityLayout, views: Views, truth: np.ndarray, scene: Scene, agent: int) -> Moment:
    """Return a moment with places relative to an agent. truth: nodes [N, D] of the agent's full graph."""
    units = units_of_nodes(layout, layout.n_allies + 1)[agent]
    x, y, health, alive = np.zeros((4, len(scene.ids)))
    alive[units] = truth.any(1)
    x[units], y[units] = (truth[:, column] * layout.sight for column in layout.position)
    health[units] = truth[:, layout.health] if layout.health >= 0 else 0.0
    x[agent] = y[agent] = 0.0
    health[agent] = truth[0, OWN_HEALTH + layout.move_dim] if layout.own_dim else 0.0
    frame = Frame(scene, x.tolist(), y.tolist(), alive.astype(bool).tolist(), health.tolist())
    seen, beliefs = seen_and_believed(layout, views, frame)
    return Moment.model_construct(
        x=frame.x, y=frame.y, alive=frame.alive, health=frame.health, seen=seen, beliefs=beliefs
    )


def _scene(session: Session, layout: EntityLayout, agent: int) -> Scene:
    """Return the units on a ground around an agent; of a set of maps those of its largest, as slots change their maps.

    An environment that names only its agents has enemies `e0`, `e1`, ... as well.
    """
    scene, n, opponents = session.env.frame(0).scene, session.info.n_agents, layout.n_enemies
    if session.info.tasks or len(scene.ids) != n + opponents:
        ids, teams = unit_names(n, opponents), (AGENTS,) * n + (OPPONENTS,) * opponents
        names = scene.team_names if len(scene.team_names) > 1 else ("agents", "enemies")
        scene = Scene(ids, teams, ("",) * len(ids), names)
    has_health = [layout.health >= 0 and most > 0 for most in scene.health_max or (1.0,) * len(scene.ids)]
    has_health[agent] &= layout.own_dim > 0
    wide = FARTHEST_SHOWN * layout.sight
    return Scene(
        scene.ids, scene.teams, scene.kinds, scene.team_names, health_max=tuple(map(float, has_health)),
        sight=(layout.sight,) * n, bounds=(-wide, -wide, wide, wide),
    )  # fmt: skip


def _best_view(obs: Tensor, full: Tensor, layout: EntityLayout) -> tuple[int, int]:
    """Return (episode, agent) of the view in which most living units are hidden, above all those seen before."""
    seen, alive = (obs_to_nodes(each, layout).any(-1)[..., 1:] for each in (obs, full))
    hidden = alive & ~seen
    remembered = hidden & torch.cummax(seen.byte(), dim=1).values.bool()
    score = (10 * remembered + 1 * hidden).sum((1, 3))
    episode, agent = divmod(int(score.argmax()), score.shape[1])
    return episode, agent
