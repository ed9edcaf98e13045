"""Several ranks compute the same update as one process with the union of their episodes, for every learner."""

import math
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from ddp_harness import run_ranks
from ddpg_toys import INFO as OF_SNAKES
from ddpg_toys import ddpg_config, make_ddpg, random_steps
from graph_toys import graph_learner, toy_episodes
from plugin_toys import add_example, own_names
from q_toys import (
    BOXED,
    GRAPH,
    INFO,
    copy_learner,
    equal,
    foggy,
    gradients_of,
    make_learner,
    random_episode,
    state_of,
    toy_config,
)

from omagd.components.episode_buffer import UNLIMITED
from omagd.learners import PREDICTORS
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.synced_optimizer import SKIPPED
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.resident.replay import ResidentBuffer
from omagd.resident.updates import FixedUpdates
from omagd.run.training.stages.base import check_replicas, held_in_common
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, RecordedEpisode, pack_episodes

pytestmark = pytest.mark.processes
PLAIN = {"learner": "nq_learner_ddp", "target_update_updates": 5}
PPO = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none"}
Q = {
    "qmix": PLAIN,
    "alone": {**PLAIN, "mixer": "none", "agent": "ff"},
    # The second rank has two episodes, so two parts.
    "parts": {**PLAIN, "accumulate": 3, "q_lambda": True, "optimizer": "rmsprop", "standardise_rewards": True},
    "graph": {**PLAIN, **GRAPH, "mac": "gnn_graph_mac", "agent": "gnn_rnn"},
    "flat_graph": {**PLAIN, **GRAPH, "mac": "n_graph_mac", "learner": "nq_graph_learner_ddp", "mixer": "vdn"},
    "team": {**PLAIN, "use_team_obs": True},
    "belief": {**PLAIN, "belief_loss": "features", "belief_every": 3, "belief_units": "all", "accumulate": 2},
    "qplex": {**PLAIN, "mixer": "qplex", "mixer_args": {"n_heads": 2}},
    "central weights": {**PLAIN, "learner": "wqmix_learner_ddp", "learner_args": {"weighting": "central"}},
    "PQN": {
        "learner": "pqn_learner_ddp", "use_layer_norm": True, "standardise_rewards": True, "t_max": 900,
        "learner_args": {"epochs": 2, "minibatches": 3, "anneal_lr": True},
    },
    "PPO": {**PPO, "t_max": 900, "learner_args": {"epochs": 2, "critic": "set", "value_clip": 0.01, "anneal_lr": True}},
    "PPO in groups": {**PPO, "learner": "rloo_learner", "learner_args": {"epochs": 2, "minibatches": 2}},
    # More minibatches than some ranks have episodes.
    "PPO belief": {
        **PPO, "belief_loss": "features", "belief_weight": 0.5, "belief_every": 2, "accumulate": 2,
        "env_args": {"common_reward": False},
        "learner_args": {"epochs": 2, "minibatches": 3},
    },
    "PPO continuous": {
        **PPO, "action_selector": "tanh_gaussian",
        "learner_args": {"epochs": 2, "minibatches": 2, "critic": "observation"},
    },
    "PPO apart": {
        **PPO, "share_parameters": False, "accumulate": 2, "learner_args": {"epochs": 2, "critic": "observation"},
    },
}  # fmt: skip
FIXED = " of fixed shapes"
Q |= {kind + FIXED: Q[kind] for kind in (
    "PPO", "PPO in groups", "PPO belief", "PPO continuous", "PQN", "belief", "central weights",
)}  # fmt: skip
SINGLE = {"graph", "team", "PPO apart", "stage2 matched", "stage2 GRU"}
"""Kinds of which gradients are compared, and nothing that several updates would show."""
for part, registry in (("agent", AGENTS), ("mixer", MIXERS)):  # everything registered that is not among these
    compared = {toy_config(**updates).model_dump()[part] for updates in Q.values()}
    rest = {name: {**PLAIN, part: name} for name in registry.names() if name not in compared}
    Q, SINGLE = Q | rest, SINGLE | (rest.keys() if part == "agent" else set())
DDPG = {"DDPG": {}, "DDPG bicnet": {"agent": "bicnet"}, "DDPG parts": {"gumbel_softmax": True, "accumulate": 3}}
MATD3 = {"joint": True, "twin": True, "target_noise": 0.2, "policy_delay": 2}
DDPG["DDPG continuous"] = {"learner_args": MATD3, "accumulate": 2, "standardise_rewards": True}
STAGES = {"stage1": {"tokenizer_config__dead_code_threshold": 0.6}, "stage2": {}}
STAGES |= {"stage2 matched": {"matching": "type"}, "stage2 GRU": {"use_gru": True}}
compared = {updates.get("kind", "masked") for name, updates in STAGES.items() if name.startswith("stage2")}
others = {f"stage2 {kind}": {"kind": kind} for kind in sorted({*PREDICTORS.names()} - compared)}
STAGES, SINGLE = STAGES | others, SINGLE | others.keys()
STAGES |= {kind + FIXED: STAGES[kind] for kind in ("stage1", "stage2")}
LOSSES = ("loss_td", "td_error_abs", "q_taken_mean", "target_mean", "graph_loss", "loss_belief", "belief_alive")
FOLLOW_DATA = {"belief_head.mean", "belief_head.deviation"}  # whether a step is taken or not
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
KINDS = (*Q, *DDPG, *STAGES)
# Different numbers of episodes and very different numbers of steps on each rank.
LENGTHS = [[9, 4, 4, 1, 7], [1, 2], [3]]
TRAINED = [kind for kind in KINDS if kind not in SINGLE]
UPDATES = {kind: 6 if kind in STAGES or kind.endswith(FIXED) else 20 for kind in TRAINED}
UPDATES |= {"stage1": 10, "stage1" + FIXED: 10}
IN_SINGLE_PRECISION = ("qmix", "PPO", "stage1", "stage2")
GRADIENTS = [(kind, torch.float64) for kind in (*Q, *STAGES)] + [(kind, torch.float32) for kind in IN_SINGLE_PRECISION]


def make(kind, dist=None, dtype=torch.float64, seed=0, **more):
    if kind in DDPG:
        return make_ddpg(dist, dtype, seed, info=steps_info(kind), **{**DDPG[kind], **more})
    if kind in Q:
        info = BOXED if "continuous" in kind else replace(INFO, agent_rewards="env_args" in Q[kind])
        made = make_learner(toy_config(**{"grad_norm_clip": 1e9, **Q[kind], **more}), dist, dtype, seed, info)
        return in_fixed_shapes(made) if kind.endswith(FIXED) else made
    learner = graph_learner(kind.split()[0], dtype, dist, graph_pretrain_epochs=10, **STAGES[kind])
    learner.warm_up()
    if kind.endswith(FIXED):
        return in_fixed_shapes(learner)
    update = learner.update
    learner.update = lambda batch, episodes: update(batch)
    return learner


def steps_info(kind):
    return BOXED if "continuous" in kind else OF_SNAKES


def in_fixed_shapes(learner):
    """Let a learner take the episodes of its batches in fixed shapes."""
    learn = FixedUpdates(learner).update

    def update(batch, episodes):
        whole = {name: batch.packing.pad(value) for name, value in batch.data.items()}
        made, buffer = {}, ResidentBuffer(UNLIMITED, "cpu", INFO.episode_limit + 1)
        for place, index in enumerate(batch.sample_index):
            rows = {name: value[place, : batch.packing.lengths[place]] for name, value in whole.items()}
            made[index] = RecordedEpisode(rows, batch.meta[place])
        buffer.add(made[index] for index in sorted(made))
        read = buffer.whole if getattr(learner, "data", "") == "on_policy" else buffer.fixed
        return learn(read(range(len(buffer))), episodes=episodes)

    learner.update = update
    return learner


def alone(kind, dtype=torch.float64):
    """Return a learner of one process that takes each packed batch in one piece."""
    return make(kind.removesuffix(FIXED), dtype=dtype, accumulate=1)


def blank(episodes):
    return [{name: torch.zeros_like(value) for name, value in episode.items()} for episode in episodes]


def played(kind, *what, sight=0.8):
    """Return a random episode; of "team" and "belief" one in which agents see parts of `full_obs`."""
    made = random_episode(*what, info=BOXED if "continuous" in kind else INFO)
    if kind.startswith(("PPO apart", "PPO belief")):
        made["agent_reward"] = made["reward"].unsqueeze(-1) * torch.arange(1.0, INFO.n_agents + 1)
    if kind == "parts":
        made["weight"] = torch.full_like(made["reward"], what[0] % 3 + 0.5)
    return foggy(made, dead=kind != "team", sight=sight) if kind == "team" or "belief" in kind else made


def episodes_of(kind, rank, update):
    if kind in DDPG:
        return random_steps(1000 * update + rank, [6, 2, 1][rank], info=steps_info(kind))
    if kind in Q:
        sight = 99 if (rank, update) in {(1, 0), (2, 4)} else 0.8  # then this rank sees all units
        # without a step on this rank
        alone = (rank, update) == (2, 3) and kind.removesuffix(FIXED) in {"PPO in groups", "PQN"}
        numbered = enumerate([0] if alone else LENGTHS[rank])
        made = [played(kind, 1000 * update + 100 * rank + i, k, i % 2 == 1, sight=sight) for i, k in numbered]
        # The first rank has a group of three and one of two, the last has an episode without others.
        origins = [EpisodeMeta(seed=rank, group=str(i // 3), outcome=float(i == 1)) for i in range(len(made))]
        return [RecordedEpisode(*pair) for pair in zip(made, origins, strict=True)]
    episodes = toy_episodes([2, 3, 4][rank], seed=100 * update + rank)
    return blank(episodes) if (rank, update) == (2, 2) else episodes


def union(kind, update):
    """Return the episodes of all ranks; minibatches count the first one of each rank first."""
    ranks = [episodes_of(kind, rank, update) for rank in range(len(LENGTHS))]
    ordered = zip_longest(*ranks) if kind.startswith(("PPO", "PQN")) else ranks
    return [episode for some in ordered for episode in some if episode is not None]


def without_a_step(kind, rank):
    """Return a batch in which only rank 0 has steps to learn from, then one in which no rank has."""
    if kind in DDPG:
        info = steps_info(kind)
        return [random_steps(1, 3 if rank == 0 else 1, int(rank == 0), info=info), random_steps(2, 1, 0, info=info)]
    if kind in Q:
        return [[played(kind, 5, 6)] if rank == 0 else [played(kind, 6, 0)], [played(kind, 7, 0)]]
    return [toy_episodes(2, seed=5) if rank == 0 else blank(toy_episodes(1)), blank(toy_episodes(2))]


def train(learner, batches):
    """Update on each batch; return the learner's state after each."""
    states = []
    for i, episodes in enumerate(batches):
        learner.update(pack_episodes(episodes), episodes=10 * i)
        states.append(state_of(learner))
    return states


def overflow(learner, episodes, here):
    """Return whether an update with weights that are not finite on one rank (`here`) is skipped and changes nothing."""

    def held():
        return {name: value for name, value in state_of(learner).items() if name not in FOLLOW_DATA}

    before, weight = held(), next(next(iter(learner.modules().values())).parameters())
    kept = weight.detach().clone()
    if here:
        weight.data.fill_(math.nan)
    skipped, steps = learner.update(pack_episodes(episodes), episodes=0)[SKIPPED]
    weight.data.copy_(kept)
    return bool(skipped == steps), equal(before, held())


def errors_of_changed_weights(learner, dist):
    """Change one number of each of two tensors on rank 1; return what the check of the ranks' weights reports."""
    check_replicas(dist, learner, "in iteration 3")
    errors, tensors = {}, held_in_common(learner)
    for name in [next(name for name in tensors if name.startswith(part)) for part in ("mixer", "target_a")]:
        value = tensors[name].view(-1)
        value[0] += 1e-6 * (dist.rank == 1)
        with pytest.raises(UserError) as error:
            check_replicas(dist, learner, "in iteration 4 of stage3")
        value[0] -= 1e-6 * (dist.rank == 1)
        errors[name] = error.value.message
    return errors


def of_ranks(rank, dist, kinds):
    """Train each kind, and its end once more from a checkpoint."""
    add_example()
    out = {}
    for kind in kinds:
        for dtype in (dtype for one, dtype in GRADIENTS if one == kind):
            out[kind, dtype] = gradients_of(make(kind, dist, dtype, seed=rank), episodes_of(kind, rank, 0))
        if kind not in TRAINED:
            continue
        batches = [episodes_of(kind, rank, i) for i in range(UPDATES[kind])]
        learner, resumed = make(kind, dist, seed=rank), make(kind, dist, seed=7)
        out[kind] = train(learner, batches[:-3])
        copy_learner(learner, resumed)
        out[kind] += train(learner, batches[-3:])
        out[kind, "resumed"] = train(resumed, batches[-3:])
        out[kind, "idle"] = train(learner, without_a_step(kind, rank))
        if kind not in DDPG:  # whose actor and critic have a step each
            out[kind, "overflow"] = overflow(learner, batches[0], here=rank == dist.world_size - 1)
    calls, learner = dist.waits.calls, make("qmix", dist)
    train(learner, [episodes_of("qmix", rank, 0)])
    out["exchanges"], out["errors"] = dist.waits.calls - calls, errors_of_changed_weights(learner, dist)
    broken = make("qmix", dist)
    broken.step._wrapped = broken.step.loss_module
    out["unsynchronised"] = train(broken, [episodes_of("qmix", rank, 0)])
    return out


@pytest.fixture(scope="module")
def ranks():
    add_example()
    return run_ranks(of_ranks, KINDS, world_size=len(LENGTHS))


@pytest.mark.parametrize(("kind", "dtype"), GRADIENTS, ids=str)
def test_gradients_equal_those_of_the_union(ranks, kind, dtype):
    bound = BOUNDS[dtype]
    wanted, stats = gradients_of(alone(kind, dtype), union(kind, 0))
    for rank in ranks:
        for a, b in zip(rank[kind, dtype][0], wanted, strict=True):
            assert (a - b).norm() <= bound * max(b.norm(), 1e-3)
    for name in set(LOSSES) & stats.keys():
        sums = [sum(rank[kind, dtype][1][name][i] for rank in ranks) for i in range(2)]
        torch.testing.assert_close(sums, list(stats[name]))
    assert len({rank[kind, dtype][1]["grad_norm"][0].item() for rank in ranks}) == 1


@pytest.mark.parametrize("kind", TRAINED)
def test_ranks_are_equal_bit_for_bit_and_train_and_resume_like_one_process(ranks, kind):
    states = ranks[0][kind]
    assert all(all(map(equal, states, other[kind])) for other in ranks[1:])
    assert not any(equal(*pair) for pair in zip(states, states[1:], strict=False))
    assert all(map(equal, states[-3:], ranks[0][kind, "resumed"]))
    one = train(alone(kind), [union(kind, i) for i in range(UPDATES[kind])])[-1]
    torch.testing.assert_close(states[-1], one, atol=1e-10, rtol=0)


def test_codes_are_revived_in_these_updates(ranks):
    names, states = ("cluster_size", "codebook"), ranks[0]["stage1"]
    sizes, codes = (torch.stack([state[f"tokenizer.{name}"] for state in states]) for name in names)
    grown = (sizes[1:] > 2 * sizes[:-1]) & ((codes[1:] - codes[:-1]).norm(dim=-1) > 1e-3)
    assert grown.any(-1).sum() >= 2


@pytest.mark.parametrize("kind", TRAINED)
def test_all_ranks_take_part_in_or_skip_an_update(ranks, kind):
    """A rank without a step takes part; without any step, or with an overflow on one rank, nothing changes."""
    first, *others = (rank[kind, "idle"] for rank in ranks)
    assert all(all(map(equal, first, other)) for other in others)
    # Targets are not due (5 does not divide 20 + 2), so the second update changes nothing at all.
    assert equal(*first) and not equal(first[0], ranks[0][kind][-1])
    assert {rank.get((kind, "overflow"), (True, True)) for rank in ranks} == {(True, True)}


def test_every_registered_learner_is_compared_and_one_without_synchronisation_is_noticed(ranks):
    names = {toy_config(**updates).learner for updates in Q.values()} | {ddpg_config().learner}
    assert {n.removesuffix("_ddp") for n in names} == {n.removesuffix("_ddp") for n in own_names(LEARNERS)}
    assert not equal(ranks[0]["unsynchronised"][0], ranks[1]["unsynchronised"][0])


def test_a_changed_weight_is_found_and_named(ranks):
    for rank in ranks:
        assert rank["exchanges"] >= 2, "each update waits for a count and for gradients"
        for name, message in rank["errors"].items():
            assert f"'{name}'" in message and "in iteration 4 of stage3" in message and "of rank 1 differs" in message
