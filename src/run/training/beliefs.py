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
from omagd.learners.belief_baselines import Baselines, fit_baselines
from omagd.learners.belief_loss import HeadBeliefs
from omagd.learners.belief_metrics import Believer, belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.modules import graph_reconstructers
from omagd.modules.graph_reconstructers.belief_head import MemoryReconstructor
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
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
    """Play episodes with the trained team and compare what it predicts with the true units.

    Returns the metrics over all ranks, the path of a picture and the table; all are empty for a team that predicts
    nothing.
    """
    head = mac.head
    if head is None and (pretrained.predictor is None or not session.config.use_graph_reconstruction):
        return {}, {}, {}
    batch = _played(session, mac, "beliefs")
    if head is not None:
        training, validation = ([_played(session, mac, purpose)] for purpose in ("pretrain", "held_out"))
        baselines = fit_baselines(lambda: training, lambda: validation, session.info, session.dist)
        table = _judged(HeadBeliefs(mac, head), batch, baselines, session.dist)
        filled = MemoryReconstructor(mac.agent, head, session.info, session.dist.device)
        return belief_values(table), _drawn(session, filled, batch), table
    assert pretrained.predictor is not None
    # Without other ranks: it only evaluates, and sums and counts are reduced below.
    alone = Dist(device=session.dist.device)
    kind = learners.PREDICTORS.get(session.config.mask_predictor_config.kind)
    judged = kind(pretrained.predictor, pretrained.tokenizer, session.config, session.info, alone)
    metrics = Metrics()
    metrics.add(judged.evaluate(batch))
    values, table = summarise(metrics.reduce(session.dist)), {}
    if not says_of_units(judged):
        return values, {}, {}
    if (saved := saved_baselines(session)) is not None:
        table = _judged(judged, batch, saved, session.dist)
        values |= belief_values(table)
    return values, _drawn(session, reconstructor_of(session, pretrained), batch), table


def _played(session: Session, mac: Any, purpose: str) -> PackedBatch:
    """Return `graph_pretrain_eval_episodes` greedy episodes over all ranks, in whole rounds of all slots."""
    per_slot = session.rounds(session.config.graph_pretrain_eval_episodes)
    rollout = session.runners[purpose].run(mac, explore=None, episodes_per_slot=per_slot, full_obs=True)
    return pack_episodes(rollout.episodes).to(session.dist.device)


def _judged(believer: Believer, batch: PackedBatch, baselines: Baselines, dist: Dist) -> dict[str, Any]:
    return {**judge(believer, [batch], baselines, dist), "episodes": dist.sum_int(batch.packing.n_episodes)}


def _drawn(session: Session, reconstructor: Reconstructor, batch: PackedBatch) -> dict[str, str]:
    return {"picture": str(picture(session, reconstructor, batch, "beliefs"))} if session.dist.is_main else {}


def reconstructor_of(session: Session, pretrained: PretrainedModules) -> Reconstructor:
    """Return what fills in what the trained predictor says."""
    kind: Any = graph_reconstructers.REGISTRY.get(session.config.mask_predictor_config.kind)
    made: Reconstructor = kind(pretrained.tokenizer, pretrained.predictor, session.config, session.info)
    return made


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


def picture(session: Session, reconstructor: Reconstructor, batch: PackedBatch, name: str) -> Path:
    """Draw one step of `batch` to `plots/<name>.png`: as seen, as reconstructed and as it truly was."""
    layout = reconstructor.layout
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
