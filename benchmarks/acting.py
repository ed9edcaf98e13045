"""What reconstruction costs while acting, and what its size buys: rollouts of stage 3 on skirmish or SMAX.

    python benchmarks/acting.py [--map 5m_vs_6m] [--slots 16 64] [--sizes published small] [--acting-precision bf16]
    python benchmarks/acting.py --table [--env smax] [--updates 100]

Plays the same battles (scripted players with random actions mixed in, whose own time is left out) with three
controllers that take turns: without reconstruction; reconstructing only what is missing; and reconstructing every agent
at every step, the dead ones too, with the predictor as it is trained. Times are CPU seconds of one thread, ratios are
medians over rounds. Weights are as initialised (times do not depend on them); with `--table`, predictors of several
sizes are trained on the same episodes with one tokenizer, and their error on held-out episodes stands beside the time.
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

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv
from omagd.learners.graph_metrics import summarise
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers.graphs import nodes_to_obs, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.predictor import MaskPredictor, SlotHistory
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.reporting.metrics import Metrics
from omagd.runners.runner import ParallelRunner
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch
from omagd.utils.seeding import EpisodeSeeds

SMALL = {"last_seen": True, "code_features": True, "dropout": 0.0}
# d_model, n_layers, n_heads, feedforward_dim
TABLE = [(32, 1, 2, 64), (48, 1, 1, 96), (64, 1, 2, 64), (64, 1, 4, 128), (64, 2, 4, 128), (128, 3, 4, 256)]
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


def configured(arguments: argparse.Namespace, slots: int, **predictor: Any) -> Config:
    """Return `omagd_small` with changed predictor sizes."""
    changes = {f"mask_predictor_config.{name}": value for name, value in predictor.items()}
    changes |= {"env_args.map_name": arguments.map, "batch_size_run": slots}
    changes |= {"acting_precision": arguments.acting_precision, "tokenizer_config.n_codes": arguments.codes}
    return resolve("omagd_small", arguments.env, changes)


def modules(config: Config, info: EnvInfo, tokenizer: Tokenizer | None = None) -> tuple[Tokenizer, MaskPredictor]:
    """Return a tokenizer, a new one unless given, and a new predictor for it."""
    assert info.layout is not None
    torch.manual_seed(0)
    tokenizer = tokenizer or Tokenizer(config.tokenizer_config, info.layout)
    codes = config.tokenizer_config.n_codes
    predictor = MaskPredictor(config.mask_predictor_config, codes, info.layout, info.episode_limit)
    predictor.bind(tokenizer.table())
    return tokenizer, predictor


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


def compare(arguments: argparse.Namespace) -> None:
    """Print the speeds of the three controllers at the chosen sizes."""
    for size in arguments.sizes:
        sizes = resolve("omagd" if size == "published" else "omagd_small", arguments.env, {}).mask_predictor_config
        codes = arguments.codes
        arguments.codes = 1024 if size == "published" else codes
        for slots in arguments.slots:
            config = configured(arguments, slots, **sizes.model_dump())
            info = make_env(config.env, dict(config.env_args), 1, processes=False).info
            parts = modules(config, info)
            ours, every = TokenReconstructor(*parts, config, info), EveryAgent(*parts, config, info)
            made = {"plain": None, "ours": ours, "every agent": every}
            speeds = rollouts(config, made, arguments.rounds)
            median = {name: f"{statistics.median(values):,.0f}" for name, values in speeds.items()}
            against_all, against_none = ratio(speeds, "ours", "every agent"), ratio(speeds, "ours", "plain")
            say(
                f"{arguments.map} {size} {arguments.acting_precision}, {slots} slots, steps/s: {median};"
                f" {against_all:.2f} x every agent, {against_none:.2f} x plain;"
                f" {1e3 * ours.seconds / ours.calls:.2f} ms and {ours.frames / ours.calls:.0f} frames a tick"
            )
        arguments.codes = codes


def collect(arguments: argparse.Namespace, config: Config, purpose: str, rounds: int) -> tuple[EnvInfo, EpisodeBuffer]:
    """Return episodes of scripted players, with `full_obs`."""
    env = make_env(config.env, dict(config.env_args), config.batch_size_run, processes=False)
    names = tuple(name for name in env.info.scripted_policies if name != "random")
    policy = ScriptedPolicy(env, names, 0.3, np.random.default_rng(len(purpose)))
    runner = ParallelRunner(env, config, env.info, EpisodeSeeds(0, purpose))
    buffer = EpisodeBuffer(rounds * config.batch_size_run)
    played = runner.run(policy, explore=None, episodes_per_slot=rounds, full_obs=True).episodes
    buffer.add([{name: episode[name] for name in ("obs", "full_obs")} for episode in played])
    return env.info, buffer


def train(learner: Any, buffer: EpisodeBuffer, updates: int) -> None:
    """Do `updates` updates of batches of 32 episodes, the same ones for every learner."""
    rng = np.random.default_rng(0)
    for _ in range(updates):
        learner.update(buffer.batch(rng.choice(len(buffer), 32, replace=False).tolist()))


def judged(learner: PredictorLearner, held_out: PackedBatch) -> dict[str, float]:
    """Return the measures of stage 2 on held-out episodes."""
    metrics = Metrics()
    metrics.add(learner.evaluate(held_out))
    return summarise(metrics.reduce(Dist()))


def table(arguments: argparse.Namespace) -> None:
    """Train each size and print its accuracy beside its cost."""
    config = configured(arguments, 32)
    info, buffer = collect(arguments, config, "pretrain", 16)
    held_out = collect(arguments, config, "held_out", 2)[1]
    truth = held_out.batch(range(len(held_out)))
    tokenizer = modules(config, info)[0]
    train(TokenizerLearner(tokenizer, config, info, Dist()), buffer, arguments.updates)
    tokenizer.requires_grad_(False)
    say(
        "| d_model, layers, heads, feed-forward | error, all nodes | balanced accuracy | top-1 | s of training |",
        end="",
    )
    say("".join(f" {slots} slots: steps/s | x plain | ms per step |" for slots in arguments.slots))
    for d, layers, heads, wide in TABLE:
        sizes = {"d_model": d, "n_layers": layers, "n_heads": heads, "feedforward_dim": wide, **SMALL}
        predictor = modules(configured(arguments, 32, **sizes), info, tokenizer)[1]
        sized = configured(arguments, 32, **sizes)
        learner = PredictorLearner(predictor, tokenizer, sized, info, Dist())
        start = time.process_time()
        train(learner, buffer, arguments.updates)
        spent = time.process_time() - start
        values = judged(learner, truth)
        line = f"| {d}, {layers}, {heads}, {wide} | {values['error_all']:.4f} | {values['balanced_accuracy']:.4f}"
        line += f" | {values['top1']:.4f} | {spent:.0f} |"
        for slots in arguments.slots:
            config = configured(arguments, slots, **sizes)
            ours = TokenReconstructor(tokenizer, predictor, config, info)
            speeds = rollouts(config, {"plain": None, "ours": ours}, arguments.rounds)
            per_step = statistics.median(
                1e3 / a - 1e3 / b for a, b in zip(speeds["ours"], speeds["plain"], strict=True)
            )
            line += (
                f" {statistics.median(speeds['ours']):,.0f} | {ratio(speeds, 'ours', 'plain'):.2f} | {per_step:.3f} |"
            )
        say(line)


def say(line: str, end: str = "\n") -> None:
    """Print at once."""
    sys.stdout.write(line + end)
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="accuracy against cost of several sizes")
    parser.add_argument("--env", choices=["skirmish", "smax"], default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--slots", type=int, nargs="+", default=[16])
    parser.add_argument("--sizes", nargs="+", choices=["published", "small"], default=["published", "small"])
    parser.add_argument("--acting-precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--codes", type=int, default=256, help="codes of the tokenizer at the small size")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--updates", type=int, default=100, help="updates of each module under --table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (table if arguments.table else compare)(arguments)


if __name__ == "__main__":
    main()
