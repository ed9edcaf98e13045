"""Several ranks compute the same update as one process with the union of their episodes, for every learner."""

from __future__ import annotations

import pytest
import torch
from ddp_harness import run_ranks
from ddpg_toys import ddpg_config, make_ddpg, random_steps
from example_plugins import add_example
from plugin_toys import own_names
from q_toys import GRAPH, copy_learner, equal, gradients_of, make_learner, random_episode, state_of, toy_config

from omagd.learners import REGISTRY as LEARNERS
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.kernels import compiling
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
pytestmark = pytest.mark.processes
PLAIN = {"learner": "nq_learner_ddp", "target_update_updates": 5}
KINDS = {
    "qmix": PLAIN,
    "alone": {**PLAIN, "mixer": "none", "agent": "ff"},
    "parts": {**PLAIN, "accumulate": 3},  # the second rank has two episodes, so two parts
    "graph": {**PLAIN, **GRAPH, "mac": "gnn_graph_mac", "agent": "gnn_rnn", "gnn_readout": "entity"},
    "flat_graph": {**PLAIN, **GRAPH, "mac": "n_graph_mac", "learner": "nq_graph_learner_ddp", "mixer": "vdn"},
    "compiled": {**PLAIN, "compile": True},
    "qplex": {**PLAIN, "mixer": "qplex", "mixer_args": {"n_heads": 2, "hidden_dim": 8}},
}
for part, registry in (("agent", AGENTS), ("mixer", MIXERS)):  # everything registered that is not among these
    compared = {toy_config(**updates).model_dump()[part] for updates in KINDS.values()}
    KINDS |= {name: {**PLAIN, part: name} for name in registry.names() if name not in compared}
DDPG = {
    "DDPG": {},
    "DDPG bicnet": {"agent": "bicnet"},
    "DDPG gumbel": {"gumbel_softmax": True},
    "DDPG parts": {"accumulate": 3},
}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
TRAINED = [kind for kind in (*KINDS, *DDPG) if kind != "compiled"]
# Different numbers of episodes and very different numbers of steps on each rank.
LENGTHS = [[9, 4, 4, 1, 7], [1, 2], [3]]
UPDATES = dict.fromkeys(TRAINED, 6) | {"qmix": 20, "graph": 20}


def make(kind, dist=None, dtype=torch.float64, seed=0, **more):
    if kind in DDPG:
        return make_ddpg(dist, dtype, seed, **{**DDPG[kind], **more})
    return make_learner(toy_config(**{"grad_norm_clip": 1e9, **KINDS[kind], **more}), dist=dist, dtype=dtype, seed=seed)


def alone(kind, dtype=torch.float64):
    """One process that learns each batch in one piece, without compiling."""
    return make(kind, dtype=dtype, accumulate=1, compile=False)


def episodes_of(kind, rank, update):
    if kind in DDPG:
        return random_steps(1000 * update + rank, [6, 2, 1][rank])
    return [random_episode(1000 * update + 100 * rank + i, k, i % 2 == 1) for i, k in enumerate(LENGTHS[rank])]


def union(kind, update):
    return [episode for rank in range(len(LENGTHS)) for episode in episodes_of(kind, rank, update)]


def train(learner, batches):
    """Update on each batch; return the learner's state after each."""
    states = []
    for i, episodes in enumerate(batches):
        learner.update(pack_episodes(episodes), episodes=10 * i)
        states.append(state_of(learner))
    return states


def without_a_step(kind, rank):
    """Return a batch in which only rank 0 has steps to learn from, then one in which no rank has."""
    if kind in DDPG:
        return [random_steps(1, 3 if rank == 0 else 1, int(rank == 0)), random_steps(2, 1, 0)]
    return [[random_episode(5, 6)] if rank == 0 else [random_episode(6, 0)], [random_episode(7, 0)]]


def of_ranks(rank, dist, kinds):
    """Train each kind, and once more from a checkpoint in the middle."""
    add_example()
    compiling.BACKEND = "aot_eager"  # which needs no compiler
    out = {}
    for kind in kinds:
        if kind not in DDPG:
            for dtype in BOUNDS if kind in TRAINED else (torch.float64,):
                out[kind, dtype] = gradients_of(make(kind, dist, dtype, seed=rank), episodes_of(kind, rank, 0))
        if kind not in TRAINED:
            continue
        batches = [episodes_of(kind, rank, i) for i in range(UPDATES[kind])]
        learner, resumed = make(kind, dist, seed=rank), make(kind, dist, seed=7)
        out[kind] = train(learner, batches[:3])
        copy_learner(learner, resumed)
        out[kind] += train(learner, batches[3:])
        out[kind, "resumed"] = train(resumed, batches[3:])
        out[kind, "idle"] = train(learner, without_a_step(kind, rank))
    broken = make("qmix", dist)
    broken._step._wrapped = broken._step.loss_module
    out["unsynchronised"] = train(broken, [episodes_of("qmix", rank, 0)])
    return out


@pytest.fixture(scope="module")
def ranks():
    add_example()
    return run_ranks(of_ranks, [*KINDS, *DDPG], world_size=len(LENGTHS))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_union(ranks, kind, dtype):
    if (kind, dtype) not in ranks[0]:
        pytest.skip("compiling takes long")
    bound = BOUNDS[dtype]
    wanted, stats = gradients_of(alone(kind, dtype), union(kind, 0))
    for rank in ranks:
        for a, b in zip(rank[kind, dtype][0], wanted, strict=True):
            assert (a - b).norm() <= bound * max(b.norm(), 1e-3)
    for name in ("loss_td", "td_error_abs", "q_taken_mean", "target_mean"):
        sums = [sum(rank[kind, dtype][1][name][i] for rank in ranks) for i in range(2)]
        torch.testing.assert_close(sums, list(stats[name]))
    assert len({rank[kind, dtype][1]["grad_norm"][0].item() for rank in ranks}) == 1


@pytest.mark.parametrize("kind", TRAINED)
def test_ranks_are_equal_bit_for_bit_and_train_and_resume_like_one_process(ranks, kind):
    states = ranks[0][kind]
    assert all(all(map(equal, states, other[kind])) for other in ranks[1:])
    assert not any(equal(*pair) for pair in zip(states, states[1:], strict=False))
    assert all(map(equal, states[3:], ranks[0][kind, "resumed"]))
    one = train(alone(kind), [union(kind, i) for i in range(UPDATES[kind])])[-1]
    for name, value in one.items():
        torch.testing.assert_close(states[-1][name], value, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_rank_without_a_step_takes_part_and_without_any_step_nothing_changes(ranks, kind):
    first, *others = (rank[kind, "idle"] for rank in ranks)
    assert all(all(map(equal, first, other)) for other in others)
    # Targets are not due (5 divides neither 6 + 2 nor 20 + 2), so the second update changes nothing at all.
    assert equal(*first) and not equal(first[0], ranks[0][kind][-1])


def test_every_registered_learner_is_compared_and_one_without_synchronisation_is_noticed(ranks):
    names = {toy_config(**updates).learner for updates in KINDS.values()} | {ddpg_config().learner}
    assert {n.removesuffix("_ddp") for n in names} == {n.removesuffix("_ddp") for n in own_names(LEARNERS)}
    assert not equal(ranks[0]["unsynchronised"][0], ranks[1]["unsynchronised"][0])
