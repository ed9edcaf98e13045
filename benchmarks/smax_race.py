"""Time to a test win rate on SMAX, beside JaxMARL's own QMIX: in turns, in one run, each with the whole machine.

    python benchmarks/smax_race.py --peer PATH_OF_A_JAXMARL_CHECKOUT --seeds 1 2 3 4 5

The clock starts with the process, so that importing and compiling count; a side stops when two tests in a row (greedy,
256 episodes, every 25,000 environment steps) reached the threshold, which counts from the first of them. JaxMARL is
also stopped when it has taken `--limit` times our seconds. CPU seconds are those of the process. JaxMARL runs its own
`baselines/QLearning/qmix_rnn.py` with its configuration for SMAX but for the sizes below, since the published ones (512
hidden units) are for GPUs; it needs flashbax, hydra-core and omegaconf beside the extra `smax`. Without `--peer` ours
runs alone.
"""

from __future__ import annotations

import argparse
import json
import math
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
# What is not taken from JaxMARL's own configuration: the sizes and the learning rate of smax_qmix.
PEER_SIZES = {
    "HIDDEN_SIZE": 64,
    "MIXER_EMBEDDING_DIM": 32,
    "MIXER_HYPERNET_HIDDEN_DIM": 64,
    "LR": 5e-4,
    "TEST_NUM_ENVS": EPISODES,
}


Tested = tuple[int, float, float, float]
"""A test: environment steps, seconds and CPU seconds since the process began, win rate."""


@dataclass(frozen=True)
class Finish:
    """When a side got there: seconds since its process began, environment steps; or the best that it reached."""

    seconds: float
    cpu: float
    steps: int
    best: float
    reached: bool

    def __str__(self) -> str:
        took = f"{self.seconds:.0f} s, CPU {self.cpu:.0f} s"
        if not self.reached:
            return f"not in {self.steps:,} steps, {took} (best {self.best:.3f})"
        return f"{took}, {self.steps:,} steps"


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a running process and of its children that have ended; 0 after its end."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def race(tests: Iterator[Tested], threshold: float, limit: float, process: subprocess.Popen[str]) -> Finish:
    """Follow `tests` until two in a row reach `threshold` or `limit` seconds have passed, and end the process."""
    best, before, last = 0.0, None, (0.0, 0.0, 0)
    try:
        for steps, seconds, cpu, won in tests:
            best, last = max(best, won), (seconds, cpu, steps)
            if won >= threshold and before is not None:
                return Finish(*before, best, True)
            before = last if won >= threshold else None
            if seconds > limit:
                break
        else:
            if process.wait():  # a side that fails has no time
                raise SystemExit(f"code {process.returncode} from: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
        return Finish(*last, best, False)
    finally:
        process.terminate()
        process.wait()


def ours(seed: int, arguments: argparse.Namespace) -> Finish:
    """Run our preset."""
    token = f"race_{arguments.map}_seed{seed}_{int(time.time())}"
    words = [f"local_results_path={arguments.results}", f"unique_token={token}", f"env_args.map_name={arguments.map}"]
    words += [f"seed={seed}", f"t_max={arguments.t_max}", f"test_nepisode={EPISODES}", "test_interval=25000"]
    words += ["save_model=False", *arguments.words]
    command = [sys.executable, str(MAIN), f"--config={arguments.config}", "--env-config=smax", "-u", "with", *words]
    started = time.time()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, text=True)
    path = Path(arguments.results) / token / "metrics.jsonl"
    return race(_our_tests(path, process, started), arguments.threshold, math.inf, process)


def _our_tests(path: Path, process: subprocess.Popen[str], started: float) -> Iterator[Tested]:
    seen = 0
    while True:
        ended = process.poll() is not None
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[seen:]:
            row = json.loads(line)
            if "test_battle_won_mean" in row:
                won = float(row["test_battle_won_mean"])
                yield int(row["t_env"]), time.time() - started, cpu_seconds(process), won
        seen = len(lines)
        if ended:
            return
        time.sleep(0.2)


def theirs(seed: int, arguments: argparse.Namespace, limit: float) -> Finish:
    """Run JaxMARL's script in a process of its own for at most `limit` seconds."""
    command = [sys.executable, __file__, "--be-peer", str(seed), "--peer", arguments.peer, "--map", arguments.map]
    command += ["--t-max", str(arguments.t_max)]
    started = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return race(_their_tests(process, started), arguments.threshold, limit, process)


def _their_tests(process: subprocess.Popen[str], started: float) -> Iterator[Tested]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TESTED):
            _, steps, won = line.split()
            yield int(steps), time.time() - started, cpu_seconds(process), float(won)


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

    def logged(metrics: dict[str, object]) -> None:
        if int(metrics["update_steps"]) % every == 0:  # type: ignore[call-overload]
            won = float(metrics["test_returned_won_episode"])  # type: ignore[arg-type]
            print(TESTED, int(metrics["env_step"]), won, flush=True)  # type: ignore[call-overload]

    qmix_rnn.wandb.log = logged
    env, _ = qmix_rnn.env_from_config(config)
    train = jax.jit(jax.vmap(qmix_rnn.make_train(config, env)))
    jax.block_until_ready(train(jax.random.split(jax.random.PRNGKey(seed), 1)))


def middle(finished: list[Finish | None]) -> str:
    """Return the median of the seconds and of the CPU seconds; a side that did not get there is infinitely late."""
    late = [one for one in finished if one is not None]
    if not late:
        return "not run"
    seconds = median(one.seconds if one.reached else math.inf for one in late)
    return f"{seconds:.0f} s, CPU {median(one.cpu if one.reached else math.inf for one in late):.0f} s"


def main() -> None:
    """Race and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="JaxMARL checkout")
    parser.add_argument("--map", default="3m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--config", default="smax_qmix_fast", help="our preset")
    parser.add_argument("--t-max", type=int, default=3_000_000)
    parser.add_argument("--limit", type=float, default=math.inf, help="JaxMARL is stopped after this times our seconds")
    parser.add_argument("--results", default="results/benchmarks")
    parser.add_argument("--be-peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further key=value for our runs")
    arguments = parser.parse_args()
    if arguments.be_peer is not None:
        be_peer(arguments.be_peer, arguments)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| SMAX {arguments.map}, win rate {arguments.threshold} twice | ours | JaxMARL |\n|---|---|---|")
    finished: list[tuple[Finish, Finish | None]] = []
    for seed in arguments.seeds:
        mine = ours(seed, arguments)
        limit = arguments.limit * mine.seconds if mine.reached else math.inf
        finished.append((mine, theirs(seed, arguments, limit) if arguments.peer else None))
        print(f"| seed {seed} | {finished[-1][0]} | {finished[-1][1] or 'not run'} |", flush=True)
    print(f"| median | {middle([mine for mine, _ in finished])} | {middle([peer for _, peer in finished])} |")


if __name__ == "__main__":
    main()
