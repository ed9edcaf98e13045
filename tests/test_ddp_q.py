"""Several ranks compute the same update as one process with the union of their episodes."""

from __future__ import annotations

import hashlib

import pytest
import torch
from ddp_harness import run_ranks
from plugin_toys import own_names
from q_toys import GRAPH, gradients_of, make_learner, random_episode, toy_config, weights_of
from test_ddpg import config_of as ddpg_config

from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
pytestmark = pytest.mark.processes
PLAIN = {"learner": "nq_learner_ddp", "target_update_updates": 7}
KINDS = {
    "qmix": PLAIN,
    "alone": {**PLAIN, "mixer": "none", "agent": "ff"},
    "parts": {**PLAIN, "accumulate": 3},  # the second rank has two episodes, so two parts
    "graph": {**PLAIN, **GRAPH, "mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "entity"},
    "flat_graph": {**PLAIN, **GRAPH, "mac": "n_graph_mac", "learner": "nq_graph_learner_ddp", "mixer": "vdn"},
}
for part, registry in (("agent", AGENTS), ("mixer", MIXERS)):  # whatever is registered and not among these
    compared = {toy_config(**updates).model_dump()[part] for updates in KINDS.values()}
    KINDS |= {name: {**PLAIN, part: name} for name in registry.names() if name not in compared}
# Different numbers of episodes and very different numbers of steps on each rank.
LENGTHS = [[9, 4, 4, 1, 7], [1, 2], [3], [6, 1, 2]]
UPDATES = 20


def episodes_of(rank, update):
    return [random_episode(1000 * update + 100 * rank + i, k, i % 2 == 1) for i, k in enumerate(LENGTHS[rank])]


def digest(learner):
    optimizer = learner.optimizer.state_dict()["state"]
    moments = [value for state in optimizer.values() for value in state.values()]
    everything = b"".join(value.numpy().tobytes() for value in [*weights_of(learner), *moments])
    return hashlib.sha256(everything).hexdigest()


def config_of(kind):
    return toy_config(**{"grad_norm_clip": 1e9, **KINDS[kind]})


def whole(kind):
    """The same configuration without accumulation: what one process computes in one piece."""
    return config_of(kind).model_copy(update={"accumulate": 1})


def train(learner, batches):
    """Update on each batch; return a digest after each and the weights at the end."""
    digests = []
    for i, episodes in enumerate(batches):
        learner.update(pack_episodes(episodes), episodes=10 * i)
        digests.append(digest(learner))
    return {"digests": digests, "weights": weights_of(learner)}


def greedy_actions(learner):
    batch = pack_episodes([random_episode(i, 8) for i in range(6)])
    q = learner.mac.agent(learner.mac.inputs(batch), batch.packing)
    return q.masked_fill(batch["avail_actions"] == 0, -torch.inf).argmax(-1)


def without_a_step(rank, learner):
    """One update in which rank 1 has no step to learn from, then one in which nobody has; digests."""
    last = [random_episode(5, 6)] if rank == 0 else [random_episode(6, 0)]
    return train(learner, [last, [random_episode(7, 0)]])["digests"]


def two_ranks(rank, dist, payload):
    """Everything that two ranks are asked, in one spawn."""
    out = {}
    for kind in KINDS:
        config = config_of(kind)
        for dtype in (torch.float32, torch.float64):
            learner = make_learner(config, dist=dist, dtype=dtype, seed=rank)
            out[kind, dtype] = gradients_of(learner, episodes_of(rank, 0))
        learner = make_learner(config, dist=dist, dtype=torch.float64)
        out[kind] = train(learner, [episodes_of(rank, i) for i in range(UPDATES)])
        out[kind]["actions"] = greedy_actions(learner)
        out[kind]["idle"] = without_a_step(rank, learner)
    broken = make_learner(config_of("qmix"), dist=dist)
    broken._step._wrapped = broken._step.loss_module
    out["unsynchronised"] = train(broken, [episodes_of(rank, 0)])["digests"]
    return out


def straight_and_resumed(rank, dist, payload):
    """Nine updates of the plain learner: in one go, and stopped after four and continued by another learner."""
    config = toy_config(**PLAIN)
    batches = [episodes_of(rank, i) for i in range(9)]
    straight = train(make_learner(config, dist=dist, seed=rank), batches)["digests"]
    stopped, resumed = make_learner(config, dist=dist, seed=rank), make_learner(config, dist=dist, seed=7)
    train(stopped, batches[:4])
    for name, module in stopped.modules().items():
        resumed.modules()[name].load_state_dict(module.state_dict())
    resumed.load_state_dict(stopped.state_dict())
    return straight, train(resumed, batches[4:])["digests"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(two_ranks)


def union(update):
    return [*episodes_of(0, update), *episodes_of(1, update)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_equal_those_of_the_union(ranks, kind, dtype, bound):
    wanted, stats = gradients_of(make_learner(whole(kind), dtype=dtype), union(0))
    for rank in ranks:
        got, _ = rank[kind, dtype]
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= bound * max(b.norm(), 1e-3)
    for name in ("loss_td", "td_error_abs", "q_taken_mean", "target_mean"):
        sums = [sum(rank[kind, dtype][1][name][i] for rank in ranks) for i in range(2)]
        torch.testing.assert_close(sums, list(stats[name]))
    assert ranks[0][kind, dtype][1]["grad_norm"] == ranks[1][kind, dtype][1]["grad_norm"]


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_equals_that_of_the_union(ranks, kind):
    learner = make_learner(whole(kind), dtype=torch.float64)
    alone = train(learner, [union(i) for i in range(UPDATES)])
    for rank in ranks:
        for a, b in zip(rank[kind]["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
        assert torch.equal(rank[kind]["actions"], greedy_actions(learner))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_equal_bit_for_bit_after_every_update(ranks, kind):
    first, second = (rank[kind] for rank in ranks)
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == UPDATES


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_step_takes_part_and_without_any_step_nobody_moves(ranks, kind):
    first, second = (rank[kind]["idle"] for rank in ranks)
    assert first == second
    # Targets are not due (7 does not divide 21 + 1), so the second update changes nothing at all.
    assert first[1] == first[0] != ranks[0][kind]["digests"][-1]


def test_every_registered_learner_is_compared_with_one_process():
    compared = {config_of(kind).learner for kind in KINDS} | {ddpg_config().learner}
    assert {name.removesuffix("_ddp") for name in compared} == {
        name.removesuffix("_ddp") for name in own_names(LEARNERS)
    }


def test_the_comparison_catches_a_forward_through_the_bare_module(ranks):
    assert ranks[0]["unsynchronised"] != ranks[1]["unsynchronised"]


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_are_equal_bit_for_bit_after_every_update_and_when_resumed(world_size):
    (straight, resumed), *others = run_ranks(straight_and_resumed, world_size=world_size)
    assert len(set(straight)) == 9
    assert all(other == (straight, resumed) for other in others)
    assert resumed == straight[4:]
