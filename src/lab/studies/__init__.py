"""Many runs from one file: studies and sweeps, on this machine or SLURM. `EXECUTORS` maps names to executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.lab.studies.executors import Executor

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    "omagd.executors",
    lazy={"local": "omagd.lab.studies.local:LocalExecutor", "slurm": "omagd.lab.studies.slurm:SlurmExecutor"},
    protocol="omagd.lab.studies.executors:Executor",
)
