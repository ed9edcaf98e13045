"""Trains EPyMARL's own code on tasks of the benchmark, and stores lines beside which `make_benchmark.py` sets ours.

    python benchmarks/peer_targets.py --epymarl CHECKOUT --maps 8x8-2p-2f-coop simple_spread_v3 --seeds 1 2 3 4 5

Same packages, rules and rewards as `studies/lbf.yaml` and `studies/mpe.yaml`; observations, states and settings
(`--configs`) are its own, not tuned here. Each run saves its weights every `--test-interval` steps; those of the best
test then play 320 episodes of another seed: the absolute metric. EPyMARL reports means, so a line has no single
episodes. Its tests come late and none at the end, so it trains 1 % longer: its last one is at `--t-max` steps.
Its `soft_policies` draw actions in tests, as ours do there (`test_greedy: false`).
A line of the same code and words is not made again. Runs take one core each, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
UNSEEN = 1_000_000  # added to the seed: the absolute metric plays no start of training or tests
NAME, WHEN = "test_return_mean", "test_return_mean_T"


def run(options: argparse.Namespace, config: str, words: list[str], folder: Path) -> dict[str, list[Any]]:
    """Run EPyMARL once and return what Sacred kept of it, by name. Errors: RuntimeError with the end of its output."""
    shutil.copytree(options.epymarl / "src", folder / "src")  # it writes beside its code
    keys = ["use_cuda=False", "use_tensorboard=False", *words]
    command = [sys.executable, "-c", START, f"--config={config}", "--env-config=gymma", "with", *keys]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": "src"}, capture_output=True, text=True, check=False
    )
    found = list(folder.glob("results/sacred/**/info.json"))
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return dict(json.loads(max(found, key=lambda path: path.stat().st_mtime).read_text()))


def numbers(values: list[Any]) -> list[float]:
    """Return numbers, which Sacred keeps as they are or, of NumPy, in dictionaries."""
    return [float(value["value"] if isinstance(value, dict) else value) for value in values]


def words_of(options: argparse.Namespace, map_name: str, seed: int) -> list[str]:
    """Return the words of a run; 40 test episodes are whole rounds of each preset's environments."""
    _, key, limit = MAPS[map_name]
    task = [f"env_args.key={key}", f"env_args.time_limit={limit}", f"seed={seed}"]
    return [*task, f"t_max={options.t_max * 101 // 100}", f"test_interval={options.test_interval}", "test_nepisode=40"]


def target(options: argparse.Namespace, config: str, map_name: str, seed: int) -> dict[str, Any]:
    """Return the line of a run: its tests, and the absolute metric of the best one's weights."""
    words = words_of(options, map_name, seed)
    saves = ["save_model=True", f"save_model_interval={options.test_interval}"]
    started, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as place:
        info = run(options, config, [*words, *saves], Path(place, "train"))
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        curve = numbers(info[NAME])
        best = max(range(len(curve)), key=curve.__getitem__)
        (models,) = Path(place, "train", "results", "models").iterdir()
        played = ["evaluate=True", f"checkpoint_path={models}", f"load_step={max(1, info[WHEN][best])}"]
        played += ["runner=episode", "batch_size_run=1", f"test_nepisode={options.episodes}"]
        again = run(options, config, [*words_of(options, map_name, seed + UNSEEN), *played], Path(place, "play"))
    cpu = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
    values = {"absolute_return_mean": numbers(again[NAME])[-1]}
    return {
        "study": "targets", "arm": config, "env": MAPS[map_name][0], "map": map_name, "seed": seed,
        "code": code(options.epymarl), "words": words, "machine": platform.processor() or platform.machine(),
        "finished": time.time(), "seconds": round(time.time() - started, 1),
        "summary": {"stages": {"stage3": {"values": values}}},
        "tests": {"t_env": info[WHEN], NAME: curve, "cpu_seconds": [round(cpu, 1)]},
    }  # fmt: skip


def code(checkout: Path) -> str:
    """Return name and commit of a checkout."""
    asked = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return f"EPyMARL {subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}"


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epymarl", type=Path, required=True, help="a checkout of uoe-agents/epymarl")
    parser.add_argument("--configs", nargs="+", default=["qmix", "vdn", "iql", "mappo", "ippo"])
    parser.add_argument("--maps", nargs="+", choices=list(MAPS), default=list(MAPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--t-max", type=int, default=1_000_000)
    parser.add_argument("--test-interval", type=int, default=50_000)
    parser.add_argument("--episodes", type=int, default=320, help="of the absolute metric")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.epymarl = options.epymarl.resolve()
    own, known = code(options.epymarl), [(row["arm"], row["code"], row["words"]) for row in read_records(options.rows)]
    for seed in options.seeds:
        for map_name in options.maps:
            for config in options.configs:
                if (config, own, words_of(options, map_name, seed)) not in known:
                    append(options.rows, target(options, config, map_name, seed))
                    print(config, map_name, seed, flush=True)


if __name__ == "__main__":
    main()
