"""Trains peers' own code on tasks of the benchmark, and stores lines beside which `make_benchmark.py` sets ours.

    python benchmarks/peer_targets.py --epymarl CHECKOUT --maps 8x8-2p-2f-coop simple_spread_v3 --seeds 1 2 3 4 5
    python benchmarks/peer_targets.py --jaxmarl CHECKOUT --seeds 1 2     # pip install distrax hydra-core omegaconf

Same packages, rules and rewards as the study files; observations, states and settings (`--configs`) are the peer's
own, not tuned here. A line of the same code and words is not made again. Runs take one core each, one after another.

EPyMARL saves its weights every `--test-interval` steps; those of the best test then play 320 episodes of another seed:
the absolute metric. It reports means, so a line has no single episodes. Its tests come late and none at the end, so it
trains 1 % longer: its last one is at `--t-max` steps. Its `soft_policies` draw actions in tests, as ours do there
(`test_greedy: false`).

JaxMARL's PPO tests nothing and keeps no weights: its figure is the best of the means over the episodes that end during
an update's 16,384 steps of training (some 500), in its favour. Its Q-learning presets would take hours on a core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from omagd.lab.studies.local import bound
from omagd.lab.studies.results import append
from omagd.run.run_folder import read_records

RESULTS = Path(__file__).resolve().parent / "results" / "targets.jsonl"
MAPS = {
    "8x8-2p-2f-coop": ("lbf", "lbforaging:Foraging-8x8-2p-2f-coop-v3", 50),
    "10x10-3p-3f": ("lbf", "lbforaging:Foraging-10x10-3p-3f-v3", 50),
    "simple_spread_v3": ("mpe", "pz-mpe-simple-spread-v3", 25),
}
"""Environment of the line, EPyMARL's key, and steps of an episode, by map."""
START = """
import runpy, sys, types
sys.modules["smaclite"] = types.ModuleType("smaclite")
try:
    import mpe2
    sys.modules["pettingzoo.mpe"] = mpe2
    import gymnasium
    from envs.pz_wrapper import PettingZooWrapper
    make = {"lib_name": "mpe", "env_name": "simple_spread_v3"}
    gymnasium.register("pz-mpe-simple-spread-v3", "envs.pz_wrapper:PettingZooWrapper", kwargs=make)
    step = PettingZooWrapper.step
    def whole(self, actions):
        play = self._env.step
        said = []
        self._env.step = lambda given: said.append(play(given)) or said[0]
        obs, _, *ends = step(self, actions)
        self._env.step = play
        return obs, list(said[0][1].values()), *ends
    PettingZooWrapper.step = whole
except ImportError:
    pass
sys.argv[0] = "src/main.py"
runpy.run_path("src/main.py", run_name="__main__")
"""
"""Starts EPyMARL without a package that these tasks do not need, and with MPE where it is since it left PettingZoo.

Its wrapper replaces the rewards of the last step by zeros; here they stay, since returns are compared.
"""
START_JAXMARL = """
import json, runpy, sys, wandb
wandb.log = lambda values: print("LOGGED", json.dumps({name: float(value) for name, value in values.items()}))
wandb.init = lambda **settings: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import jax
jax.effects_barrier()
"""
"""Starts a script of JaxMARL, which does not wait for its own end, and prints what it would send to W&B."""
UNSEEN = 1_000_000  # added to the seed: the absolute metric plays no start of training or tests
NAME, WHEN = "test_return_mean", "test_return_mean_T"


Outcome = tuple[dict[str, float], dict[str, list[Any]]]
"""Values of the line, and its tests."""


def run(command: list[str], folder: Path, path: str | Path) -> tuple[str, float]:
    """Run a peer; return what it prints, and CPU seconds. Errors: RuntimeError with the end of its errors."""
    before = cpu_seconds()
    alone = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "JAX_PLATFORMS": "cpu"}
    env = os.environ | alone | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, preexec_fn=bound())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout, round(cpu_seconds() - before, 1)


def cpu_seconds() -> float:
    """Return the CPU time of the peers' processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@dataclass
class EPyMARL:
    """Tasks that EPyMARL plays by Gymnasium's ids."""

    checkout: Path
    options: argparse.Namespace
    configs: ClassVar = ("qmix", "vdn", "iql", "mappo", "ippo")
    maps: ClassVar = MAPS

    def words(self, map_name: str, seed: int) -> list[str]:
        """Return the words of a run; 40 test episodes are whole rounds of each preset's environments."""
        _, key, limit = MAPS[map_name]
        every, steps = self.options.test_interval, self.options.t_max * 101 // 100
        task = [f"env_args.key={key}", f"env_args.time_limit={limit}", f"seed={seed}"]
        return [*task, f"t_max={steps}", f"test_interval={every}", "test_nepisode=40"]

    def run(self, config: str, words: list[str], folder: Path) -> tuple[dict[str, list[Any]], float]:
        """Run it once and return what Sacred kept, by name, and CPU seconds."""
        shutil.copytree(self.checkout / "src", folder / "src")  # it writes beside its code
        keys = ["use_cuda=False", "use_tensorboard=False", *words]
        start = [sys.executable, "-c", START, f"--config={config}", "--env-config=gymma", "with"]
        _, spent = run([*start, *keys], folder, "src")
        found = folder.glob("results/sacred/**/info.json")
        return dict(json.loads(max(found, key=lambda path: path.stat().st_mtime).read_text())), spent

    def outcome(self, config: str, map_name: str, seed: int, place: Path) -> Outcome:
        """Train, and play the absolute metric with the weights of the best test."""
        saves = ["save_model=True", f"save_model_interval={self.options.test_interval}"]
        info, spent = self.run(config, [*self.words(map_name, seed), *saves], place / "train")
        curve = numbers(info[NAME])
        best = max(range(len(curve)), key=curve.__getitem__)
        (models,) = (place / "train" / "results" / "models").iterdir()
        played = ["evaluate=True", f"checkpoint_path={models}", f"load_step={max(1, info[WHEN][best])}"]
        played += ["runner=episode", "batch_size_run=1", f"test_nepisode={self.options.episodes}"]
        again, _ = self.run(config, [*self.words(map_name, seed + UNSEEN), *played], place / "play")
        tests = {"t_env": info[WHEN], NAME: curve, "cpu_seconds": [spent]}
        return {"absolute_return_mean": numbers(again[NAME])[-1]}, tests


@dataclass
class JaxMARL:
    """SMAX by JaxMARL's PPO."""

    checkout: Path
    options: argparse.Namespace
    configs: ClassVar = ("mappo", "ippo")
    maps: ClassVar = {"3m": ("smax",), "2s3z": ("smax",)}

    def words(self, map_name: str, seed: int) -> list[str]:
        """Return the words of a run."""
        return [f"MAP_NAME={map_name}", f"SEED={seed}", f"TOTAL_TIMESTEPS={self.options.t_max}"]

    def outcome(self, config: str, map_name: str, seed: int, place: Path) -> Outcome:
        """Train, and take the best update's mean."""
        script = self.checkout / "baselines" / config.upper() / f"{config}_rnn_smax.py"
        start = [sys.executable, "-c", START_JAXMARL, str(script)]
        said, spent = run([*start, *self.words(map_name, seed)], place, self.checkout)
        lines = [line for line in said.splitlines() if line.startswith("LOGGED ")]
        rows = [json.loads(line.removeprefix("LOGGED ")) for line in lines]
        curve = [round(row["win_rate"], 4) for row in rows]
        steps = [int(row["env_step"]) for row in rows]  # before the update
        tests = {"t_env": steps, "test_battle_won_mean": curve, "cpu_seconds": [spent]}
        return {"absolute_battle_won_mean": max(curve)}, tests


Peer = EPyMARL | JaxMARL


def numbers(values: list[Any]) -> list[float]:
    """Return numbers, which Sacred keeps as they are or, of NumPy, in dictionaries."""
    return [float(value["value"] if isinstance(value, dict) else value) for value in values]


def code(peer: Peer) -> str:
    """Return name and commit of a checkout."""
    asked = ["git", "-C", str(peer.checkout), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return f"{type(peer).__name__} {commit}"


def target(peer: Peer, config: str, map_name: str, seed: int) -> dict[str, Any]:
    """Return the line of a run."""
    started = time.time()
    with tempfile.TemporaryDirectory() as place:
        values, tests = peer.outcome(config, map_name, seed, Path(place))
    return {
        "study": "targets", "arm": config, "env": peer.maps[map_name][0], "map": map_name, "seed": seed,
        "code": code(peer), "words": peer.words(map_name, seed), "machine": platform.processor() or platform.machine(),
        "finished": time.time(), "seconds": round(time.time() - started, 1),
        "summary": {"stages": {"stage3": {"values": values}}}, "tests": tests,
    }  # fmt: skip


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epymarl", type=Path, help="a checkout of uoe-agents/epymarl")
    parser.add_argument("--jaxmarl", type=Path, help="a checkout of JaxMARL 0.2.0")
    parser.add_argument("--configs", nargs="+", help="default: all that the peer has")
    parser.add_argument("--maps", nargs="+", choices=[*EPyMARL.maps, *JaxMARL.maps])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--t-max", type=int, default=1_000_000)
    parser.add_argument("--test-interval", type=int, default=50_000, help="of EPyMARL")
    parser.add_argument("--episodes", type=int, default=320, help="of EPyMARL's absolute metric")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    options = parser.parse_args()
    peers: list[Peer] = []
    if options.epymarl:
        peers.append(EPyMARL(options.epymarl.resolve(), options))
    if options.jaxmarl:
        peers.append(JaxMARL(options.jaxmarl.resolve(), options))
    known = [(row["arm"], row["code"], row["words"]) for row in read_records(options.rows)]
    for peer in peers:
        own = code(peer)
        asked = itertools.product(options.seeds, options.maps or peer.maps, options.configs or peer.configs)
        for seed, map_name, config in asked:
            if map_name in peer.maps and (config, own, peer.words(map_name, seed)) not in known:
                append(options.rows, target(peer, config, map_name, seed))
                print(config, map_name, seed, flush=True)


if __name__ == "__main__":
    main()
