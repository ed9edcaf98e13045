"""Time one QMIX update of the graph agent (`gnn_rnn`) beside that of the flat one (`n_rnn`), on played episodes.

    python benchmarks/graph_agent_update.py [--maps 3m 5m_vs_6m] [--batch 128] [--updates 20] [--precision float32|bf16]

Scripts with 30 % random actions play the episodes. `obs`: agents read what they see; `full_obs`: everything, as a
reconstruction without errors would be. Both agents take turns in one process on one core, at the published sizes.
Prints one JSON line for each map and observation: CPU seconds of the flat agent, the ratios with their quartiles, and
`empty`, the share of nodes that show nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.envs.factory import make_env
from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.training.device import keep_freed_memory
from omagd.runners.runner import Runner
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, PackedBatch, pack_episodes

AGENTS: dict[str, dict[str, Any]] = {
    "n_rnn": {"mac": "n_graph_mac", "agent": "n_rnn"},
    "pool": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "pool"},
    "entity": {"mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "entity"},
}
SLOTS = 16


def played(map_name: str, n_episodes: int) -> tuple[list[Episode], EnvInfo]:
    """Return episodes with `full_obs`, and the facts of the map."""
    env = make_env("skirmish", {"map_name": map_name}, SLOTS, processes=False)
    runner = Runner(env, resolve("qmix", None, {}), env.info, EpisodeSeeds(1, "benchmark"))
    scripts = ScriptedPolicy(env, env.info.scripted_policies, 0.3, np.random.default_rng(1))
    per_slot = -(-n_episodes // SLOTS)
    rollout = runner.run(scripts, explore=None, episodes_per_slot=per_slot, full_obs=True)
    env.close()
    return rollout.episodes[:n_episodes], env.info


def update_of(keys: dict[str, Any], info: EnvInfo, batch: PackedBatch) -> Callable[[], object]:
    """Return what does one update of a learner with these keys."""
    config = resolve("gnn_qmix", "skirmish", {"env_args.map_name": info.map_name, **keys})
    mac = MACS.get(config.mac)(config, info, torch.device("cpu"))
    learner = LEARNERS.get(config.learner)(mac, config, info, Dist())
    return lambda: learner.update(batch, episodes=0)


def measure(work: dict[str, Callable[[], object]], updates: int) -> dict[str, Any]:
    """Time the updates in turns; return the values of a line."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(updates + 2):  # the first two are not counted
        for name, update in work.items():
            took = seconds(update)
            if turn > 1:
                times[name].append(took)
    line: dict[str, Any] = {"n_rnn": round(float(np.median(times["n_rnn"])), 4)}
    for name in ("pool", "entity"):
        ratios = np.array(times[name]) / np.array(times["n_rnn"])
        line[name] = [round(float(q), 2) for q in np.quantile(ratios, (0.5, 0.25, 0.75))]
    return line


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main(words: Sequence[str] | None = None) -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", nargs="+", default=["3m", "5m_vs_6m"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    keep_freed_memory()
    for map_name in options.maps:
        episodes, info = played(map_name, options.batch)
        batch = pack_episodes(episodes)
        for seen in ("obs", "full_obs"):
            more = {"use_full_obs": seen == "full_obs", "precision": options.precision}
            work = {name: update_of({**keys, **more}, info, batch) for name, keys in AGENTS.items()}
            nodes = obs_to_nodes(batch[seen], info.layout)
            empty = float((nodes == 0).all(-1)[..., 1:].float().mean())
            line = {"map": map_name, "reads": seen, "precision": options.precision, "batch": options.batch}
            line |= {"rows": len(nodes), "empty": round(empty, 2), **measure(work, options.updates)}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
