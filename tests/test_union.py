"""What ranks have played of a set of maps, however it was dealt, updates as one process with all of it would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_harness import run_ranks
from interruption import stage_of
from plugin_toys import own_names
from q_toys import equal, make_learner, state_of

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.learners import REGISTRY as LEARNERS
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, RecordedEpisode, pack_episodes

pytestmark = pytest.mark.processes
torch.set_num_threads(1)
SMALL = {
    "env_args.map_name": ["2m_vs_1m", "3m_vs_2m", "4m_vs_2m"], "use_cuda": False, "rnn_hidden_dim": 8,
    "batch_size_run": 4, "batch_size": 4, "checkpoint_interval": 10**6, "grad_norm_clip": 1e9,
}  # fmt: skip
GROUPS = {
    "agent": "hpn_rnn", "obs_agent_id": False, "group_size": 2, "learner_args.epochs": 2, "learner_args.minibatches": 1,
    "enable_dynamic_sampling": True, "max_sampling_attempts": 1,
}  # fmt: skip
LEARNING: dict[str, dict[str, Any]] = {
    "hpn_mappo": {"learner_args.epochs": 2, "learner_args.minibatches": 1},
    "hpn_qmix": {"updates_per_iteration": 2},
    "rloo": GROUPS,
    "pqn": {"learner": "pqn_learner", "learner_args.epochs": 2, "learner_args.minibatches": 1},
    "wqmix": {"learner": "wqmix_learner", "updates_per_iteration": 2},
}
DEALINGS: dict[str, dict[str, Any]] = {
    "round_robin": {},
    "sharded": {"task_weights": {"2m_vs_1m": 2.0}},
}
CASES = [
    ("hpn_mappo", "round_robin"), ("hpn_qmix", "sharded"), ("rloo", "round_robin"), ("rloo", "sharded"),
    ("pqn", "sharded"), ("wqmix", "round_robin"),
]  # fmt: skip


def config_of(preset: str, dealing: str) -> Config:
    updates = {"task_dealing": dealing, **DEALINGS[dealing], **LEARNING[preset]}
    preset = preset if preset in {"hpn_mappo", "rloo"} else "hpn_qmix"
    return resolve(preset, "skirmish", {**SMALL, **updates})


def episodes_of(batch: PackedBatch) -> list[RecordedEpisode]:
    """Return the episodes of a batch one by one."""
    found = []
    for number, meta in enumerate(batch.meta):
        rows = (batch.packing.episode == number).nonzero().flatten()
        found.append(RecordedEpisode({name: value[rows].clone() for name, value in batch.data.items()}, meta))
    return found


def played(stage: RLStage) -> list[PackedBatch]:
    """Return the batches of this rank's first update."""
    stage.collect()
    while not stage.ready():
        stage.advance()
        stage.collect()
    batches = stage.data.batches()
    return [next(batches) for _ in range(stage.data.batches_per_iteration)]


def of_ranks(rank: int, dist: Dist, place: str) -> dict[tuple[str, str], Any]:
    """Return for each case this rank's batches, the learner's state after them, and what was dropped."""
    out = {}
    for preset, dealing in CASES:
        config = config_of(preset, dealing)
        stage = stage_of(config, Path(place) / f"{preset} {dealing}", dist)
        batches, info = played(stage), stage.session.info
        dropped = getattr(stage.data, "_dropped", 0)
        stage.session.close()
        learner = make_learner(config, dist, torch.float64, info=info)
        for batch in batches:
            learner.update(batch, episodes=0)
        out[preset, dealing] = [episodes_of(batch) for batch in batches], state_of(learner), dropped, info
    return out


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of two ranks."""
    return run_ranks(of_ranks, str(tmp_path_factory.mktemp("walks")), world_size=2)


@pytest.mark.parametrize(("preset", "dealing"), CASES)
def test_ranks_equal_one_process_with_all_that_they_played(preset, dealing, walks):
    found = [rank[preset, dealing] for rank in walks]
    states = [state for _, state, _, _ in found]
    assert all(equal(states[0], other) for other in states[1:])
    alone = make_learner(config_of(preset, dealing), None, torch.float64, info=found[0][3])
    before = state_of(alone)
    for parts in zip(*(batches for batches, *_ in found), strict=True):
        alone.update(pack_episodes([episode for part in parts for episode in part]), episodes=0)
    for name, value in state_of(alone).items():
        torch.testing.assert_close(states[0][name], value, atol=1e-10, rtol=0, msg=name)
    assert not equal(before, states[0]), "nothing was learned"
    if preset == "rloo":
        assert sum(rank[case][2] for rank in walks for case in CASES if case[0] == preset), "no group was dropped"


def test_every_learner_that_plays_sets_is_among_these():
    """Learners of reconstructed graphs and of steps play one map; tests/test_ddp.py has every learner."""
    known = {config_of(*case).learner for case in CASES}
    names = {name.removesuffix("_ddp") for name in own_names(LEARNERS) if "graph" not in name and "ddpg" not in name}
    assert names == known
