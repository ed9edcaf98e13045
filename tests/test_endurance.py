"""A run of many short iterations: what it holds does not grow with them. benchmarks/endurance.py is the long form."""

from __future__ import annotations

import gc
import os
import sys
import threading

import numpy as np
import pytest
import torch

from omagd.config.loading import resolve
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.launch.launcher import launch
from omagd.run.memory_budget import resident_bytes

TINY = {
    "run": "default", "use_cuda": False, "batch_size_run": 2, "batch_size": 4, "buffer_size": 8, "t_max": 10**9,
    "updates_per_iteration": 1, "rnn_hidden_dim": 8, "mixing_embed_dim": 4, "hypernet_embed": 4, "test_nepisode": 2,
    "test_interval": 20, "log_interval": 10, "runner_log_interval": 10, "learner_log_interval": 10,
    "save_model_interval": 100, "checkpoint_interval": 0.0,
}  # fmt: skip
EVERY, SAMPLES = 40, 8


class EnoughError(Exception):
    """Ends the run."""


class Sampler:
    """Called at the end of each iteration: notes what the process holds every now and then, then ends the run."""

    def __init__(self, ending) -> None:
        self.ending, self.calls = ending, 0
        self.objects, self.blocks, self.resident, self.files, self.threads = [], [], [], [], []

    def __call__(self, checkpointer, stage) -> None:
        self.ending(checkpointer, stage)
        self.calls += 1
        if self.calls % EVERY == 0:
            checkpointer.finish()
            gc.collect()
            self.objects.append(len(gc.get_objects()))
            self.blocks.append(sys.getallocatedblocks())
            self.resident.append(resident_bytes())
            self.files.append(len(os.listdir("/proc/self/fd")))
            self.threads.append(threading.active_count())
        if self.calls == EVERY * SAMPLES:
            raise EnoughError


def test_nothing_grows_with_the_iterations(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    sampler = Sampler(Checkpointer.boundary)
    monkeypatch.setattr(Checkpointer, "boundary", lambda checkpointer, stage: sampler(checkpointer, stage))
    config = resolve("qmix", "matrix_game", {**TINY, "local_results_path": str(tmp_path)})
    with pytest.raises(EnoughError):
        launch(config, "endurance")
    # What leaks grows from each sample to the next; what is made once, late, does not.
    middle = SAMPLES // 2
    assert not all(grown >= EVERY // 2 for grown in np.diff(sampler.objects[middle - 1 :]))
    assert not all(grown >= EVERY for grown in np.diff(sampler.blocks[middle - 1 :]))
    assert sampler.resident[-1] < 1.02 * sampler.resident[middle - 1]
    assert len(set(sampler.files[1:])) == len(set(sampler.threads[1:])) == 1
