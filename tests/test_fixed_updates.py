"""Updates of fixed shapes: the updates of packed batches, without a value that the host reads, and as CUDA graphs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ddpg_toys import make_ddpg
from fixed_toys import (
    BATCH,
    CPU,
    DDPG,
    METHODS,
    ON_POLICY,
    ROWS,
    data_of,
    draws,
    growing,
    iterations,
    replay,
    steps_replay,
)
from q_toys import BOXED, INFO, equal, make_learner, random_episode, state_of, toy_config
from simulated_gpu import DEVICE, OnGPU, simulated_gpu, simulated_graphs

from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.nq_learner import NQLearner
from omagd.resident.replay import ROUNDING, FixedPacking, ResidentBuffer, StagedBuffer
from omagd.resident.updates import WARM_UP, FixedUpdates, why_packed
from omagd.run.launchers import Plan
from omagd.run.training.device import check_machine
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError


@pytest.mark.parametrize("kind", [ResidentBuffer, StagedBuffer])
def test_a_batch_of_fixed_shape_repeats_closing_rows(kind):
    buffer = replay(kind=kind)
    for indices in draws(6):
        packed, drawn = buffer.batch(indices), buffer.fixed(indices)
        assert drawn.rows == min(-(-packed.packing.n_steps // ROUNDING) * ROUNDING, ROWS)
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
    config = toy_config(**METHODS[method], target_update_interval=200)
    assert_equal_updates([make_learner(config, dtype=kind) for _ in range(2)], replay(), kind)


@pytest.mark.parametrize("method", DDPG)
def test_six_updates_of_ddpg_are_those_of_packed_batches(method):
    assert_equal_updates([make_ddpg(**DDPG[method]) for _ in range(2)], steps_replay(**DDPG[method]), torch.float64)


def assert_equal_updates(learners: list[Any], buffer: Any, kind: torch.dtype) -> None:
    """Compare six updates of packed batches with those of fixed shapes."""
    packed, fixed = learners
    start, draws_of = state_of(packed), FixedUpdates(fixed)
    tolerance = {"atol": 1e-10, "rtol": 0} if kind is torch.float64 else {"atol": 3e-4, "rtol": 1e-2}
    for number, indices in enumerate(draws(6), start=1):
        wanted = packed.update(buffer.batch(indices), episodes=50 * number)
        found = draws_of.update(buffer.fixed(indices), episodes=50 * number)
        assert list(found) == list(wanted)
        for name, (total, count) in wanted.items():
            assert float(found[name][1]) == float(count), name
            if kind is torch.float64:
                torch.testing.assert_close(found[name][0].double(), total.double(), **tolerance, msg=name)
    assert not equal(start, one := state_of(packed))
    torch.testing.assert_close(state_of(fixed), one, **tolerance)


@pytest.mark.parametrize("method", ON_POLICY)
def test_six_on_policy_updates_are_those_of_packed_batches(method):
    """Also where nobody has a choice in a minibatch, and without any group; memory is kept from batch to batch."""
    config, memory = toy_config(**ON_POLICY[method]), set()
    packed, fixed = (make_learner(config, dtype=torch.float64) for _ in range(2))
    start, updates = state_of(packed), FixedUpdates(fixed)
    buffers = EpisodeBuffer(UNLIMITED), growing()
    sources = [data_of(config, buffer) for buffer in buffers]
    for episodes in iterations():
        for source in sources:
            source.add(episodes)
        (wanted,), (found,) = ([*source.batches()] for source in sources)
        memory.add(found.buffer.layout())
        wanted, found = packed.update(wanted, episodes=0), updates.update(found, episodes=0)
        assert list(found) == list(wanted) and fixed.updates == packed.updates > 0
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0, check_dtype=False)
    torch.testing.assert_close(state_of(fixed), one := state_of(packed), atol=1e-10, rtol=0)
    assert not equal(start, one) and fixed.state_dict().get("steps") == packed.state_dict().get("steps")
    assert len(memory) <= 3, "16, 32, 64 episodes"


CHEAP = {"mixer": "vdn", "agent": "ff"}


@pytest.fixture
def graphs(monkeypatch):
    """Stand-ins for CUDA graphs, which repeat the operations of a capture; tests/gpu has real ones."""
    seen = SimpleNamespace(made=0, problem="")
    made = FixedUpdates._made

    def counted(fixed, *given):
        seen.made += 1
        if seen.problem == "fails":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        graph = made(fixed, *given)
        if seen.problem == "differs":
            graph.replay = lambda: None
        return graph

    monkeypatch.setattr(FixedUpdates, "_made", counted)
    with simulated_graphs():
        yield seen


def both_kinds(**updates: Any) -> tuple[FixedUpdates, FixedUpdates]:
    """Return the updates of equal learners on a GPU: those that make graphs, and those that do not."""
    config = toy_config(**updates)
    graph, plain = (FixedUpdates(make_learner(config, Dist(device=DEVICE), device=DEVICE)) for _ in range(2))
    plain._capture = lambda shape, draw, inputs: plain._aside(draw, inputs)  # type: ignore[method-assign]
    return graph, plain


def equal_weights(one: FixedUpdates, other: FixedUpdates) -> bool:
    return equal(*({name: value.to(CPU) for name, value in state_of(each._learner).items()} for each in (one, other)))


@pytest.mark.parametrize(("method", "kind"), [
    ("cheap", StagedBuffer), ("beliefs", ResidentBuffer), ("recomputed", ResidentBuffer), ("mappo", ResidentBuffer),
])  # fmt: skip
def test_a_graph_learns_what_its_update_learns(graphs, method, kind):
    """Replayed for other episodes, with targets copied in between; the first update of a graph counts once.

    On policy, minibatches and learning rate follow the number of updates, which the host counts.
    """
    graph, plain = both_kinds(**{"cheap": CHEAP, **METHODS, **ON_POLICY}[method], target_update_updates=4)
    buffer, drawn = replay(DEVICE, longest=6, kind=kind), draws(WARM_UP + 3)
    read = buffer.whole if method in ON_POLICY else buffer.fixed
    both = [[each.update(read(indices), episodes=0) for indices in drawn] for each in (graph, plain)]
    for found, wanted in zip(*both, strict=True):  # a later replay changes no earlier statistics
        assert {name: (float(a), float(b)) for name, (a, b) in found.items()} == {
            name: (float(a), float(b)) for name, (a, b) in wanted.items()
        }
    assert graphs.made == 1 and equal_weights(graph, plain)
    assert graph._learner.updates == plain._learner.updates > 0
    assert graph._steps[0].dist.waits.ticks >= len(drawn), "the watchdog sees no progress"


def test_graphs_are_made_again_where_what_they_read_has_moved(graphs):
    """The optimizer's state of a checkpoint, the memory of a cleared replay, longer episodes."""
    (graph, plain), buffer = both_kinds(**CHEAP), replay(DEVICE)
    by_length = np.argsort([len(episode["reward"]) for episode in buffer.episodes]).tolist()
    drawn = by_length[:2]
    for made in range(1, 5):
        for _ in range(WARM_UP + 2):
            for each in (graph, plain):
                each.update(buffer.fixed(drawn), episodes=0)
        assert graphs.made == made and equal_weights(graph, plain)
        if made == 1:
            for learner in (graph._learner, plain._learner):
                learner.load_state_dict(copy.deepcopy(learner.state_dict()))
        elif made == 2:
            buffer.restore([buffer.since(0)], buffer.added)
        else:
            drawn = by_length[-2:]


def test_a_graph_follows_the_learning_rate(graphs):
    """Another one needs no other graph, and saved states hold a number."""
    (graph, plain), buffer = both_kinds(**CHEAP), replay(DEVICE, longest=6)
    for number, indices in enumerate(draws(WARM_UP + 4)):
        for each in (graph, plain):
            each._learner.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            each.update(buffer.fixed(indices), episodes=0)
    saved = graph._learner.state_dict()["optimizer"]["param_groups"][0]
    assert graphs.made == 1 and equal_weights(graph, plain)
    assert (saved["lr"], saved["capturable"]) == (0.1 / (WARM_UP + 4), False)


@pytest.mark.parametrize(("problem", "reason"), [("fails", "when stream is capturing)"), ("differs", "differs")])
def test_what_cannot_be_captured_is_learned_from_packed_batches(graphs, caplog, problem, reason):
    graphs.problem = problem
    (graph, plain), buffer = both_kinds(**CHEAP), replay(DEVICE, longest=6)
    for number, indices in enumerate(draws(WARM_UP + 2)):
        graph.update(buffer.fixed(indices), episodes=0)
        if number < WARM_UP + (problem == "differs"):
            plain.update(buffer.fixed(indices), episodes=0)
        else:
            plain._learner.update(buffer.batch(indices), episodes=0)
    assert equal_weights(graph, plain) and graphs.made == 1
    (record,) = caplog.records
    assert "packed batches" in record.message and reason in record.message and "\n" not in record.message


def test_a_plugin_that_reads_packings_as_documented_learns_from_packed_batches(graphs, monkeypatch):
    class Own(NQLearner):
        def targets(self, q, inputs, batch, state):
            assert torch.tensor(batch.sample_index)[batch.packing.episode].shape == batch["reward"].shape
            return super().targets(q, inputs, batch, state)

    monkeypatch.setitem(LEARNERS._objects, "own", Own)
    (own, _), (plain, _) = both_kinds(**CHEAP, learner="own"), both_kinds(**CHEAP)
    buffer = replay(DEVICE, longest=6)
    for indices in draws(2):
        own.update(buffer.fixed(indices), episodes=0)
        plain._learner.update(buffer.batch(indices), episodes=0)
    assert equal_weights(own, plain)


@pytest.mark.parametrize("method", ["gumbel in parts", "matd3"])
def test_a_graph_learns_what_ddpg_learns(graphs, method):
    """With noise that is another one in each update, and targets that follow each, as on a CPU."""
    made = [make_ddpg(Dist(device=to), torch.float32, device=to, **DDPG[method]) for to in (DEVICE, DEVICE, CPU)]
    graph, plain, on_cpu = map(FixedUpdates, made)
    plain._capture = lambda shape, draw, inputs: plain._aside(draw, inputs)
    buffers = {to: steps_replay(to, 6, **DDPG[method]) for to in (DEVICE, CPU)}
    for indices in draws(WARM_UP + 3):
        for each in (graph, plain, on_cpu):
            each.update(buffers[each._device].fixed(indices), episodes=0)
    assert graphs.made == 1 and equal_weights(graph, plain)
    for name, value in state_of(made[2]).items():
        torch.testing.assert_close(state_of(made[0])[name].to(CPU), value, atol=1e-3, rtol=0, msg=name)


@pytest.mark.parametrize(
    "method",
    ["qmix", "beliefs", "graphs", "units", "in parts", "central weights", "qplex", "hpn_mappo", "rloo", "pqn"],
)
def test_an_update_waits_for_nothing_on_a_gpu(method):
    """So a graph of it can be captured; the simulated GPU counts waits and copies."""
    with simulated_gpu() as gpu:
        config = toy_config(**{"target_update_updates": 4, **{**METHODS, **ON_POLICY}[method]})
        learner, buffer = make_learner(config, Dist(device=DEVICE), device=DEVICE), replay(DEVICE, longest=6)
        updates, read = FixedUpdates(learner), buffer.whole if method in ON_POLICY else buffer.fixed
        for indices in draws(2):
            gpu.waits.clear()
            updates.update(read(indices), episodes=0)
        assert not gpu.waits, gpu.waits


@pytest.mark.parametrize("selector", ["softmax", "tanh_gaussian"])
def test_an_update_of_continuous_actions_waits_for_nothing_on_a_gpu(selector):
    with simulated_gpu() as gpu:
        config = toy_config(learner="ppo_learner", mixer="none", action_selector=selector)
        learner, buffer = make_learner(config, Dist(device=DEVICE), device=DEVICE, info=BOXED), growing(DEVICE)
        updates = FixedUpdates(learner)
        for number in range(2):
            buffer.restore([], buffer.added)
            buffer.add([random_episode(number + 2 * i, 3 + i, info=BOXED) for i in range(4)])
            gpu.waits.clear()
            updates.update(buffer.whole(range(4)), episodes=0)
        assert not gpu.waits, gpu.waits


def test_a_replay_counts_as_a_write_of_the_weights():
    """Kernels of a graph do not: acting agents would go on with tables of earlier weights."""
    learner = make_learner(toy_config())
    before = [parameter._version for parameter in learner.step.parameters]
    learner.step.replayed()
    assert all(p._version > old for p, old in zip(learner.step.parameters, before, strict=True))


def test_a_step_without_samples_changes_nothing_where_only_the_device_knows():
    with simulated_gpu():
        learner = make_learner(toy_config(mixer="vdn"), Dist(device=DEVICE), device=DEVICE)
        buffer = replay(DEVICE, longest=6)
        draw = buffer.fixed(draws(1)[0])
        FixedUpdates(learner).update(draw, episodes=0)  # from here on, Adam moves weights without gradients, too
        before = {name: value.value.clone() for name, value in state_of(learner).items() if isinstance(value, OnGPU)}
        parts = draw.batches(draw.drawn.to(DEVICE), 1)
        learner.step(torch.zeros((), dtype=torch.int64).to(DEVICE), *(learner._part(part) for part in parts))
        assert before and all(torch.equal(state_of(learner)[name].value, value) for name, value in before.items())


def test_where_updates_have_fixed_shapes(monkeypatch):
    class Own(NQLearner):
        def update(self, batch, *, episodes):
            return super().update(batch, episodes=episodes)

    monkeypatch.setitem(LEARNERS._objects, "own", Own)
    for updates, reason in [
        ({}, ""),
        ({"learner": "nq_graph_learner"}, ""),
        *((made, "") for made in ON_POLICY.values()),
        ({"learner": "own"}, "learner=own has no update of fixed shapes"),
        ({"graph_updates": False}, "graph_updates=False"),
    ]:
        assert why_packed(toy_config(**updates)) == reason
    with pytest.raises(UserError, match="graph_updates=True: learner=own has no") as raised:
        check_machine(toy_config(graph_updates=True, learner="own"), Plan(1, "gloo", cuda=False, joins=False), INFO)
    assert "\n" not in raised.value.render()
