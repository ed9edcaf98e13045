"""Many runs from one file: studies and sweeps, on this machine or SLURM. `EXECUTORS` maps names to executors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omagd.utils.errors import UserError, readable
from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.lab.studies.executors import Executor

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    "omagd.executors",
    lazy={
        "local": "omagd.lab.studies.local:LocalExecutor",
        "slurm": "omagd.lab.studies.slurm:SlurmExecutor",
    },
    protocol="omagd.lab.studies.executors:Executor",
)


def import_extra(module: str, needed: str, extra: str) -> Any:
    """Import a package of an extra. needed: what needs it. Errors: UserError where it is not installed, or broken."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        broken = "" if missing else f", which is installed but cannot be imported ({readable(str(error))})"
        raise UserError(f'{needed}{broken}: pip install "omagd[{extra}]"') from None
