"""`omagd beliefs`: what is unseen, and what filling it in is worth, in minutes and without training."""

from __future__ import annotations

import argparse
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.utils.errors import UserError
from omagd.utils.progress import Progress
from omagd.utils.signals import stoppable
from omagd.utils.writing import open_lines, print_out

if TYPE_CHECKING:
    from omagd.config.env_info import EnvInfo
    from omagd.config.schema import Config
    from omagd.envs.protocol import BatchedEnv
    from omagd.lab.beliefs.believing import Source

TESTS = ("census", "plug-in", "swap", "gate")
SLOTS = 128
"""Most battles at a time."""

MOST_EPISODES = 100_000
READ_BY = {
    **dict.fromkeys(("episodes", "into"), ("census", "plug-in", "swap")), "reconstruction": ("plug-in", "swap"),
    **dict.fromkeys(("least", "lower", "upper"), ("gate",)),
}  # fmt: skip
"""The tests that read an option."""

NOTE_WIDTH = 120
"""Columns of the text below a table."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `beliefs`."""
    add = parser.add_argument
    parser.usage = "omagd beliefs census|plug-in|swap [RUN] [options] [key=value ...]  |  omagd beliefs gate STUDY"
    parser.epilog = "docs/beliefs.md describes the tests. RUN: the folder of a trained run, whose team plays."
    add("words", nargs="*", metavar="WORD", help="the test, a run, and keys such as env_args.map_name=3m seed=2")
    add("--config", help="as for a training, where no run is given (default: omagd_small)")
    add("--env-config", "--env_config", help="the environment, where no run is given (default: skirmish)")
    add("--episodes", metavar="N", help="battles that are measured, of each belief (default: 512)")
    add("--reconstruction", metavar="RUN2", help="plug-in, swap: the run whose stages 1 and 2 are tested too")
    add("--into", metavar="FOLDER", help="folder of a run or a study, for whose report the result is kept")
    add("--least", metavar="X", help="gate: smallest difference that a map needs (default: 0.15)")
    add("--lower", metavar="ARM", help="gate: the arm that sees least (default: baseline)")
    add("--upper", metavar="ARM", help="gate: the arm that sees everything (default: full_obs)")


def main(options: argparse.Namespace) -> int:
    """Run a test, keep its result and print its tables. Errors: UserError."""
    test, *rest = options.words or [""]
    if test not in TESTS:
        asked = f"beliefs {test}".strip()
        raise UserError(f"{asked}: name a test, one of {', '.join(TESTS)}. See omagd beliefs --help")
    for flag, readers in READ_BY.items():
        if (value := getattr(options, flag)) is not None and test not in readers:
            raise UserError(f"--{flag}={value}: beliefs {test} does not read it. Use it with {', '.join(readers)}")
    if test == "gate":
        return _gate(options, rest)
    run = rest.pop(0) if rest and "=" not in rest[0] and rest[0] != "with" else ""
    episodes = _number("512" if options.episodes is None else options.episodes)
    if test == "swap" and not run:
        raise UserError("beliefs swap: name a run that was trained with use_full_obs=True, as in: omagd beliefs swap"
                        " results/<run>")  # fmt: skip
    with stoppable():
        config = _config(options, test, run, rest)
        folder = _folder(options, config, run)
        with _players(config, test, run, episodes) as players:
            record = {"census": _census, "plug-in": _plug_in, "swap": _swap}[test](players, options.reconstruction)
    record = {"test": test, "env": config.env, "map": players.info.map_name, **record,
              "policy": players.policy_name, "episodes": players.measured, "seed": config.seed}  # fmt: skip
    from omagd.lab.analysis.belief_tests import tables

    print_out("\n".join(_as_text(table) for table in tables([record])) + "\n")  # even if it cannot be kept
    print_out(f"{_keep(folder, record)}\n")
    return 0


def _number(text: str) -> int:
    if not text.isdecimal() or not 8 <= int(text) <= MOST_EPISODES:
        raise UserError(f"--episodes={text}: must be a number from 8 to {MOST_EPISODES:,}")
    return int(text)


def _config(options: argparse.Namespace, test: str, run: str, words: Sequence[str]) -> Config:
    """Return the configuration of the battles: that of `run`, or as for a training. Errors: UserError."""
    from omagd.run.cli.main import config_from, updates

    words = [] if not words else list(words) if words[0] == "with" else ["with", *words]
    if not run:
        given = [f"--{name}={value}" for name in ("config", "env-config")
                 if (value := getattr(options, name.replace("-", "_"))) is not None]  # fmt: skip
        return config_from([*given, *words])
    for name, value in (("config", options.config), ("env-config", options.env_config)):
        if value is not None:
            raise UserError(f"--{name}={value}: the run has its own configuration. Leave it out")
    from omagd.run.training.evaluate import evaluation_config

    return evaluation_config(run, updates(words), f"beliefs {test}")


def _folder(options: argparse.Namespace, config: Config, run: str) -> Path:
    """Return the folder for the result: as given, else that of the run, else `beliefs` among the results."""
    if options.into is not None:
        folder = Path(os.path.expanduser(options.into))
        if not folder.is_dir():
            raise UserError(f"--into={options.into}: no such folder. Give that of a run or of a study")
        return folder
    if not run:
        return Path(config.local_results_path).expanduser() / "beliefs"
    from omagd.run.checkpoint.weights import find_step_folder, run_folder_of

    return run_folder_of(find_step_folder(run))


def _keep(folder: Path, record: dict[str, Any]) -> Path:
    """Append a record to the file of a folder, whole. Errors: UserError."""
    from omagd.lab.analysis.belief_tests import FILE

    path = folder / FILE
    try:
        handle = open_lines(path)
        try:
            os.write(handle, json.dumps(record).encode() + b"\n")
        finally:
            os.close(handle)
    except OSError as problem:
        raise UserError(f"{path}: cannot be written ({problem.strerror}). Give another folder with --into") from None
    return path


@dataclass
class Players:
    """An environment and who plays there.

    Attributes:
        policy: of the census, and of the battles on which baselines are fitted; in the swap test the team that is
            tested. policy_name: in words. episodes: battles that are measured, at least. counter: advances the bar.
    """

    env: BatchedEnv
    config: Config
    info: EnvInfo
    policy: Any
    policy_name: str
    episodes: int
    counter: Callable[[int], None]

    @property
    def measured(self) -> int:
        """Battles that are measured: whole rounds of all slots."""
        return -(-self.episodes // self.env.n_slots) * self.env.n_slots


@contextmanager
def _players(config: Config, test: str, run: str, episodes: int) -> Iterator[Players]:
    """Build the environment and the policy. Errors: UserError."""
    import torch

    from omagd.envs import REGISTRY
    from omagd.envs.factory import make_env
    from omagd.envs.protocol import MultiAgentEnv

    torch.set_num_threads(config.torch_threads)
    slots = min(config.batch_size_run if issubclass(REGISTRY.get(config.env), MultiAgentEnv) else SLOTS, episodes)
    env = make_env(config.env, dict(config.env_args), slots, processes=False)
    rounds = -(-episodes // slots)
    total = slots * (rounds * (2 if test == "census" else 6) + -(-rounds // 4))
    with closing(env), closing(Progress(total, "episode", test)) as bar:
        info = env.info
        if info.layout is None or info.tasks:
            fix = "give one map" if info.tasks else f"env={info.name} has no list of units to be unseen"
            raise UserError(f"beliefs {test}: {fix}")
        if test != "census" and not info.has_win:
            raise UserError(f"beliefs {test}: compares win rates, but env={info.name} has none")
        if test == "swap" and not config.use_full_obs:
            raise UserError(f"beliefs swap: agents of {run} do not see everything. Give a run with use_full_obs=True")
        policy, name = _policy(config, env, run)
        yield Players(env, config, info, policy, name, episodes, bar.update)


def _policy(config: Config, env: BatchedEnv, run: str) -> tuple[Any, str]:
    """Return the trained team of a run, or scripts with random actions as in stages 1 and 2; and its name."""
    import numpy as np
    import torch

    from omagd.controllers.scripted_mac import ScriptedPolicy
    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.training.build import RANDOM_SHARE
    from omagd.run.training.evaluate import load_mac, policy_name
    from omagd.utils.seeding import stream_seed

    info = env.info
    if run:
        folder = find_step_folder(config.checkpoint_path, config.load_step)
        return load_mac(config, info, torch.device("cpu"), folder, "checkpoint_path"), policy_name(config, folder)
    names = tuple(name for name in info.scripted_policies if name != "random") or ("random",)
    rng = np.random.default_rng(stream_seed(config.seed, "beliefs"))
    share = RANDOM_SHARE
    return ScriptedPolicy(env, names, share, rng), f"scripts, {100 * share:.0f} % random actions"


def _census(players: Players, _: str | None) -> dict[str, Any]:
    from omagd.lab.beliefs.census import CLASSES, census

    found = census(players.env, players.config, players.info, players.policy, players.episodes, players.counter)
    return {**found, "class_means": CLASSES[found["class"]]}


def _plug_in(players: Players, run: str | None) -> dict[str, Any]:
    from omagd.lab.beliefs.believing import BeliefScript

    sources = _sources(players, run)  # plays, so that there is a frame
    script = BeliefScript(players.info, players.env.frame(0).scene.actions)
    players.policy_name = "script that attacks the nearest enemy"
    return {**_compared(players, script, sources), "reconstruction": run}


def _swap(players: Players, run: str | None) -> dict[str, Any]:
    return {**_compared(players, players.policy, _sources(players, run)), "reconstruction": run}


def _compared(players: Players, policy: Any, sources: dict[str, Source]) -> dict[str, Any]:
    from omagd.lab.analysis.belief_tests import compared
    from omagd.lab.beliefs.believing import win_rates

    won = win_rates(
        players.env, players.config, players.info, policy, sources, players.episodes, players.counter
    )  # fmt: skip
    return {"beliefs": compared(won)}


def _sources(players: Players, run: str | None) -> dict[str, Source]:
    """Return the beliefs that are compared; map constants are means over other battles of `players.policy`."""
    import torch

    from omagd.lab.beliefs.believing import Reconstructed, Seen, map_constant
    from omagd.lab.beliefs.census import fitted
    from omagd.modules.graph_reconstructers.last_sight import LastSight

    given = {} if run is None else {"reconstruction": _reconstructor(players, run)}
    baselines = fitted(
        players.env, players.config, players.info, players.policy, players.episodes, players.counter
    )  # fmt: skip
    filled = {
        "last_seen": LastSight(players.info, torch.device("cpu")),
        "map_constant": map_constant(baselines, players.config, players.info),
        **given,
    }
    sources = {name: Reconstructed(reconstructor, players.info) for name, reconstructor in filled.items()}
    return {"observation": Seen(), **sources, "full": Seen(full=True)}


def _reconstructor(players: Players, run: str) -> Any:
    """Return the reconstructor of a run, with its newest predictor. Errors: UserError."""
    import torch

    from omagd.config.loading import read_saved, validate
    from omagd.modules.graph_reconstructers import n_inferred
    from omagd.modules.graph_reconstructers.belief_head import MemoryReconstructor
    from omagd.run.training.build import build_mac, load_pretrained, of_checkpoint
    from omagd.run.training.evaluate import FIXED, HERE, load_mac
    from omagd.utils.run_folder import RunFolder

    source, folder = f"--reconstruction={run}", RunFolder(Path(run).expanduser())
    values = {**read_saved(folder.config_json, source), **FIXED, **HERE, "evaluate": False}
    step, config = folder.step(max(folder.saved_steps(), default=0)), validate(values)
    if config.belief_loss != "none":
        team: Any = load_mac(config, players.info, torch.device("cpu"), step, source)
        if team.head is None:
            raise UserError(f"{source}: {step} has no belief_head.th. Give a run whose weights are whole")
        return MemoryReconstructor(team.agent, team.head, players.info, torch.device("cpu"))
    if not config.use_graph_reconstruction:
        fix = "Give one with use_graph_reconstruction=True, or with a belief_loss"
        raise UserError(f"{source}: this run predicts nothing. {fix}")
    config = of_checkpoint(config, step)
    if n_inferred(config, players.info.layout):
        raise UserError(f"{source}: mask_predictor_config.kind={config.mask_predictor_config.kind} fills in no units")
    device = torch.device("cpu")
    mac: Any = build_mac(config, players.info, device, load_pretrained(config, players.info, device))
    return mac.reconstructor


def _gate(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Print which maps of a study enter the main study. Errors: UserError."""
    if len(words) != 1:
        raise UserError("beliefs gate: name one finished study, as in: omagd beliefs gate results/gate")
    lower, upper = options.lower or "baseline", options.upper or "full_obs"
    if lower == upper:
        raise UserError(f"--lower={lower}: --upper is the same arm. Give two arms")
    try:
        least = 0.15 if options.least is None else float(options.least)
    except ValueError:
        least = math.nan
    if not 0 <= least <= 1:
        raise UserError(f"--least={options.least}: must be a number from 0 to 1, such as 0.15")
    from omagd.lab.analysis.gate import gate, gate_table
    from omagd.lab.analysis.runs import load

    rows = gate(load(words, "beliefs gate"), lower, upper, least)
    print_out(_as_text(gate_table(rows, lower, upper, least)) + "\n")
    return 0


def _as_text(table: dict[str, Any]) -> str:
    from omagd.run.reporting.report import aligned

    lines = aligned([table["head"], *table["rows"]])
    note = textwrap.fill(table["note"], NOTE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([table["title"], *lines, note])
