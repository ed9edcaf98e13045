"""What a rank imports before it can train, in one place: `omagd.run.launch.preload` loads it ahead of time."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  (DistributedDataParallel and the optimizers load it when they are made)

import omagd.learners.nq_graph_learner  # noqa: F401
import omagd.learners.nq_learner  # noqa: F401
import omagd.run.reporting.plots  # noqa: F401
import omagd.run.run_ddp  # noqa: F401
import omagd.run.training.experiment  # noqa: F401
import omagd.run.training.stages.pretraining  # noqa: F401
import omagd.run.training.stages.rl  # noqa: F401
