"""Everything that a rank imports before it can train, in one place: `omagd.run.prestart` loads it ahead of time."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  (DistributedDataParallel and the optimizers load it when they are made)

import omagd.learners.nq_graph_learner  # noqa: F401
import omagd.learners.nq_learner  # noqa: F401
import omagd.run.experiment  # noqa: F401
import omagd.run.run_ddp  # noqa: F401
import omagd.run.stages.stage1  # noqa: F401
import omagd.run.stages.stage2  # noqa: F401
import omagd.run.stages.stage3  # noqa: F401
import omagd.utils.plots  # noqa: F401
