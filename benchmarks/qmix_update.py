"""Time one QMIX update at the sizes of SMAC's maps, beside PyMARL3's learner where a checkout of it is given.

    python benchmarks/qmix_update.py [--map 3m|5m_vs_6m|27m_vs_30m|all] [--precision float32|bf16]
        [--peer PATH_OF_A_PYMARL3_CHECKOUT] [--updates 20] [--batch 128] [--device cpu|cuda]

Both learners get the same random episodes, ready as each keeps them once sampled, several batches in turn. Lengths are
those of real play, from the replay of a training (results/played_lengths.json); the more padding, the more a learner on
packed steps gains. Each learner works in a process of its own, set up as its own runs are; they take turns. On a CPU
the peer works a second time with our setting of the allocator (`peer_kept`), which is no part of it; on a GPU we work a
second time on batches of fixed shapes, read from a replay in its memory by CUDA graphs (`ours_graph`, as
`runner=resident` does). Times are CPU seconds of one thread, on a GPU seconds until it is idle; ratios are medians over
all rounds, with the quartiles as their spread. Prints one JSON line for each map, `filled` being the share of a padded
batch that is real.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.nq_learner import NQLearner
from omagd.resident.replay import FixedDraw, ResidentBuffer
from omagd.resident.updates import WARM_UP, FixedUpdates
from omagd.run.training.device import keep_freed_memory
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

RESULTS = Path(__file__).resolve().parent / "results"
Episodes = list[dict[str, Tensor]]
Update = Callable[[int], object]
MakeUpdate = Callable[[str, argparse.Namespace, list[Episodes], EnvInfo], Update]
BATCHES = {"27m_vs_30m": 1}  # of the most agents, which take the most memory and time; 4 otherwise
MOST_UPDATES = {"27m_vs_30m": 5}


def info_of(name: str, n: int, m: int, state_dim: int, limit: int) -> EnvInfo:
    """Return a map of n against m marines as SMAC describes it."""
    layout = EntityLayout(move_dim=4, n_enemies=m, enemy_dim=5, n_allies=n - 1, ally_dim=5, own_dim=1)
    return EnvInfo("skirmish", name, n, 6 + m, layout.obs_dim, state_dim, limit, n_normal_actions=6, layout=layout)


MAPS = {
    "3m": info_of("3m", 3, 3, 48, 60),
    "5m_vs_6m": info_of("5m_vs_6m", 5, 6, 98, 70),
    "27m_vs_30m": info_of("27m_vs_30m", 27, 30, 1170, 180),
}


def played_lengths(name: str) -> list[int]:
    """Return the lengths of the newest 5,000 episodes at the most of a training on a map."""
    counts = json.loads((RESULTS / "played_lengths.json").read_text(encoding="utf-8"))["counts"]
    return [int(n) for n, times in counts[name].items() for _ in range(times)]


def make_episodes(n_episodes: int, rng: np.random.Generator, info: EnvInfo) -> Episodes:
    """Return random episodes whose lengths are those of real play."""
    episodes = []
    for steps in rng.choice(played_lengths(info.map_name), n_episodes):
        rows, n = int(steps) + 1, info.n_agents
        available = rng.random((rows, n, info.n_actions)) < 0.6
        actions = rng.integers(info.n_actions, size=(rows, n))
        np.put_along_axis(available, actions[..., None], True, axis=-1)
        terminated = np.zeros(rows, np.uint8)
        terminated[-2] = 1
        arrays = {
            "obs": rng.standard_normal((rows, n, info.obs_dim), np.float32),
            "state": rng.standard_normal((rows, info.state_dim), np.float32),
            "avail_actions": available.astype(np.uint8),
            "actions": actions.astype(np.uint8),
            "reward": rng.standard_normal(rows, np.float32),
            "terminated": terminated,
        }
        episodes.append({name: torch.from_numpy(value) for name, value in arrays.items()})
    return episodes


def new_learner(options: argparse.Namespace, info: EnvInfo) -> NQLearner:
    """Return our learner."""
    keys = {"env_args.map_name": info.map_name, "precision": options.precision}
    config, device = resolve("qmix", "skirmish", keys), torch.device(options.device)
    return NQLearner(BasicMAC(config, info, device), config, info, Dist(device=device))


def of_packed(learner: Any, batches: list[Episodes], device: str) -> Update:
    """Return a function that does one update of packed batch number i."""
    learner.warm_up()
    packed = [pack_episodes(episodes).to(device) for episodes in batches]
    return lambda i: learner.update(packed[i], episodes=0)


def of_graphs(
    learner: Any, batches: list[Episodes], info: EnvInfo, device: str,
    read: Callable[[ResidentBuffer, Sequence[int]], FixedDraw],
) -> Update:  # fmt: skip
    """Return one that does the same from a replay on the device, as a graph. read: draws episodes of a replay."""
    learner.warm_up()
    size = len(batches[0])
    replay, updates = (
        ResidentBuffer(size * len(batches), torch.device(device), info.episode_limit + 1),
        FixedUpdates(learner),
    )
    replay.add(episode for batch in batches for episode in batch)

    def update(i: int) -> object:
        return updates.update(read(replay, range(i * size, (i + 1) * size)), episodes=0)

    for number in range((WARM_UP + 1) * len(batches)):  # then all graphs are there
        update(number % len(batches))
    return update


def peers(options: argparse.Namespace, batches: list[Episodes], info: EnvInfo) -> Update:
    """Return a function that does one update of PyMARL3's learner on the same episodes, padded as it keeps them."""
    sys.path.insert(0, str(options.peer / "src"))
    PeerMAC = importlib.import_module("controllers.n_controller").NMAC
    PeerLearner = importlib.import_module("learners.nq_learner").NQLearner

    of_peer = [padded(episodes, info) for episodes in batches]
    changes = {"use_cuda": options.device == "cuda", "learner_log_interval": 10**9}
    args, groups = peer_arguments(options.peer, info, **changes), {"agents": info.n_agents}
    with contextlib.redirect_stdout(io.StringIO()):
        learner = PeerLearner(PeerMAC(of_peer[0].scheme, groups, args), of_peer[0].scheme, SimpleNamespace(), args)
    learner.log_stats_t = 0
    if args.use_cuda:
        learner.cuda()
        for batch in of_peer:
            batch.to(options.device)

    def update(i: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            learner.train(of_peer[i], 0, 0)

    return update


def peer_arguments(path: Path, info: EnvInfo, **changes: Any) -> SimpleNamespace:
    """Return the arguments for QMIX of a checkout of PyMARL3, with the sizes of the environment filled in."""
    values: dict[str, Any] = {}
    for name in ("default.yaml", "algs/qmix.yaml"):
        values |= yaml.safe_load((path / "src" / "config" / name).read_text(encoding="utf-8"))
    sizes = {"n_agents": info.n_agents, "n_actions": info.n_actions}
    sizes |= {"state_shape": info.state_dim, "obs_shape": info.obs_dim, "episode_limit": info.episode_limit}
    return SimpleNamespace(**{**values, "use_cuda": False, "device": "cpu", **sizes, **changes})


def scheme(info: EnvInfo, floats: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return the fields of the peer's replay. floats: type of observations, rewards and states."""
    return {
        "state": {"vshape": info.state_dim, "dtype": floats},
        "obs": {"vshape": info.obs_dim, "group": "agents", "dtype": floats},
        "actions": {"vshape": (1,), "group": "agents", "dtype": torch.long},
        "avail_actions": {"vshape": (info.n_actions,), "group": "agents", "dtype": torch.int},
        "reward": {"vshape": (1,), "dtype": floats},
        "terminated": {"vshape": (1,), "dtype": torch.uint8},
    }


def padded(
    episodes: Episodes, info: EnvInfo, convert: Callable[[np.ndarray], Any] = np.asarray,
    floats: torch.dtype = torch.float32,
) -> Any:  # fmt: skip
    """Return the peer's batch of some episodes, cut to the longest one as it does after sampling.

    convert: arrays to what its batch takes. floats: type of observations, rewards and states.
    """
    EpisodeBatch = importlib.import_module("components.episode_buffer").EpisodeBatch
    OneHot = importlib.import_module("components.transforms").OneHot
    onehot = {"actions": ("actions_onehot", [OneHot(out_dim=info.n_actions)])}
    fields_of, groups = scheme(info, floats), {"agents": info.n_agents}
    batch = EpisodeBatch(fields_of, groups, len(episodes), info.episode_limit + 1, preprocess=onehot)
    for i, episode in enumerate(episodes):
        fields = {name: value.numpy()[None] for name, value in episode.items()}
        fields["actions"] = fields["actions"][..., None].astype(np.int64)
        batch.update(
            {name: convert(value) for name, value in fields.items()},
            bs=slice(i, i + 1),
            ts=slice(0, len(episode["reward"])),
        )
    return batch[:, : max(len(episode["reward"]) for episode in episodes)]


def filled(batches: list[Episodes]) -> float:
    """Return the share of padded batches that is real."""
    rows = [[len(episode["reward"]) for episode in batch] for batch in batches]
    return float(np.mean([np.mean(batch) / max(batch) for batch in rows]))


def make_update(name: str, options: argparse.Namespace, batches: list[Episodes], info: EnvInfo) -> Update:
    """Return our learner's update of batch number i (`name` "ours", "ours_graph") or PyMARL3's."""
    if name == "ours":
        return of_packed(new_learner(options, info), batches, options.device)
    if name == "ours_graph":
        return of_graphs(new_learner(options, info), batches, info, options.device, ResidentBuffer.fixed)
    return peers(options, batches, info)


def work(pipe: Connection, options: argparse.Namespace, info: EnvInfo, name: str, make: MakeUpdate) -> None:
    """Do an update for every number that comes and answer with its seconds; None ends: answer the peak in GB."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    batches = [make_episodes(options.batch, rng, info) for _ in range(n_batches(info))]
    cuda = options.device == "cuda"
    if name != "peer":
        keep_freed_memory()
        torch.backends.cudnn.allow_tf32 = False  # as runs do
    update = make(name, options, batches, info)
    clock = time.perf_counter if cuda else time.process_time
    while (number := pipe.recv()) is not None:
        start = clock()
        update(number % len(batches))
        if cuda:
            torch.cuda.synchronize()
        pipe.send(clock() - start)
    held = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    pipe.send(held or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def n_batches(info: EnvInfo) -> int:
    """Return the number of batches that take turns."""
    return BATCHES.get(info.map_name, 4)


def measure(options: argparse.Namespace, info: EnvInfo, make: MakeUpdate = make_update) -> dict[str, Any]:
    """Return medians, peaks of memory and ratios. make: builds the updates."""
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    names = ["ours"] if options.device == "cpu" else ["ours", "ours_graph"]
    names += [] if not options.peer else ["peer", "peer_kept"] if options.device == "cpu" else ["peer"]
    for name in names:
        pipes[name], far = spawn.Pipe()
        spawn.Process(target=work, args=(far, options, info, name, make), daemon=True).start()
        far.close()  # one that fails ends this process, too
    times: dict[str, list[float]] = {name: [] for name in pipes}
    first, last = -n_batches(info), min(options.updates, MOST_UPDATES.get(info.map_name, options.updates))
    for number in range(first, last):
        for name, pipe in pipes.items():
            pipe.send(number - first)
            seconds = pipe.recv()
            if number >= 0:
                times[name].append(seconds)
    rng = np.random.default_rng(0)  # as in `work`
    share = filled([make_episodes(options.batch, rng, info) for _ in range(n_batches(info))])
    result: dict[str, Any] = {"filled": round(share, 2)}
    result |= {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}
    for name, pipe in pipes.items():
        pipe.send(None)
        result[f"{name}_peak_gb"] = round(pipe.recv(), 2)
    for own, name in itertools.product(("ours", "ours_graph"), times):
        if own in times and name.startswith("peer"):
            ratios = [b / a for a, b in zip(times[own], times[name], strict=True)]
            low, middle, high = (round(float(x), 2) for x in np.percentile(ratios, [25, 50, 75]))
            of = f"{own.removeprefix('ours').removeprefix('_')}_ratio_to_{name}".removeprefix("_")
            result |= {of: middle, f"{of}_quartiles": [low, high]}
    return result


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description="Time one QMIX update.")
    parser.add_argument("--map", choices=[*MAPS, "all"], default="5m_vs_6m")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    for name in MAPS if options.map == "all" else [options.map]:
        row = {"work": f"qmix_update {name}", "device": options.device}
        row |= {"precision": options.precision, "batch": options.batch}
        print(json.dumps(row | measure(options, MAPS[name])), flush=True)


if __name__ == "__main__":
    main()
