"""`omagd beliefs`: census, plug-in and swap test, gate; against loops over single units and closed forms."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_harness import train
from graph_toys import INFO, LAYOUT, toy_config, toy_episodes
from many_runs import make_run

from omagd.config.env_info import ALLY, ENEMY
from omagd.config.loading import resolve
from omagd.controllers.types import Decision, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.lab.analysis.belief_tests import FILE, compared, records, tables
from omagd.lab.analysis.gate import gate, gate_table
from omagd.lab.analysis.runs import load
from omagd.lab.analysis.statistics import difference, paired_share, proportion
from omagd.lab.analysis.study_report import _belief_tests
from omagd.lab.beliefs import census as belief_census
from omagd.lab.beliefs.believing import BeliefScript, Believing, Reconstructed, Seen, map_constant, win_rates
from omagd.lab.beliefs.census import CLASSES, census_of, classified
from omagd.lab.commands import beliefs
from omagd.learners.belief_baselines import fit_baselines
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.graph_reconstructers.last_sight import LastSight
from omagd.modules.graph_reconstructers.map_constant import MapConstantReconstructor
from omagd.run.checkpoint.weights import AGENT_FILE
from omagd.run.cli.main import main
from omagd.run.training.evaluate import evaluation_config
from omagd.runners.runner import Runner
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes
from omagd.utils.run_folder import write_json

torch.set_num_threads(1)


def fit(episodes):
    return fit_baselines(lambda: [pack_episodes(episodes)], lambda: [pack_episodes(episodes[:4])], INFO, Dist())


def test_the_census_against_loops_over_units():
    training, test = toy_episodes(40, seed=1), toy_episodes(30, seed=2)
    baselines = fit(training)
    found = census_of([pack_episodes(test[:10]), pack_episodes(test[10:])], baselines)
    for kind, number in (("enemy", ENEMY), ("ally", ALLY)):
        living = unseen = before = 0
        last, constant, blind = [], [], []
        for episode in test:
            seen, full = (obs_to_nodes(episode[name], LAYOUT).double().numpy() for name in ("obs", "full_obs"))
            for agent in range(INFO.n_agents):
                memory, met = {}, False
                for step in range(len(seen) - 1):  # the last row is the closing observation
                    if not episode["obs"][step, agent].any():
                        continue
                    visible = [node for node in range(1, LAYOUT.n_nodes) if seen[step, agent, node].any()]
                    met |= any(LAYOUT.node_types[node] == ENEMY for node in visible)
                    for node in range(1, LAYOUT.n_nodes):
                        truth = full[step, agent, node]
                        if LAYOUT.node_types[node] != number or not truth.any():
                            continue
                        living += 1
                        if node in visible:
                            continue
                        unseen += 1
                        guess = baselines.map_constant[agent, node, step].double().numpy()
                        constant.append(((guess - truth)[2:4] ** 2).sum())
                        if not met:
                            blind.append(constant[-1])
                        if node in memory:
                            before += 1
                            last.append(((memory[node] - truth)[2:4] ** 2).sum())
                    memory |= {node: seen[step, agent, node] for node in visible}
        entry = found["units"][kind]
        assert (entry["living"], entry["rows"]["all"]["count"]) == (living, unseen)
        assert entry["unseen"] == pytest.approx(unseen / living)
        assert entry["before"] == pytest.approx(before / unseen)
        cells = entry["rows"]["before"]["cells"]["last_seen"]
        assert cells == pytest.approx(math.sqrt(np.mean(last)) * LAYOUT.sight)
        assert entry["rows"]["all"]["cells"]["map_constant"] == pytest.approx(
            math.sqrt(np.mean(constant)) * LAYOUT.sight
        )
        if kind == "enemy":
            row = entry["rows"]["before_contact"]
            assert row["count"] == len(blind)
            assert row["cells"]["map_constant"] == pytest.approx(math.sqrt(np.mean(blind)) * LAYOUT.sight)


@pytest.mark.parametrize(
    ("unseen", "constant", "ridge", "blind", "wanted"),
    [(0.01, 9, 1, 1, "-"), (0.3, 2.4, 2, 1, "a"), (0.5, 10, 7, 9.9, "b"), (0.5, 10, 9.5, 8.5, "b"),
     (0.5, 10, 8, 9, "c"), (0.019, 2, 1, 1, "-"), (0.021, 2, 1, 1, "a"), (0.5, 2.45, 2.4, 9.9, "a"),
     (0.5, 2.55, 2.5, 9.9, "c"), (0.5, 10, 7.05, 9.9, "b"), (0.5, 10, 7.1, 9.9, "c"), (0.5, 10, 9.5, 8.9, "b")],
)  # fmt: skip
def test_classes_follow_from_the_errors_of_map_constant_and_ridge(unseen, constant, ridge, blind, wanted):
    cells = {"map_constant": constant, "ridge": ridge}
    rows = {"all": {"cells": cells}, "before_contact": {"cells": {"map_constant": 10, "ridge": blind}}}
    found = classified({"unseen": unseen, "rows": rows})
    assert found["class"] == wanted and wanted in CLASSES
    if wanted != "-":
        assert found["inferable"] == pytest.approx(1 - ridge**2 / constant**2)
    assert classified({"unseen": 0.5, "rows": {"all": {"cells": cells}}})["inferable_before"] is None


def ticks(episode):
    for step in range(len(episode["obs"])):
        obs, full = (episode[name][step][None].numpy() for name in ("obs", "full_obs"))
        seen = Observation(obs, np.zeros((1, 1)), np.ones((1, INFO.n_agents, INFO.n_actions), bool), full)
        yield Tick(seen, np.array([step]), np.ones(1, bool))


def test_beliefs_keep_what_is_seen_and_fill_in_what_is_not():
    episodes = toy_episodes(30, seed=3)
    baselines = fit(episodes)
    filling = {"last": LastSight(INFO, torch.device("cpu")), "map": map_constant(baselines, toy_config(), INFO)}
    sources = {name: Reconstructed(each, INFO) for name, each in filling.items()}
    for source in sources.values():
        source.begin(1)
    filled = 0
    for episode in episodes:
        memory = {}
        for source in sources.values():
            source.reset(np.ones(1, bool))
        for step, tick in enumerate(ticks(episode)):
            seen = obs_to_nodes(tick.observation.obs, LAYOUT)[0]
            believed = {name: obs_to_nodes(source.believed(tick), LAYOUT)[0] for name, source in sources.items()}
            for agent in range(INFO.n_agents):
                lives = tick.observation.obs[0, agent].any()
                for node in range(1, LAYOUT.n_nodes):
                    if seen[agent, node].any():
                        memory[agent, node] = wanted = seen[agent, node]
                        assert all((each[agent, node] == wanted).all() for each in believed.values())
                    elif lives:
                        nothing = np.zeros(LAYOUT.node_dim, np.float32)
                        last = memory.get((agent, node), nothing).astype(np.float16)  # as runs store it
                        assert (believed["last"][agent, node] == last).all()
                        constant = baselines.map_constant[agent, node, step].numpy().astype(np.float16)
                        assert (believed["map"][agent, node] == constant).all()
                        filled += (agent, node) in memory
    assert filled > 50
    assert Seen().believed(tick) is tick.observation.obs and Seen(full=True).believed(tick) is tick.observation.full_obs


def test_the_script_attacks_the_nearest_in_reach_and_walks_towards_the_nearest_it_believes_in():
    env = make_env("skirmish", {"map_name": "3m"}, 1, processes=False)
    info, names = env.info, ("no-op", "stop", "north", "south", "east", "west")
    script, layout = BeliefScript(info, names), env.info.layout
    script.begin(1)

    def act(enemies, reach=(), walls=()):
        obs = np.zeros((1, 3, info.obs_dim), np.float32)
        for number, (x, y) in enemies.items():
            first = layout.move_dim + number * layout.enemy_dim
            obs[0, 0, first : first + 4] = 1, math.hypot(x, y), x, y
        avail = np.zeros((1, 3, info.n_actions), bool)
        avail[0, 0, 1:6], avail[0, 1:, 0] = True, True
        avail[0, 0, [6 + number for number in reach]] = True
        avail[0, 0, [names.index(name) for name in walls]] = False
        seen = Observation(obs, np.zeros((1, 1)), avail, obs)
        actions = script.act(Tick(seen, np.zeros(1, np.int64), np.ones(1, bool)), None).actions[0]
        assert avail[0, np.arange(3), actions].all()
        return (*names, "attack 0", "attack 1", "attack 2")[actions[0]]

    assert act({0: (0.9, 0.2)}) == "east" and act({0: (0.1, -0.5)}) == "south"
    assert act({0: (0.9, 0.2)}, walls=["east"]) == "north"
    assert act({0: (0.9, 0.0), 2: (-0.3, 0.0)}) == "west"
    assert act({0: (0.5, 0.0), 1: (0.2, 0.1), 2: (0.1, 0.0)}, reach=[0, 1]) == "attack 1"
    assert act({}) == "stop"


class Winner:
    """Plays the environment's own script if it is shown more than the observation."""

    wants_full_obs = False

    def __init__(self, env):
        self.env, self.rng = env, np.random.default_rng(0)

    def begin(self, n_slots):
        pass

    def reset(self, which):
        pass

    def act(self, tick, explore):
        return Decision(self.env.scripted_actions("attack_nearest", self.rng))


def test_every_belief_plays_the_same_battles():
    env = make_env("skirmish", {"map_name": "3m"}, 8, processes=False)
    config = SimpleNamespace(seed=4)
    won = win_rates(env, config, env.info, Winner(env), {"a": Seen(), "b": Seen(full=True)}, 30, lambda played: None)
    assert len(won["a"]) == 32 and (won["a"] == won["b"]).all()
    plain = Runner(env, config, env.info, EpisodeSeeds(4, "test")).run(Winner(env), explore=None, episodes_per_slot=4)
    by_seed = {int(entry["seed"]): entry["battle_won"] for entry in plain.log}
    assert [*by_seed] != sorted(by_seed)  # battles end in another order with other beliefs
    assert won["a"].tolist() == [by_seed[seed] for seed in sorted(by_seed)]
    acting = Believing(Winner(env), Seen())
    assert acting.wants_full_obs  # else `full` would have nothing to show


def test_guesses_are_fitted_on_other_battles_than_those_that_are_measured(monkeypatch):
    env, played, used = make_env("skirmish", {"map_name": "3m_mixed_sight6"}, 8, processes=False), [], {}

    def fitting(training, validation, *rest):
        used.update(training=training(), validation=validation())
        return fit_baselines(training, validation, *rest)

    monkeypatch.setattr(belief_census, "fit_baselines", fitting)
    monkeypatch.setattr(belief_census, "census_of", lambda batches, baselines: used.update(test=batches) or {})
    belief_census.census(env, SimpleNamespace(seed=4), env.info, Winner(env), 16, played.append)
    starts = {
        purpose: {row.tobytes() for batch in batches for row in batch["full_obs"][: batch.packing.n_episodes].numpy()}
        for purpose, batches in used.items()
    }
    assert {name: len(found) for name, found in starts.items()} == {"training": 16, "validation": 8, "test": 16}
    assert len(set.union(*starts.values())) == 16 + 8 + 16 == sum(played)


def test_a_reconstructor_is_given_the_actions_that_were_taken():
    given, shown = [], []

    class Noting:
        def begin(self, n_slots):
            given.append(n_slots)

        def reset(self, which):
            given.append(which.tolist())

        def step(self, obs, step, active, last_action):
            given.append((step.tolist(), active.tolist(), last_action.tolist()))
            return SimpleNamespace(obs=torch.from_numpy(obs) + 1)

        def act(self, tick, explore):
            shown.append((tick.observation.obs, tick.observation.full_obs))
            return Decision(10 * tick.step[:, None] + np.arange(INFO.n_agents) + 100 * np.arange(2)[:, None])

    class Policy(Noting):
        def begin(self, n_slots):
            pass

        reset = begin

    acting = Believing(Policy(), Reconstructed(Noting(), INFO))
    obs, avail = np.zeros((2, INFO.n_agents, INFO.obs_dim), np.float32), np.ones((2, INFO.n_agents, 1), bool)
    acting.begin(2)
    for t, active, starts in ((0, (1, 1), (1, 1)), (1, (1, 0), (0, 0)), (2, (1, 1), (0, 0)), (3, (1, 1), (1, 0))):
        acting.reset(np.array(starts, bool))
        acting.act(Tick(Observation(obs, np.zeros((2, 1)), avail, obs), np.full(2, t), np.array(active, bool)), None)
    nothing, last = [-1, -1, -1], [[10 * t + 100 * slot + agent for agent in range(3)] for t, slot in
                                   ((0, 0), (1, 0), (0, 1), (2, 1))]  # fmt: skip
    assert [each[2] for each in given if isinstance(each, tuple)] == [
        [nothing, nothing],
        last[0::2],
        [last[1], last[2]],
        [nothing, last[3]],
    ]
    assert given[0] == 2 and [each for each in given if isinstance(each, list)][0] == [True, True]
    assert all((seen == 1).all() and (full == 1).all() for seen, full in shown)  # a team that reads full_obs, too


def test_what_a_belief_carries_is_its_share_of_the_difference():
    won = {"observation": (0, 0, 0, 1), "last_seen": (1, 0, 0, 1), "full": (1, 1, 1, 1)}
    found = compared({name: np.array(values, float) for name, values in won.items()})
    assert [each["win_rate"] for each in found.values()] == [0.25, 0.5, 1.0]
    assert [each["share"] for each in found.values()] == pytest.approx([0, 1 / 3, 1])
    assert compared(dict.fromkeys(won, np.ones(4)))["full"]["share"] is None


def test_tables_of_records_show_shares_of_the_living_and_the_last_test_of_each_reconstruction(tmp_path):
    cells = dict.fromkeys(("last_seen", "slot_mean", "map_constant", "ridge"), 1.0)
    rows = {"all": {"count": 50, "cells": cells}, "before": {"count": 20, "cells": cells}}
    entry = {"living": 200, "unseen": 0.25, "before": 0.4, "rows": rows}
    census = {
        "test": "census",
        "env": "skirmish",
        "map": "3m",
        "units": {"enemy": entry},
        "class": "b",
        "class_means": "x",
        "inferable": 0.5,
        "inferable_before": None,
        "policy": "p",
        "episodes": 8,
        "seed": 1,
    }
    plug_in = {**census, "test": "plug-in", "beliefs": {}, "reconstruction": "one"}  # fmt: skip
    lines = [census, plug_in, {**plug_in, "reconstruction": "two"}, {**plug_in, "seed": 7}]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = records(tmp_path)
    assert [(each["test"], each.get("reconstruction"), each["seed"]) for each in found] == [
        ("census", None, 1), ("plug-in", "one", 7), ("plug-in", "two", 1)
    ]  # fmt: skip
    table = tables(found)[0]
    (tmp_path / "study.jsonl").write_text("")
    beside = [tmp_path / "study.jsonl", tmp_path / "another.jsonl"]
    (tmp_path / "another.jsonl").write_text("")
    of_map, other = (SimpleNamespace(place=f"skirmish {name}", folder=tmp_path / "x") for name in (census["map"], "no"))
    assert _belief_tests([of_map], beside, []) == tables(found), "those beside results files, once"
    assert _belief_tests([other], beside, []) == [], "of other maps"
    assert _belief_tests([other], [beside[0], tmp_path], []) == tables(found), "all of a folder that was named"
    empty = {**census, "units": {"enemy": {**entry, "living": 0}}}
    odd = {**plug_in, "beliefs": {"full": {"win_rate": 0.5, "interval": [], "share": None}}}
    assert tables([empty, odd, *found]) == tables(found), "what cannot be shown is left out"
    (tmp_path / FILE).write_text(json.dumps({**census, "test": []}) + "\n" + json.dumps(empty) + "\n")
    assert records(tmp_path) == [empty]
    warnings = []
    assert _belief_tests([], [tmp_path], warnings) == []
    assert warnings == [f"{tmp_path / FILE}: 1 of 1 tests cannot be shown"]
    assert [row[:2] for row in table["rows"]] == [["enemy, all", "0.250"], ["enemy, seen before", "0.100"]]
    assert "enemy: 25 % unseen, of these 40 % seen before" in table["note"]


def test_the_beliefs_that_are_compared_have_their_names():
    env = make_env("skirmish", {"map_name": "3m"}, 8, processes=False)
    config = resolve("omagd_small", "skirmish", {"env_args.map_name": "3m"})
    policy, words = beliefs._policy(config, env, "")
    assert policy._random_share == 0.3 and words == "scripts, 30 % random actions"
    players = beliefs.Players(env, config, env.info, policy, words, 12, lambda played: None)
    assert players.measured == 16  # two rounds of all slots
    sources = beliefs._sources(players, None)
    kinds = {"observation": Seen, "last_seen": LastSight, "map_constant": MapConstantReconstructor, "full": Seen}
    assert {name: type(getattr(each, "reconstructor", each)) for name, each in sources.items()} == kinds
    assert [*sources] == [*kinds]
    assert sources["full"].full and not sources["observation"].full


def test_shares_of_paired_battles_and_intervals_in_closed_form():
    rng = np.random.default_rng(0)
    low, high = (rng.random((2, 1000)) < [[0.2], [0.6]]).astype(float)
    assert paired_share(low, low, high) == (0.0, (0.0, 0.0)) and paired_share(high, low, high) == (1.0, (1.0, 1.0))
    middle = np.where(rng.random(1000) < 0.5, low, high)
    share, (left, right) = paired_share(middle, low, high)
    gap = (high - low).mean()
    assert share == pytest.approx((middle - low).mean() / gap)
    residual = ((middle - low) - share * (high - low)) / gap  # delta method of a ratio of paired means
    half = 1.96 * residual.std(ddof=1) / math.sqrt(1000)
    assert (left, right) == pytest.approx((share - half, share + half), abs=0.012)
    shuffled = paired_share(rng.permutation(middle), low, high)[1]
    assert shuffled[1] - shuffled[0] > 1.15 * (right - left)  # without the pairing the interval would be wider
    assert math.isnan(paired_share(low, low, low)[0])
    k, n, z = 30, 100, 1.959964
    centre, wide = (k + z * z / 2) / (n + z * z), z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    assert proportion(np.repeat([1.0, 0.0], [k, n - k])) == pytest.approx((centre - wide, centre + wide), abs=1e-5)


def test_difference_by_hand():
    rng = np.random.default_rng(1)
    one, other = rng.normal(0.6, 0.1, 200), rng.normal(0.3, 0.2, 150)
    gap, (left, right) = difference([one], [other])
    half = 1.96 * math.sqrt(one.var() / 200 + other.var() / 150)
    assert gap == pytest.approx(one.mean() - other.mean())
    assert (left, right) == pytest.approx((gap - half, gap + half), abs=0.006)


def study(folder, ends, seeds=5, finished=True):
    """Write the runs of a study of one map; ends: final win rates by arm."""
    jobs = []
    for arm, end in ends.items():
        for seed in range(1, seeds + 1):
            top = end + 0.01 * seed
            place = folder / "runs" / f"{arm}_{seed}"
            make_run(place, (0, top / 2, top, top), lr=end / 100, seed=seed, finished=finished)
            jobs.append({"job": {"name": place.name, "arm": arm}, "state": "done"})
    write_json(folder / "study.json", {"jobs": jobs})
    return folder


def test_the_gate_reads_a_finished_study(tmp_path, capsys):
    wide = study(tmp_path / "wide", {"baseline": 0.3, "full_obs": 0.5})
    assert main(["beliefs", "gate", str(wide)]) == 0
    wide_out = capsys.readouterr().out
    row = next(line for line in wide_out.splitlines() if line.startswith("skirmish 3m"))
    assert re.search(r" 0\.200 \[0\.1\d\d, 0\.2\d\d\] ", row) and row.endswith("yes"), "as many places as the rates"
    make_run(wide / "runs" / "played", seed=9, evaluate=True, checkpoint_path="x", finished=False)
    jobs = json.loads((wide / "study.json").read_text())["jobs"]
    write_json(wide / "study.json", {"jobs": [*jobs, {"job": {"name": "played", "arm": "baseline"}, "state": "done"}]})
    assert main(["beliefs", "gate", str(wide)]) == 0
    assert capsys.readouterr().out == wide_out, "an evaluation is no run of an arm"
    assert main(["beliefs", "gate", str(wide), "--least=0.25"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("no")
    wild = study(tmp_path / "wild", {"baseline": 0.2, "full_obs": 0.4}, seeds=1)
    assert main(["beliefs", "gate", str(wild)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].endswith("no")  # one seed has no interval
    assert "fewer than 5 seeds" in out and "fewer than 5 seeds" not in wide_out
    even = study(tmp_path / "even", {"baseline": 0.3, "full_obs": 0.301})
    assert main(["beliefs", "gate", str(even), "--least=0"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("no")
    longer = study(tmp_path / "longer", {"baseline": 0.3, "full_obs": 0.5})
    for run in (longer / "runs").glob("full_obs*"):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"stage": "stage3", "t_env": 60_000, "test_battle_won_mean": 0.9}) + "\n")
    assert main(["beliefs", "gate", str(longer)]) == 0
    assert "open: `baseline`, seed 1, has its last test after 30,100 steps" in capsys.readouterr().out
    for words, problem in (
        ([str(wide), "--lower=full_obs"], "--lower=full_obs: --upper is the same arm. Give two arms"),
        ([str(wide), "--upper=all"], "--upper=all: is no arm of this study. Arms: baseline, full_obs"),
        ([str(study(tmp_path / "going", {"baseline": 0.1, "full_obs": 0.2}, finished=False))], "has not ended"),
        ([], "name one finished study"), ([str(wide), "--least=x"], "--least=x: must be a number"),
        ([str(wide), "--least=nan"], "--least=nan: must be a number from 0 to 1"),
        ([str(wide), "--least=15"], "--least=15: must be a number from 0 to 1"),
    ):  # fmt: skip
        assert main(["beliefs", "gate", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1


def test_means_of_the_gate_count_every_seed_whatever_the_order(tmp_path):
    jobs, ends = [], {"baseline": (0.25,) * 5, "full_obs": (0.375, 0.4375, 0.4375, 0.4375, 0.8125)}
    for arm, values in ends.items():
        for seed, end in enumerate(values, start=1):
            name = f"{arm}_{seed}"
            make_run(tmp_path / "runs" / name, (end,) * 4, lr=values[-1] / 100, seed=seed)
            jobs.append({"job": {"name": name, "arm": arm}, "state": "done"})
    write_json(tmp_path / "study.json", {"jobs": jobs})
    runs = load([tmp_path])
    found = gate(runs, "baseline", "full_obs", 0.25)  # at least so much: as much is enough
    assert [(row.place, row.seeds, row.gap, row.enters) for row in found] == [("skirmish 3m", 5, 0.25, True)]
    (row,) = gate_table(found, "baseline", "full_obs", 0.25)["rows"]
    assert row[2:4] == ["0.250", "0.500"] and row[4].startswith("0.250 [") and row[5] == "yes"
    assert gate_table(gate(runs[::-1], "baseline", "full_obs", 0.25), "baseline", "full_obs", 0.25)["rows"] == [row]


@pytest.fixture(scope="module")
def seeing_run(tmp_path_factory):
    """Return the folder of a run whose agents see everything."""
    words = "--config=qmix --env-config=skirmish with env_args.map_name=3m mac=n_graph_mac use_full_obs=True"
    return train(tmp_path_factory.mktemp("seeing"), *words.split())


@pytest.mark.processes
def test_tests_of_beliefs_from_the_command_line(seeing_run, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["--episodes=8"]
    swap = ["beliefs", "swap", str(seeing_run), f"--reconstruction={small_run}", *few]
    assert main(swap) == 0
    line = json.loads((seeing_run / "beliefs.jsonl").read_text())
    assert list(line["beliefs"]) == ["observation", "last_seen", "map_constant", "reconstruction", "full"]
    assert (line["test"], line["map"], line["episodes"]) == ("swap", "3m", 8)
    assert main(["beliefs", "census", str(seeing_run), *few]) == 0
    assert main(["beliefs", "plug-in", *few, f"--into={seeing_run}", "with", "env_args.map_name=3m", "seed=3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    texts = [line for line in printed if "seed 3" in line or "squared error" in line]
    assert texts and max(map(len, texts)) <= 120, "notes are wrapped"
    ends = [line.split() for line in printed if line.startswith(("observation ", "everything "))]
    assert all("[" not in word for line in ends for word in line[4:]), "the ends of the difference have no interval"
    assert any(line.startswith("everything") for line in printed)
    assert main(["report", str(seeing_run)]) == 0
    page = (seeing_run / "report.html").read_text()
    assert "Swap test" in page and "Census" in page and "Plug-in test" in page
    assert main(["beliefs", "census", *few, "env_args.map_name=3m"]) == 0
    file = tmp_path / "results" / "beliefs" / "beliefs.jsonl"
    assert file.is_file()
    capsys.readouterr()
    file.unlink()
    file.mkdir()
    assert main(["beliefs", "census", *few]) == 2
    shown = capsys.readouterr()
    assert "Census" in shown.out and "cannot be written" in shown.err, "what was measured is shown all the same"
    inferring = tmp_path / "inferring"
    inferring.mkdir()
    (inferring / "config.json").write_text(json.dumps(resolve("fog_ma2e", "skirmish", {}).model_dump(mode="json")))
    for words, problem in (
        (["census", "--episodes=7"], "--episodes=7: must be a number from 8"),
        (["guess"], "beliefs guess: name a test"), ([], "error: beliefs: name a test"), (["swap"], "use_full_obs=True"),
        (["swap", str(small_run), *few], "do not see everything"),
        (["swap", str(seeing_run), *few, f"--reconstruction={seeing_run}"], "this run predicts nothing"),
        (["census", *few, "--into=nowhere"], "--into=nowhere: no such folder"),
        (["census", *few, "--env-config=matrix_game"], "env=matrix_game has no list of units"),
        (["census", *few, f"--reconstruction={small_run}"], "census does not read it. Use it with plug-in, swap"),
        (["plug-in", *few, "--least=0.2"], "--least=0.2: beliefs plug-in does not read it. Use it with gate"),
        (["gate", str(small_run), "--into=x"], "--into=x: beliefs gate does not read it. Use it with census, plug-in"),
        (["plug-in", *few, f"--reconstruction={inferring}"], "kind=ma2e fills in no units"),
        (["swap", str(seeing_run), "--config=qmix"], "--config=qmix: the run has its own configuration"),
        (["census", *few, "env_args.map_name=[3m,5m]"], "give one map"),
    ):  # fmt: skip
        assert main(["beliefs", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1, error


@pytest.mark.processes
def test_the_team_of_a_run_plays_with_its_trained_weights(seeing_run):
    env = make_env("skirmish", {"map_name": "3m"}, 2, processes=False)
    team, words = beliefs._policy(evaluation_config(str(seeing_run), {}), env, str(seeing_run))
    (file,) = seeing_run.glob(f"models/*/{AGENT_FILE}")
    saved = torch.load(file, weights_only=True)
    assert saved.keys() == team.agent.state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in team.agent.state_dict().items())
    assert "qmix" in words
