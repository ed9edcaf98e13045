"""Accuracy of the agents' reconstructions of unseen units, and a picture of one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd import learners
from omagd.config.checks import pretrained_file
from omagd.config.env_info import EntityLayout
from omagd.envs.frames import AGENTS, OPPONENTS, Scene, unit_names
from omagd.learners.belief_baselines import Baselines
from omagd.learners.belief_metrics import belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.modules import graph_reconstructers
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes, unseen
from omagd.run.checkpoint.weights import PREDICTOR_FILE, load_file
from omagd.run.reporting.battle_plot import battle_moment, battle_nodes
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.metrics import Metrics
from omagd.utils.packing import PackedBatch, last_actions, pack_episodes


def evaluate_beliefs(
    session: Session, pretrained: PretrainedModules, mac: Any
) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Play episodes with the trained team and compare its reconstructions with the true units.

    Returns the metrics over all ranks, the path of a picture and the table; all are empty without reconstruction.
    """
    if pretrained.predictor is None or not session.config.use_graph_reconstruction:
        return {}, {}, {}
    per_slot = session.rounds(session.config.graph_pretrain_eval_episodes)
    rollout = session.runners["beliefs"].run(mac, explore=None, episodes_per_slot=per_slot, full_obs=True)
    batch = pack_episodes(rollout.episodes).to(session.dist.device)
    # Without other ranks: it only evaluates, and sums and counts are reduced below.
    alone = Dist(device=session.dist.device)
    kind = learners.PREDICTORS.get(session.config.mask_predictor_config.kind)
    judged = kind(pretrained.predictor, pretrained.tokenizer, session.config, session.info, alone)
    metrics = Metrics()
    metrics.add(judged.evaluate(batch))
    values, table = summarise(metrics.reduce(session.dist)), {}
    if not says_of_units(judged):
        return values, {}, {}
    if (baselines := saved_baselines(session)) is not None:
        table = judge(judged, [batch], baselines, session.dist)
        values |= belief_values(table)
        table["episodes"] = session.dist.sum_int(batch.packing.n_episodes)
    drawn = {"picture": str(picture(session, pretrained, batch, "beliefs"))} if session.dist.is_main else {}
    return values, drawn, table


def says_of_units(learner: Any) -> bool:
    """Whether a learner of stage 2 trains a predictor of units; others have no baselines and no pictures."""
    return hasattr(learner, "beliefs")


def saved_baselines(session: Session) -> Baselines | None:
    """Return the baselines in the file of the predictor: the given one, else the run's own; None where it has none.

    Called by all ranks; rank 0 reads. Errors: UserError for a damaged file.
    """
    key = "pretrained_mask_predictor_path"
    given, own = getattr(session.config, key), session.folder.pretrained("stage2", best=True) / PREDICTOR_FILE
    state, problem = None, ""
    if session.dist.is_main:
        try:
            path = pretrained_file(key, given, PREDICTOR_FILE) if given else own
            state = load_file(path, key).get("baselines") if path.is_file() else None
        except UserError as error:
            problem = error.message
    state, problem = session.dist.broadcast((state, problem))
    if problem:
        raise UserError(problem)
    if state is not None:
        return Baselines.restored(state, session.info, session.dist.device, f"{key}={given or own}")
    session.logger.info(f"{given or own} has no baselines: errors on living units and beside baselines are left out")
    return None


def picture(session: Session, pretrained: PretrainedModules, batch: PackedBatch, name: str) -> Path:
    """Draw one step of `batch` to `plots/<name>.png`: as seen, as reconstructed and as it truly was."""
    assert pretrained.predictor is not None and session.info.layout is not None
    layout = session.info.layout
    kind: Any = graph_reconstructers.REGISTRY.get(session.config.mask_predictor_config.kind)
    reconstructor = kind(pretrained.tokenizer, pretrained.predictor, session.config, session.info)
    obs, full = batch.packing.pad(batch["obs"]), batch.packing.pad(batch["full_obs"])
    episode, step, agent = _best_view(obs, full, layout)
    reconstructor.begin(1)
    actions = torch.full((*obs.shape[:2], session.info.n_agents), -1, device=obs.device)
    if "actions" in batch:
        actions = batch.packing.pad(last_actions(batch["actions"], batch.packing), -1)
    made = [
        reconstructor.step(obs[episode, t][None], torch.tensor([t]), None, actions[episode, t][None])
        for t in range(step + 1)
    ][-1]
    guessed = made.guessed[0, agent].cpu().numpy()
    at = episode, step, agent
    views = {"seen": obs[at], "reconstructed": made.obs[0, agent], "truth": full[at]}
    nodes = {key: obs_to_nodes(value, layout).cpu().numpy() for key, value in views.items()}
    marks = {"reconstructed": guessed}
    scene = _scene(session)
    drawn = {key: battle_nodes(value, layout, scene, agent, marks.get(key)) for key, value in nodes.items()}
    teams = dict(zip(("ally", "enemy", "thing"), scene.team_names, strict=False))
    info = {
        "label": f"{session.info.name} {session.info.map_name}".strip(), "step": step, "agent": scene.ids[agent],
        "sight": layout.sight, "errors": _errors(nodes, guessed), "teams": teams,
    }  # fmt: skip
    path = battle_moment(session.folder.plots / f"{name}.png", **drawn, info=info)
    session.logger.picture(name, path)
    return path


def _scene(session: Session) -> Scene:
    """Return the names and teams of the units; of a set of maps those of its largest, as slots change their maps."""
    scene, info = session.env.frame(0).scene, session.info
    if not info.tasks or info.layout is None:
        return scene
    n, opponents = info.n_agents, info.layout.n_enemies
    teams = (AGENTS,) * n + (OPPONENTS,) * opponents
    return replace(scene, ids=unit_names(n, opponents), teams=teams, health_max=())


def _best_view(obs: Tensor, full: Tensor, layout: EntityLayout) -> tuple[int, int, int]:
    """Return (episode, step, agent) of the most informative view.

    Score: 10 for each living unit that is hidden now but was seen before, 3 for each visible one (3 at most), 1 for
    each hidden one.
    """
    seen = ~unseen(obs_to_nodes(obs, layout))[..., 1:]
    alive = ~unseen(obs_to_nodes(full, layout))[..., 1:]
    hidden = alive & ~seen
    remembered = hidden & torch.cummax(seen.byte(), dim=1).values.bool()
    score = 10 * remembered.sum(-1) + 3 * (seen & alive).sum(-1).clamp(max=3) + hidden.sum(-1)
    score = torch.where(hidden.any(-1), score, 0)
    flat = int(np.argmax(score.cpu().numpy()))
    episode, step, agent = np.unravel_index(flat, tuple(score.shape))
    return int(episode), int(step), int(agent)


def _errors(nodes: dict[str, np.ndarray], guessed: np.ndarray) -> dict[str, float]:
    """Return the mean squared error over the guessed living units of this moment.

    It stands alone: what it is worth beside baselines is a question of many battles, which stage 2 answers.
    """
    living = guessed & nodes["truth"].any(-1)
    if not living.any():
        return {}
    error = float(np.mean((nodes["reconstructed"][living] - nodes["truth"][living]) ** 2))
    units = "1 living unseen unit" if living.sum() == 1 else f"{living.sum()} living unseen units"
    return {f"MSE of {units} at this moment:": error}
