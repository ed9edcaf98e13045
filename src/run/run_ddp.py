"""`run=ddp`, by its published name: one process per device, or a rank of torchrun's group."""

from __future__ import annotations

from omagd.run.launch.launcher import worker as ddp_worker
from omagd.run.run import run

__all__ = ["ddp_worker", "run"]
