"""The published import path of `NQGraphLearner`, which synchronises with other ranks under either name."""

from omagd.learners.nq_learner import NQGraphLearner as NQGraphLearnerDDP

__all__ = ["NQGraphLearnerDDP"]
