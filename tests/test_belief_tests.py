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
from graph_toys import INFO, LAYOUT, toy_episodes
from many_runs import make_run

from omagd.config.env_info import ALLY, ENEMY
from omagd.controllers.types import Decision, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.learners.belief_baselines import fit_baselines
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.analysis.contrasts import contrasts
from omagd.run.analysis.groups import groups
from omagd.run.analysis.runs import load
from omagd.run.analysis.statistics import area, difference, paired_share, proportion
from omagd.run.cli.main import main
from omagd.run.training.believing import BeliefScript, Believing, LastSeen, MapConstant, Seen, win_rates
from omagd.run.training.census import CLASSES, census_of, classified
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
        living = unseen = before = blind = 0
        last, constant = [], []
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
                        blind += not met
                        guess = baselines.map_constant[agent, node, step].double().numpy()
                        constant.append(((guess - truth)[2:4] ** 2).sum())
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
            assert entry["rows"]["before_contact"]["count"] == blind


@pytest.mark.parametrize(
    ("unseen", "constant", "ridge", "blind", "wanted"),
    [(0.01, 9, 1, 1, "-"), (0.3, 2.4, 2, 1, "a"), (0.5, 10, 7, 9.9, "b"), (0.5, 10, 9.5, 8.5, "b"),
     (0.5, 10, 8, 9, "c")],
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
    sources = {"last": LastSeen(INFO), "map": MapConstant(baselines)}
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
                        assert (believed["last"][agent, node] == memory.get((agent, node), nothing)).all()
                        constant = baselines.map_constant[agent, node, step].numpy()
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
    assert won["a"].mean() == pytest.approx(np.mean([entry["battle_won"] for entry in plain.log]))
    acting = Believing(Winner(env), Seen())
    assert acting.wants_full_obs  # else `full` would have nothing to show


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


def test_difference_and_area_by_hand():
    rng = np.random.default_rng(1)
    one, other = rng.normal(0.6, 0.1, 200), rng.normal(0.3, 0.2, 150)
    gap, (left, right) = difference([one], [other])
    half = 1.96 * math.sqrt(one.var() / 200 + other.var() / 150)
    assert gap == pytest.approx(one.mean() - other.mean())
    assert (left, right) == pytest.approx((gap - half, gap + half), abs=0.006)
    assert area(np.array([0, 10, 40.0]), np.array([0, 1, 1.0])) == pytest.approx((5 + 30) / 40)
    assert area(np.array([7.0]), np.array([0.4])) == 0.4


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
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("skirmish 3m"))
    assert re.search(r" 0\.200 \[0\.1\d\d, 0\.2\d\d\] ", row) and row.endswith("yes"), "as many places as the rates"
    assert main(["beliefs", "gate", str(wide), "--least=0.25"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("no")
    wild = study(tmp_path / "wild", {"baseline": 0.2, "full_obs": 0.4}, seeds=1)
    assert main(["beliefs", "gate", str(wild)]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("no")  # one seed has no interval
    even = study(tmp_path / "even", {"baseline": 0.3, "full_obs": 0.301})
    assert main(["beliefs", "gate", str(even), "--least=0"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("no")
    for words, problem in (
        ([str(wide), "--upper=all"], "--upper=all: is no arm of this study. Arms: baseline, full_obs"),
        ([str(study(tmp_path / "going", {"baseline": 0.1, "full_obs": 0.2}, finished=False))], "has not ended"),
        ([], "name one finished study"), ([str(wide), "--least=x"], "--least=x: must be a number"),
    ):  # fmt: skip
        assert main(["beliefs", "gate", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1


def test_the_page_of_a_study_compares_its_arms_with_the_named_ones(tmp_path):
    folder = study(tmp_path / "arms", {"baseline": 0.2, "last_seen": 0.215, "omagd": 0.4, "full_obs": 0.6})
    table = contrasts(groups(load([folder])))[0]
    rows = {row[0]: dict(zip(table["head"], row, strict=True)) for row in table["rows"]}
    assert rows["omagd"]["win rate at the end, IQM"].startswith("0.43 [")
    assert rows["omagd"]["P(better than last_seen)"].startswith("1.00 [")
    assert rows["last_seen"]["P(better than baseline)"].startswith("0.76 [")  # 19 of 25 pairs
    assert rows["omagd"]["share of the gap"].startswith("0.50 [") and rows["full_obs"]["share of the gap"] == "-"
    steps, heights = np.array([100, 10_100, 20_100, 30_100]), np.array([0, 0.5, 1, 1])
    height = np.trapezoid(heights, steps) / 30_000 * 0.43
    assert float(rows["omagd"]["mean height of the curve"]) == pytest.approx(height, abs=5e-4)
    assert contrasts(groups(load([study(tmp_path / "other", {"a": 0.1, "b": 0.2})]))) == []
    assert "without brackets" not in table["note"]
    close = study(tmp_path / "close", {"baseline": 0.2, "omagd": 0.4, "full_obs": 0.21})
    (table,) = contrasts(groups(load([close])))
    (row,) = (row for row in table["rows"] if row[0] == "omagd")
    assert "[" not in row[table["head"].index("share of the gap")] and "share without brackets" in table["note"]
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "P(better than last_seen)" in (tmp_path / "page.html").read_text()


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
    assert (tmp_path / "results" / "beliefs" / "beliefs.jsonl").is_file()
    capsys.readouterr()
    for words, problem in (
        (["census", "--episodes=7"], "--episodes=7: must be a number from 8"),
        (["guess"], "beliefs guess: name a test"), ([], "error: beliefs: name a test"), (["swap"], "use_full_obs=True"),
        (["swap", str(small_run), *few], "do not see everything"),
        (["swap", str(seeing_run), *few, f"--reconstruction={seeing_run}"], "has no stages 1 and 2"),
        (["census", *few, "--into=nowhere"], "--into=nowhere: no such folder"),
        (["census", *few, "--env-config=matrix_game"], "env=matrix_game has no list of units"),
        (["census", *few, f"--reconstruction={small_run}"], "a census measures no reconstruction"),
        (["swap", str(seeing_run), "--config=qmix"], "--config=qmix: the run has its own configuration"),
        (["census", *few, "env_args.map_name=[3m,5m]"], "give one map"),
    ):  # fmt: skip
        assert main(["beliefs", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1, error
