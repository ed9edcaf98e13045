"""Whole runs on a GPU: twice the same bits, killed and continued, ranks by NCCL and gloo."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from command_harness import MAIN, PYTHON, Started, run_command
from run_equality import differences

if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

RESIDENT = ("runner=resident", "buffer_cpu_only=False", "batch_size_run=64", "batch_size=32", "t_max=60000")
FEW = ("batch_size_run=32", "batch_size=16", "log_interval=2000", "learner_log_interval=2000", "test_interval=8000")
STAGES = (
    "graph_pretrain_episodes=64", "graph_pretrain_eval_episodes=16", "graph_pretrain_batch_size=16", "t_max=8000",
    "graph_pretrain_epochs=4",
)  # fmt: skip
RUNS = {
    "qmix": ("qmix", ("t_max=16000",)),
    "qmix, resident": ("qmix", (*RESIDENT, "standardise_rewards=True")),
    "qmix, by errors": ("qmix", (*RESIDENT, "use_per=True", "q_lambda=True", "optimizer=rmsprop")),
    "mappo, resident": ("mappo", (*RESIDENT, "resident_slots=24")),
    "rloo, resident": ("rloo", (*RESIDENT, "group_size=8", "learner_args.score=return")),
    "mappo": ("mappo", ("t_max=16000",)),
    "omagd_small": ("omagd_small", STAGES),
}


def words(config, *more):
    """Return a command: with -u it starts a process of its own, and is not forked from one that may have used CUDA."""
    start = [PYTHON, "-u", MAIN, f"--config={config}", "--env-config=skirmish", "with", "env_args.map_name=3m"]
    return [*start, *FEW, *more]


def saved(folder):
    """Return how many checkpoints a run has completed and how many lines it has logged."""
    lines = folder / "metrics.jsonl"
    logged = lines.read_text().splitlines() if lines.exists() else []
    return len(list(folder.glob("checkpoints/*/manifest.json"))), len(logged)


@pytest.mark.parametrize("case", RUNS)
def test_two_starts_and_a_killed_run_leave_the_same_bits(case, tmp_path):
    config, more = RUNS[case]
    more = (*more, f"local_results_path={tmp_path}", "test_nepisode=8", "checkpoint_interval=0.2")
    runs = {name: Started(words(config, *more, f"unique_token={name}"), tmp_path) for name in ("one", "two", "killed")}
    killed, until = tmp_path / "killed", time.monotonic() + 120
    while runs["killed"].process.poll() is None and time.monotonic() < until:
        checkpoints, lines = saved(killed)
        if checkpoints and lines > 2:
            break
        time.sleep(0.02)
    assert runs["killed"].process.poll() is None, "ended before it was killed"
    os.killpg(runs["killed"].group, signal.SIGKILL)
    runs["killed"].wait()
    continued = run_command(words(config, *more, "unique_token=killed", "auto_resume=True"), tmp_path)
    assert "Compiling" not in continued.text, "kernels are compiled once"
    for name in ("one", "two"):
        assert (ended := runs[name].wait()).code == 0, ended.text
    assert json.loads((killed / "card.json").read_text())["resumed"]
    assert differences(tmp_path / "one", tmp_path / "two") == []
    assert differences(tmp_path / "one", killed) == []


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_ranks_train_and_a_warning_free_log_says_on_what(ranks, backend, tmp_path):
    more = ("run=ddp", f"world_size={ranks}", f"dist_backend={backend}", "t_max=6000", f"local_results_path={tmp_path}")
    ended = run_command(words("qmix", *more, "unique_token=run"), tmp_path)
    assert json.loads((tmp_path / "run" / "card.json").read_text())["recorded"]["device"].startswith("cuda")
    assert "not part of single contiguous chunk" not in ended.text and "CUDA graph of them failed" not in ended.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_state"] == "completed"
