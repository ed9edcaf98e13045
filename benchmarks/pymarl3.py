"""OMAGD's QMIX beside PyMARL3's own controller, mixer, learner and replay, on the same skirmish battles.

    python benchmarks/pymarl3.py gradients --peer PYMARL3 --map 5m_vs_6m
    OMP_NUM_THREADS=1 python benchmarks/pymarl3.py learning --peer PYMARL3 --map 3m --t-max 200000 --seeds 1 2 3 4 5
    python benchmarks/pymarl3.py learning --show             # the table of what has been run; --picture: the curves

A checkout of PyMARL3 is imported as it is, with the arguments of its `default.yaml` and `algs/qmix.yaml`.

`gradients`: one update with copied weights and the same episodes. Compares, in float64, the clipped gradients with
which the optimizers step, the norm before clipping and what both log. Prints one JSON line and exits with 1 where a
relative difference exceeds 1e-6.

`learning`: whole trainings. What stands in for PyMARL3's runner follows its order: battles in parallel, one episode
each, a tick at a time; then one update; then a test where one is due. The battles are those of our run with the same
seed, training and test alike. 8 battles, one update of 128 episodes a round, targets copied every 200 episodes, epsilon
over 100,000 steps, Adam with 0.001; greedy tests on 256 battles that no training has. Each line of
results/pymarl3_learning.jsonl is one run; what stands there already is not run again. Without --peer only our side
runs. The table gives the area under the test win rate over environment steps (0 to 1), and the 95 % interval (Welch) of
the difference of the means.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from qmix_update import MAPS, Episodes, make_episodes, padded, peer_arguments, scheme
from runs import area, play, summary, tests
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv, Observation
from omagd.lab.analysis.statistics import t_interval
from omagd.lab.studies.results import append
from omagd.learners.nq_learner import NQLearner
from omagd.run.reporting.metrics import Every
from omagd.run.run_folder import read_records
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes
from omagd.utils.seeding import EpisodeSeeds, seed_everything

RESULTS = Path(__file__).resolve().parent / "results"
TEST_SLOTS = 128
HYPER = ("hyper_w1", "hyper_w2", "hyper_b1", "hyper_b2")  # in the order of our joint first layer
LOGGED = ("loss_td", "td_error_abs", "grad_norm", "q_taken_mean", "target_mean")
TOLERANCE = 1e-6
SIZES = ["batch_size_run=8", "batch_size=128", "updates_per_iteration=1", "epsilon_anneal_time=100000"]
SIZES += ["grad_norm_clip=10", "target_update_interval=200", "lr=0.001", "td_lambda=0.6", "buffer_size=5000"]
SIDES = ("omagd", "pymarl3")


class Silent:
    """The logger that PyMARL3's learner asks for; keeps the last value of every name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.console_logger = SimpleNamespace(info=lambda *_: None)

    def log_stat(self, name: str, value: Any, t: int) -> None:
        """Keep a value."""
        self.values[name] = float(value)


class Peer:
    """PyMARL3's parts for one map.

    Args:
        path: the checkout. info: the environment. floats: type of observations, rewards and weights.
        changes: laid over the checkout's own arguments.
    """

    def __init__(self, path: Path, info: EnvInfo, floats: torch.dtype = torch.float32, **changes: Any) -> None:
        sys.path.insert(0, str(path / "src"))
        self.info = info
        self.args = peer_arguments(path, info, **changes)
        self.groups = {"agents": info.n_agents}
        self.scheme = scheme(info, floats)
        one_hot = importlib.import_module("components.transforms").OneHot(out_dim=info.n_actions)
        self.preprocess = {"actions": ("actions_onehot", [one_hot])}
        self._episodes = importlib.import_module("components.episode_buffer")
        self.logger = Silent()
        with contextlib.redirect_stdout(io.StringIO()):
            self.buffer = self._episodes.ReplayBuffer(
                self.scheme, self.groups, self.args.buffer_size, info.episode_limit + 1, preprocess=self.preprocess
            )
            controllers = importlib.import_module("controllers").REGISTRY
            learners = importlib.import_module("learners").REGISTRY
            self.mac = controllers[self.args.mac](self.buffer.scheme, self.groups, self.args)
            self.mac.agent.to(floats)
            self.learner = learners[self.args.learner](self.mac, self.buffer.scheme, self.logger, self.args)
        for mixer in (self.learner.mixer, self.learner.target_mixer):
            mixer.to(floats)

    def blank(self, n_episodes: int) -> Any:
        """Return an empty batch of episodes."""
        rows = self.info.episode_limit + 1
        return self._episodes.EpisodeBatch(self.scheme, self.groups, n_episodes, rows, preprocess=self.preprocess)

    def train(self, t_env: int, episodes: int) -> None:
        """Sample a batch, cut it to its longest episode and take one step, as PyMARL3's run does."""
        sample = self.buffer.sample(self.args.batch_size)
        sample = sample[:, : sample.max_t_filled()]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line for each update
            self.learner.train(sample, t_env, episodes)


def _rows(seen: Observation, slots: np.ndarray) -> dict[str, np.ndarray]:
    """Return what the `slots` show, as PyMARL3's batch takes it: one more axis for the time step."""
    fields = {"state": seen.state, "obs": seen.obs, "avail_actions": seen.avail_actions.astype(np.int32)}
    return {name: value[slots][:, None] for name, value in fields.items()}


def play_round(peer: Peer, env: BatchedEnv, seeds: np.ndarray, t_env: int, *, test: bool) -> tuple[Any, int, float]:
    """Play one episode in every slot from `seeds` [B]; return the batch, the steps and the share of battles won."""
    batch, everyone = peer.blank(env.n_slots), np.ones(env.n_slots, bool)
    env.reset(everyone, seeds)
    slots, active = np.arange(env.n_slots), everyone.copy()
    batch.update(_rows(env.observe(), slots), ts=0, mark_filled=True)
    peer.mac.init_hidden(batch_size=env.n_slots)
    steps, won = 0, 0.0
    for t in range(env.info.episode_limit):
        rows = slots.tolist()
        chosen = peer.mac.select_actions(batch, t_ep=t, t_env=t_env, bs=rows, test_mode=test).numpy()
        batch.update({"actions": chosen[:, None]}, bs=rows, ts=t, mark_filled=False)
        actions = np.zeros((env.n_slots, env.info.n_agents), np.int64)
        actions[slots] = chosen
        result = env.step(actions, active)
        steps += len(slots)
        ended = result.terminated & active
        won += float(result.info["battle_won"][ended].sum()) if ended.any() else 0.0
        terminal = (result.terminated & ~result.truncated)[slots]
        after = {"reward": result.reward[slots][:, None], "terminated": terminal[:, None, None]}
        batch.update(after, bs=rows, ts=t, mark_filled=False)
        batch.update(_rows(env.observe(), slots), bs=rows, ts=t + 1, mark_filled=True)
        active &= ~ended
        slots = np.flatnonzero(active)
        if not len(slots):
            break
    return batch, steps, won / env.n_slots


def train_theirs(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train PyMARL3's learner with one seed; return the tests (t_env, seconds, win rate) and what was done."""
    torch.set_num_threads(1)
    map_name, t_max, episodes = arguments.map, arguments.t_max, arguments.test_episodes
    probe = make_env("skirmish", {"map_name": map_name}, 1, processes=False)
    seed_everything(seed, "pymarl3")
    peer = Peer(arguments.peer, probe.info)
    n_slots = peer.args.batch_size_run
    env = make_env("skirmish", {"map_name": map_name}, n_slots, processes=False)
    test_env = make_env("skirmish", {"map_name": map_name}, min(TEST_SLOTS, episodes), processes=False)
    train_seeds, tested = EpisodeSeeds(seed, "train"), TestBattles(seed, n_slots, episodes)
    due, started = Every(arguments.test_interval, first=True), time.monotonic()
    t_env, played, updates, tests = 0, 0, 0, []
    with torch.no_grad():
        while t_env < t_max:
            batch, steps, _ = play_round(peer, env, train_seeds.draw(np.ones(n_slots, bool)), t_env, test=False)
            peer.buffer.insert_episode_batch(batch)
            t_env, played = t_env + steps, played + n_slots
            if peer.buffer.can_sample(peer.args.batch_size):
                with torch.enable_grad():
                    peer.train(t_env, played)
                updates += 1
            if due.due(t_env) or t_env >= t_max:
                won = tested.play(peer, test_env, t_env)
                tests.append([t_env, round(time.monotonic() - started), round(won, 4)])
    return {"tests": tests, "updates": updates, "episodes": played, "seconds": round(time.monotonic() - started)}


class TestBattles:
    """The test battles of a run of ours with the same seed, one set after another.

    Args:
        seed: of the run. n_slots: its battles side by side. episodes: of each test, a multiple of `n_slots`.
    """

    def __init__(self, seed: int, n_slots: int, episodes: int) -> None:
        self.stream, self.everyone = EpisodeSeeds(seed, "test"), np.ones(n_slots, bool)
        self.draws = episodes // n_slots

    def play(self, peer: Peer, env: BatchedEnv, t_env: int) -> float:
        """Play the next set greedily; return the share won."""
        seeds = np.concatenate([self.stream.draw(self.everyone) for _ in range(self.draws)])
        rates = [play_round(peer, env, part, t_env, test=True)[2] for part in seeds.reshape(-1, env.n_slots)]
        return float(np.mean(rates))


def mixer_as_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return PyMARL3's mixer values (weights or gradients) under our names."""
    first = {part: torch.cat([theirs[f"{name}.0.{part}"] for name in HYPER]) for part in ("weight", "bias")}
    ours = {f"first.{part}": value for part, value in first.items()}
    for name, place in (("weight1", "hyper_w1.2"), ("weight2", "hyper_w2.2"), ("bias2", "hyper_b2.2")):
        ours |= {f"{name}.{part}": theirs[f"{place}.{part}"] for part in ("weight", "bias")}
    return ours


def gradients(agent: nn.Module, mixer: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    parts = (("agent", agent), ("mixer", mixer))
    return {f"{part}.{name}": p.grad.clone() for part, module in parts for name, p in module.named_parameters()}


def step_ours(peer: Peer, episodes: Episodes, info: EnvInfo) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the clipped gradients of one update of ours from the peer's weights, and what is logged."""
    values = {"env_args.map_name": info.map_name, "grad_norm_clip": float(peer.args.grad_norm_clip)}
    config = resolve("qmix", "skirmish", values)
    mac = BasicMAC(config, info, torch.device("cpu"))
    mac.agent.double()
    learner = NQLearner(mac, config, info, Dist())
    mac.agent.load_state_dict(peer.mac.agent.state_dict())
    learner.target_agent.load_state_dict(peer.learner.target_mac.agent.state_dict())
    learner.mixer.load_state_dict(mixer_as_ours(peer.learner.mixer.state_dict()))
    learner.target_mixer.load_state_dict(mixer_as_ours(peer.learner.target_mixer.state_dict()))
    found: dict[str, Tensor] = {}
    learner.optimizer.register_step_pre_hook(lambda *_: found.update(gradients(mac.agent, learner.mixer)))
    stats = learner.update(pack_episodes(episodes), episodes=0)
    return found, {name: float(stats[name][0] / stats[name][1]) for name in LOGGED}


def step_theirs(peer: Peer, episodes: Episodes) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the same of one update of the peer's learner, which leaves its gradients behind."""
    with contextlib.redirect_stdout(io.StringIO()):
        peer.learner.train(padded(episodes, peer.info, floats=torch.float64), 0, 0)
    found = {f"agent.{name}": value.grad for name, value in peer.mac.agent.named_parameters()}
    mixer = mixer_as_ours({name: value.grad for name, value in peer.learner.mixer.named_parameters()})
    return found | {f"mixer.{name}": value for name, value in mixer.items()}, peer.logger.values


def train_ours(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train a run of ours."""
    words = [*SIZES, f"env_args.map_name={arguments.map}", f"seed={seed}", f"t_max={arguments.t_max}"]
    words += [f"test_nepisode={arguments.test_episodes}", "save_model=False", "enable_checkpointing=False"]
    intervals = ("test_interval", "log_interval", "runner_log_interval", "learner_log_interval")
    words += [f"{name}={arguments.test_interval}" for name in intervals]
    token = f"pymarl3_{arguments.map}_seed{seed}_{time.time_ns()}"
    folder = play(token, arguments.results, "qmix", "skirmish", [*words, *arguments.words])
    found = summary(folder)
    played = [[t_env, round(seconds), round(won, 4)] for t_env, seconds, won in tests(folder)]
    clock = found["stages"]["stage3"]["clock"]
    counts = {"updates": found["updates"], "episodes": clock["episodes"], "seconds": round(found["wall_seconds"])}
    return {"tests": played, **counts}


def area_of(run: dict[str, Any]) -> float:
    """Return the area under a run's win rate over environment steps, 0 to 1."""
    t_env, _, won = zip(*run["tests"], strict=True)
    return area(list(t_env), list(won), run["t_max"])


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table: each seed's area and last win rate by side, and the difference of the mean areas."""
    head = ["map, steps", "", "areas of the seeds", "mean", "last win rates", "wall, s (shared)"]
    out = ["| " + " | ".join([*head, "difference of the means (95 %)"]) + " |", "|---|---|---|---|---|---|---|"]
    for name, t_max in dict.fromkeys((run["map"], run["t_max"]) for run in runs):
        areas = {}
        for side in SIDES:
            mine = [run for run in runs if (run["side"], run["map"], run["t_max"]) == (side, name, t_max)]
            mine.sort(key=lambda run: int(run["seed"]))
            areas[side] = np.array([area_of(run) for run in mine])
            verdict = ""
            if side == SIDES[-1] and min(map(len, areas.values())) >= 3:
                ours, theirs = (areas[one] for one in SIDES)
                ends = t_interval([ours], [theirs])
                assert ends is not None
                verdict = f"{ours.mean() - theirs.mean():+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})"
            if mine:
                cells = [f"{name}, {t_max:,}", side, ", ".join(f"{value:.3f}" for value in areas[side])]
                cells += [f"{areas[side].mean():.3f}", ", ".join(f"{run['tests'][-1][2]:.2f}" for run in mine)]
                cells += [f"{np.median([run['seconds'] for run in mine]):.0f}", verdict]
                out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the win rates over environment steps: a panel for each map, a thin line for each seed, a thick mean."""
    from matplotlib.figure import Figure

    maps = list(dict.fromkeys((run["map"], run["t_max"]) for run in runs))
    figure = Figure(figsize=(4.6 * len(maps), 3.8), dpi=110, layout="constrained")
    for axis, (name, t_max) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        grid = np.linspace(0, t_max, 201)
        for side, colour in zip(SIDES, ("#0f8f8a", "#d95f3a"), strict=True):
            mine = [run for run in runs if (run["side"], run["map"], run["t_max"]) == (side, name, t_max)]
            rates = [np.interp(grid, *np.array(run["tests"], float).T[[0, 2]]) for run in mine]
            for rate in rates:
                axis.plot(grid, rate, color=colour, linewidth=0.8, alpha=0.5)
            if rates:
                axis.plot(
                    grid, np.mean(rates, axis=0), color=colour, linewidth=2.2, label=f"{side}, {len(rates)} seeds"
                )
        axis.set(title=f"skirmish {name}", xlabel="environment steps, thousands", ylim=(-0.02, 1.02))
        ticks = np.linspace(0, t_max, 5)
        axis.set_xticks(ticks, [f"{tick / 1000:.0f}" for tick in ticks])
        axis.set_ylabel("share of battles won (greedy test)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def run_missing(arguments: argparse.Namespace, path: Path) -> None:
    """Run what does not stand in the file of results yet, and append it there."""
    done = {(run["side"], run["map"], run["seed"], run["t_max"]) for run in read_records(path)}
    for seed in arguments.seeds:
        for side in arguments.sides:
            key = (side, arguments.map, seed, arguments.t_max)
            if key in done or (side == "pymarl3" and arguments.peer is None):
                continue
            run = train_ours(arguments, seed) if side == "omagd" else train_theirs(arguments, seed)
            line = dict(zip(("side", "map", "seed", "t_max"), key, strict=True)) | run
            append(path, line)
            print(f"{side}, {arguments.map}, seed {seed}: area {area_of(line):.3f}, {line['seconds']} s", flush=True)


def compare_gradients(arguments: argparse.Namespace) -> None:
    """Compare one update's gradients and logs, and print."""
    torch.manual_seed(0)
    info = MAPS[arguments.map]
    peer = Peer(arguments.peer, info, floats=torch.float64, buffer_size=arguments.batch)
    for module in (peer.learner.target_mac.agent, peer.learner.target_mixer):
        for weight in module.parameters():  # targets that are no copies
            weight.data += 0.1 * torch.randn_like(weight)
    episodes = make_episodes(arguments.batch, np.random.default_rng(0), info)
    ours, log = step_ours(peer, episodes, info)  # first: it reads the weights before the peer's step
    theirs, their_log = step_theirs(peer, episodes)
    assert ours.keys() == theirs.keys()
    of_gradients = max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)
    of_log = {name: abs(log[name] / their_log[name] - 1) for name in LOGGED}
    worst = max(of_gradients, *of_log.values())
    print(json.dumps({"map": arguments.map, "parameters": len(ours), "gradients": of_gradients, "logged": of_log}))
    sys.exit(int(not worst <= TOLERANCE))


def compare_learning(arguments: argparse.Namespace) -> None:
    """Run what is missing, then print the table and draw the curves."""
    path = arguments.out / "pymarl3_learning.jsonl"
    if not arguments.show:
        run_missing(arguments, path)
    runs = list(read_records(path))
    print(table(runs))
    if arguments.picture:
        draw(runs, arguments.picture)


def main() -> None:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("gradients", help="one update")
    one.add_argument("--peer", type=Path, required=True, help="a checkout of PyMARL3")
    one.add_argument("--map", choices=list(MAPS), default="5m_vs_6m")
    one.add_argument("--batch", type=int, default=32)
    one.set_defaults(compare=compare_gradients)
    whole = parts.add_parser("learning", help="whole trainings")
    whole.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    whole.add_argument("--map", default="3m")
    whole.add_argument("--t-max", type=int, default=200_000)
    whole.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    whole.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    whole.add_argument("--test-interval", type=int, default=20_000)
    whole.add_argument("--test-episodes", type=int, default=256)
    whole.add_argument("--results", default="results/benchmarks/pymarl3", help="where our runs' folders go")
    whole.add_argument("--out", type=Path, default=RESULTS)
    whole.add_argument("--picture", type=Path, help="draw the curves into this file")
    whole.add_argument("--show", action="store_true", help="run nothing")
    whole.add_argument("words", nargs="*", help="further key=value for our runs")
    whole.set_defaults(compare=compare_learning)
    arguments = parser.parse_args()
    arguments.compare(arguments)


if __name__ == "__main__":
    main()
