"""The published import path of `DDPGLearner`, which synchronises with other ranks under either name."""

from omagd.learners.ddpg_learner import DDPGLearner as DDPGLearnerDDP

__all__ = ["DDPGLearnerDDP"]
