"""Errors of beliefs and their baselines against loops over single units, on one rank and on two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ddp_harness import run_phases
from graph_toys import INFO, LAYOUT, graph_learner, toy_episodes

from omagd.config.env_info import ALLY
from omagd.lab.beliefs import baselines as belief_baselines
from omagd.lab.beliefs.baselines import BASELINES, LEAST, PENALTIES, Baselines, cases_of, fit_baselines
from omagd.lab.beliefs.judge import BeliefJudge
from omagd.lab.beliefs.table import belief_values, judge
from omagd.modules.graph_reconstructers.graphs import GraphTables, feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.run.training.judges import Verdict
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import Episode, pack_episodes

TYPED = replace(LAYOUT, ally_types=1, enemy_types=3, n_types=2)
N, D = LAYOUT.n_nodes, LAYOUT.node_dim


class Case(NamedTuple):
    """One unit that a living agent does not see. past: steps at which it was seen, with its features then."""

    episode: int
    step: int
    agent: int
    node: int
    truth: np.ndarray
    past: list[tuple[int, np.ndarray]]

    @property
    def age(self) -> int:
        return self.step - self.past[-1][0] if self.past else 0

    @property
    def last(self) -> np.ndarray:
        return self.past[-1][1] if self.past else np.zeros(D)


def unseen_units(episodes: list[Episode]) -> Iterator[Case]:
    """Yield the cases, episode by episode."""
    for number, episode in enumerate(episodes):
        seen, full = (obs_to_nodes(episode[name], LAYOUT).double().numpy() for name in ("obs", "full_obs"))
        for step in range(len(seen) - 1):  # the last row is the closing observation
            for agent in range(INFO.n_agents):
                if not episode["obs"][step, agent].any():
                    continue
                for node in range(1, N):
                    if seen[step, agent, node].any():
                        continue
                    past = [(t, seen[t, agent, node]) for t in range(step) if seen[t, agent, node].any()]
                    yield Case(number, step, agent, node, full[step, agent, node], past)


def values_of(episodes: list[Episode]) -> list[list[np.ndarray]]:
    """Return the features of living units that living agents could know of, by node."""
    values: list[list[np.ndarray]] = [[] for _ in range(N)]
    for episode in episodes:
        full = obs_to_nodes(episode["full_obs"], LAYOUT).double().numpy()
        for step, agent in np.ndindex(len(full) - 1, INFO.n_agents):
            if episode["obs"][step, agent].any():
                for node in range(N):
                    if full[step, agent, node].any():
                        values[node].append(full[step, agent, node])
    return values


def varying(episodes: list[Episode]) -> np.ndarray:
    """Return which features [N, D] differ over these units."""
    differ = [np.ptp(each, axis=0) >= 1e-6 if each else np.zeros(D, bool) for each in values_of(episodes)]
    return np.array(differ) & feature_mask(LAYOUT).numpy()


def mean_of_training(cases: list[Case], case: Case) -> dict[str, np.ndarray]:
    """Return the two means that predict a case."""
    living = [each for each in cases if each.truth.any() and each.node == case.node]
    same_step = [each for each in living if each.step == case.step]
    same_agent = [each for each in same_step if each.agent == case.agent]
    mean = np.mean([each.truth for each in living], axis=0)
    fitting = next((each for each in (same_agent, same_step) if len(each) >= LEAST), living)
    return {"slot_mean": mean, "map_constant": np.mean([each.truth for each in fitting], axis=0)}


def inputs_of(case: Case, episodes: list[Episode]) -> np.ndarray:
    """Return the inputs of the regression: own observation, history of all units, agent, step."""
    episode, n_limit = episodes[case.episode], INFO.episode_limit
    nodes = obs_to_nodes(episode["obs"], LAYOUT).double().numpy()
    parts = [episode["obs"][case.step, case.agent].double().numpy()]
    for node in range(1, N):
        dim = LAYOUT.ally_dim if node <= LAYOUT.n_allies else LAYOUT.enemy_dim
        times = [t for t in range(case.step) if nodes[t, case.agent, node].any()]
        age = case.step - times[-1] if times else 0
        last = nodes[times[-1], case.agent, node] if times else np.zeros(D)
        parts += [last[:dim], np.array([age > 0, age / n_limit, 1 / age if age else 0.0])]
    steps = np.arange(n_limit + 1)  # the limit of 12 has a knot at each step
    return np.concatenate([*parts, np.arange(INFO.n_agents) == case.agent, steps == case.step]).astype(float)


def regression(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and intercept of ridge regression by least squares with one more row for each input."""
    spread = x.std(0)
    z = np.where(spread > 1e-3, (x - x.mean(0)) / np.where(spread > 1e-3, spread, 1), 0)
    rows = np.concatenate([z, math.sqrt(penalty * len(x)) * np.eye(z.shape[1])])
    solution = np.linalg.lstsq(rows, np.concatenate([y - y.mean(0), np.zeros((z.shape[1], D))]), rcond=None)[0]
    weights = solution / np.where(spread > 1e-3, spread, np.inf)[:, None]
    return weights, y.mean(0) - x.mean(0) @ weights


def fitted(training: list[Episode], validation: list[Episode], dist: Dist | None = None) -> Baselines:
    """Return the baselines, from several batches."""
    parts = [training[i::3] for i in range(3)]
    return fit_baselines(
        lambda: [pack_episodes(part) for part in parts], lambda: [pack_episodes(validation)], INFO, dist or Dist()
    )


def in_batch_order(cases: list[Case], batch: Any) -> list[Case]:
    """Return the cases in the order of the batch: row by row, agents, nodes."""
    place = {number: i for i, number in enumerate(batch.sample_index)}
    return sorted(cases, key=lambda case: (case.step, place[case.episode], case.agent, case.node))


@pytest.fixture(scope="module")
def data() -> SimpleNamespace:
    episodes = [toy_episodes(count, seed=seed) for seed, count in ((1, 24), (2, 8), (3, 10))]
    for some in episodes:
        for episode in some:  # a feature of all enemies is constant, one of a single enemy, and one can be inferred
            for name in ("obs", "full_obs"):
                nodes = obs_to_nodes(episode[name], LAYOUT)
                there = nodes.ne(0).any(-1)
                nodes[..., 3:, 1] = torch.where(there[..., 3:], 0.25, 0.0)
                nodes[..., 3:, 0] = torch.where(there[..., 3:], nodes[..., :1, 4] + 0.1 * nodes[..., 3:, 0], 0.0)
                nodes[..., 4, 2] = torch.where(there[..., 4], -0.5, 0.0)
                episode[name] = GraphTables(LAYOUT, nodes.device).obs(nodes)
    training, validation, test = episodes
    test[0]["obs"][..., 0] *= 30  # views unlike those of training: predictions are clipped
    return SimpleNamespace(
        training=training, validation=validation, test=test, baselines=fitted(training, validation),
        cases=list(unseen_units(training)), batch=pack_episodes(test),
        judged=in_batch_order(list(unseen_units(test)), pack_episodes(test)),
    )  # fmt: skip


def test_cases_are_the_units_that_living_agents_do_not_see(data) -> None:
    cases, judged = cases_of(data.batch, LAYOUT), data.judged
    assert len(cases) == len(judged) > 200
    for name in ("step", "agent", "node", "age"):
        assert getattr(cases, name).tolist() == [getattr(case, name) for case in judged], name
    assert cases.living.tolist() == [case.truth.any() for case in judged]
    for name in ("truth", "last"):
        np.testing.assert_array_equal(getattr(cases, name).numpy(), [getattr(case, name) for case in judged])


def test_what_was_there_is_what_living_agents_could_know_of(data) -> None:
    """Not what an environment may show to the dead, and not what comes after the last step."""
    shown = [{**each, "full_obs": each["full_obs"].clone()} for each in data.training]
    for episode in shown:
        episode["full_obs"][~episode["obs"].any(-1)] = 77.0
        episode["full_obs"][-1] = -77.0
    made, known = fitted(shown, data.validation), values_of(data.training)
    for name, value in data.baselines.state_dict().items():
        assert torch.equal(getattr(made, name), value), name
    for node in range(1, N):
        wanted = [extreme(known[node], axis=0) for extreme in (np.min, np.max)]
        np.testing.assert_array_equal(made.bounds[:, node].numpy(), wanted)
    np.testing.assert_array_equal(made.varies[1:].numpy(), varying(data.training)[1:])
    assert not made.varies[3:, 1].any() and made.varies[3:, 2].tolist() == [True, False, True]


def test_simple_baselines_are_means_and_last_sights(data) -> None:
    made = data.baselines.predictions(cases_of(data.batch, LAYOUT))
    assert tuple(made) == BASELINES and not made["zeros"].any()
    kinds = set()
    for i, case in enumerate(data.judged):
        means = mean_of_training(data.cases, case)
        wanted = {**means, "last_seen": case.last, "last_seen_or_mean": case.last if case.past else means["slot_mean"]}
        for name, value in wanted.items():
            np.testing.assert_allclose(made[name][i].numpy(), value, atol=1e-5, err_msg=name)
        kinds.add(np.allclose(means["slot_mean"], means["map_constant"]))
    assert kinds == {True, False}, "with and without a mean of its own"


@pytest.mark.parametrize("every", [1, 3])
def test_ridge_is_least_squares_with_the_penalty_that_suits_the_validation_episodes(data, monkeypatch, every) -> None:
    """Maps with many units use some of the frames."""
    frames = len({(case.episode, case.step, case.agent) for case in data.cases})
    if every == 3:
        operations = frames * N * data.baselines.ridge.shape[1] ** 2
        monkeypatch.setattr(belief_baselines, "FIT_OPERATIONS", operations / 2.5)
    baselines = fitted(data.training, data.validation)
    groups = {"training": data.cases, "validation": list(unseen_units(data.validation)), "test": data.judged}
    nodes = np.array([case.node for case in data.judged])
    made = baselines.predictions(cases_of(data.batch, LAYOUT))["ridge"].numpy()
    known, varies, chosen, outside = values_of(data.training), varying(data.training), [], 0
    for node in range(1, N):
        x, y = {}, {}
        for name, cases in groups.items():
            used = [case for case in cases if name == "test" or (case.step + case.agent) % every == 0]
            of_node = [case for case in used if case.node == node and (name == "test" or case.truth.any())]
            x[name] = np.array([inputs_of(case, getattr(data, name)) for case in of_node])
            y[name] = np.array([case.truth for case in of_node])
        errors = []
        for penalty in PENALTIES:
            weights, intercept = regression(x["training"], y["training"], penalty)
            off = x["validation"] @ weights + intercept - y["validation"]
            errors.append((off**2)[:, varies[node]].mean())
        chosen.append(PENALTIES[int(np.argmin(errors))])
        weights, intercept = regression(x["training"], y["training"], chosen[-1])
        wanted = x["test"] @ weights + intercept
        bounds = [extreme(known[node], axis=0) for extreme in (np.min, np.max)]
        np.testing.assert_allclose(made[nodes == node], wanted.clip(*bounds), atol=1e-5)
        outside += int((np.abs(wanted - wanted.clip(*bounds)) > 1e-3).sum())
    assert baselines.penalty.tolist()[1:] == pytest.approx(chosen) and len(set(chosen)) > 1 and outside


class Guesser:
    """Believes at random; takes a unit for dead above another probability than one half."""

    layout = TYPED

    def __init__(self, spread: bool = True) -> None:
        self.spread, self.said = spread, []

    def beliefs(self, batch):
        generator = torch.Generator().manual_seed(len(self.said))
        cases = cases_of(batch, LAYOUT)
        p = torch.rand(len(cases), generator=generator)
        features = torch.randn(len(cases), D, generator=generator)
        spread = torch.rand(len(cases), D, generator=generator) if self.spread else None
        dead = p > 0.3
        self.said.append(Belief(torch.where(dead[:, None], 0.0, features), p, dead, spread))
        return cases.missing, self.said[-1]


def of_row(name: str, case: Case) -> bool:
    """Return whether a case belongs to the row `name`."""
    ally = LAYOUT.node_types[case.node] == ALLY
    fits = {"ally": ally, "enemy": not ally, "never": not case.age, "before": case.age > 0}
    if numbers := [int(number) for number in re.findall(r"\d+", name)]:
        fits["age"] = numbers[0] <= case.age <= numbers[-1]
        fits["type"] = case.truth[(1 if ally else 3) + min(numbers[0], 1)] > 0.5
    return all(value for word, value in fits.items() if word in name)


@pytest.mark.parametrize("counts", [True, False])
def test_the_table_against_loops_over_units(data, counts) -> None:
    """Units of which no feature counts, as those of node 4 once, count in positions alone."""
    guesser, varies, found = Guesser(), varying(data.training), set()
    varies[4] &= counts
    baselines = replace(data.baselines, varies=torch.from_numpy(varies))
    table = judge(guesser, [data.batch], baselines, Dist())
    (belief,) = guesser.said
    guesses = {"predictor": belief.features, **baselines.predictions(cases_of(data.batch, LAYOUT))}
    taken, off = belief.p_dead.numpy() > 0.3, np.zeros(0)
    for entry in table["rows"]:
        which = np.array([i for i, case in enumerate(data.judged) if of_row(entry["row"], case)])
        lives = np.array([data.judged[i].truth.any() for i in which])
        living, dead = which[lives], which[~lives]
        found.add(entry["row"])
        assert (entry.get("dead", 0), entry.get("count", 0)) == (len(dead), len(living))
        if len(dead):
            assert entry["recall_dead"] == pytest.approx(taken[dead].mean())
        if not len(living):
            continue
        assert entry["taken_for_dead"] == pytest.approx(taken[living].mean())
        truth = np.array([data.judged[i].truth for i in living])
        counted = np.array([varies[data.judged[i].node] for i in living])
        some, health = counted.any(1), truth[:, LAYOUT.health]
        assert ("mse" in entry) == some.any()
        for name, guess in guesses.items():
            off = guess[living].double().numpy() - truth
            wanted = {"position_rms": math.sqrt((81 * (off[:, 2:4] ** 2).sum(1)).mean())}
            wanted["position_mean"] = 9 * np.hypot(off[:, 2], off[:, 3]).mean()
            if some.any():
                wanted["mse"] = np.mean([(e[c] ** 2).mean() for e, c in zip(off[some], counted[some], strict=True)])
            if "health_r2" in entry:
                wanted["health_r2"] = 1 - (off[:, LAYOUT.health] ** 2).sum() / ((health - health.mean()) ** 2).sum()
            assert {value: entry[value][name] for value in wanted} == pytest.approx(wanted, rel=1e-6), entry["row"]
        # The spread is that of a unit that is not taken for dead.
        off = belief.features[living].double().numpy() - truth
        spread = belief.spread[living].double().numpy().clip(0.01)
        inside, density = np.abs(off) <= spread, 0.5 * (off / spread) ** 2 + np.log(spread * math.sqrt(2 * math.pi))
        kept = np.flatnonzero(some & ~taken[living])
        assert ("coverage" in entry) == ("nll" in entry) == bool(len(kept))
        for name, values in (("coverage", inside), ("nll", density)) if len(kept) else ():
            assert entry[name] == pytest.approx(np.mean([values[k][counted[k]].mean() for k in kept]))
    ages = ("", "never", "before", "age1", "age2_3", "age4_7")
    assert found >= {"_".join(filter(None, (kind, age))) for kind in ("", "ally", "enemy") for age in ages}
    assert found >= {"ally_type0", "ally_type1", "enemy_type0", "enemy_type1"}


def test_logged_values_are_those_of_the_table(data) -> None:
    table = judge(Guesser(), [data.batch], data.baselines, Dist())
    rows, values = {entry["row"]: entry for entry in table["rows"]}, belief_values(table)
    assert values["error"] == rows[""]["mse"]["predictor"]
    assert values["error_ridge_enemy_never"] == rows["enemy_never"]["mse"]["ridge"]
    assert values["error_last_seen_before"] == rows["before"]["mse"]["last_seen"]
    assert values["error_ally_age2_3"] == rows["ally_age2_3"]["mse"]["predictor"]
    assert values["position_map_constant"] == rows[""]["position_rms"]["map_constant"]
    simple = ("zeros", "slot_mean", "last_seen", "last_seen_or_mean", "map_constant")
    assert values["ratio_simple"] == values["error"] / min(rows[""]["mse"][name] for name in simple)
    assert values["ratio_ridge"] == values["error"] / rows[""]["mse"]["ridge"]
    assert values["recall_dead_never"] == rows["never"]["recall_dead"]


def test_a_predictors_beliefs_are_its_guesses_with_their_spread() -> None:
    stage, batch = graph_learner("stage2", decode="argmax"), pack_episodes(toy_episodes(6, seed=4))
    missing, belief = stage.beliefs(batch)
    sample = stage.sample(batch)
    logits = stage.predictor(sample.frames, sample.masked)
    guess, p, table = stage.predictor.guess(logits), logits.softmax(-1).detach(), stage.tokenizer.table()
    assert torch.equal(missing, cases_of(batch, LAYOUT).missing)
    assert torch.equal(belief.features, guess.features.float()) and torch.equal(belief.taken_for_dead, guess.absent)
    torch.testing.assert_close(belief.p_dead, p[:, -1], rtol=0, atol=1e-12)
    values = torch.cat([table, torch.zeros(1, D)])
    mean = p @ values.double()
    for i in range(0, len(p), 7):
        variance = sum(p[i, c] * (values[c] - mean[i]) ** 2 for c in range(len(values)))
        torch.testing.assert_close(belief.spread[i], variance.sqrt(), rtol=1e-6, atol=1e-7)
    parts = graph_learner("stage2", decode="argmax", graph_frames_at_once=9).beliefs(batch)[1]
    torch.testing.assert_close(parts.features, belief.features, rtol=1e-5, atol=1e-6)


def on_a_rank(rank: int, dist: Dist, episodes: list[list[Episode]]) -> Any:
    """Return baselines and table of the episodes of which each rank has a share."""
    training, validation, test = (some[rank :: dist.world_size] for some in episodes)
    baselines = fitted(training, validation, dist)
    with pytest.MonkeyPatch.context() as patch:  # so that some of the frames are left out
        patch.setattr(belief_baselines, "FIT_OPERATIONS", 5e6)
        some = fitted(training, validation, dist).ridge
    batches = [pack_episodes(test)] if test else []
    table = judge(graph_learner("stage2"), batches, baselines, dist)
    return {**baselines.state_dict(), "some": some}, table, of_a_team(validation, baselines, dist)


def of_a_team(played: list[Episode], baselines: Baselines, dist: Dist) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what is measured of the beliefs of a trained team that has played these episodes on this rank."""
    stage = graph_learner("stage2", torch.float32)
    runner = SimpleNamespace(run=lambda mac, **how: SimpleNamespace(episodes=played))
    session = SimpleNamespace(config=stage.config, info=INFO, dist=dist, rounds=int, runners={"beliefs": runner})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeliefJudge, "_saved_baselines", lambda judge: baselines)
        patch.setattr("omagd.lab.beliefs.judge.picture", lambda *rest: "drawn")
        trained = PretrainedModules(stage.tokenizer, stage.predictor)
        found = BeliefJudge(session, trained).team(SimpleNamespace(head=None))  # type: ignore[arg-type]
    assert found.files == ({"picture": "drawn"} if dist.is_main else {})
    return found.values, found.table


def test_a_head_is_not_judged_on_units_that_a_map_of_a_set_does_not_have() -> None:
    session: Any = SimpleNamespace(config=None, dist=None, info=SimpleNamespace(tasks=("3m", "8m")))
    assert BeliefJudge(session, PretrainedModules()).team(SimpleNamespace(head=0)) == Verdict()


@pytest.mark.processes
def test_two_ranks_fit_and_judge_as_one_process(data) -> None:
    episodes = [data.training, data.validation, data.test[:1]]  # the second rank has no test episode
    alone = on_a_rank(0, Dist(), episodes)
    (ranks,) = run_phases(on_a_rank, [(2, episodes)])
    assert not torch.allclose(alone[0]["some"], alone[0]["ridge"], atol=0.01)
    assert alone[2][1]["episodes"] == len(data.validation)
    for state, table, (values, of_team) in ranks:
        assert of_team["episodes"] == len(data.validation)
        assert values == pytest.approx(alone[2][0], rel=1e-5, abs=1e-6) and values.keys() >= {"error", "error_all"}
        torch.testing.assert_close(state, alone[0], rtol=1e-6, atol=1e-7)
        assert table == ranks[0][1]
        for mine, wanted in zip(table["rows"], alone[1]["rows"], strict=True):
            for key, value in wanted.items():
                assert key == "row" or mine[key] == pytest.approx(value, rel=1e-5), (wanted["row"], key)
