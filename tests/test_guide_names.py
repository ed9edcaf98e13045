"""The tables of other guides' names in docs/many_machines.md have all of them, and what they name here exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import omagd
from omagd.config.loading import known_keys, resolve

# Keys of the guide, section by section; its log files; its metrics.
KEYS = """
    enabled backend timeout_seconds find_unused_parameters bucket_cap_mb
    sync_every_n_steps enable_gradient_checkpointing async_data_loading
    enable_task_sharding balance_tasks_across_gpus min_tasks_per_gpu task_names_to_use
    enable_torch_compile max_memory_per_gpu_gb prefetch_factor num_workers pin_memory use_mixed_precision
    enable_checkpointing checkpoint_interval max_checkpoints_to_keep auto_resume resume_from_latest
    profile_performance log_memory_usage save_intermediate_results distributed_debug
    rloo_batch_size data_batch_size lr lr_scaling
""".split()
FILES = """
    distributed_training_<date>_node<R>.log train_rank_<r>.log distributed_training_results.json
    checkpoint_step_10.pth checkpoint_latest.pth
""".split()
METRICS = ("training speed", "memory per GPU", "GPU use", "communication time", "success rate", "loss")
ELSEWHERE = {"logs/launch_<date>_node<R>.log", "launch.sh", "gpu/use", "memory/gpu_mb", "memory/gpu_peak_mb",
             "communicate_ms_per_sync", "loss_ppo"}  # fmt: skip
"""What a run on one CPU does not make: of a launcher, of GPUs, of several ranks, of another learner."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "many_machines.md"


def tables() -> list[list[tuple[str, str]]]:
    """Return the rows (there, here) of both tables of names."""
    text = PAGE.read_text().split("## Names of other guides")[1].split("Differences from these guides")[0]
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[tuple(cell.strip() for cell in line.strip("|\n").split("|")) for line in b.splitlines()] for b in blocks]
    return [block[2:] for block in rows]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_key_of_the_guide_is_there_and_means_a_key_of_ours():
    keys, _ = tables()
    assert sorted(word for there, _ in keys for word in words(there)) == sorted(KEYS)
    values = {"none", "round_robin", "sharded", "queue"}
    for _, here in keys:
        named = [re.split(r"[=.]", word)[0] for word in words(here)]
        assert set(named) <= {*known_keys(), *values}, here
        assert set(named) & set(known_keys()) or here.startswith(("no ", "always")), here
    settings = [word.split("=") for _, here in keys for word in words(here) if "=" in word]
    for key, value in settings:
        resolve("qmix", updates={key: {"True": True, "False": False, "1": 1}.get(value, value)})


def test_every_log_and_metric_of_the_guide_is_there_and_a_run_makes_ours(tmp_path):
    _, outputs = tables()
    there = " ".join(cell for cell, _ in outputs)
    assert [word for cell, _ in outputs for word in words(cell)] == FILES
    assert all(metric in there for metric in METRICS)
    sizes = {"batch_size_run": 2, "batch_size": 2, "buffer_size": 4, "test_nepisode": 2, "rnn_hidden_dim": 8}
    times = {"t_max": 40, "log_interval": 20, "runner_log_interval": 20, "learner_log_interval": 20}
    saved = {"checkpoint_interval": 0, "sync_every_n_steps": 1, "local_results_path": str(tmp_path)}
    agents = {"agent": "hpn_rnn", "mixer": "vdn", "obs_agent_id": False, "env_args.map_name": ["3m", "4m"]}
    config = resolve("qmix", "skirmish", {**sizes, **times, **saved, **agents, "use_cuda": False})
    folder = Path(omagd.run(config)["folder"])
    logged = {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    summary = json.loads((folder / "summary.json").read_text())
    for word in {word for _, here in outputs for word in words(here)} - ELSEWHERE:
        place = re.sub(r"<(?:r|iteration|t_env)>", "*", word).rstrip("/")
        made = list(folder.glob(place)) or word in summary or word.replace("<map>", "4m") in logged
        assert made, f"{word} is named in {PAGE.name}, but the run has made nothing of that name"
    assert summary["tasks"]["4m"]["visits"] > 0
