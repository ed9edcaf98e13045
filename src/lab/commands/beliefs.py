"""`omagd beliefs`: how far off what a trained run says of unseen units is, beside guesses that need no network."""

from __future__ import annotations

import argparse
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

from omagd.run.signals import stoppable
from omagd.utils.errors import UserError, print_out
from omagd.utils.logging import Progress

if TYPE_CHECKING:
    from omagd.config.env_info import EnvInfo
    from omagd.config.schema import Config
    from omagd.lab.beliefs.table import Believer
    from omagd.utils.packing import PackedBatch

SLOTS = 128
"""Most battles at a time."""

MOST_EPISODES = 100_000
SHOWN = {"predictor": "reconstruction", "slot_mean": "mean of the node", "last_seen_or_mean": "last seen, else mean",
         "map_constant": "map constant", "ridge": "ridge"}  # fmt: skip
"""Columns of the table: guesses of `omagd.lab.beliefs.table`."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `beliefs`."""
    add = parser.add_argument
    parser.usage = "omagd beliefs --reconstruction RUN [--episodes N] [key=value ...]"
    parser.epilog = "RUN: the folder of a trained run, whose team plays. docs/beliefs.md describes the table."
    add("words", nargs="*", metavar="key=value", help="keys that change the run's own, as in `evaluate`")
    add("--reconstruction", metavar="RUN", help="the run whose predictor, or belief head, is measured")
    add("--episodes", metavar="N", default="512", help="battles that are measured (default: 512)")


def main(options: argparse.Namespace) -> int:
    """Play battles and print the table. Errors: UserError."""
    run, episodes, words = options.reconstruction, options.episodes, options.words
    if not run:
        raise UserError("beliefs: name a run, as in: omagd beliefs --reconstruction results/<run>")
    if not episodes.isdecimal() or not 8 <= int(episodes) <= MOST_EPISODES:
        raise UserError(f"--episodes={episodes}: must be a number from 8 to {MOST_EPISODES:,}")
    from omagd.lab.analysis.runs import aligned
    from omagd.run.cli.main import updates
    from omagd.run.training.evaluate import evaluation_config

    words = words if not words or words[0] == "with" else ["with", *words]
    config = evaluation_config(run, updates(words), "beliefs --reconstruction")
    with stoppable():
        title, table = _measured(config, int(episodes), f"--reconstruction={run}")
    rows = _rows(table)
    if len(rows) == 1:
        raise UserError(f"--reconstruction={run}: its agents saw every living unit, so there is nothing to judge")
    print_out("\n".join([title, *aligned(rows)]) + "\n")
    return 0


def _measured(config: Config, episodes: int, source: str) -> tuple[str, dict[str, Any]]:
    """Return what was measured, and the table of what a team believes beside guesses fitted on its other battles."""
    import torch

    from omagd.envs import REGISTRY
    from omagd.envs.factory import make_env
    from omagd.envs.protocol import MultiAgentEnv
    from omagd.lab.beliefs.baselines import fit_baselines
    from omagd.lab.beliefs.table import judge
    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.training.evaluate import load_mac, policy_name
    from omagd.runners.runner import Runner
    from omagd.utils.dist_utils import Dist
    from omagd.utils.packing import pack_episodes
    from omagd.utils.seeding import EpisodeSeeds

    torch.set_num_threads(config.torch_threads)
    slots = min(config.batch_size_run if issubclass(REGISTRY.get(config.env), MultiAgentEnv) else SLOTS, episodes)
    rounds, fewer = -(-episodes // slots), -(-episodes // (4 * slots))
    with (
        closing(make_env(config.env, dict(config.env_args), slots, processes=False)) as env,
        closing(Progress(slots * (2 * rounds + fewer), "episode", "beliefs")) as bar,
    ):
        info, step = env.info, find_step_folder(config.checkpoint_path, config.load_step)
        if info.layout is None or info.tasks:
            fix = "give one map" if info.tasks else f"env={info.name} has no list of units to be unseen"
            if config.belief_loss != "none" and info.tasks:
                fix = "the head of a set of maps is not judged (docs/beliefs.md)"
            raise UserError(f"{source}: {fix}")
        mac = load_mac(config, info, torch.device("cpu"), step, source)
        believer = _believer(config, info, mac, step, source)

        def played(purpose: str, rounds: int) -> list[PackedBatch]:
            """Return greedy episodes from starts of their own, in rounds of all slots."""
            runner, batches = Runner(env, config, info, EpisodeSeeds(config.seed, purpose)), []
            for _ in range(rounds):
                batches.append(pack_episodes(runner.run(mac, explore=None, full_obs=True).episodes))
                bar.update(slots)
            return batches

        training, validation = played("training", rounds), played("validation", fewer)
        baselines = fit_baselines(lambda: training, lambda: validation, info, Dist())
        place, name = f"{info.name} {info.map_name}".strip(), policy_name(config, step)
        title = f"Error of position in cells (RMS), living units that an agent does not see: {place}, {name}"
        return title, judge(believer, played("test", rounds), baselines, Dist())


def _believer(config: Config, info: EnvInfo, mac: Any, step: Any, source: str) -> Believer:
    """Return the learner of the run's predictor, or its head. Errors: UserError for a run that has neither."""
    import torch

    from omagd.lab.beliefs.judge import HeadBeliefs, learner_of
    from omagd.learners.belief_loss import HEAD
    from omagd.run.training.build import load_pretrained, of_checkpoint
    from omagd.utils.dist_utils import Dist

    if config.belief_loss != "none":
        if mac.head is None:
            lacks = "its belief head is of a map with other units, which cannot be judged here"
            if not (step / f"{HEAD}.th").is_file():
                lacks = f"{step} has no belief_head.th. Give a run whose weights are whole"
            raise UserError(f"{source}: {lacks}")
        return HeadBeliefs(mac, mac.head)
    if not config.use_graph_reconstruction:
        raise UserError(f"{source}: predicts nothing. Give a run with use_graph_reconstruction=True or a belief_loss")
    trained = load_pretrained(of_checkpoint(config, step), info, torch.device("cpu"))
    believer: Believer = learner_of(trained, config, info, Dist())
    if not hasattr(believer, "beliefs"):
        raise UserError(
            f"{source}: mask_predictor_config.kind={config.mask_predictor_config.kind} says nothing of units"
        )
    return believer


def _rows(table: dict[str, Any]) -> list[list[str]]:
    """Return the table: a row for each kind of units and each time since the last sight."""
    rows = [["units, steps since the last sight", "units", *SHOWN.values(), "taken for dead"]]
    for entry in table["rows"]:
        if "count" in entry:
            cells = [f"{entry['position_rms'][name]:.2f}" for name in SHOWN]
            name = re.sub(r"(\d)_(\d)", r"\1-\2", entry["row"]).replace("_", " ") or "all"
            rows.append([name, f"{entry['count']:,}", *cells, f"{entry['taken_for_dead']:.2f}"])
    return rows
