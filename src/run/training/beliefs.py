"""Accuracy of the agents' reconstructions of unseen units."""

from __future__ import annotations

from typing import Any

from omagd import learners
from omagd.config.checks import pretrained_file
from omagd.learners.belief_baselines import Baselines, fit_baselines
from omagd.learners.belief_loss import HeadBeliefs
from omagd.learners.belief_metrics import Believer, belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.run.checkpoint.recovery import agreed
from omagd.run.checkpoint.weights import PREDICTOR_FILE, load_file
from omagd.run.training.stages.base import PretrainedModules, Session
from omagd.utils.dist_utils import Dist
from omagd.utils.metrics import Metrics
from omagd.utils.packing import PackedBatch, pack_episodes


def evaluate_beliefs(
    session: Session, pretrained: PretrainedModules, mac: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    """Play episodes with the trained team and compare what it predicts with the true units.

    Returns the metrics over all ranks and the table; both are empty for a team that predicts nothing.
    """
    head = mac.head
    if head is None and (pretrained.predictor is None or not session.config.use_graph_reconstruction):
        return {}, {}
    batch = _played(session, mac, "beliefs")
    if head is not None:
        training, validation = ([_played(session, mac, purpose)] for purpose in ("pretrain", "held_out"))
        baselines = fit_baselines(lambda: training, lambda: validation, session.info, session.dist)
        table = _judged(HeadBeliefs(mac, head), batch, baselines, session.dist)
        return belief_values(table), table
    assert pretrained.predictor is not None
    # Without other ranks: it only evaluates, and sums and counts are reduced below.
    alone = Dist(device=session.dist.device)
    kind = learners.PREDICTORS.get(session.config.mask_predictor_config.kind)
    judged = kind(pretrained.predictor, pretrained.tokenizer, session.config, session.info, alone)
    metrics = Metrics()
    metrics.add(judged.evaluate(batch))
    values = summarise(metrics.reduce(session.dist))
    if not says_of_units(judged) or (saved := saved_baselines(session)) is None:
        return values, {}
    table = _judged(judged, batch, saved, session.dist)
    return values | belief_values(table), table


def _played(session: Session, mac: Any, purpose: str) -> PackedBatch:
    """Return `graph_pretrain_eval_episodes` greedy episodes over all ranks, in whole rounds of all slots."""
    per_slot = session.rounds(session.config.graph_pretrain_eval_episodes)
    rollout = session.runners[purpose].run(mac, explore=None, episodes_per_slot=per_slot, full_obs=True)
    return pack_episodes(rollout.episodes).to(session.dist.device)


def _judged(believer: Believer, batch: PackedBatch, baselines: Baselines, dist: Dist) -> dict[str, Any]:
    return {**judge(believer, [batch], baselines, dist), "episodes": dist.sum_int(batch.packing.n_episodes)}


def says_of_units(learner: Any) -> bool:
    """Whether a learner of stage 2 trains a predictor of units; others have no baselines."""
    return hasattr(learner, "beliefs")


def saved_baselines(session: Session) -> Baselines | None:
    """Return the baselines in the file of the predictor: the given one, else the run's own; None where it has none.

    Called by all ranks; rank 0 reads. Errors: UserError for a damaged file.
    """
    key = "pretrained_mask_predictor_path"
    given, own = getattr(session.config, key), session.folder.pretrained("stage2", best=True) / PREDICTOR_FILE

    def read() -> Any:
        path = pretrained_file(key, given, PREDICTOR_FILE) if given else own
        return load_file(path, key).get("baselines") if path.is_file() else None

    state = agreed(session.dist, read)
    if state is not None:
        return Baselines.restored(state, session.info, session.dist.device, f"{key}={given or own}")
    session.logger.info(f"{given or own} has no baselines: errors on living units and beside baselines are left out")
    return None
