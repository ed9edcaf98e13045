"""Time one update of stage 3 at the sizes of 5m_vs_6m, which reads the reconstructions that playing stored.

    python benchmarks/stage3_update.py [--peer PATH_OF_THE_ORIGINAL] [--updates 5] [--batch 128] [--config omagd]
        [--precision float32|bf16] [--device cpu|cuda]

Rows: `n_graph_mac` (flat agent) and `gnn_graph_mac` with both readouts. The original runs its frozen transformer at
every step of every update, too slow for 128 episodes: with --peer its learner takes one update each of 2 and of 6
episodes, and the line through both gives its seconds at --batch. Its modules run unchanged. CPU seconds of one
thread, on a GPU seconds until it is idle; medians of ours. Prints one JSON line for each row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from graph_updates import INFO, LAYOUT, _say_nothing, _stand_in, make_episodes
from qmix_update import make_args, padded
from torch import Tensor

from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.predictor_learner import PredictorLearner
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.training.device import keep_freed_memory
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

STORED = 150.0  # seconds of the original at 128 episodes, extrapolated from 18.5 s at 16 on another machine
PEER_BATCHES = (2, 6)
ROWS: dict[str, dict[str, Any]] = {
    "n_graph_mac": {"mac": "n_graph_mac", "agent": "n_rnn"},
    "gnn_graph_mac pool": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "pool"},
    "gnn_graph_mac entity": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "entity"},
}
Episodes = list[dict[str, Tensor]]


def played_episodes(n_episodes: int, rng: np.random.Generator) -> Episodes:
    """Return random episodes with all that a Q-learner reads."""
    episodes = []
    for seen in make_episodes(n_episodes, rng):
        rows, n = len(seen["obs"]), INFO.n_agents
        available = rng.random((rows, n, INFO.n_actions)) < 0.6
        actions = rng.integers(INFO.n_actions, size=(rows, n))
        np.put_along_axis(available, actions[..., None], True, axis=-1)
        arrays = {
            "state": rng.standard_normal((rows, INFO.state_dim), np.float32),
            "avail_actions": available.astype(np.uint8),
            "actions": actions.astype(np.uint8),
            "reward": rng.standard_normal(rows, np.float32),
        }
        made = {name: torch.from_numpy(value) for name, value in arrays.items()}
        episodes.append({"obs": seen["obs"], "terminated": seen["terminated"].squeeze(-1), **made})
    return episodes


def ours(row: str, options: argparse.Namespace, episodes: Episodes) -> Callable[[], object]:
    """Return a function that does one update of the packed episodes with a stored guess for every unseen node."""
    changes = {"env_args.map_name": "5m_vs_6m", "precision": options.precision, **ROWS[row]}
    config = resolve(options.config, "skirmish", changes)
    device = torch.device(options.device)
    dist = Dist(device=device)
    tokenizer = Tokenizer(config.tokenizer_config, LAYOUT).to(device)
    sizes = config.mask_predictor_config, config.tokenizer_config.n_codes, LAYOUT, INFO.episode_limit
    predictor = MaskPredictor(*sizes).to(device)
    PredictorLearner(predictor, tokenizer, config, INFO, dist)
    reconstructor = TokenReconstructor(tokenizer, predictor, config, INFO)
    mac = MACS.get(config.mac)(config, INFO, device, reconstructor)
    learner = LEARNERS.get(config.learner)(mac, config, INFO, dist)
    learner.warm_up()
    field = reconstructor.field
    for episode in episodes:
        shape = (len(episode["obs"]), INFO.n_agents, LAYOUT.n_nodes)
        tokens = torch.randint(config.tokenizer_config.n_codes, shape, dtype=torch.int16)
        episode[field] = torch.randn(episode["obs"].shape).half() if field == "recon" else tokens
    batch = pack_episodes(episodes).to(device)
    return lambda: learner.update(batch, episodes=0)


def peers(path: Path, batches: list[Episodes], device: str) -> list[Callable[[], object]]:
    """Return functions that do one update each of the original's learner on the batches, padded as it keeps them."""
    _stand_in("loguru", logger=SimpleNamespace(info=_say_nothing, warning=_say_nothing, debug=_say_nothing))
    _stand_in("torchmetrics", aggregation=SimpleNamespace(MeanMetric=torch.nn.Module))
    sys.path.insert(0, str(path / "src"))
    yaml = importlib.import_module("yaml").safe_load((path / "src/config/algs/omagd.yaml").read_text())
    component = (LAYOUT.move_dim, (6, LAYOUT.enemy_dim), (4, LAYOUT.ally_dim), LAYOUT.own_dim)
    of_graphs = {"recontructer_stage": "stage3", "obs_component": component, "n_enemies": 6, "n_allies": 4}
    more = {
        "device": device,
        "use_cuda": device != "cpu",
        "obs_shape": 55,
        "episode_limit": INFO.episode_limit,
        "evaluate": False,
    }
    args = SimpleNamespace(**{**yaml, **vars(make_args(INFO)), **of_graphs, **more})
    of_peer = [padded(episodes, INFO) for episodes in batches]
    with contextlib.redirect_stdout(io.StringIO()):
        mac = importlib.import_module("controllers.n_graph_controller").NGraphMAC
        made = importlib.import_module("learners.nq_graph_learner").NQGraphLearner
        learner = made(mac(of_peer[0].scheme, {"agents": 5}, args), of_peer[0].scheme, SimpleNamespace(), args)
    learner.log_stats_t = 0
    for one in (learner.mac, learner.target_mac):
        one.set_graph_reconstructer(learner.graph_reconstructer)

    if device != "cpu":
        learner.cuda()
        for batch in of_peer:
            batch.to(device)

    def update(batch: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            learner.train(batch, 0, 0)

    return [lambda batch=batch: update(batch) for batch in of_peer]


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Return the CPU seconds that one call takes, on a GPU those until it is idle."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description="Time one update of stage 3.")
    parser.add_argument("--peer", type=Path, help="a checkout of the original")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--config", default="omagd")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rng = np.random.default_rng(0)
    episodes = played_episodes(options.batch, rng)
    works = {row: ours(row, options, episodes) for row in ROWS}
    few_episodes = [played_episodes(n, rng) for n in PEER_BATCHES]
    theirs = peers(options.peer, few_episodes, options.device) if options.peer else []
    points = []
    for n, work in zip(PEER_BATCHES, theirs, strict=False):
        points.append((n, seconds_of(work, options.device)))
    times: dict[str, list[float]] = {row: [] for row in works}
    for i in range(options.updates + 1):
        for row, work in works.items():
            seconds = seconds_of(work, options.device)
            if i:
                times[row].append(seconds)
    original = STORED if options.device == "cpu" else None
    if points:
        (few, fast), (many, slow) = points
        original = fast + (slow - fast) / (many - few) * (options.batch - few)
    measured: dict[str, Any] = {"original_measured": [(n, round(s, 2)) for n, s in points]}
    for row, seconds in times.items():
        median = statistics.median(seconds)
        line = {"work": f"stage3_update {row}", "device": options.device, "precision": options.precision}
        result = {"batch": options.batch, "ours": round(median, 4), **measured}
        if original is not None and (points or options.batch == 128):
            result |= {"original": round(original, 1), "ratio": round(original / median)}
        sys.stdout.write(json.dumps({**line, **result}) + "\n")


if __name__ == "__main__":
    main()
