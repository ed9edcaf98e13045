"""What reconstruction costs while acting: rollouts of stage 3 on skirmish.

    python benchmarks/acting.py [--map 5m_vs_6m] [--slots 16 64] [--sizes published small] [--acting-precision bf16]

Plays the same battles (scripted players with random actions mixed in, whose own time is left out) with three
controllers that take turns: without reconstruction; reconstructing only what is missing; and reconstructing every agent
at every step, the dead ones too, with the predictor as it is trained. Times are CPU seconds of one thread, ratios are
medians over rounds. Weights are as initialised: times do not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.modules.graph_reconstructers.graphs import nodes_to_obs, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.predictor import SlotHistory
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.runners.runner import ParallelRunner
from omagd.utils.seeding import EpisodeSeeds

PRESETS = {"published": "omagd", "small": "omagd_small"}
CPU = torch.device("cpu")


class Driven:
    """A controller that is asked, and scripted players that decide; the time of the latter is counted `aside`."""

    wants_full_obs = False

    def __init__(self, mac: NGraphMAC, env: BatchedEnv) -> None:
        self.mac, self.aside = mac, 0.0
        names = tuple(name for name in env.info.scripted_policies if name != "random")
        self._script = ScriptedPolicy(env, names, 0.3, np.random.default_rng(0))

    def begin(self, n_slots: int) -> None:
        """Prepare both."""
        self.mac.begin(n_slots)
        self._script.begin(n_slots)

    def reset(self, which: np.ndarray) -> None:
        """Begin episodes in both."""
        self.mac.reset(which)
        self._script.reset(which)

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Return the script's actions beside what the controller stores."""
        extras = self.mac.act(tick, explore).extras
        start = time.process_time()
        actions = self._script.act(tick, explore).actions
        self.aside += time.process_time() - start
        return Decision(actions, extras)


class EveryAgent(TokenReconstructor):
    """The baseline: every agent's frame at every step, dead or alive, missing something or not."""

    @torch.no_grad()
    def step(
        self,
        obs: np.ndarray | torch.Tensor,
        step: np.ndarray | torch.Tensor,
        active: np.ndarray | torch.Tensor | None = None,
        last_action: np.ndarray | torch.Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct one tick, as `TokenReconstructor.step`; guesses for dead observers are made and thrown away."""
        obs, now = torch.as_tensor(obs), torch.as_tensor(step)
        nodes = obs_to_nodes(obs, self.layout)
        hidden, living = unseen(nodes), (obs != 0).any(-1, keepdim=True)
        ids = torch.where(hidden, self.predictor.specials.mask, self.tokenizer.ids(nodes))
        history: SlotHistory = self._history
        history.push(ids, torch.ones(len(obs), dtype=torch.bool))
        rows = torch.arange(obs.shape[0] * obs.shape[1])
        logits = self.predictor(history.frames(rows, now), hidden.flatten(0, 1))
        guesses = torch.zeros_like(nodes)
        guesses[hidden] = self.predictor.guess(logits).features.half().float()
        history.commit(now, torch.ones(len(obs), dtype=torch.bool))
        missing = hidden & living
        guesses[~missing] = 0.0
        stored = nodes_to_obs(guesses, self.layout)
        where = nodes_to_obs(missing[..., None].expand_as(nodes), self.layout)
        return Reconstruction({self.field: stored.half()}, torch.where(where, stored, obs), missing)


def rollouts(config: Config, baselines: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return steps per second of each controller, round by round."""
    made = {}
    for name, reconstructor in baselines.items():
        env = make_env(config.env, dict(config.env_args), config.batch_size_run, processes=False)
        torch.manual_seed(0)
        runner = ParallelRunner(env, config, env.info, EpisodeSeeds(0, "train"))
        made[name] = runner, Driven(NGraphMAC(config, env.info, CPU, reconstructor), env)
    speeds: dict[str, list[float]] = {name: [] for name in baselines}
    for number in range(rounds + 1):
        for name, (runner, policy) in made.items():
            explore = Exploration(0.05, np.random.default_rng(number))
            policy.aside, start = 0.0, time.process_time()
            steps = runner.run(policy, explore=explore).steps
            if number:
                speeds[name].append(steps / (time.process_time() - start - policy.aside))
    return speeds


def ratio(speeds: dict[str, list[float]], ours: str, baseline: str) -> float:
    """Return the median over rounds of the ratio of two controllers' speeds."""
    return statistics.median(a / b for a, b in zip(speeds[ours], speeds[baseline], strict=True))


def compare(arguments: argparse.Namespace, size: str, slots: int) -> None:
    """Print the speeds of the three controllers at one size."""
    keys = {"env_args.map_name": arguments.map, "batch_size_run": slots, "acting_precision": arguments.acting_precision}
    config = resolve(PRESETS[size], "skirmish", keys)
    info = make_env(config.env, dict(config.env_args), 1, processes=False).info
    tokenizer, predictor = new_tokenizer(config, info, CPU), new_predictor(config, info, CPU)
    predictor.bind(tokenizer.table())
    ours, every = (kind(tokenizer, predictor, config, info) for kind in (TokenReconstructor, EveryAgent))
    speeds = rollouts(config, {"plain": None, "ours": ours, "every agent": every}, arguments.rounds)
    median = {name: f"{statistics.median(values):,.0f}" for name, values in speeds.items()}
    against_all, against_none = ratio(speeds, "ours", "every agent"), ratio(speeds, "ours", "plain")
    sys.stdout.write(
        f"{arguments.map} {size} {arguments.acting_precision}, {slots} slots, steps/s: {median};"
        f" {against_all:.2f} x every agent, {against_none:.2f} x plain;"
        f" {1e3 * ours.seconds / ours.calls:.2f} ms and {ours.frames / ours.calls:.0f} frames a tick\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--slots", type=int, nargs="+", default=[16])
    parser.add_argument("--sizes", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--acting-precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for size in arguments.sizes:
        for slots in arguments.slots:
            compare(arguments, size, slots)


if __name__ == "__main__":
    main()
