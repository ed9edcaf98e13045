"""The page of the study of reconstruction: redrawn from its JSON lines alone, verdicts computed by its rules."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from many_runs import make_run

from omagd.learners import belief_baselines
from omagd.run.analysis import predictor_aim
from omagd.run.analysis.contrasts import final_tests, mean_heights
from omagd.run.analysis.groups import Group
from omagd.run.analysis.runs import Run, load
from omagd.run.analysis.verdicts import SIMPLE, needed_arms, verdict
from omagd.run.studies.executors import Job
from omagd.run.studies.results import append, line_of
from omagd.run.watch.recording import Recording
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "results"))
script, study, predictor = (
    importlib.import_module(name) for name in ("make_reconstruction", "reconstruction_data", "reconstruction_predictor")
)

STEPS = (100_000, 200_000, 300_000)
MAP = "skirmish 3m_mixed_sight6"


def run(arm: str, seed: int, won: float, early: float = 0.0, steps=STEPS) -> Run:
    rates = (early, (early + won) / 2, won)
    records = tuple(
        {"stage": "stage3", "t_env": t, "test_battle_won_mean": rate} for t, rate in zip(steps, rates, strict=True)
    )
    config = {"env": "skirmish", "env_args": {"map_name": "3m_mixed_sight6"}, "seed": seed}
    return Run(Path(f"{arm}{seed}"), config, {}, {}, True, arm, records)


def arms(seeds: int = 6, early: float = 0.0, **middles: float) -> list[Group]:
    """Return arms whose last tests lie evenly around a win rate, a hundredth apart."""
    around = 0.01 * (np.arange(seeds) - (seeds - 1) / 2)
    return [
        Group(arm, {}, tuple(run(arm, i, middle + each, early) for i, each in enumerate(around)))
        for arm, middle in middles.items()
    ]


GOOD = {"baseline": 0.2, "last_seen": 0.22, "map_constant": 0.24, "baseline_truth": 0.21, "map_constant_truth": 0.23,
        "omagd": 0.5, "full_obs": 0.7}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "seeds", "state", "short", "said"),
    [
        ({}, 6, "holds", "meets all conditions", "`omagd` closes 0.600 ["),
        ({}, 4, "open", "open", "Seeds so far, of 5: `omagd` 4, `baseline` 4, `full_obs` 4, `last_seen` 4"),
        ({"omagd": 0.44}, 6, "does not hold", "misses 1 of 5 conditions", "closes 0.48"),
        ({"omagd": 0.235}, 6, "does not hold", "misses 4 of 5 conditions", "closes 0.07"),
        ({"last_seen": 0.495}, 6, "does not hold", "misses 1 of 5 conditions", "`omagd` - `last_seen` = 0.01 [-0.02"),
        ({"map_constant": 0.51}, 6, "does not hold", "misses 1 of 5 conditions", "`omagd` - `map_constant` = -0.01"),
        ({"map_constant_truth": 0.51}, 6, "does not hold", "misses 1 of 5 conditions",
         "`omagd` - `map_constant_truth` = -0.01"),
        ({"map_constant": None, "full_obs": None}, 6, "open", "open", "Not run yet: `full_obs`, `map_constant`."),
        ({"full_obs": 0.19}, 6, "does not hold", "no gap to close", "There is no gap: `full_obs` - `baseline` = -0.01"),
    ],
)  # fmt: skip
def test_class_b_asks_for_half_of_the_gap_and_for_more_than_simple_guesses(changed, seeds, state, short, said):
    given = {arm: middle for arm, middle in {**GOOD, **changed}.items() if middle is not None}
    found = verdict(arms(seeds, **given), MAP, "b")
    assert (found.state, found.short) == (state, short) and said in found.why
    assert found.text.startswith(f"**{MAP}, class b: {state}.** ")
    assert state != "does not hold" or said in found.text.split(";")[0]  # what fails comes first


def test_a_difference_of_0_is_no_loss_and_no_gain():
    def flat(**won: float) -> list[Group]:
        return [Group(arm, {}, tuple(run(arm, i, each) for i in range(6))) for arm, each in won.items()]

    assert [verdict(flat(baseline=0.25, omagd=0.25), MAP, kind).state for kind in ("a", "c")] == ["holds", "holds"]
    won = {**dict.fromkeys(GOOD, 0.25), "omagd": 0.5, "full_obs": 0.75}
    assert verdict(flat(**won), MAP, "b").state == "holds"
    found = verdict(flat(**{**won, "last_seen": 0.5}), MAP, "b")
    assert found.short == "misses 1 of 5 conditions" and "`omagd` - `last_seen` = 0.00 [0.00, 0.00]" in found.why
    assert verdict(flat(**{**won, "full_obs": 0.25}), MAP, "b").short == "no gap to close"


def test_a_verdict_has_the_numbers_of_an_independent_bootstrap():
    rng = np.random.default_rng(5)
    scores = {arm: rng.normal(middle, 0.05, 10) for arm, middle in GOOD.items()}
    scores["omagd"][3] = 0.0  # a run that has failed: the middle half does without it
    groups = [Group(arm, {}, tuple(run(arm, i, won) for i, won in enumerate(each))) for arm, each in scores.items()]

    def iqm(values):  # the middle half: ten seeds without the two lowest and the two highest
        return np.sort(values, axis=-1)[..., 2:8].mean(-1)

    drawn = {arm: iqm(each[rng.integers(10, size=(50_000, 10))]) for arm, each in scores.items()}
    low, high = iqm(scores["baseline"]), iqm(scores["full_obs"])
    expected = [
        ((iqm(scores["omagd"]) - low) / (high - low),
         (drawn["omagd"] - drawn["baseline"]) / (drawn["full_obs"] - drawn["baseline"])),
        *((iqm(scores["omagd"]) - iqm(scores[other]), drawn["omagd"] - drawn[other])
          for other in ("baseline", *SIMPLE)),
    ]  # fmt: skip
    why = verdict(groups, MAP, "b").why
    found = [list(map(float, each)) for each in re.findall(r"(-?\d\.\d+) \[(-?\d\.\d+), (-?\d\.\d+)\]", why)]
    assert len(found) == 2 + len(SIMPLE)
    for (value, *ends), (true, samples) in zip(found, expected, strict=True):
        assert value == pytest.approx(true, abs=0.0051)
        assert ends == pytest.approx(np.percentile(samples, [2.5, 97.5]), abs=0.02)
    assert verdict(groups, MAP, "b") == verdict(groups, MAP, "b")


def test_the_result_of_a_run_is_its_last_test_not_its_best():
    records = [{"stage": "stage3", "t_env": t, "test_battle_won_mean": won}
               for t, won in zip((100_000, 300_000, 400_000), (0.1, 0.9, 0.3), strict=True)]  # fmt: skip
    plain = run("omagd", 1, 0.0)
    fallen = Group("omagd", {}, (Run(plain.folder, plain.config, {}, {}, True, "omagd", tuple(records)),))
    again = Group("omagd", {}, (*fallen.runs, Run(plain.folder, plain.config, {}, {"kind": "evaluation"}, True, "omagd",
                                                  tuple(records[:2]))))  # fmt: skip
    assert final_tests([again], MAP)["omagd"].tolist() == [0.3], "an evaluation is no run of the arm"
    assert mean_heights([fallen], MAP)["omagd"] == pytest.approx([(0.5 * 200 + 0.6 * 100) / 300])


@pytest.mark.parametrize(
    ("omagd", "state"), [(0.25, "holds"), (0.2, "holds"), (0.195, "holds"), (0.17, "does not hold")]
)
def test_class_c_asks_for_no_loss(omagd, state):
    found = verdict(arms(baseline=0.2, omagd=omagd), MAP, "c")
    assert (found.state, found.short) == (state, {"holds": "no loss found"}.get(state, "wins less"))
    assert verdict(arms(4, baseline=0.2, omagd=omagd), MAP, "c").state == "open"


def test_class_a_asks_for_the_area_under_the_curve_whatever_the_end_is():
    slow, fast = arms(baseline=0.6), arms(early=0.55, omagd=0.58)
    found = verdict([*slow, *fast], MAP, "a")
    assert (found.state, found.short) == ("holds", "not found slower")
    assert "median steps to a win rate of 0.54: `omagd` 100,000, `baseline` 300,000" in found.why
    swapped = [Group(name, {}, group.runs) for name, group in (("omagd", slow[0]), ("baseline", fast[0]))]
    assert verdict(swapped, MAP, "a").short == "slower"
    hardly = verdict(arms(baseline=0.6, omagd=0.595), MAP, "a")
    assert hardly.state == "holds"  # the interval of the difference holds 0
    ended = {"kind": "evaluation", "exit_state": "failed"}
    played = replace(slow[0].runs[0], summary=ended, given=slow[0].runs[0].given[-1:])
    again = [Group("baseline", {}, (*slow[0].runs, *[replace(played, folder=Path(f"e{i}")) for i in range(9)])), *fast]
    assert verdict(again, MAP, "a").why == found.why, "an evaluation is no curve"
    never = verdict([*arms(baseline=0.6), *arms(omagd=0.3)], MAP, "a")
    assert never.state == "does not hold" and "`omagd` never" in never.why


def changed(found: list[Group], label: str, seed: int, **values) -> list[Group]:
    """Return the groups, one run of which has other values."""
    return [
        replace(g, runs=tuple(replace(r, **values) if (g.label, r.seed) == (label, seed) else r for r in g.runs))
        for g in found
    ]


def card(**compared) -> dict:
    return {"id": "x", "compared": {"t_max": 300_000, "observations": "own", **compared}, "recorded": {}}


@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("label", "values", "said"),
    [
        (
            "baseline",
            {"given": run("baseline", 1, 0.2).given[:2]},
            "its last test after 200,000 steps, others after 300",
        ),
        ("omagd", {"given": ({**run("omagd", 1, 0.9).given[0], "test_battle_won_mean": math.nan},)}, "has no win rate"),
        ("omagd", {"given": ()}, "the last test of `omagd`, seed 1, has no win rate"),
        ("baseline", {"summary": {"exit_state": "failed"}}, "`baseline`, seed 1, ended as failed"),
        ("omagd", {"summary": {}, "finished": False}, "`omagd`, seed 1, ended as unfinished"),
        ("omagd", {"card": card(t_max=600_000)}, "seed 1, against `omagd`, seed 0: t_max 600000, not 300000"),
        ("omagd", {"config": {**run("omagd", 7, 0.9).config, "seed": 7}}, "`omagd` has seeds that `baseline` lacks: 7"),
    ],
    ids=["shorter", "nan", "none", "failed", "unfinished", "t_max", "seeds"],
)
def test_runs_that_are_not_alike_decide_nothing(kind, label, values, said):
    given = [replace(g, runs=tuple(replace(r, card=card(observations=g.label)) for r in g.runs)) for g in arms(**GOOD)]
    given.sort(key=lambda group: group.label != "omagd")
    assert verdict(given, MAP, kind).state == "holds"
    found = verdict(changed(given, label, 1, **values), MAP, kind)
    assert found.state == "open" and said in found.why and found.why.startswith("Runs are not alike: ")


def test_one_seed_many_times_is_one_seed():
    repeated = [Group(arm, {}, tuple(run(arm, 1, won) for _ in range(6))) for arm, won in GOOD.items()]
    found = verdict(repeated, MAP, "b")
    assert found.state == "open" and found.why.startswith("Seeds so far, of 5: `omagd` 1, `baseline` 1,")
    given = arms(5, baseline=0.2, omagd=0.3)
    for seed, state in ((9, "holds"), (None, "open")):  # a run whose seed nobody knows is none
        config = {**given[0].runs[0].config, "seed": seed}
        each = [replace(g, runs=(replace(g.runs[0], config=config), *g.runs[1:])) for g in given]
        assert verdict(each, MAP, "c").state == state


def test_no_verdict_looks_at_numbers_before_each_arm_has_its_seeds():
    given = arms(**{**GOOD, "omagd": 0.9})
    assert verdict(given, MAP, "b", 6).state == "holds"
    found = verdict(given, MAP, "b", 7)
    assert found.state == "open" and "`omagd` 6, `baseline` 6" in found.why and "closes" not in found.why
    few = [replace(group, runs=group.runs[:2]) if group.label == "last_seen" else group for group in given]
    few = [group for group in few if group.label != "full_obs"]
    assert verdict(few, MAP, "b", 6).why == "Not run yet: `full_obs`; seeds so far, of 6: `last_seen` 2."
    played_again = replace(given[0].runs[5], summary={"kind": "evaluation"})
    again = [replace(given[0], runs=(*given[0].runs[:5], played_again)), *given[1:]]
    assert verdict(again, MAP, "b", 6).why == "Seeds so far, of 6: `baseline` 5."


# --- the page


def test_the_committed_pages_are_those_of_the_committed_data():
    data = study.Data(script.DATA)
    for page, text in script.pages(data).items():
        assert page.read_text(encoding="utf-8") == text, "run: python docs/results/make_reconstruction.py"
    pictures = set(re.findall(r"reconstruction/(\w+\.png)", "".join(script.pages(data).values())))
    assert pictures == {path.name for path in script.DATA.glob("*.png")}


def test_predicted_classes_and_maps_are_those_of_the_study_files():
    folder = ROOT / "benchmarks" / "studies"
    text = re.sub(r"\n#", "", (folder / "reconstruction_gate.yaml").read_text())
    written = re.search(r"not\):(.*?)reserve:(.*?)Controls[^:]*:(.*?)\.", text, re.DOTALL)
    assert written is not None

    def classes(part: str) -> dict[str, str]:
        found = re.findall(r"(smax )?(\w+) ([abc])\b", part)
        return {f"{env or 'skirmish '}{name}": kind for env, name, kind in found}

    main, reserve, controls = map(classes, written.groups())
    assert {**main, **controls} == study.MAPS and reserve == study.RESERVE and set(controls) == set(study.CONTROLS)
    for name in (
        "reconstruction_3_agents",
        "reconstruction_5_agents",
        "reconstruction_controls",
        "reconstruction_control_8m",
        "reconstruction_gate",
    ):
        given = yaml.safe_load((folder / f"{name}.yaml").read_text())
        places = {f"{each.get('env_config', 'skirmish')} {each['map']}" for each in given["environments"].values()}
        assert places <= study.MAPS.keys() | study.RESERVE.keys()
        assert set(given["arms"]) <= set(study.ARMS) and given["results_file"] == f"{name}.jsonl"
        if name != "reconstruction_gate":
            assert {study.seeds_of(place)[-1] for place in places} == {given["seeds"]}
            assert {arm for place in places for arm in needed_arms(study.MAPS.get(place, "b"))} <= set(given["arms"])


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A copy of the pages, whose data are made-up results: the folder of the data."""
    pages = {name: getattr(script, name).relative_to(ROOT) for name in ("PAGE", "DETAILS", "README")}
    for name, place in pages.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
        monkeypatch.setattr(script, name, tmp_path / place)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "DATA", tmp_path / pages["PAGE"].with_suffix(""))
    script.DATA.mkdir()
    (made,) = load([make_run(tmp_path / "run", seed=1)])
    line = line_of("s", Job("j", "a", made.env, "3m", 1, ()), RunFolder(made.folder), made.card, "x", commit="ab" * 20)
    shutil.rmtree(tmp_path / "run")

    def add(name: str, place: str, middles: dict[str, float], seeds: int) -> None:
        env, _, map_name = place.partition(" ")
        for arm, middle in middles.items():
            for seed in range(seeds):
                rates = [middle / 2, middle + 0.01 * seed]
                where = {"arm": arm, "env": env, "map": map_name, "seed": seed, "job": f"{arm}{map_name}{seed}"}
                tests = {"t_env": [5000, 10_000], "wall_seconds": [1, 2], "test_battle_won_mean": rates}
                team = [{**ROWS[0], "mse": {**ERRORS, "predictor": 0.15}}]
                stages = {"stage2": {"beliefs": {"rows": ROWS}}, "stage3": {"beliefs": {"rows": team}}}
                stages = stages if arm == "omagd" else {}
                own = {"summary": {"stages": stages}, "identity": f"{name}{where}", "cpu_seconds": 360.0}
                append(script.DATA / f"{name}.jsonl", {**line, **where, **own, "tests": tests})

    add("reconstruction_gate", MAP, {"baseline": 0.2, "full_obs": 0.6}, 3)
    add("reconstruction_gate", "skirmish 5m_mixed_sight6", {"baseline": 0.2, "full_obs": 0.3}, 3)
    add("reconstruction_3_agents", MAP, GOOD, 10)
    add("reconstruction_5_agents", "skirmish 8m", {"baseline": 0.5, "omagd": 0.6, "full_obs": 0.6}, 2)
    census = {"test": "census", "env": "skirmish", "map": "3m_mixed_sight6", "class": "b", "policy": "scripts",
              "inferable": 0.213, "inferable_before": 0.239}  # fmt: skip
    played = {"win_rate": 0.25, "interval": [0.2, 0.3], "share": 0.5, "share_interval": [0.4, 0.6]}
    plug_in = {**census, "test": "plug-in", "beliefs": {"reconstruction": played}, "episodes": 512, "seed": 1}
    records = {**census, "units": {"enemy": {"unseen": 0.63}}}, plug_in
    (script.DATA / "beliefs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return script.DATA


ERRORS = {"predictor": 0.1, "ridge": 0.2, "last_seen": 0.3, "last_seen_or_mean": 0.4, "map_constant": 0.5,
          "slot_mean": 0.6, "zeros": 0.7}  # fmt: skip
ROWS = [
    {"row": "enemy", "count": 900, "mse": ERRORS, "recall_dead": 0.99, "health_r2": {"predictor": 0.4, "ridge": 0.3}},
    {
        "row": "enemy_before",
        "count": 300,
        "mse": ERRORS,
        "taken_for_dead": 0.04,
        "recall_dead": 0.96,
        "position_rms": {**ERRORS, "predictor": 3.14, "last_seen_or_mean": 7.7},
    },
    {"row": "enemy_age16", "count": 199, "mse": {**ERRORS, "ridge": 0.01}},
]


def rows_with(rows, name: str, change: dict) -> dict:
    """Return rows by name with numbers of one of them changed; None takes a number out."""
    made = {row["row"]: {key: dict(v) if isinstance(v, dict) else v for key, v in row.items()} for row in rows}
    for key, number in change.items():
        place, last = (made[name][key[0]], key[1]) if isinstance(key, tuple) else (made[name], key)
        place[last] = number
        if number is None:
            del place[last]
    return made


@pytest.mark.parametrize(
    ("name", "change", "state", "said"),
    [
        ("enemy", {}, "yes", "error at most 0.333 of the best simple guess's (row: all; asked: 0.9); error at"),
        ("enemy", {("mse", "ridge"): math.nan}, "open", "error at most unknown of ridge regression's"),
        ("enemy", {("mse", "predictor"): math.nan}, "open", "error at most unknown of the best simple guess"),
        ("enemy_before", {("mse", "zeros"): None}, "open", "error at most unknown of the best simple guess"),
        ("enemy_before", {"taken_for_dead": None}, "open", "unknown of those seen before taken for dead"),
        ("enemy_before", {"taken_for_dead": 0.051}, "no", "0.051 of those seen before taken for dead"),
        ("enemy", {"taken_for_dead": 0.3}, "yes", ""),  # nothing is asked of those never seen
        ("enemy_before", {"recall_dead": 0.949}, "no", "0.949 of the dead that were seen before"),
        ("enemy_before", {"recall_dead": None}, "open", "unknown of the dead that were seen before recognised"),
        ("enemy", {"recall_dead": 0.5}, "yes", ""),
        ("enemy", {("health_r2", "ridge"): 0.41}, "no", "R² of health 0.4000, of ridge regression 0.41"),
        ("enemy", {("health_r2", "ridge"): 0.4}, "yes", ""),  # as good is enough
        ("enemy", {("health_r2", "predictor"): None}, "open", "R² of health unknown, of ridge regression 0.3000"),
        ("enemy_before", {"recall_dead": None, "taken_for_dead": 0.06}, "no", "0.060 of those seen"),
        ("enemy_age16", {("mse", "ridge"): 0.01}, "yes", ""),  # of too few cases
        ("enemy", {("mse", "ridge"): 0.0}, "no", "error at most inf of ridge regression's (row: all"),
        ("enemy_age16", {("mse", "ridge"): 0.01, "count": 200},
         "no", "error at most 10.000 of ridge regression's (row: 16"),
    ],
)  # fmt: skip
def test_the_predictor_is_judged_in_every_row(name, change, state, said):
    rows = rows_with(ROWS, name, change)
    found = predictor_aim.judged(rows, 3, 3)
    assert found.state == state and found.words.startswith(said)
    assert bool(found.worst) == (state != "yes") and found.words.startswith(found.worst)
    backwards = predictor_aim.judged(dict(reversed(rows.items())), 3, 3)  # the largest number counts in any order
    assert backwards.state == state and backwards.words.startswith(said.partition(" (row: all")[0])
    assert predictor_aim.judged(rows, 2, 3).state == "open"


def test_the_last_sight_is_no_guess_of_units_that_were_never_seen():
    row = {"mse": {"last_seen": 2.0, "ridge": 1.0}}
    said = [predictor._guess(row, "mse", "last_seen", name, 1) for name in ("enemy_never", "enemy_before", "enemy")]
    assert said == ["-", "2.0", "2.0"] and predictor._guess(row, "mse", "ridge", "enemy_never", 1) == "1.0"


def test_the_simple_guesses_are_the_baselines_that_are_fitted():
    assert predictor_aim.SIMPLE == belief_baselines.SIMPLE


@pytest.mark.parametrize("row", ["enemy", "enemy_before"])
@pytest.mark.parametrize("guess", ["zeros", "slot_mean", "last_seen", "last_seen_or_mean", "map_constant", "ridge"])
def test_one_row_and_one_guess_are_enough_to_miss_what_was_asked(row, guess):
    rows = rows_with(ROWS, row, {("mse", guess): 0.099 if guess == "ridge" else 0.105})
    words = f"error at most {'1.010 of ridge regression' if guess == 'ridge' else '0.952 of the best simple guess'}"
    found = predictor_aim.judged(rows, 3, 3)
    assert found.state == "no" and found.words.startswith(words) and found.worst.startswith(words)
    assert f"(row: {'all' if row == 'enemy' else 'seen before'}; asked" in found.worst


def test_rows_are_means_over_seeds_and_missing_where_cases_are_few():
    row = predictor_aim.mean_row([ROWS[0], {**ROWS[0], "count": 100, "mse": {**ERRORS, "ridge": 0.4}}])
    assert row["count"] == 500 and row["mse"]["ridge"] == pytest.approx(0.3) and row["recall_dead"] == 0.99
    assert predictor_aim.mean_row([ROWS[2]]) == predictor_aim.mean_row([]) == {}
    assert predictor_aim.mean_row([{**ROWS[2], "count": 200}])["count"] == 200, "as many as asked are enough"


def test_one_command_redraws_the_page_from_the_lines_alone(site, monkeypatch):
    episode = {"env": "skirmish", "map_name": "m", "seed": 1, "policy": "p", "values": "Q-values", "results": {}}
    scene = {"ids": ["a0", "e0"], "teams": [0, 1], "kinds": ["", ""], "team_names": ["agents", "enemies"], "sight": [6]}
    moment = {"x": [0, 9], "y": [0, 0], "alive": [True, True], "seen": ["1"], "beliefs": [[[1, 8, 0, None]]]}
    episode |= {"scene": {**scene, "actions": [], "bounds": [-9, -9, 9, 9]}, "moments": [moment, moment]}
    Recording.model_validate({"episodes": [episode]}).write(site / "battle.json.gz")
    drawn, render = {}, script.render
    monkeypatch.setattr(script, "render", lambda *args: (drawn.update({args[1].kind: args}), render(*args))[1])
    script.main()
    assert all("IQM" in words for _, _, words, *_ in drawn.values()), "as the page says"
    (panel, *_), axes, *_ = drawn["final"]
    ends = {line.label: float(line.x[0]) for line in panel.lines}
    assert axes.gap == ("baseline", "full_obs") and ends["omagd"] == pytest.approx(0.545)
    made = {page: page.read_text() for page in (script.PAGE, script.DETAILS, script.README)}
    page, readme = made[script.PAGE] + made[script.DETAILS], made[script.README]
    assert "**skirmish 3m_mixed_sight6, class b: holds.**" in page and "asked: at least 2" in page
    assert (
        f"| {MAP} | b | b | 63% | 0.21, 0.24 | yes |" in page
        and "| skirmish 5m_mixed_sight6 | b | - | - | - | no |" in page
    )
    assert "5m_mixed_sight6, class b" not in page  # it has not entered
    assert "**skirmish 8m, class a: open.** Seeds so far, of 5: `omagd` 2, `baseline` 2." in page
    assert "### skirmish 8m" not in page  # no number before all are there
    assert "**Class b as a whole: open.** Of 3 maps it holds on 1, 2 are undecided" in page
    assert "(asked: at least 2). Not through the gate: skirmish 5m_mixed_sight6." in page
    table = page.split(f"### {MAP}\n\n")[1].split("\n\n")[0]
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert f"| {MAP} | 0 | 1 | 2 |" in page and "\n| omagd | 0.500 | 0.510 | 0.520 |" in page
    assert "| 10 | 0.55 [" in rows["omagd"] and rows["omagd"].endswith("| 6.0 |")  # minutes
    assert f"| {MAP} | seen before | 33% | 3.1 | 0.2 | 0.3 | 0.5 |" in page, "where they are, in cells"
    assert f"| {MAP} | 0.040 | 0.960 | 0.990 | 0.990 | 0.400, 0.300 | yes |" in page, "who is dead"
    assert "| all | 900 | 0.100 | - | 0.200 | 0.300 | 0.400 | 0.500 |" in page and "| 16 and more |" not in page
    assert (
        "| enemies, all, in battles of the arm's own teams | 900 | 0.150 | - | 0.200 | 0.300 | 0.400 | 0.500 |" in page
    )
    assert f"| plug-in | {MAP} | scripts | 512 | - | - | - | 0.250 | - |" in page
    assert "**Meets what was asked: yes.** Error at most 0.333 of the best simple guess's" in page
    assert (
        f"88 runs, 8.8 core-hours.\n- Commit `{'ab' * 6}`, 88 runs. gate, {MAP}: `baseline` 3, `full_obs` 3; gate, "
        in page
    )
    assert f"; {MAP}: `baseline` 10, `baseline_truth` 10, " in page
    line = next(line for line in readme.splitlines() if line.startswith(f"| {MAP} (b)"))
    assert line in page and "(docs/results/reconstruction/final.png)" in readme
    cells = line.strip("| ").split(" | ")
    assert cells[1:5] == ["10", "0.25", "0.55", "0.75"] and cells[-2:] == ["1.0 to 1.0", "meets all conditions"]
    assert cells[5].startswith("0.30 [0.2") and cells[6].startswith("0.600 [0.5")
    for name in ("final.png", "curves.png", "beliefs.png"):
        assert f"(reconstruction/{name})" in page and (site / name).read_bytes().startswith(b"\x89PNG")
    assert script.pages(study.Data(site)) == made
    # Lines in another order, as merged files have them, give the same page.
    for path in site.glob("reconstruction_*.jsonl"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert page_now() == page
    # Without data the pages are those without data again.
    shutil.rmtree(site)
    site.mkdir()
    script.main()
    assert (
        "Not run yet: `omagd`, `baseline`, `full_obs`" in script.PAGE.read_text()
        and "png" not in script.PAGE.read_text()
    )


def page_now() -> str:
    """Return both pages as the data make them, without drawing pictures."""
    made = script.pages(study.Data(script.DATA))
    return made[script.PAGE] + made[script.DETAILS]


def test_what_is_resampled_does_not_depend_on_the_order_of_runs(site):
    runs = study.Data(site).parts["gate"]
    ordered, reversed_ = (final_tests(study.by_arm(each), MAP)["baseline"] for each in (runs, runs[::-1]))
    assert ordered.tolist() == reversed_.tolist() == sorted(ordered)


def test_a_gate_that_goes_on_decides_nothing(site):
    path = site / "reconstruction_gate.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    full = [line for line in lines if '"arm":"full_obs"' in line and "3m_mixed" in line]
    path.write_text("".join(line for line in lines if line not in full))  # one map without, one with all
    page = page_now()
    assert f"| {MAP} | b | b | 63% | 0.21, 0.24 | not run yet |" in page and f"| {MAP} | 3" not in page
    assert "| skirmish 5m_mixed_sight6 | 3, 3 | 0.210 | 0.310 |" in page and f"{MAP}, class b: holds" in page
    path.write_text("".join(line for line in lines if line not in full[1:]))
    page = page_now()
    assert f"| {MAP} | 3, 1 | 0.210 | 0.600 |" in page and page.count("| open |") == 1
    path.write_text("".join(line for line in lines if '"arm":"full_obs"' not in line))
    assert "| skirmish 5m_mixed_sight6 | b | - | - | - | not run yet |" in page_now()


def test_the_reduced_study_is_no_part_of_the_page_and_controls_need_no_gate(site):
    page = page_now()
    for text in (site / "reconstruction_3_agents.jsonl").read_text().splitlines():
        line = json.loads(text)
        other = {"seed": line["seed"] + 100, "job": f"short {line['job']}", "identity": f"short {line['identity']}"}
        append(site / "reconstruction_short.jsonl", {**line, **other})
    assert page_now() == page
    (site / "reconstruction_short.jsonl").unlink()
    gate = site / "reconstruction_gate.jsonl"
    lines = gate.read_text()
    gate.write_text(lines + lines.replace("5m_mixed_sight6", "8m"))  # with a gap of 0.1, which a map of class b needs
    page = page_now()
    assert "| skirmish 8m | a | - | - | - | control |" in page and "**skirmish 8m, class a: open.**" in page


def test_class_b_is_open_while_enough_maps_can_still_hold(site, monkeypatch):
    asked = "**Class b as a whole: {}.** Of 3 maps it holds on 1, 2 are undecided"
    for number, state in ((1, "holds"), (2, "open"), (7, "open"), (8, "does not hold")):
        monkeypatch.setattr(study, "MAPS_ASKED", number)
        assert asked.format(state) in page_now()


def test_the_predictor_of_each_map_is_judged_by_its_own_runs(site):
    path = site / "reconstruction_5_agents.jsonl"
    path.write_text(path.read_text().replace('"count":900', '"count":400').replace('"ridge":0.2', '"ridge":0.15'))
    assert "### skirmish 8m" not in page_now()
    for line in map(json.loads, path.read_text().splitlines()):
        for seed in (line["seed"] + 2, line["seed"] + 4):
            append(path, {**line, "seed": seed} | {key: f"{line[key]} {seed}" for key in ("job", "identity")})
    page = page_now().split("<!-- begin errors")[1].split("<!-- end errors")[0]
    of_map, of_8m = page.split("### Errors on skirmish 8m")
    assert "| all | 900 | 0.100 | - | 0.200 |" in of_map and "; 10 seeds." in of_map
    assert "| all | 400 | 0.100 | - | 0.150 |" in of_8m and of_8m.count(" asked: yes.**") == 1 and "; 5 seeds." in of_8m


def test_arms_show_numbers_once_they_have_their_seeds(site):
    """Nobody should read a picture of one seed; the lines are kept meanwhile."""
    path = site / "reconstruction_3_agents.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    extra = [line.replace('"arm":"full_obs"', '"arm":"team_obs"').replace("full_obs3m", "team_obs3m")
             for line in lines if '"arm":"full_obs"' in line]  # fmt: skip
    path.write_text("".join([*lines, *extra[:9]]))
    page = page_now()
    assert "| team_obs |" not in page and "| full_obs | 10 |" in page and "97 runs" in page
    path.write_text("".join([*lines, *extra]))
    assert "| team_obs | 10 |" in page_now()
    path.write_text("".join(line for line in lines if '"arm":"last_seen"' not in line or '"seed":0' in line))
    page = page_now()
    assert f"**{MAP}, class b: open.** Seeds so far, of 10: `last_seen` 1." in page and "| baseline | 10 |" not in page
    assert "final.png" not in page and "class a: open" in page


def test_a_map_whose_number_of_seeds_was_raised_shows_both_verdicts(site, monkeypatch):
    """More seeds that were added after a look must not replace what that look showed."""
    monkeypatch.setattr(study, "SEEDS_OF", {MAP: (5, 10)})
    path = site / "reconstruction_3_agents.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    late = [line for line in lines if json.loads(line)["seed"] >= 5]
    path.write_text("".join(line for line in lines if line not in late))
    five = page_now()
    assert f"**{MAP}, class b: open.** With 5 of 10 planned seeds it holds. " in five and "; 5 seeds." in five
    readme = script.pages(study.Data(site))[script.README]
    assert f"| {MAP} (b) | 5 |" in readme and "| 1.0 to 1.0 | open |" in readme
    assert "b as a whole: open.** Of 3 maps it holds on 0, 3 are undecided" in five
    control = [line.replace('"arm":"full_obs"', '"arm":"ridge"').replace("full_obs3m", "ridge3m")
               for line in lines if '"arm":"full_obs"' in line and line not in late]  # fmt: skip
    path.write_text("".join([*lines, *control]))
    page = page_now()
    assert "| baseline | 10 |" in page and "| ridge | 5 |" in page, (
        "an arm that decides no verdict keeps its first seeds"
    )
    assert "\n| ridge | 0.700 | 0.710 | 0.720 | 0.730 | 0.740 | - | - | - | - | - |" in page
    path.write_text("".join([*lines, *control[:4]]))
    assert "| ridge | 4 |" not in page_now() and "| ridge | 5 |" not in page_now()
    path.write_text("".join(line for line in lines if line not in late[:3]))  # some of the later seeds
    between = page_now()
    assert "| baseline | 5 |" in between and between.split("<!-- begin cost")[0] == five.split("<!-- begin cost")[0]
    fallen = {"last_seen", "map_constant", "baseline_truth", "map_constant_truth"}  # the later seeds win all battles
    path.write_text("".join(_with_wins(line, 1.0) if line in late and json.loads(line)["arm"] in fallen else line
                            for line in lines))  # fmt: skip
    page = page_now()
    assert "| baseline | 10 |" in page and f"**{MAP}, class b: does not hold.** " in page
    first = five.split("With 5 of 10 planned seeds it holds. ")[1].split("; 5 seeds.")[0] + "; 5 seeds."
    assert f"; 10 seeds. With the first 5 seeds: holds. {first}" in page
    assert "b as a whole: open.** Of 3 maps it holds on 0, 2 are undecided" in page


def test_a_map_that_waits_for_more_seeds_may_still_hold(site, monkeypatch):
    """Otherwise class b would be given up too early."""
    path = site / "reconstruction_3_agents.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(_with_wins(line, 1.0) if '"arm":"last_seen"' in line else f"{line}\n" for line in lines))
    assert "Of 3 maps it holds on 0, 2 are undecided" in page_now()
    monkeypatch.setattr(study, "SEEDS_OF", {MAP: (10, 12)})
    assert f"{MAP}, class b: open.** With 10 of 12 planned seeds it does not hold. " in page_now()
    assert "holds on 0, 3 are undecided" in page_now()


def test_variants_are_compared_with_the_arm_without_them_and_decide_no_verdict(site):
    before = page_now()
    assert "<!-- begin variants" in before and before.split("<!-- begin variants")[1].split("\n")[1] == script.NOT_YET
    lines = [json.loads(line) for line in (site / "reconstruction_3_agents.jsonl").read_text().splitlines()]
    path = site / "reconstruction_variants.jsonl"
    for line in lines:
        if line["arm"] == "omagd" and line["seed"] < 5:
            for arm, won in (("sample", 0.9), ("masked", 0.3), ("masked_truth", 0.4)):
                varied = {**line, "arm": arm, "study": "reconstruction_variants", "identity": f"{arm}{line['seed']}"}
                append(path, json.loads(_with_wins(json.dumps(varied), won + 0.01 * line["seed"])))
    page = page_now()
    part = page.split("<!-- begin variants")[1].split("<!-- end variants")[0]
    rows = [line.split(" | ") for line in part.splitlines() if "skirmish" in line]
    assert [(row[1], row[4].split(" [")[0]) for row in rows] == [("`sample`", "0.38"), ("`masked_truth`", "0.10")]
    assert [row[3].split(",")[0] for row in rows] == ["`omagd`: 10 seeds", "`masked`: 5 seeds"]
    assert rows[1][2] == "0.400, 0.410, 0.420, 0.430, 0.440" and rows[1][3].endswith(" 0.300 to 0.340")
    assert page.split("<!-- end verdicts")[0] == before.split("<!-- end verdicts")[0]
    assert "variants, skirmish 3m_mixed_sight6: `masked` 5, `masked_truth` 5, `sample` 5." in page


def test_a_gap_that_is_asked_for_once_more_decides_no_verdict(site):
    """Nor does it fill in a seed that the study lacks."""
    path = site / "reconstruction_3_agents.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    path.unlink()
    for line in lines:
        if (line["arm"], line["seed"]) != ("baseline", 3):
            append(path, line)
    before = page_now()
    assert "`baseline` 9" in before
    for line in lines:
        if line["arm"] in ("baseline", "full_obs") and line["seed"] < 4:
            again = {**line, "study": "reconstruction_float32", "identity": f"again {line['arm']}{line['seed']}"}
            append(site / "reconstruction_float32.jsonl", json.loads(_with_wins(json.dumps(again), 0.5)))
    page = page_now()
    part = page.split("<!-- begin float32")[1].split("<!-- end float32")[0]
    assert f"| {MAP} | float32 | 4, 4 | 0.500 | 0.500 | 0.000 [0.000, 0.000] |" in part
    assert "main study" not in part, "not before the study shows this map"
    for name in ("verdicts", "tables", "gate"):
        ours, theirs = (each.split(f"<!-- begin {name}")[1].split("<!-- end")[0] for each in (page, before))
        assert ours == theirs, name
    assert f"float32, {MAP}: `baseline` 4, `full_obs` 4" in page
    for line in lines:  # now with all seeds
        if (line["arm"], line["seed"]) == ("baseline", 3):
            append(path, line)
    # Ten of .245 and of .745 in the mean, and four of .5.
    both = "| float32 and main study, runs counted singly | 14, 14 | 0.318 | 0.675 | 0.357 ["
    assert f"| {MAP} {both}" in page_now()


def test_parts_of_predictions_have_a_table_of_their_own_once_all_were_played(site):
    def played(rate: float) -> dict:
        return {"win_rate": rate, "interval": [rate, rate], "share": 2 * rate, "share_interval": [rate, 3 * rate]}

    record = {
        "test": "swap",
        "env": "skirmish",
        "map": "3m_mixed_sight6",
        "policy": "a team",
        "episodes": 512,
        "seed": 1,
    }
    ends = {"observation": played(0.05), "full": played(0.45)}
    with (site / "beliefs.jsonl").open("a") as file:
        for number, name in enumerate(predictor.PREDICTORS, start=1):
            page = page_now()
            assert page.split("<!-- begin parts")[1].split("<!-- end")[0].count("*Not run yet.*") == 1
            line = {**record, "reconstruction": name, "beliefs": {**ends, "reconstruction": played(number / 10)}}
            file.write(json.dumps(line) + "\n")
            file.flush()
    page = page_now()
    cells = [f"0.{n}00, {0.2 * n:.2f} [0.{n}0, {0.3 * n:.2f}]" for n in range(1, 5)]
    assert f"| swap | {MAP} | 0.050 | {' | '.join(cells)} | 0.450 |" in page
    assert f"| swap | {MAP} | a team | 512 | 0.050 | - | - | 0.400 | 0.450 |" in page
    assert page.count(f"| swap | {MAP} | a team |") == 1, "the parts are in their own table alone"


@pytest.mark.parametrize(("won", "reached"), [(0.1, "never"), (0.58, "1.0 million (8)")])
def test_the_baseline_with_as_much_cpu_time_stands_beside_the_method_and_decides_nothing(site, won, reached):
    before = page_now()
    lines = [json.loads(line) for line in (site / "reconstruction_3_agents.jsonl").read_text().splitlines()]
    for line in lines:
        if line["arm"] == "baseline" and line["seed"] < 5:
            more = {"study": "reconstruction_equal_time", "identity": f"longer {line['seed']}", "cpu_seconds": 3000.0}
            tests = {**line["tests"], "t_env": [1_000_000, 6_000_000], "test_battle_won_mean": [won, 0.45]}
            append(site / "reconstruction_equal_time.jsonl", {**line, **more, "tests": tests})
    page = page_now()
    part = page.split("<!-- begin equal_time")[1].split("<!-- end equal_time")[0]
    assert f"| {MAP} | 10, 5 | 0.25 (6) | 0.55 (6) | 0.45 (50) | 6 million | 0.10 [0.0" in part
    assert f"] | {reached} |" in part
    for name in ("verdicts", "tables", "answer", "gate"):
        ours, theirs = (each.split(f"<!-- begin {name}")[1].split("<!-- end")[0] for each in (page, before))
        assert ours == theirs, name
    assert f"equal CPU time, {MAP}: `baseline` 5" in page


def _with_wins(text: str, won: float) -> str:
    line = json.loads(text)
    tests = {**line["tests"], "test_battle_won_mean": [won / 2, won]}
    return json.dumps({**line, "tests": tests}) + "\n"


def test_a_map_counts_for_class_b_once_it_is_through_the_gate(site):
    assert "**Class b as a whole: open.** Of 3 maps it holds on 1, 2 are undecided" in page_now()
    (site / "reconstruction_gate.jsonl").unlink()
    page = page_now()
    assert f"{MAP}, class b: holds" in page
    assert "**Class b as a whole: open.** Of 4 maps it holds on 0, 4 are undecided" in page


def test_a_gate_of_runs_that_are_not_alike_decides_nothing(site):
    path = site / "reconstruction_gate.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    short = {name: values[:1] for name, values in line["tests"].items()}
    path.write_text("".join([json.dumps({**line, "tests": short}) + "\n", *others]))
    page = page_now()
    assert "| open: `baseline`, seed 0, has its last test after 5,000 steps, others after 10,000 |" in page
    assert (
        f"| {MAP} | b | b | 63% | 0.21, 0.24 | not run yet |" in page
        and "| skirmish 5m_mixed_sight6 | b | - | - | - | no |" in page
    )


def test_an_arm_with_runs_of_two_settings_is_named(site):
    assert "different settings" not in page_now()
    path = site / "reconstruction_5_agents.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["card"]["recorded"]["settings"]["lr"] = 0.5
    path.write_text("".join([json.dumps(line) + "\n", *others]))
    assert "- **Runs of different settings are one arm**: `baseline` on skirmish 8m (main study)." in page_now()


def test_a_key_that_is_gone_again_makes_no_other_arm_of_runs_that_had_its_default(site):
    path = site / "reconstruction_5_agents.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    for value, named in ((False, False), (True, True)):
        line = json.loads(first)
        line["card"]["recorded"]["settings"]["belief_inputs"] = value
        path.write_text("".join([json.dumps(line) + "\n", *others]))
        assert ("different settings" in page_now()) == named


def test_results_of_no_part_of_the_study_are_rejected(site):
    (site / "reconstruction_other.jsonl").write_text("")
    with pytest.raises(UserError, match="reconstruction_other.jsonl: belongs to no part of the study"):
        page_now()
    files = {path.stem for path in (ROOT / "benchmarks" / "studies").glob("reconstruction_*.yaml")}
    assert files == set(study.PART_OF)


def test_a_map_without_a_predicted_class_is_refused(site):
    path = site / "reconstruction_3_agents.jsonl"
    path.write_text(path.read_text().replace("3m_mixed_sight6", "27m_vs_30m"))
    with pytest.raises(UserError, match="has runs on skirmish 27m_vs_30m, of no predicted class"):
        script.main()


def test_a_page_without_a_marker_is_refused_and_nothing_is_written(site):
    script.main()
    page = script.PAGE
    page.write_text(page.read_text().replace("<!-- begin verdicts", "<!-- begin verdictz"))
    before = {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}
    with (site / "reconstruction_5_agents.jsonl").open("a") as file:  # so that pictures would change
        for line in (site / "reconstruction_3_agents.jsonl").read_text().splitlines():
            file.write(json.dumps({**json.loads(line), "map": "8m_mixed_sight6"}) + "\n")
    before[site / "reconstruction_5_agents.jsonl"] = (site / "reconstruction_5_agents.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"{page.name}: needs one marker <!-- begin verdicts"):
        script.main()
    assert {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()} == before


def test_a_second_result_of_a_seed_is_refused(site):
    line = json.loads((site / "reconstruction_5_agents.jsonl").read_text().splitlines()[0])
    append(site / "reconstruction_5_agents.jsonl", {**line, "job": "again"})
    with pytest.raises(UserError, match=r"main study: baseline: the same map and seed again.*Remove the lines of one"):
        page_now()


def test_a_record_of_a_test_without_a_map_is_refused(site):
    append(site / "beliefs.jsonl", {"test": "census"})
    with pytest.raises(UserError, match=r"beliefs.jsonl: a census names no map. Remove its line"):
        page_now()
