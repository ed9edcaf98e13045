"""The published name of the graph learner that several ranks share."""

from __future__ import annotations

from omagd.learners.nq_graph_learner import NQGraphLearner


class NQGraphLearnerDDP(NQGraphLearner):
    """`NQGraphLearner`: it synchronises whenever its `Dist` has more than one rank, under either name."""
