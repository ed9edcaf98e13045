"""Updates of fixed shapes: the updates of packed batches, without a value that the host reads, and as CUDA graphs."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fixed_toys import BATCH, CPU, METHODS, ROWS, draws, replay
from q_toys import INFO, equal, make_learner, state_of, toy_config
from simulated_gpu import DEVICE, OnGPU, simulated_gpu
from simulated_graphs import simulated_graphs
from torch import Tensor

from omagd.components.episode_buffer import ROUNDING
from omagd.learners.fixed_updates import WARM_UP, uses_graph_updates
from omagd.learners.nq_learner import NQGraphLearner, NQLearner
from omagd.run.launchers import Plan
from omagd.run.training.device import check_machine
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import FixedPacking

torch.set_num_threads(1)


def test_a_batch_of_fixed_shape_repeats_closing_rows():
    buffer = replay()
    for indices in draws(6):
        packed, drawn = buffer.batch(indices), buffer.fixed(indices)
        assert drawn.rows == min(-(-packed.packing.n_steps // ROUNDING) * ROUNDING, ROWS)
        assert buffer.fixed([*indices, indices[0]]).shape() != drawn.shape(), "one more"
        (fixed,) = drawn.batches(drawn.drawn, 1)
        assert isinstance(fixed.packing, FixedPacking)
        for name in packed.data:
            found = fixed[name].unflatten(0, (drawn.rows, BATCH))
            padded = packed.packing.pad(packed[name])
            for place, length in enumerate(packed.packing.lengths):
                of_episode = found[:, packed.sample_index[place]]
                assert torch.equal(of_episode[:length], padded[place, :length])
                assert (of_episode[length:] == padded[place, length - 1]).all()
        assert int(fixed.valid_mask.sum()) == int(packed.valid_mask.sum())
        halves = drawn.batches(drawn.drawn, 2)
        rewards = [part["reward"].view(drawn.rows, -1) for part in (*halves, fixed)]
        assert torch.equal(rewards[0], rewards[2][:, ::2])
        assert torch.equal(rewards[1], rewards[2][:, 1::2])


@pytest.mark.parametrize(
    ("method", "kind"),
    [*((name, torch.float64) for name in METHODS), ("qmix", torch.float32), ("units", torch.float32)],
)
def test_six_updates_are_those_of_packed_batches(method, kind):
    """The same episodes, targets copied on the way; statistics, weights, optimizer and targets."""
    config, buffer = toy_config(**METHODS[method], target_update_updates=4), replay()
    packed, fixed = (make_learner(config, dtype=kind) for _ in range(2))
    start = state_of(packed)
    tolerance = {"atol": 1e-10, "rtol": 0} if kind is torch.float64 else {"atol": 3e-4, "rtol": 1e-2}
    for indices in draws(6):
        wanted = packed.update(buffer.batch(indices), episodes=0)
        found = fixed.update(buffer.fixed(indices), episodes=0)
        assert list(found) == list(wanted)
        for name, (total, count) in wanted.items():
            assert float(found[name][1]) == float(count), name
            if kind is torch.float64:
                torch.testing.assert_close(found[name][0].double(), total.double(), **tolerance, msg=name)
    one, other = state_of(packed), state_of(fixed)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, **tolerance, msg=name)
    assert not equal(start, one)


def learner_on_gpu(seed: int = 0, **updates: Any) -> NQLearner:
    """Return a learner on the simulated GPU; equal seeds give the weights of `make_learner`."""
    return make_learner(toy_config(**updates), Dist(device=DEVICE), seed=seed, device=DEVICE)


CHEAP = {"mixer": "vdn", "agent": "ff"}
ON_GPU = {name: METHODS[name] for name in ("beliefs", "graphs")}
ON_GPU |= {"in parts, bf16": {"accumulate": 2, "precision": "bf16", "mixer": "none"}}


@pytest.mark.parametrize("method", ON_GPU)
def test_a_graph_learns_what_its_update_learns(method):
    """On the simulated GPU: replayed for other episodes, with targets copied in between.

    A capture fails where the host waits or copies, so no operation of the update does.
    """
    updates, drawn = {**ON_GPU[method], "target_update_updates": 4}, draws(WARM_UP + 3)
    with simulated_gpu() as gpu:
        plain, buffer = learner_on_gpu(**updates), replay(DEVICE, longest=6)
        wanted = [plain.update(buffer.fixed(indices), episodes=0) for indices in drawn]
        with simulated_graphs() as graphs:
            learner = learner_on_gpu(**updates)
            found, waits = [], []
            for indices in drawn:
                gpu.waits.clear()
                found.append(learner.update(buffer.fixed(indices), episodes=0))
                waits.append(sum(gpu.waits.values()))
        assert (graphs.captures, graphs.failed, graphs.replays) == (1, 0, 3)
        assert waits == [0, 0, 1, 0, 0], "one value is read when a graph is new"
        for one, other in zip(wanted, found, strict=True):
            assert list(one) == list(other)
            assert all(float(a) == float(b) for name in one for a, b in zip(one[name], other[name], strict=True))
        assert equal(on_cpu(plain), on_cpu(learner))
    assert learner.updates == len(drawn)
    assert learner._step.dist.waits.ticks >= len(drawn), "the watchdog sees no progress"


def on_cpu(learner: NQLearner) -> dict[str, Tensor]:
    return {name: value.value if isinstance(value, OnGPU) else value for name, value in state_of(learner).items()}


def test_graphs_are_made_again_where_what_they_read_has_moved():
    """The optimizer's state of a checkpoint, the memory of a cleared replay, longer episodes."""
    with simulated_gpu(), simulated_graphs() as graphs:
        learner, plain, buffer = learner_on_gpu(**CHEAP), learner_on_gpu(**CHEAP), replay(DEVICE)
        plain._fixed._captures = False
        by_length = np.argsort([len(episode["reward"]) for episode in buffer.episodes]).tolist()
        drawn = [by_length[:2]]

        def both() -> None:
            for _ in range(WARM_UP + 2):
                for each in (learner, plain):
                    each.update(buffer.fixed(drawn[-1]), episodes=0)

        changes: list[Callable[[], object]] = [
            lambda: [each.load_state_dict(copy.deepcopy(each.state_dict())) for each in (learner, plain)],
            lambda: buffer.restore([buffer.since(0)], buffer.added),
            lambda: drawn.append(by_length[-2:]),
        ]
        both()
        for made, change in enumerate(changes, start=1):
            assert graphs.captures == made
            change()
            both()
            assert equal(on_cpu(learner), on_cpu(plain)), made
        assert (graphs.captures, graphs.failed) == (len(changes) + 1, 0)


class Reads(NQLearner):
    """Reads a number on the host in each update, as a plug-in may."""

    def td_targets(self, values, batch):
        return super().td_targets(values, batch) * float(batch["reward"].sum() < 1e9)


@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_captured_is_learned_without_a_graph(caplog, late):
    """Late: an optimizer that waits for the norm, after gradients have been captured. They must not add up, which would
    not show in a clipped sum.
    """
    learners = []
    for graphs_there in (False, True):
        with simulated_gpu(), simulated_graphs() if graphs_there else contextlib.nullcontext() as graphs:
            learner, buffer = learner_on_gpu(**CHEAP, grad_norm_clip=1e9), replay(DEVICE, longest=6)
            if late:
                learner.optimizer._step_supports_amp_scaling = False
            else:
                learner.__class__ = Reads
            with caplog.at_level(logging.WARNING):
                for indices in draws(WARM_UP + 2):
                    learner.update(buffer.fixed(indices), episodes=0)
            learners.append(on_cpu(learner))
    assert equal(*learners)
    assert (graphs.captures, graphs.failed) == (1, 1)
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "graph_updates=False" in caplog.text
    assert "_local_scalar_dense" in caplog.text
    assert not any(group["capturable"] for group in learner.optimizer.param_groups)


def test_a_replay_counts_as_a_write_of_the_weights():
    """Kernels of a graph do not: acting agents would go on with tables of earlier weights."""
    learner = make_learner(toy_config())
    before = [parameter._version for parameter in learner._step.parameters]
    learner._step.replayed()
    assert all(p._version > old for p, old in zip(learner._step.parameters, before, strict=True))


def test_a_step_without_samples_changes_nothing_where_only_the_device_knows():
    with simulated_gpu():
        learner, buffer = learner_on_gpu(mixer="vdn"), replay(DEVICE, longest=6)
        draw = buffer.fixed(draws(1)[0])
        learner.update(draw, episodes=0)  # from here on, Adam moves weights without gradients, too
        before = {name: value.clone() for name, value in on_cpu(learner).items()}
        parts = draw.batches(draw.drawn.to(DEVICE), 1)
        learner._step(torch.zeros((), dtype=torch.int64).to(DEVICE), *(learner._part(part) for part in parts))
        assert equal(before, on_cpu(learner))


def test_where_updates_have_fixed_shapes():
    resident = {"runner": "resident", "buffer_cpu_only": False}
    for updates, device, ranks, expected in [
        (resident, DEVICE, 1, True),
        (resident, CPU, 1, False),
        ({**resident, "graph_updates": True}, CPU, 1, True),
        ({**resident, "graph_updates": False}, DEVICE, 1, False),
        (resident, DEVICE, 2, False),
    ]:
        assert uses_graph_updates(toy_config(**updates), device, ranks) is expected

    class Own(NQLearner):
        def update(self, batch, *, episodes):
            return super().update(batch, episodes=episodes)

    assert NQLearner.learns_from_draws() and NQGraphLearner.learns_from_draws()
    assert not Own.learns_from_draws()


@pytest.mark.parametrize(("updates", "ranks", "error"), [
    ({}, 1, "not of runner=parallel"),
    ({"runner": "resident"}, 1, "buffer_cpu_only=False"),
    ({"runner": "resident", "buffer_cpu_only": False}, 2, "one rank, not 2"),
    ({"runner": "resident", "buffer_cpu_only": False, "enable_gradient_checkpointing": True}, 1, "recompute"),
])  # fmt: skip
def test_fixed_shapes_that_cannot_be_are_one_line(updates, ranks, error):
    config = toy_config(graph_updates=True, **updates)
    with pytest.raises(UserError, match=error) as raised:
        check_machine(config, Plan(ranks, "gloo", cuda=False, joins=False), INFO)
    assert "graph_updates=True: " in raised.value.render()
    assert "\n" not in raised.value.render()
