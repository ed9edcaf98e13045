"""Build the objects of a run from its configuration: environment, runner, controller, learner, pretrained modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omagd import controllers, learners, runners
from omagd.config.checks import pretrained_file
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.envs.factory import make_env
from omagd.learners.belief_loss import HEAD
from omagd.learners.protocol import Learner
from omagd.modules import graph_reconstructers as reconstructers
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.recovery import ResumePlan
from omagd.run.checkpoint.weights import (
    AGENT_FILE,
    PREDICTOR_FILE,
    TOKENIZER_FILE,
    find_step_folder,
    load_file,
    load_into,
    run_folder_of,
)
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.run.reporting.profiling import Profiler
from omagd.run.run_folder import RunFolder, read_entry
from omagd.run.training.checks import complete_args, require_same_map
from omagd.run.training.stages.base import BUILDING, PretrainedModules, Session
from omagd.run.training.tasks import episode_starts
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import Logger
from omagd.utils.seeding import random_state, seed_everything, set_random_state
from omagd.utils.storage import read_json

# What stages 1 and 2 and the belief head need is imported where it is used: a plain run loads none of it.
if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
    from omagd.modules.graph_reconstructers.tokenizer import Tokenizer

RANDOM_SHARE = 0.3
"""Probability of a random action of the scripted players under `graph_pretrain_policy=mixed`."""

PURPOSES = ("train", "test", "pretrain", "held_out", "pretrain_test", "beliefs")


def n_slots(config: Config) -> int:
    """Return the number of environment slots of each rank."""
    return int(runners.REGISTRY.get(config.runner).slots(config))


def build_session(
    config: Config, dist: Dist, folder: RunFolder, logger: Logger, plan: ResumePlan | None = None
) -> Session:
    """Return one rank's session: environment, its facts, runners by purpose. plan: what it continues from."""
    torch.set_num_threads(config.torch_threads)
    with dist.waits.doing(BUILDING):
        env = make_env(config.env, dict(config.env_args), n_slots(config), processes=config.env_processes)
    # Half, so that the episodes are played again before the other ranks, which wait for them, give up.
    env.set_worker_timeout(30 * config.dist_timeout_minutes)
    dist.waits.slots = env.busy_slots
    info = env.info
    made = {
        purpose: runners.REGISTRY.build(
            config.runner, env, config, info, episode_starts(config, info, purpose, dist.rank)
        )
        for purpose in PURPOSES
    }
    for runner in made.values():
        runner.ticked, runner.asked = dist.waits.played, dist.waits.ask
    profiler = Profiler(dist, each=config.log_memory_usage, traces=folder.profile if config.profile else None)
    log = EpisodeLog(folder.episode_log(dist.rank))
    checkpointer = Checkpointer(config, dist, folder, plan)
    return Session(config, dist, env, info, folder, logger, made, checkpointer, log, profiler)


def new_tokenizer(config: Config, info: EnvInfo, device: torch.device) -> Tokenizer:
    """Return an untrained tokenizer, the same on every rank."""
    from omagd.modules.graph_reconstructers.tokenizer import Tokenizer

    assert info.layout is not None
    seed_everything(config.seed, "tokenizer")
    return Tokenizer(config.tokenizer_config, info.layout).to(device)


def new_predictor(config: Config, info: EnvInfo, device: torch.device) -> torch.nn.Module:
    """Return an untrained predictor of the configured kind, the same on every rank."""
    seed_everything(config.seed, "predictor")
    return reconstructers.REGISTRY.get(config.mask_predictor_config.kind).new_predictor(config, info).to(device)


PRETRAINED: dict[str, tuple[str, str, str, Callable[[Config, EnvInfo, torch.device], torch.nn.Module]]] = {
    "stage1": ("tokenizer", "pretrained_tokenizer_path", TOKENIZER_FILE, new_tokenizer),
    "stage2": ("predictor", "pretrained_mask_predictor_path", PREDICTOR_FILE, new_predictor),
}
"""What stages train: its name, the key of its path, the name of its file, and the function that makes it."""


def load_pretrained(config: Config, info: EnvInfo, device: torch.device) -> PretrainedModules:
    """Return the pre-trained modules whose paths are given, frozen. Errors: UserError for what does not fit."""
    pretrained = PretrainedModules()
    for name, key, file, make in PRETRAINED.values():
        # A head learns codes of the tokenizer; a trained one knows what they stand for.
        learns_codes = name == "tokenizer" and not config.evaluate
        if not config.use_graph_reconstruction and not (learns_codes and config.belief_loss == "tokens"):
            continue
        if given := getattr(config, key):
            from omagd.modules.graph_reconstructers.pretrained import check

            path = pretrained_file(key, given, file)
            content, module = load_file(path, key), make(config, info, device)
            check(content.get("meta"), config, info, predictor=name == "predictor", source=f"{key}={path}")
            load_into(module, content.get("weights", {}), path, key)
            setattr(pretrained, name, module.eval().requires_grad_(False))
    if pretrained.tokenizer is not None and pretrained.predictor is not None:
        from omagd.modules.graph_reconstructers.pretrained import require_one_pretraining

        require_one_pretraining(pretrained.tokenizer, pretrained.predictor)
    return pretrained


def restore_pretrained(session: Session, pretrained: PretrainedModules, plan: ResumePlan) -> None:
    """Restore what finished stages of this run have trained. Errors: UserError for what does not fit."""
    config, info, device = session.config, session.info, session.dist.device
    for stage, (name, _, _, make) in PRETRAINED.items():
        weights = plan.trained(stage)
        if weights is not None and getattr(pretrained, name) is None:
            module = make(config, info, device)
            load_into(module, weights, session.folder.checkpoints, "checkpoint")
            setattr(pretrained, name, module.eval().requires_grad_(False))


def of_checkpoint(config: Config, step_folder: Path) -> Config:
    """Return `config` with the modules of stages 1 and 2 that agents of a step act with, where no others are given."""
    run_folder = RunFolder(run_folder_of(step_folder))
    found: dict[str, str] = {}
    for stage in reconstructers.pretraining(config):
        _, key, _, _ = PRETRAINED[stage]
        given, own = getattr(config, key), run_folder.pretrained(stage, best=True)
        found[key] = given or (str(own) if own.is_dir() else _given_to(run_folder, key))
    return config.model_copy(update=found)


def _given_to(run_folder: RunFolder, key: str) -> str:
    """Return a path of a run's configuration; the run's folder, which the error then names, where there is none."""
    given = read_entry(run_folder.config_json).get(key)
    return given if given and isinstance(given, str) else str(run_folder.path)


def build_mac(config: Config, info: EnvInfo, device: torch.device, pretrained: PretrainedModules | None = None) -> MAC:
    """Return the controller, its agent initialised equally on every rank, with a reconstructor where configured.

    Without `pretrained` it reads plain observations, and what it would infer is zeros.
    """
    reconstructor: Reconstructor | None = None
    if config.use_graph_reconstruction and pretrained is not None:
        assert pretrained.predictor is not None
        frozen: tuple[Any, ...] = pretrained.tokenizer, pretrained.predictor
        if config.cpu_inference:
            frozen = tuple(copy.deepcopy(module).cpu() if module is not None else None for module in frozen)
        kind: Any = reconstructers.REGISTRY.get(config.mask_predictor_config.kind)
        reconstructor = kind(*frozen, config, info)
    seed_everything(config.seed, "agent")
    config = complete_args(config, ("agent_args",))
    mac: MAC = controllers.REGISTRY.build(config.mac, config, info, device, reconstructor)
    if config.belief_loss != "none" and info.layout is not None:
        from omagd.modules.graph_reconstructers.belief_head import new_head

        mac.head = new_head(config, info, next(mac.agent.parameters()))
        if config.belief_loss == "tokens" and pretrained is not None and pretrained.tokenizer is not None:
            mac.head.learn_codes(pretrained.tokenizer)
    return mac


def read_env_info(path: Path, source: str) -> EnvInfo:
    """Return the facts in a run's `env_info.json`. source: what named the run. Errors: UserError."""
    try:
        return EnvInfo.from_dict(read_json(path))
    except OSError as problem:
        raise UserError(f"{source}: {path} cannot be read ({problem.strerror}): give the folder of a run") from None
    except (ValueError, RecursionError):
        raise UserError(f"{source}: {path} is damaged: put back a copy of it") from None


def load_agent(mac: MAC, step_folder: Path, key: str) -> None:
    """Load the weights of the agent, and of its head, of a step's folder. key: the configuration key that named it.

    Errors: UserError for weights of another map, which the run's `env_info.json` names, or of other sizes.
    """
    path = step_folder / AGENT_FILE
    facts = RunFolder(run_folder_of(step_folder)).env_info_json
    if facts.is_file():
        require_same_map(read_env_info(facts, key), mac.info, f"{key}={path}", mac.agent)
    load_into(mac.agent, load_file(path, key), path, key)
    if mac.head is not None:
        path = step_folder / f"{HEAD}.th"
        weights = load_file(path, key) if path.is_file() else {}
        own = {name: value.shape for name, value in mac.head.state_dict().items()}
        if own == {name: getattr(value, "shape", None) for name, value in weights.items()}:
            load_into(mac.head, weights, path, key)
        else:  # of a team that was trained without, or on a map with other units; no agent acts on it
            mac.head = None


def build_learner(session: Session, pretrained: PretrainedModules) -> tuple[MAC, Learner]:
    """Return the controller and the learner of stage 3."""
    mac = build_mac(session.config, session.info, session.dist.device, pretrained)
    config = session.config
    learner = learner_of(mac, config, session.info, session.dist)
    seed_everything(session.config.seed, "stage3 dropout", session.dist.rank)
    return mac, learner


def learner_of(mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> Learner:
    """Return the learner of a controller. Errors: UserError, also for one that would not train its head."""
    learner: Learner = learners.REGISTRY.build(config.learner, mac, config, info, dist)
    if mac.head is not None and mac.head not in learner.modules().values():
        raise UserError(
            f"belief_loss={config.belief_loss}: learner={config.learner} has no such loss. Use learner=nq_learner or"
            " learner=ppo_learner"
        )
    return learner


def pretrain_policy(session: Session, rng: np.random.Generator) -> Any:
    """Return the policy of the episodes of stages 1 and 2: random, scripted with random actions, or a trained agent.

    rng: where the chance of the first two comes from.
    """
    from omagd.controllers.scripted_mac import ScriptedPolicy

    config = session.config
    if config.graph_pretrain_policy == "random":
        return ScriptedPolicy(session.env, ("random",), 0.0, rng)
    if config.graph_pretrain_policy == "mixed":
        names = tuple(name for name in session.info.scripted_policies if name != "random") or ("random",)
        return ScriptedPolicy(session.env, names, RANDOM_SHARE, rng)
    # The agent of a trained run, reading plain observations. Its first weights draw from the generator of dropout.
    kept, key = random_state(), "graph_pretrain_policy"
    mac = build_mac(config, session.info, session.dist.device)
    set_random_state(kept)
    load_agent(mac, find_step_folder(config.graph_pretrain_policy, key=key), key)
    return mac
