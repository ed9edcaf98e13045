"""The published import path of `NQLearner`, which synchronises with other ranks under either name."""

from omagd.learners.nq_learner import NQLearner as NQLearnerDDP

__all__ = ["NQLearnerDDP"]
