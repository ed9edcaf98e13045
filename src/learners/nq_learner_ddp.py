"""The published name of the learner that several ranks share."""

from __future__ import annotations

from omagd.learners.nq_learner import NQLearner


class NQLearnerDDP(NQLearner):
    """`NQLearner`: it synchronises whenever its `Dist` has more than one rank, under either name."""
