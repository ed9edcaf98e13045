"""From `env=` and `env_args` to a batched environment, with errors that name the key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from omagd.config.messages import typed_args
from omagd.envs import REGISTRY
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.utils.errors import UserError


def validate_env_args(name: str, env_args: dict[str, Any]) -> BaseModel:
    """Return the typed arguments of environment `name`; builds nothing.

    Errors: UserError for an unknown environment or key, a wrong type, or a value out of range.
    """
    model: type[BaseModel] = REGISTRY.get(name).args_model  # type: ignore[attr-defined]
    return typed_args("env_args", f"env={name}", model, env_args)


def make_env(name: str, env_args: dict[str, Any], n_slots: int, processes: bool) -> BatchedEnv:
    """Return `n_slots` battles of environment `name`.

    With `processes` each battle gets a worker process of its own. Without, a batched environment is built as it is, and
    single ones are played one after another in this process. Errors: UserError for names and arguments, for a batched
    environment that cannot be divided, or what the environment itself lacks.
    """
    args = validate_env_args(name, env_args)
    cls = REGISTRY.get(name)
    if not issubclass(cls, MultiAgentEnv):
        if not processes:
            return cls(args, n_slots)
        if not cls.divisible:
            raise UserError(f"env_processes=True: env={name} computes all battles at once; use env_processes=False")
    # The adapters bring multiprocessing along; environments that are batched themselves do without.
    from omagd.envs.workers.process_envs import ProcessEnvs
    from omagd.envs.workers.vector import SerialEnvs

    adapter = ProcessEnvs if processes else SerialEnvs
    return adapter(cls, args, n_slots, name=name)
