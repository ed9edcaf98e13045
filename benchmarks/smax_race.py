"""Time to a test win rate on SMAX, beside JaxMARL's own QMIX: in turns, in one run, each with the whole machine.

    python benchmarks/smax_race.py --peer PATH_OF_A_JAXMARL_CHECKOUT --seeds 1 2 3

The clock starts with the process, so that importing and compiling count; a side stops at the first of two tests in a
row (greedy, 256 episodes, every 25,000 environment steps) that reach the threshold. JaxMARL's side is its script
`baselines/QLearning/qmix_rnn.py`, run as it is with its configuration for SMAX but for the sizes below, since the
published ones (512 hidden units) are for GPUs; it needs flashbax, hydra-core and omegaconf beside the extra `smax`.
Without `--peer` ours runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from runs import MAIN

TESTED = "tested"
EPISODES = 256
# What is not taken from JaxMARL's own configuration: the sizes and the learning rate of our preset, smax_qmix.
PEER_SIZES = {
    "HIDDEN_SIZE": 64,
    "MIXER_EMBEDDING_DIM": 32,
    "MIXER_HYPERNET_HIDDEN_DIM": 64,
    "LR": 5e-4,
    "TEST_NUM_ENVS": EPISODES,
}


@dataclass(frozen=True)
class Finish:
    """When a side got there: seconds since its process began, environment steps; or the best that it reached."""

    seconds: float
    steps: int
    best: float
    reached: bool

    def __str__(self) -> str:
        if not self.reached:
            return f"not in {self.steps:,} steps, {self.seconds:.0f} s (best {self.best:.3f})"
        return f"{self.seconds:.0f} s, {self.steps:,} steps"


def race(tests: Iterator[tuple[int, float, float]], threshold: float, process: subprocess.Popen[str]) -> Finish:
    """Follow `tests` (steps, seconds, win rate) until two in a row reach `threshold`, and end the process."""
    best, before, last = 0.0, None, (0, 0.0)
    try:
        for steps, seconds, won in tests:
            best, last = max(best, won), (steps, seconds)
            if won >= threshold and before is not None:
                return Finish(before[1], before[0], best, True)
            before = (steps, seconds) if won >= threshold else None
        return Finish(last[1], last[0], best, False)
    finally:
        process.terminate()
        process.wait()


def ours(seed: int, arguments: argparse.Namespace) -> Finish:
    """Run the preset `smax_qmix`."""
    token = f"race_{arguments.map}_seed{seed}_{int(time.time())}"
    words = [f"local_results_path={arguments.results}", f"unique_token={token}", f"env_args.map_name={arguments.map}"]
    words += [f"seed={seed}", f"t_max={arguments.t_max}", f"test_nepisode={EPISODES}", "test_interval=25000"]
    words += ["save_model=False", *arguments.words]
    command = [sys.executable, str(MAIN), "--config=smax_qmix", "--env-config=smax", "-u", "with", *words]
    started = time.time()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, text=True)
    path = Path(arguments.results) / token / "metrics.jsonl"
    return race(_our_tests(path, process, started), arguments.threshold, process)


def _our_tests(path: Path, process: subprocess.Popen[str], started: float) -> Iterator[tuple[int, float, float]]:
    seen = 0
    while True:
        ended = process.poll() is not None
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[seen:]:
            row = json.loads(line)
            if "test_battle_won_mean" in row:
                yield int(row["t_env"]), time.time() - started, float(row["test_battle_won_mean"])
        seen = len(lines)
        if ended:
            return
        time.sleep(0.2)


def theirs(seed: int, arguments: argparse.Namespace) -> Finish:
    """Run JaxMARL's script in a process of its own."""
    command = [sys.executable, __file__, "--be-peer", str(seed), "--peer", arguments.peer, "--map", arguments.map]
    command += ["--t-max", str(arguments.t_max)]
    started = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return race(_their_tests(process, started), arguments.threshold, process)


def _their_tests(process: subprocess.Popen[str], started: float) -> Iterator[tuple[int, float, float]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TESTED):
            _, steps, won = line.split()
            yield int(steps), time.time() - started, float(won)


def be_peer(seed: int, arguments: argparse.Namespace) -> None:
    """Train with JaxMARL's script, printing a line for every test."""
    folder = Path(arguments.peer) / "baselines" / "QLearning"
    sys.path[:0] = [arguments.peer, str(folder)]
    # An optional part of the package that replaces sys.stdout on import.
    sys.modules["jaxmarl.environments.mabrax"] = None  # type: ignore[assignment]
    import jax
    import qmix_rnn
    from omegaconf import OmegaConf

    config = dict(OmegaConf.to_container(OmegaConf.load(folder / "config" / "alg" / "ql_rnn_smax.yaml")))
    per_update = config["NUM_STEPS"] * config["NUM_ENVS"]
    updates = arguments.t_max // per_update
    every = max(1, round(25_000 / per_update))
    config |= PEER_SIZES | {"MAP_NAME": arguments.map, "TOTAL_TIMESTEPS": arguments.t_max, "WANDB_MODE": "offline"}
    config |= {"SEED": seed, "NUM_SEEDS": 1, "TEST_INTERVAL": (every + 0.5) / updates}

    def told(metrics: dict[str, object]) -> None:
        if int(metrics["update_steps"]) % every == 0:  # type: ignore[call-overload]
            won = float(metrics["test_returned_won_episode"])  # type: ignore[arg-type]
            print(TESTED, int(metrics["env_step"]), won, flush=True)  # type: ignore[call-overload]

    qmix_rnn.wandb.log = told
    env, _ = qmix_rnn.env_from_config(config)
    train = jax.jit(jax.vmap(qmix_rnn.make_train(config, env)))
    jax.block_until_ready(train(jax.random.split(jax.random.PRNGKey(seed), 1)))


def main() -> None:
    """Race and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="JaxMARL checkout")
    parser.add_argument("--map", default="3m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--t-max", type=int, default=3_000_000)
    parser.add_argument("--results", default="results/benchmarks")
    parser.add_argument("--be-peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further key=value for our runs")
    arguments = parser.parse_args()
    if arguments.be_peer is not None:
        be_peer(arguments.be_peer, arguments)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| SMAX {arguments.map}, win rate {arguments.threshold} twice | ours | JaxMARL |\n|---|---|---|")
    times: list[tuple[float, float]] = []
    for seed in arguments.seeds:
        mine = ours(seed, arguments)
        other = theirs(seed, arguments) if arguments.peer else None
        print(f"| seed {seed} | {mine} | {other or 'not run'} |", flush=True)
        times.append((mine.seconds, other.seconds if other else float("nan")))
    print(f"| median | {median(a for a, _ in times):.0f} s | {median(b for _, b in times):.0f} s |")


if __name__ == "__main__":
    main()
