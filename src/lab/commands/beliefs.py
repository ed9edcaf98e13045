"""`omagd beliefs`: how far off what a trained run says of unseen units is, beside guesses that need no network."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omagd.utils.errors import UserError, print_out
from omagd.utils.logging import Progress
from omagd.utils.signals import stoppable

if TYPE_CHECKING:
    from omagd.config.env_info import EnvInfo
    from omagd.config.schema import Config
    from omagd.envs.protocol import BatchedEnv
    from omagd.learners.belief_metrics import Believer
    from omagd.utils.packing import PackedBatch

SLOTS = 128
"""Most battles at a time."""

MOST_EPISODES = 100_000
SHOWN = {"predictor": "reconstruction", "slot_mean": "mean of the node", "last_seen_or_mean": "last seen, else mean",
         "map_constant": "map constant", "ridge": "ridge"}  # fmt: skip
"""Columns of the table: guesses of `belief_metrics`."""


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
    run, episodes = options.reconstruction, options.episodes
    if not run:
        raise UserError("beliefs: name a run, as in: omagd beliefs --reconstruction results/<run>")
    if not episodes.isdecimal() or not 8 <= int(episodes) <= MOST_EPISODES:
        raise UserError(f"--episodes={episodes}: must be a number from 8 to {MOST_EPISODES:,}")
    from omagd.run.reporting.report import aligned

    with stoppable(), _team(run, options.words, int(episodes)) as team:
        rows = _rows(team.judged())
        print_out("\n".join([team.title, *aligned(rows)]) + "\n")
    return 0


@dataclass
class Team:
    """A trained team in its environment, and what it believes.

    Attributes:
        episodes: battles that are measured, at least. counter: called with the number of episodes played.
    """

    env: BatchedEnv
    config: Config
    info: EnvInfo
    policy: Any
    believer: Believer
    name: str
    episodes: int
    counter: Callable[[int], None]

    @property
    def title(self) -> str:
        """What was measured, above the table."""
        place = f"{self.info.name} {self.info.map_name}".strip()
        return f"Error of position in cells (RMS), living units that an agent does not see: {place}, {self.name}"

    def judged(self) -> dict[str, Any]:
        """Return the table of what is believed, beside guesses that are fitted on other battles of the team."""
        from omagd.learners.belief_baselines import fit_baselines
        from omagd.learners.belief_metrics import judge
        from omagd.utils.dist_utils import Dist

        training = self._played("training", self.episodes)
        validation = self._played("validation", -(-self.episodes // 4))
        baselines = fit_baselines(lambda: training, lambda: validation, self.info, Dist())
        return judge(self.believer, self._played("test", self.episodes), baselines, Dist())

    def _played(self, purpose: str, wanted: int) -> list[PackedBatch]:
        """Return at least `wanted` greedy episodes from starts of their own, in rounds of all slots."""
        from omagd.runners.runner import Runner
        from omagd.utils.packing import pack_episodes
        from omagd.utils.seeding import EpisodeSeeds

        runner, batches = Runner(self.env, self.config, self.info, EpisodeSeeds(self.config.seed, purpose)), []
        for _ in range(-(-wanted // self.env.n_slots)):
            batches.append(pack_episodes(runner.run(self.policy, explore=None, full_obs=True).episodes))
            self.counter(self.env.n_slots)
        return batches


@contextmanager
def _team(run: str, words: list[str], episodes: int) -> Iterator[Team]:
    """Build the environment, the team and what it believes. Errors: UserError."""
    import torch

    from omagd.envs import REGISTRY
    from omagd.envs.factory import make_env
    from omagd.envs.protocol import MultiAgentEnv
    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.cli.main import updates
    from omagd.run.training.evaluate import evaluation_config, load_mac, policy_name

    source = f"--reconstruction={run}"
    words = words if not words or words[0] == "with" else ["with", *words]
    config = evaluation_config(run, updates(words), "beliefs --reconstruction")
    torch.set_num_threads(config.torch_threads)
    slots = min(config.batch_size_run if issubclass(REGISTRY.get(config.env), MultiAgentEnv) else SLOTS, episodes)
    env = make_env(config.env, dict(config.env_args), slots, processes=False)
    rounds = -(-episodes // slots)
    with closing(env), closing(Progress(slots * (2 * rounds + -(-rounds // 4)), "episode", "beliefs")) as bar:
        info, step = env.info, find_step_folder(config.checkpoint_path, config.load_step)
        if info.layout is None or info.tasks:
            fix = "give one map" if info.tasks else f"env={info.name} has no list of units to be unseen"
            raise UserError(f"{source}: {fix}")
        mac = load_mac(config, info, torch.device("cpu"), step, source)
        believer = _believer(config, info, mac, step, source)
        yield Team(env, config, info, mac, believer, policy_name(config, step), episodes, bar.update)


def _believer(config: Config, info: EnvInfo, mac: Any, step: Any, source: str) -> Believer:
    """Return the learner of the run's predictor, or its head. Errors: UserError for a run that has neither."""
    import torch

    from omagd import learners
    from omagd.learners.belief_loss import HeadBeliefs
    from omagd.run.training.build import load_pretrained, of_checkpoint
    from omagd.utils.dist_utils import Dist

    if config.belief_loss != "none":
        if mac.head is None:
            raise UserError(f"{source}: {step} has no belief_head.th. Give a run whose weights are whole")
        return HeadBeliefs(mac, mac.head)
    if not config.use_graph_reconstruction:
        raise UserError(f"{source}: predicts nothing. Give a run with use_graph_reconstruction=True or a belief_loss")
    trained = load_pretrained(of_checkpoint(config, step), info, torch.device("cpu"))
    kind = config.mask_predictor_config.kind
    learner: Any = learners.PREDICTORS.get(kind)(trained.predictor, trained.tokenizer, config, info, Dist())
    if not hasattr(learner, "beliefs"):
        raise UserError(f"{source}: mask_predictor_config.kind={kind} says nothing of units")
    believer: Believer = learner
    return believer


def _rows(table: dict[str, Any]) -> list[list[str]]:
    """Return the table: a row for each kind of units and each time since the last sight."""
    rows = [["units, steps since the last sight", "units", *SHOWN.values()]]
    for entry in table["rows"]:
        if "count" in entry:
            cells = [f"{entry['position_rms'][name]:.2f}" for name in SHOWN]
            rows.append([entry["row"].replace("_", " ") or "all", f"{entry['count']:,}", *cells])
    return rows
