"""Learners: one for each method; whether it synchronises with other ranks depends on its `Dist` alone."""

from __future__ import annotations

from omagd.utils.registry import Registry

_LEARNERS = {
    "nq_learner": "omagd.learners.nq_learner:NQLearner",
    "nq_graph_learner": "omagd.learners.nq_learner:NQGraphLearner",
    "wqmix_learner": "omagd.learners.wqmix_learner:WQMIXLearner",
    "pqn_learner": "omagd.learners.pqn_learner:PQNLearner",
    "ppo_learner": "omagd.learners.ppo_learner:PPOLearner",
    "rloo_learner": "omagd.learners.rloo_learner:RLOOLearner",
    "ddpg_learner": "omagd.learners.ddpg_learner:DDPGLearner",
}
REGISTRY: Registry[type] = Registry(
    "learner",
    "omagd.learners",
    # Published names: a learner's `Dist` knows the ranks.
    lazy={name + end: place for name, place in _LEARNERS.items() for end in ("", "_ddp")},
    protocol="omagd.learners.protocol:protocol_of",
)

PREDICTORS: Registry[type] = Registry(
    "learner of mask_predictor_config.kind",
    "omagd.predictor_learners",
    lazy={"masked": "omagd.learners.predictor_learner:PredictorLearner"},
    protocol="omagd.learners.protocol:PretrainingLearner",
)
"""Learners of stage 2 by the kind of predictor; `omagd.modules.graph_reconstructers.REGISTRY` has the same names."""
