"""The published name of the DDPG learner that several ranks share."""

from __future__ import annotations

from omagd.learners.ddpg_learner import DDPGLearner


class DDPGLearnerDDP(DDPGLearner):
    """`DDPGLearner`: it synchronises whenever its `Dist` has more than one rank, under either name."""
