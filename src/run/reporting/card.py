"""The comparability card: what a result depends on, and what made it: code, command line, host, versions.

It is saved with every result; tables mark rows that differ.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omagd
from omagd import runners
from omagd.config.env_info import given_map
from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.run.run_folder import RunFolder, fingerprint, plain, read_entry
from omagd.utils.errors import readable

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

Card = dict[str, Any]
"""A card as in `card.json`.

`id`: hash of `compared`. `kind`: training or evaluation. `compared`: what must be equal for two results to be
comparable. `recorded`: what may differ; its `settings` are the keys that change a result. `method`: hash of what may
differ and changes a result, whatever the seed. `reached`: steps and updates at the end. `resumed`: for each later start
of a resumed run, the checkpoint and the versions.
"""

NO_EFFECT = frozenset(
    {"run", "use_ddp", "world_size", "ddp_port", "dist_timeout_minutes", "max_memory_per_gpu_gb"}
    | {"local_results_path", "unique_token", "seeds", "save_replay", "save_model", "save_model_interval"}
    | {"use_wandb", "wandb_project", "wandb_entity", "wandb_naming", "use_tensorboard", "profile", "log_memory_usage"}
    | {"log_video", "log_detail"}
    | {"log_interval", "runner_log_interval", "learner_log_interval", "distributed_debug", "save_pretrain_buffer"}
    | {"enable_checkpointing", "checkpoint_interval", "max_checkpoints_to_keep", "keep_checkpoints", "max_restarts"}
    | {"auto_resume", "auto_resume_wait", "resume"}
)
"""Keys that do not change a result: where a run is executed, what it logs and saves. They are not on the card, which
records the number of ranks, every later start, and what a damaged run has lost."""

ROUNDING = frozenset(
    {"use_cuda", "dist_backend", "torch_threads", "cpu_inference", "buffer_cpu_only", "deterministic"}
    | {"accumulate", "enable_gradient_checkpointing", "bucket_cap_mb", "graph_frames_at_once"}
    | {"env_processes", "graph_updates"}
)
"""Keys that change a result by rounding only: on the card, but runs that differ in them are repetitions."""

COVERED = {
    "batch_size": "effective_batch", "batch_size_run": "environments", "updates_per_iteration": "updates_per_round",
    "ticks_per_iteration": "ticks_per_round", "test_nepisode": "test_episodes", "use_full_obs": "observations",
    "use_team_obs": "observations",
    "precision": "precision", "acting_precision": "precision",
}  # fmt: skip
"""Keys that `compared` has under another name, over all ranks."""

METHOD = ("name", "learner", "mac", "agent", "mixer", "use_graph_reconstruction", "lr_scaling")
"""Keys that the card has at the top level of `recorded`, beside the seed."""

IRRELEVANT = frozenset(
    {"map_name", "difficulty", "game_version", "game_timeout", "debug", "replay_dir", "replay_prefix"}
    | {"jax_platform", "jax_threads"}
)
"""Environment arguments that do not affect results, or have their own entry in the card."""

GAME_VERSIONS = {75689: "4.10", 69232: "4.6.2"}
READS = "observations"
"""Entry of a card: what agents read."""
NO_CARD = "no card"

GIT_SECONDS = 3.0
"""Longest time that git may take for each of two questions, as on a slow file system."""

PACKAGE = Path(omagd.__path__[0])


def make_card(config: Config, world_size: int, device: torch.device, trained: Card | None = None) -> Card:
    """Return the card of a run at its start.

    Args:
        world_size: ranks. device: of rank 0. trained: card of the training that an evaluation plays.

    Errors: UserError for arguments that the environment rejects, or when its game is not installed.
    """
    slots = int(runners.REGISTRY.get(config.runner).slots(config)) * world_size
    budget = _evaluation(config, slots, trained) if config.evaluate else _training(config, world_size, slots)
    compared = {**_environment(config), **budget, "precision": _precision(config)}
    kind = "evaluation" if config.evaluate else "training"
    facts = _may_differ(config, world_size, device, compared)
    method = card_id(_method(facts))
    return {
        "id": card_id(compared), "method": method, "kind": kind, "compared": compared, "recorded": facts, "reached": {},
    }  # fmt: skip


def card_id(compared: Mapping[str, Any]) -> str:
    """Return a short hash of what must be equal."""
    return fingerprint(plain(compared))[:8]


def _method(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may differ and changes a result, without the name of the configuration and the seed."""
    settings = {key: value for key, value in facts["settings"].items() if key not in ROUNDING}
    kept = {key: facts[key] for key in (*METHOD, *COMPONENT_ARGS) if key in facts and key != "name"}
    settings["graph_pretrain_batch_size"] *= facts["ranks"] * facts["use_graph_reconstruction"]  # one rank's
    kept["learner"] = kept["learner"].removesuffix("_ddp")
    return {**kept, **settings, **({} if facts["lr_scaling"] == "none" else {"ranks": facts["ranks"]})}


def final_card(card: Card, stats: Mapping[str, float], stages: Mapping[str, Any]) -> Card:
    """Return the card at the end of a run: with the build that the game reports, and the steps and updates reached.

    Args:
        stats: of the environment, with `game_build` if the game reports one. stages: as in `summary.json`.
    """
    compared = dict(card["compared"])
    if stats.get("game_build"):
        compared["game"] = game_name(int(stats["game_build"]))
    clock = stages.get("stage3", {}).get("clock", {})
    reached = {}
    if clock.get("updates") and clock.get("t_env"):
        steps, updates = clock["t_env"], clock["updates"]
        reached = {"environment_steps": steps, "updates": updates, "updates_per_environment_step": updates / steps}
    return {**card, "id": card_id(compared), "compared": compared, "reached": reached}


def beside_one_rank(config: Config, world_size: int, slots: int, data: str) -> str:
    """Return what several ranks multiply, each number beside that of one rank; empty for one rank.

    slots: environments of a rank. data: of the learner; "replay" for one that keeps a replay.
    """
    if world_size == 1:
        return ""
    sizes = {"environments": slots}
    if not config.evaluate:
        sizes = {"batch": config.batch_size, **sizes} | ({"replay": config.buffer_size} if data == "replay" else {})
    shown = (f"{name} {size * world_size:,} (1 rank: {size:,})" for name, size in sizes.items())
    return f"{world_size} ranks: {', '.join(shown)}"


def start_lines(card: Card, sizes: str, batch: str) -> list[str]:
    """Return the lines that a run logs at its start. sizes: of the environment. batch: on ranks and updates."""
    compared, recorded = card["compared"], card["recorded"]
    given = {name: value for name, value in compared.items() if name.startswith("env_args.")}
    facts = {**given, "seed": recorded["seed"], "omagd": recorded["versions"]["omagd"]}
    return [
        f"{recorded['name']} on {compared['env']} {compared['map']}: {sizes}".replace(" :", ":"),
        batch,
        f"card {card['id']} (card.json): {', '.join(f'{name} {value}' for name, value in facts.items())}",
    ]


def read_card(folder: str | Path) -> Card | None:
    """Return the card in a run's folder, None if there is none or it cannot be read."""
    card = read_entry(RunFolder(folder).card_json)
    return card if is_card(card) else None


def is_of(card: Card | None, ranks: int) -> bool:
    """Return whether a card is of a start with so many ranks and with the versions of this process."""
    facts = recorded_of(card)
    return (facts.get("ranks"), facts.get("versions")) == (ranks, versions())


def resumed(card: Card | None) -> list[dict[str, Any]]:
    """Return the entries for the later starts of a resumed run."""
    entries = (card or {}).get("resumed", [])
    return [dict(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def changed_versions(before: Card | None) -> str:
    """Return the versions of this process that differ from those of a run's last start, as text; empty if none does."""
    old = recorded_of(before).get("versions")
    if not isinstance(old, dict):
        return ""
    now = versions()
    return ", ".join(f"{name} {now[name]} (was {old.get(name, 'none')})" for name in now if old.get(name) != now[name])


def is_card(value: object) -> bool:
    """Return whether a value from a JSON file has the form of a card."""
    return isinstance(value, dict) and isinstance(value.get("compared"), dict) and isinstance(value.get("id"), str)


def recorded_of(card: object) -> dict[str, Any]:
    """Return what may differ between comparable results, empty where a card lacks it; once named `told`."""
    entries = card if isinstance(card, dict) else {}
    facts = entries.get("recorded", entries.get("told"))
    return facts if isinstance(facts, dict) else {}


def _environment(config: Config) -> dict[str, Any]:
    """Return environment, map or maps, game, difficulty, and the arguments that differ from the published ones."""
    from omagd.envs import REGISTRY
    from omagd.envs.factory import validate_env_args
    from omagd.envs.task_sets import task_set

    args = validate_env_args(config.env, dict(config.env_args))
    values = args.model_dump(mode="json")
    module = REGISTRY.get(config.env).__module__
    facts = {"env": config.env, "map": str(given_map(config.env, values)), "game": _game(args, module)}
    if (tasks := task_set(config.env_args.get("map_name"))) is not None:
        facts |= {"map": tasks.label, "maps": " ".join(tasks.training), "held_out_maps": " ".join(tasks.held_out)}
    if "difficulty" in values:
        facts["difficulty"] = values["difficulty"]
    return facts | {f"env_args.{name}": value for name, value in _differing(args).items()}


def _game(args: BaseModel, module: str) -> str:
    """Return the game and its version, as far as they are known before the start."""
    if "game_version" in type(args).model_fields:
        from omagd.envs.sc2.install import build_of

        return game_name(build_of(args.game_version))  # type: ignore[attr-defined]
    package = getattr(args, "package", module.partition(".")[0])  # of environments of other packages
    if package == "omagd":
        return f"omagd {omagd.__version__}"
    found = packages_distributions().get(package, [])
    return f"{found[0]} {version(found[0])}" if found else package


def game_name(build: int) -> str:
    """Return the name of the game of a build in results."""
    return f"StarCraft II {GAME_VERSIONS[build]} ({build})" if build in GAME_VERSIONS else f"StarCraft II ({build})"


def _differing(args: BaseModel) -> dict[str, Any]:
    """Return the arguments that differ from the environment's defaults (for battles SMAC's), nested ones dotted."""
    fields, found = type(args).model_fields, {}
    for name, value in args.model_dump(mode="json").items():
        default: Any = fields[name].get_default(call_default_factory=True) if name in fields else None
        default = default.model_dump(mode="json") if hasattr(default, "model_dump") else default
        usual = flattened({name: list(default) if isinstance(default, tuple) else default})
        if name not in IRRELEVANT:
            flat = flattened({name: value})
            found.update({key: flat[key] for key in flat if key not in usual or usual[key] != flat[key]})
    return found


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _observations(config: Config) -> dict[str, Any]:
    shared = "what any living ally sees (use_team_obs)" if config.use_team_obs else "each agent's own"
    return {READS: "everything (use_full_obs)" if config.use_full_obs else shared}


def _evaluation(config: Config, environments: int, trained: Card | None) -> dict[str, Any]:
    """Return what an evaluation plays, and how many episodes."""
    episodes = config.eval_report_episodes or config.test_nepisode
    known = readable(trained["id"]) if trained else NO_CARD
    return {**_observations(config), "trained": known, **_tests(config, episodes, environments)}


def _training(config: Config, world_size: int, environments: int) -> dict[str, Any]:
    """Return the data and the updates that a training uses, and how its result is measured."""
    if config.stage in {"stage1", "stage2"} or config.pretrain_only or config.evaluation_only:
        return {
            "environments": environments,
            "graph_pretrain_epochs": config.graph_pretrain_epochs,
            "graph_pretrain_episodes": _whole_rounds(config.graph_pretrain_episodes, environments),
            "graph_pretrain_policy": config.graph_pretrain_policy,
            "effective_batch": config.graph_pretrain_batch_size * world_size,
            "held_out_episodes": _whole_rounds(config.graph_pretrain_eval_episodes, environments),
        }
    from omagd.learners.protocol import updates_per_iteration

    reads = _observations(config)
    if config.belief_loss != "none":
        reads[READS] += f"; a loss of training reads everything (belief_loss={config.belief_loss})"
    return reads | {
        "environments": environments,
        "updates_per_round": updates_per_iteration(config),
        **({"ticks_per_round": config.ticks_per_iteration} if config.runner == "ticks" else {}),
        "effective_batch": config.batch_size * world_size,
        "t_max": config.t_max,
        **({} if config.max_episodes is None else {"max_episodes": config.max_episodes}),
        **_tests(config, config.test_nepisode, environments),
    }


def _tests(config: Config, asked: int, environments: int) -> dict[str, Any]:
    return {"test_episodes": _whole_rounds(asked, environments), "greedy": config.test_greedy}


def _whole_rounds(episodes: int, environments: int) -> int:
    return -(-episodes // environments) * environments


def _precision(config: Config) -> str:
    acting = config.acting_precision
    return config.precision if acting == config.precision else f"{config.precision} (acting {acting})"


def _may_differ(config: Config, world_size: int, device: torch.device, compared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card records but does not compare."""
    import torch

    card = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    elsewhere = NO_EFFECT | {*METHOD, *COMPONENT_ARGS, *compared, "seed", "env_args", "evaluate"}
    covered = {key for key, name in COVERED.items() if name in compared}
    values = config.model_dump(mode="json")
    return {
        **{key: values[key] for key in (*METHOD, "seed")},
        **{key: values[key] for key in COMPONENT_ARGS if values[key]},
        "settings": {key: value for key, value in values.items() if key not in elsewhere | covered},
        "ranks": world_size,
        "device": device.type + card,
        "versions": versions(),
    }


@dataclass(frozen=True)
class Code:
    """The code that runs.

    Attributes:
        commit: of the checkout, empty where there is none or git cannot tell. changed: whether files of the package
            differ from it. name: the version, and what is equal for equal code; a commit that leaves the package alone
            does not change it.
    """

    commit: str
    changed: bool
    name: str


@cache
def code(package: Path = PACKAGE) -> Code:
    """Return the code of this process as it was at the first call.

    git does not answer for a repository of another user, since that repository could make it run something.
    """
    newest = _git(package, "log", "-1", "--format=%H", "--", ".")
    state = _git(package, "status", "--porcelain=v2", "--branch", "--", ".") if newest else ""
    lines = state.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not commit:
        return Code("", False, f"{omagd.__version__} (sources {_sources(package)})")
    changed = any(line[0] != "#" and (line[0] != "?" or line.endswith((".py", ".yaml"))) for line in lines)
    how = f", changed: {_sources(package)}" if changed else ""
    return Code(commit, changed, f"{omagd.__version__} ({newest.strip()[:12]}{how})")


def _git(package: Path, *words: str) -> str:
    """Return what git says about the package; empty where it is missing, slow, refuses, or knows no such folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(package), *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS, env=environment
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def _sources(package: Path) -> str:
    """Return a short hash of the package's sources: a version or a changed commit alone does not name its code."""
    found = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in package.rglob(kind)):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def versions() -> dict[str, str]:
    """Return the versions that the exact bits of a result depend on; this package's with its commit."""
    import numpy
    import torch

    found = {"omagd": code().name, "torch": torch.__version__, "numpy": numpy.__version__}
    return {**found, "Python": platform.python_version()}


def made_by() -> dict[str, Any]:
    """Return what made this run, for its summary."""
    return {
        "commit": code().commit,
        "changed": code().changed,
        "command": shlex.join(sys.argv),
        "host": socket.gethostname(),
        "versions": versions(),
    }
