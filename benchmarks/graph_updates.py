"""What the benchmarks of stages 1 and 2 share: the episodes, both learners, the clock and the memory.

A peer is a checkout of the original method's code; its modules run unchanged (its console logger, where that package is
missing, is replaced by one that says nothing, and a metric package of a part that is not run by an empty class).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.loading import resolve
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers.graphs import nodes_to_obs
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.training.device import keep_freed_memory
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

LAYOUT = EntityLayout(move_dim=4, n_enemies=6, enemy_dim=5, n_allies=4, ally_dim=5, own_dim=1)
INFO = EnvInfo("skirmish", "5m_vs_6m", 5, 12, 55, 98, 70, n_normal_actions=6, layout=LAYOUT)
SEEN = 0.5  # share of the living others that an agent sees
Episodes = list[dict[str, Tensor]]
Work = Callable[[], object]
Maker = Callable[[Episodes], Work]


def make_episodes(n_episodes: int, rng: np.random.Generator) -> Episodes:
    """Return random episodes of 10 to 70 steps in which units die (a quarter are dead) and half of the others hide."""
    episodes = []
    n, m = INFO.n_agents, LAYOUT.n_enemies
    for steps in np.clip(rng.gamma(6.0, 5.2, n_episodes).astype(int), 10, INFO.episode_limit):
        rows = int(steps) + 1
        alive = np.arange(rows)[:, None] < rng.uniform(0.2, 1.4, n + m) * rows
        nodes = rng.normal(size=(rows, n, LAYOUT.n_nodes, LAYOUT.node_dim)).astype(np.float32)
        nodes[..., 0, 0], nodes[..., 0, 1:4] = 1.0, 0.0
        for agent in range(n):
            others = [agent, *(a for a in range(n) if a != agent), *range(n, n + m)]
            nodes[:, agent] *= (alive[:, others] & alive[:, agent, None])[..., None]
        seen = rng.random(nodes.shape[:3]) < SEEN
        seen[..., 0] = True
        full, obs = nodes_to_obs(nodes, LAYOUT), nodes_to_obs(nodes * seen[..., None], LAYOUT)
        terminated = np.zeros((rows, 1), np.uint8)
        terminated[-2] = 1
        arrays = {"obs": obs, "full_obs": full, "terminated": terminated}
        episodes.append({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()})
    return episodes


def _ours(stage: str, options: argparse.Namespace) -> Maker:
    """Return what makes an update of episodes, packed; memory is kept as a run does."""
    keep_freed_memory()
    changes: dict[str, Any] = {"precision": options.precision, "enable_gradient_checkpointing": options.checkpointing}
    if options.frames_at_once:
        changes["graph_frames_at_once"] = options.frames_at_once
    config = resolve(options.config, "skirmish", {"env_args.map_name": "5m_vs_6m", **changes})
    torch.manual_seed(0)
    tokenizer = Tokenizer(config.tokenizer_config, LAYOUT)
    learner: TokenizerLearner | PredictorLearner = TokenizerLearner(tokenizer, config, INFO, Dist())
    if stage == "stage2":
        sizes = config.mask_predictor_config, config.tokenizer_config.n_codes, LAYOUT, INFO.episode_limit
        learner = PredictorLearner(MaskPredictor(*sizes), tokenizer, config, INFO, Dist())

    def maker(episodes: Episodes) -> Work:
        batch = pack_episodes([{name: e[name] for name in ("obs", "full_obs")} for e in episodes])
        return lambda: learner.update(batch)

    return maker


def _peers(stage: str, path: Path) -> Maker:
    """Return what makes an update of the original of episodes, padded to the longest as it samples them."""
    _stand_in("loguru", logger=SimpleNamespace(info=_say_nothing, warning=_say_nothing, debug=_say_nothing))
    _stand_in("torchmetrics", aggregation=SimpleNamespace(MeanMetric=torch.nn.Module))
    sys.path.insert(0, str(path / "src"))
    yaml = importlib.import_module("yaml").safe_load((path / "src/config/algs/omagd.yaml").read_text())
    component = (LAYOUT.move_dim, (6, LAYOUT.enemy_dim), (4, LAYOUT.ally_dim), LAYOUT.own_dim)
    args = SimpleNamespace(
        **{**yaml, "recontructer_stage": stage, "obs_component": component, "n_agents": 5, "n_enemies": 6},
        n_allies=4, device="cpu", use_cuda=False, grad_norm_clip=10, obs_shape=55, episode_limit=INFO.episode_limit,
    )  # fmt: skip
    Learner = importlib.import_module("learners.nq_graph_learner").NQGraphLearner
    learner = Learner.__new__(Learner)  # its graph part alone
    learner.enable_parallel_computing = False
    learner.args, learner.logger, learner.graph_train_steps = args, SimpleNamespace(log_stat=_say_nothing), 0
    with contextlib.redirect_stdout(io.StringIO()):
        learner.graph_reconstructer = importlib.import_module(
            "modules.graph_reconstructers.graph_reconstructer"
        ).GraphReconstructer(args)
    learner.graph_optimizer = torch.optim.Adam(learner.graph_reconstructer.get_stage_parameters(), lr=args.graph_lr)

    def maker(episodes: Episodes) -> Work:
        longest = max(len(episode["obs"]) for episode in episodes)
        batch = {name: torch.zeros(len(episodes), longest, *episodes[0][name].shape[1:]) for name in episodes[0]}
        batch["filled"] = torch.zeros(len(episodes), longest, 1)
        for i, episode in enumerate(episodes):
            for name, value in episode.items():
                batch[name][i, : len(value)] = value
            batch["filled"][i, : len(episode["obs"])] = 1

        def update() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                learner.train_graph_reconstructor(batch, 0, 0)

        return update

    return maker


def _stand_in(name: str, **content: object) -> None:
    """Let `name` be importable where it is not installed; nothing that is timed uses it."""
    if importlib.util.find_spec(name) is None:
        module = ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module


def _say_nothing(*_: object, **__: object) -> None:
    """Take anything."""


def cpu_seconds(work: Work) -> float:
    """Return the CPU seconds that one call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def facts(episodes: Episodes) -> dict[str, float]:
    """Return what the batch is made of: steps, share of a padded batch that is real, frames of living observers."""
    steps = [len(episode["obs"]) - 1 for episode in episodes]
    living = sum(int((episode["obs"][:-1] != 0).any(-1).sum()) for episode in episodes)
    return {
        "steps": sum(steps),
        "real_share": round(sum(steps) / (max(steps) * len(steps)), 2),
        "living_frames": living,
        "living_share": round(living / (INFO.n_agents * sum(steps)), 2),
    }


def peak_memory() -> float:
    """Return the most memory that this process has held, in GB (imports included)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def parse(stage: str, batch: int, updates: int) -> argparse.Namespace:
    """Return the options of a benchmark of one stage."""
    parser = argparse.ArgumentParser(description=f"Time one update of {stage}.")
    parser.add_argument("--peer", type=Path, help="a checkout of the original")
    parser.add_argument("--config", default="omagd", help="omagd (published sizes) or omagd_small")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--frames-at-once", type=int, help="graph_frames_at_once; default: the configuration's")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="enable_gradient_checkpointing")
    return parser.parse_args()


def run(stage: str, options: argparse.Namespace, stored: float) -> dict[str, Any]:
    """Time both sides in turns, each in a process of its own, as each is run; return what to print.

    stored: seconds of the original over ours where both ran together, printed where no peer is given.
    """
    sides = ["ours", "peer"] if options.peer else ["ours"]
    times: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, float] = {}
    workers = {name: _start(stage, options, name) for name in sides}
    for number in range(options.updates + 1):  # the first one is not counted
        for name, worker in workers.items():
            worker.send(number)
            seconds, memory[name] = worker.recv()
            times[name].append(seconds)
    for worker in workers.values():
        worker.send(None)
    result: dict[str, Any] = {"work": f"{stage}_update 5m_vs_6m", "batch": options.batch, "config": options.config}
    result |= {"precision": options.precision, **facts(make_episodes(options.batch, np.random.default_rng(1)))}
    for name in sides:
        result |= {name: round(statistics.median(times[name][1:]), 4), f"{name}_gb": round(memory[name], 2)}
    if options.peer:
        ratios = [b / a for a, b in zip(times["ours"][1:], times["peer"][1:], strict=True)]
        result |= {"ratio": round(statistics.median(ratios), 2), "lowest": round(min(ratios), 2)}
        result |= {"highest": round(max(ratios), 2)}
    else:
        result["stored_ratio"] = stored
    return result


def serve(pipe: Connection, stage: str, options: argparse.Namespace, side: str) -> None:
    """Do one update for every number that comes, on the batch that follows from it; answer with seconds and memory."""
    torch.set_num_threads(1)
    update = _ours(stage, options) if side == "ours" else _peers(stage, options.peer)
    while (number := pipe.recv()) is not None:
        episodes = make_episodes(options.batch, np.random.default_rng(number if options.batch < 16 else 1))
        work = update(episodes)
        pipe.send((cpu_seconds(work), peak_memory()))


def _start(stage: str, options: argparse.Namespace, side: str) -> Connection:
    """Start the process of one side, which imports afresh; return the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    spawn.Process(target=serve, args=(far, stage, options, side), daemon=True).start()
    return near
