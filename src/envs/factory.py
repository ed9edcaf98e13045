"""From `env=` and `env_args` to a batched environment, with errors that name the key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from omagd.envs import REGISTRY
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.utils.errors import UserError, nearest


def validate_env_args(name: str, env_args: dict[str, Any]) -> BaseModel:
    """Return the typed arguments of environment `name`; builds nothing.

    Errors: UserError for an unknown environment or key, a wrong type, or a value out of range.
    """
    model: type[BaseModel] = REGISTRY.get(name).args_model  # type: ignore[attr-defined]
    known = list(model.model_fields)
    for key in env_args:
        if key not in known and model.model_config.get("extra") != "allow":
            options = ", ".join(sorted(known)) or "none"
            raise UserError(
                f"env_args.{key} is not an argument of env={name}.{nearest(str(key), known)}", f"known: {options}"
            )
    try:
        return model.model_validate(env_args)
    except ValidationError as error:
        raise _as_user_error(name, error) from None


def _as_user_error(name: str, error: ValidationError) -> UserError:
    """Return the first complaint as one line: key, value, mend."""
    first = error.errors()[0]
    key = ".".join(["env_args", *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return UserError(f"{key} is missing; env={name} needs it")
    mend = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should", "must")
    )
    hint = ""
    if first["type"] == "literal_error":
        options = [part.strip(" '") for part in first["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = nearest(str(first["input"]), options)
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        mend, hint = "must be text", " Write it in quotes"
    if not first["loc"]:
        return UserError(f"{mend}.")  # about several keys, which it names
    return UserError(f"{key}={first['input']}: {mend}.{hint}")


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
    from omagd.envs.adapters import SerialEnvs
    from omagd.envs.workers.vector import ProcessEnvs

    adapter = ProcessEnvs if processes else SerialEnvs
    return adapter(cls, args, n_slots, name=name)
