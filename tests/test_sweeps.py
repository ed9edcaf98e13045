"""Sweeps: the file, the search, pruning, what is kept over kills, and what is written."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import sweep_stand_in
import yaml
from many_runs import without
from matplotlib.figure import Figure
from sweep_stand_in import BEST_GAMMA, BEST_LR, PLUGIN, KnownExecutor

from omagd.config.loading import resolve
from omagd.lab.studies import EXECUTORS, engine, estimate, sweep, sweep_report, trials
from omagd.lab.studies.spec import config_of
from omagd.lab.studies.state import DONE, FAILED, PRUNED, StudyState
from omagd.lab.studies.study import examine
from omagd.lab.studies.sweep import run_sweep
from omagd.lab.studies.sweep_spec import Parameter, load_sweep
from omagd.run.cli.main import main
from omagd.utils.errors import UserError

SPACE = {"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "gamma": {"low": 0.5, "high": 0.99}}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The executor `known`, polls without pauses, no check that needs torch."""
    monkeypatch.setitem(EXECUTORS._objects, "known", KnownExecutor)
    monkeypatch.setattr(EXECUTORS, "names", lambda: ["known", "local", "ray", "slurm"])
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "examine", lambda jobs, executor, source: {})


def values_of(folder: Path, **more) -> dict:
    return {
        "name": "toy", "results": str(folder), "config": "qmix", "with": {"test_interval": 10_000}, "seeds": 2,
        "space": SPACE, "trials": 12, "executor": {"known": {}}, **more,
    }  # fmt: skip


def swept(folder: Path, **more) -> dict:
    return run_sweep(load_sweep(values_of(folder, **more)), lambda line: None, quiet=True)


def started(folder: Path, what: str = "start") -> list[str]:
    lines = (folder / "toy" / "started").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(what)]


def test_thirty_trials_find_the_known_optimum(tmp_path):
    space = {**SPACE, "mixer": {"choices": ["vdn", "qmix"]}}
    found = swept(tmp_path, space=space, trials=30, executor={"known": {"jobs": 1}})
    assert len(found["trials"]) == 30
    best = found["trials"][0]
    assert best["trial"] == found["best"] and best["keys"]["mixer"] == "qmix"
    assert abs(math.log10(best["keys"]["lr"] / BEST_LR)) < 0.5
    assert abs(best["keys"]["gamma"] - BEST_GAMMA) < 0.15
    assert best["value"] > 0.93
    assert best["value"] == pytest.approx(statistics.mean(best["by_seed"].values()))
    assert list(found["importances"])[0] == "lr" and sum(found["importances"].values()) == pytest.approx(1)
    # As many random combinations find less.
    drawn = swept(tmp_path / "random", space=space, trials=30, startup_trials=30, pruning=False)
    assert best["value"] > drawn["trials"][0]["value"]
    # It is the same search whenever it is repeated.
    again = swept(tmp_path / "again", space=space, trials=30, executor={"known": {"jobs": 1}})
    assert again["trials"][0]["keys"] == best["keys"]


def test_trials_that_fall_behind_are_ended_early(tmp_path):
    found = swept(tmp_path, trials=20, pruning={"after_trials": 4, "after_tests": 1}, executor={"known": {"jobs": 2}})
    by_state = {state: [t for t in found["trials"] if t["state"] == state] for state in ("complete", "pruned")}
    assert len(by_state["complete"]) + len(by_state["pruned"]) == 20
    assert len(by_state["pruned"]) >= 5 and min(t["trial"] for t in by_state["pruned"]) >= 4
    assert {1} <= {t["pruned_after_test"] for t in by_state["pruned"]} <= {1, 2}
    assert max(t["value"] for t in by_state["pruned"]) < max(t["value"] for t in by_state["complete"])
    state = StudyState.read(tmp_path / "toy")
    for trial in by_state["pruned"]:
        assert {state.records[name].state for name in trial["runs"]} <= {PRUNED, DONE}
        assert not all(state.is_finished(name) for name in trial["runs"])
    assert started(tmp_path, "cancel")
    for trial in found["trials"]:
        seconds = [state.records[name].seconds for name in trial["runs"]]
        assert 0 < sum(seconds) == pytest.approx(trial["seconds"])
    whole = swept(tmp_path / "whole", trials=20, pruning=False)
    assert {t["state"] for t in whole["trials"]} == {"complete"}


def test_one_run_at_a_time_prunes_by_the_seeds_there_are(tmp_path):
    """The first seed of a trial is compared with the first seeds of others, so the second one may never start."""
    settings = {"executor": {"known": {"jobs": 1}}, "pruning": {"after_trials": 4, "after_tests": 1}}
    found = swept(tmp_path, trials=16, **settings)
    pruned = [trial["runs"] for trial in found["trials"] if trial["state"] == "pruned"]
    begun = set(started(tmp_path))
    assert pruned and any(runs[0] in begun and runs[1] not in begun for runs in pruned)


def test_a_failed_trial_is_reported_and_the_sweep_goes_on(tmp_path):
    said = []
    given = values_of(tmp_path, trials=5, executor={"known": {"fails": ["trial0001-seed2"]}})
    found = run_sweep(load_sweep(given), said.append, quiet=True)
    states = {trial["trial"]: (trial["state"], trial["error"]) for trial in found["trials"]}
    error = "trial0001-seed2: error: no luck"
    assert states[1] == ("failed", error) and said == [f"trial 1 has failed: {error}"]
    assert [states[n][0] for n in (0, 2, 3, 4)] == ["complete"] * 4
    assert StudyState.read(tmp_path / "toy").records["trial0001-seed2"].state == FAILED
    before = started(tmp_path)
    assert swept(tmp_path, trials=5)["trials"] == found["trials"]  # not even what has failed is repeated
    assert started(tmp_path) == before
    assert len(swept(tmp_path, trials=7)["trials"]) == 7  # more trials may be asked for later


def test_an_interrupted_sweep_ends_as_an_undisturbed_one(tmp_path, monkeypatch):
    """Interrupted at every step: between a trial and its runs, between a run and its value, while runs are going on."""
    calm = swept(tmp_path / "calm", trials=8, executor={"known": {"jobs": 1}}, pruning=False)
    save, left = StudyState.save, [3]

    def interrupt(self, now=False):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        save(self, now)

    monkeypatch.setattr(StudyState, "save", interrupt)
    rough = None
    for attempt in range(200):
        left[0] = 3 + attempt % 7
        try:
            rough = swept(tmp_path, trials=8, executor={"known": {"jobs": 1}}, pruning=False)
            break
        except KeyboardInterrupt:
            continue
    assert rough is not None and attempt > 5

    def bare(found):
        return [{k: v for k, v in trial.items() if k not in {"seconds"}} for trial in found["trials"]]

    assert bare(rough) == bare(calm)
    finished = [line for line in (tmp_path / "toy" / "started").read_text().splitlines() if line.startswith("start")]
    assert len({line.split()[1] for line in finished}) == 16


@pytest.mark.processes
def test_a_sweep_that_is_killed_at_random_moments_loses_and_repeats_no_trial(tmp_path):
    plugin = tmp_path / "plugin"
    for name, text in PLUGIN.items():
        (plugin / name).parent.mkdir(parents=True, exist_ok=True)
        (plugin / name).write_text(text)
    program = (
        "import sys; from omagd.lab.studies import engine, sweep; from omagd.run.cli.main import main\n"
        "engine.POLL_SECONDS = 0.02; sweep.LOOK_SECONDS = 0; sweep.examine = lambda *_: {}\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    given = values_of(tmp_path, trials=10, executor={"known": {"jobs": 2, "tests": 4}})
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(given))
    path = os.pathsep.join(filter(None, (str(plugin), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", program, "sweep", str(tmp_path / "toy.yaml")]
    journal, moments = tmp_path / "toy" / trials.JOURNAL, random.Random(3)
    kills = 0
    while True:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        size = journal.stat().st_size if journal.exists() else 0
        until = time.monotonic() + 60
        while kills < 4 and process.poll() is None and time.monotonic() < until:
            if journal.exists() and journal.stat().st_size > size + 400:
                time.sleep(moments.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        error = process.communicate(timeout=120)[1]
        if process.returncode != -signal.SIGKILL:
            break
    assert process.returncode == 0, error
    assert kills == 4
    found = json.loads((tmp_path / "toy" / "trials.json").read_text())
    assert sorted(trial["trial"] for trial in found["trials"]) == list(range(10))
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "pruned"}
    for trial in found["trials"]:
        if trial["state"] == "complete":
            for name in trial["runs"]:
                text = (tmp_path / "toy" / "runs" / name / "metrics.jsonl").read_text()
                assert text.count("test_battle") == 4  # no test was played twice


@pytest.mark.processes
def test_a_sweep_of_real_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(sweep, "examine", examine)
    given = {
        "name": "toy", "results": str(tmp_path), "config": "qmix", "env_config": "matrix_game", "seeds": 1, "trials": 2,
        "with": {"t_max": 300, "test_interval": 100, "test_nepisode": 8, "torch_threads": 1, "save_model": False},
        "metric": "test_return_mean", "over_tests": "mean", "executor": {"local": {"jobs": 1}},
        "space": {"env_args.payoff": {"choices": ["climbing", "monotonic"]}},
    }  # fmt: skip
    wrong = {**given, "space": {"env_args.payoff": {"choices": ["climbing", "climbin"]}}}
    with pytest.raises(UserError, match=r"^sweep: space.env_args.payoff \(climbin\): env_args.payoff=climbin: "):
        run_sweep(load_sweep(wrong), lambda line: None, quiet=True)
    assert list(tmp_path.iterdir()) == []
    found = run_sweep(load_sweep(given), lambda line: None, quiet=True)
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 2
    for trial in found["trials"]:
        folder = tmp_path / "toy" / "runs" / trial["runs"][0]
        assert (
            json.loads((folder / "config.json").read_text())["env_args"]["payoff"] == trial["keys"]["env_args.payoff"]
        )
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        tests = [line["test_return_mean"] for line in lines if "test_return_mean" in line]
        assert len(tests) >= 3 and trial["value"] == pytest.approx(statistics.mean(tests))
    assert found["trials"][0]["value"] >= found["trials"][1]["value"]
    assert main([f"--config={tmp_path / 'toy' / 'best.yaml'}", "--env-config=matrix_game", "--dry-run"]) == 0
    assert found["trials"][0]["keys"]["env_args.payoff"] in capsys.readouterr().out


def test_a_lost_journal_is_made_from_the_runs(tmp_path):
    found = swept(tmp_path, trials=6, pruning=False)
    before = started(tmp_path)
    (tmp_path / "toy" / trials.JOURNAL).rename(tmp_path / "away")
    again = swept(tmp_path, trials=6, pruning=False)
    assert started(tmp_path) == before
    assert again["trials"] == found["trials"]


def test_a_damaged_journal_is_one_line_and_a_torn_end_is_set_aside(tmp_path):
    found = swept(tmp_path, trials=4)
    journal = tmp_path / "toy" / trials.JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')  # the machine stopped while it was written
    assert swept(tmp_path, trials=4)["trials"] == found["trials"]
    assert journal.with_name(f"{journal.name}.torn").read_bytes() == b'{"op_code": 4, "wor\n'
    assert journal.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    for damage in (b"x" * 40 + b"\n", b"[]\n", b'{"op_code": 5}\n'):
        journal.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
        with pytest.raises(UserError, match=r"sweep\.journal: is damaged .* Move it away and start the sweep again"):
            swept(tmp_path, trials=4)


def test_folders_of_others_are_rejected(tmp_path):
    swept(tmp_path, trials=2)
    with pytest.raises(UserError, match=r"belongs to another sweep \(space\.lr is .* there, .* here\)"):
        swept(tmp_path, trials=2, space={**SPACE, "lr": {"low": 1e-4, "high": 1e-1, "log": True}})
    (tmp_path / "toy" / trials.JOURNAL).unlink()
    with pytest.raises(UserError, match="belongs to another sweep"):
        swept(tmp_path, trials=2, space={"gamma": SPACE["gamma"], "epsilon_start": {"low": 0.5, "high": 1.0}})
    state = json.loads((tmp_path / "toy" / "study.json").read_text())
    state["jobs"][0]["job"]["arm"] = "qmix"
    (tmp_path / "toy" / "study.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"is the folder of a study \(arm qmix\)"):
        swept(tmp_path, trials=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"space": {}}, "space: is empty"),
        ({"space": {"lrr": {"low": 0.1, "high": 0.2}}}, "space.lrr: with lrr=0.1: unknown key 'lrr'"),
        ({"space": {"lr": {"low": 0.2, "high": 0.1}}}, "space.lr: low=0.2 must be less than high=0.1"),
        ({"space": {"lr": {"low": 0, "high": 0.1, "log": True}}}, "space.lr: log: needs low=0 above 0"),
        ({"space": {"lr": {"low": -1.0, "high": 0.1}}}, "space.lr: lr=-1.0: must be"),
        ({"space": {"lr": {"low": 0.1}}}, "space.lr: give low: and high:, or choices:"),
        ({"space": {"lr": {"low": 0.1, "high": 10**400}}}, "space.lr: low=0.1 must be less than high=1000"),
        ({"space": {"lr": {"low": 0.1, "high": 0.2, "step": 1e-300}}}, "space.lr: step=1e-300: makes more than 1,000"),
        ({"space": {"lr": {"low": 0.1, "high": 0.2, "step": 5e-324}}}, "space.lr: step=5e-324: makes more than 1,000"),
        ({"seeds": 10**12}, "seeds=1000000000000: are more than 10000"),
        ({"trials": 5001}, "trials: 5001 x seeds: 2 = 10002 runs, more than 10000. Lower one"),
        ({"seeds": "1,2"}, "seeds=1,2: must be a list of whole numbers, or how many. Write seeds: [1, 2]"),
        ({"results": "~nosuchuser/x"}, "results=~nosuchuser/x: this machine does not know that user"),
        ({"space": {"lr": {"lo": 0.1}}}, "space.lr: unknown key 'lo'. Did you mean 'low'?"),
        ({"space": {"batch_size": {"low": 0.5, "high": 8}}}, "space.batch_size: takes whole numbers"),
        ({"space": {"mixer": {"choices": ["qmix"]}}}, "space.mixer: choices=['qmix']: give at least two values"),
        ({"space": {"mixer": {"choices": ["qmix", "vdn"]}}}, "the space has 2 combinations. Lower trials to 2"),
        ({"space": {"seed": {"low": 1, "high": 9}}}, "space.seed: give seeds: at the top"),
        ({"space": {"test_interval": {"low": 1, "high": 9}}}, "space.test_interval: has a value in with:"),
        ({"space": {"t_max": {"low": 1000, "high": 9000}}}, "space.t_max: trials have different tests then"),
        ({"pruning": {"percentile": 100}}, "pruning: percentile=100: must be less than 100"),
        ({"direction": "up"}, "direction=up: must be one of"),
        ({"trial": 3}, "unknown key 'trial'. Did you mean 'trials'?"),
        ({"seeds": []}, "seeds=[]"),
        ({"with": {}, "space": {"test_interval": {"low": 1, "high": 99}}}, "space.test_interval: trials have"),
        ({"space": {"gamma": {"low": 0.5, "high": 2.0}}}, "space.gamma: gamma=2.0: must be"),
        ({"space": {"precision": {"choices": ["float32", "f"]}}}, "space.precision: precision=f: must be one of"),
        ({"space": {"mixer": {"choices": ["qmix", "vdn"], "low": 1}}}, "choices: take no low:, high:, log: or step:"),
        ({"space": {"env_args": {"choices": [{"map_name": "3m"}, {"map_name": "8m"}]}}}, "give values, not mappings"),
        ({"space": {"lr": {"low": 0.1, "high": 0.2, "log": True, "step": 0.1}}}, "above 0, and no step:"),
        ({"space": {"lr": {"low": 0.1, "high": 0.2, "step": 0.3}}}, "step=0.3: must be more than 0, and at most"),
    ],
)  # fmt: skip
def test_what_a_sweep_file_gets_wrong_is_one_line(given, said, tmp_path):
    with pytest.raises(UserError) as caught:
        load_sweep(values_of(tmp_path, **given))
    assert said in caught.value.message
    assert caught.value.message.startswith("sweep: ")
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_a_sweep_is_one_line_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r'needs Optuna: pip install "omagd\[studies\]"'):
        swept(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_sweep_is_one_line_before_it_runs_anything(tmp_path, monkeypatch, capsys):
    without("matplotlib", monkeypatch)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(values_of(tmp_path)))
    assert main(["sweep", str(tmp_path / "toy.yaml")]) == 2
    said = "error: sweep: needs matplotlib, which is not installed: pip install matplotlib\n"
    assert capsys.readouterr().err == said and not (tmp_path / "toy").exists()


def test_whole_numbers_and_steps_stay_in_their_range(tmp_path):
    space = {
        "lr": {"low": 0.001, "high": 0.009, "step": 0.002}, "batch_size": {"low": 4, "high": 64, "log": True},
        "double_q": {"choices": [True, False]},
    }  # fmt: skip
    found = swept(tmp_path, space=space, trials=15, pruning=False)
    rates = {round(trial["keys"]["lr"], 9) for trial in found["trials"]}
    assert rates <= {0.001, 0.003, 0.005, 0.007, 0.009} and len(rates) > 1
    sizes = [trial["keys"]["batch_size"] for trial in found["trials"]]
    assert all(isinstance(size, int) and 4 <= size <= 64 for size in sizes)
    assert {trial["keys"]["double_q"] for trial in found["trials"]} == {True, False}
    combinations = [json.dumps(trial["keys"], sort_keys=True) for trial in found["trials"]]
    assert len(set(combinations)) == 15


def test_all_of_a_small_space_is_tried_once(tmp_path):
    space = {"mixer": {"choices": ["qmix", "vdn"]}, "lr": {"low": 0.1, "high": 0.3, "step": 0.1}}
    found = swept(tmp_path, space=space, trials=6, pruning=False)
    assert len({json.dumps(trial["keys"], sort_keys=True) for trial in found["trials"]}) == 6
    with pytest.raises(UserError, match="the space has 6 combinations. Lower trials to 6"):
        swept(tmp_path, space=space, trials=7)


def test_whole_ends_of_a_key_with_a_point_are_numbers_with_a_point(tmp_path):
    found = swept(tmp_path, space={**SPACE, "gamma": {"low": 0, "high": 1}}, trials=3, pruning=False)
    assert all(0 < trial["keys"]["gamma"] < 1 for trial in found["trials"])


def test_a_misspelt_metric_stops_the_sweep_after_its_first_run_and_can_be_corrected(tmp_path):
    wrong = {"metric": "test_battle_wonn_mean", "executor": {"known": {"jobs": 1}}}
    with pytest.raises(UserError, match=r"metric=test_battle_wonn_mean: trial0000-seed1 has finished .* Did you mean"):
        swept(tmp_path, **wrong)
    with pytest.raises(UserError, match=r"Known: test_battle_won_mean"):
        swept(tmp_path, **wrong)
    assert {name.partition("-")[0] for name in started(tmp_path)} == {"trial0000"}
    found = swept(tmp_path, trials=2, pruning=False)
    assert {trial["state"] for trial in found["trials"]} == {"complete"}
    assert started(tmp_path).count("trial0000-seed1") == 1  # its run is kept
    with pytest.raises(UserError, match="belongs to another sweep"):
        swept(tmp_path, trials=2, metric="test_return_mean")


def test_the_value_of_a_trial_is_what_the_file_asks_for(tmp_path, monkeypatch):
    def one(**more):
        found = swept(tmp_path / str(len(list(tmp_path.iterdir()))), trials=1, seeds=[1, 2, 3], **more)
        return found["trials"][0]

    last, mean = one(), one(over_tests="mean")
    assert mean["value"] == pytest.approx(last["value"] / 2)  # 0, 1/3, 2/3, 1
    best = one(over_tests="best", direction="minimize")
    assert best["value"] == 0.0
    monkeypatch.setattr(sweep_stand_in, "OFFSET", {1: 0.0, 2: 0.1, 3: 0.2, 4: 5.0})
    (middle,) = swept(tmp_path / "iqm", trials=1, seeds=4, over_seeds="iqm")["trials"]
    _, *inner, _ = sorted(middle["by_seed"].values())
    assert middle["value"] == pytest.approx(statistics.mean(inner))


def test_a_sweep_that_minimizes_looks_for_less_and_puts_it_first(tmp_path):
    found = swept(tmp_path, trials=24, direction="minimize", pruning=False, startup_trials=8)
    values = {trial["trial"]: trial["value"] for trial in found["trials"]}
    assert list(values.values()) == sorted(values.values())
    assert values[found["best"]] == min(values.values()) < max(values.values())
    first, last = ([values[number] for number in range(*ends)] for ends in ((0, 8), (16, 24)))
    assert statistics.mean(last) < statistics.mean(first)
    assert "less is better" in (tmp_path / "toy" / "trials.md").read_text()
    assert f"# Trial {found['best']} of" in (tmp_path / "toy" / "best.yaml").read_text()


def test_a_lower_percentile_ends_more_trials(tmp_path):
    def pruned(percentile: float) -> int:
        pruning = {"after_trials": 4, "after_tests": 1, "percentile": percentile}
        found = swept(tmp_path / str(percentile), trials=16, pruning=pruning, executor={"known": {"jobs": 1}})
        return sum(trial["state"] == "pruned" for trial in found["trials"])

    assert pruned(10.0) > pruned(50.0) > pruned(90.0)


def test_each_test_of_a_trial_is_noted_once(tmp_path, monkeypatch):
    """The journal does not grow while runs train."""
    storage = optuna.storages.JournalStorage
    note, noted = storage.set_trial_intermediate_value, []
    monkeypatch.setattr(storage, "set_trial_intermediate_value", lambda *args: noted.append(args[1:3]) or note(*args))
    swept(tmp_path, trials=3)
    assert noted and len(set(noted)) == len(noted)


@pytest.mark.parametrize(
    ("given", "most"), [({"seeds": 2}, 3), ({"seeds": 1}, 8), ({"seeds": 1, "at_a_time": 2}, 2), ({"seeds": 3}, 2)]
)
def test_as_many_trials_at_a_time_as_there_is_room_for(given, most, tmp_path, monkeypatch):
    """Six places for two seeds each, or what the file asks for; never more than eight, which would know nothing."""
    more, open_at_a_time = sweep._Search.more, []
    monkeypatch.setattr(sweep._Search, "more", lambda self: (more(self), open_at_a_time.append(len(self._open)))[0])
    slots = 12 if most == 8 else 6
    swept(tmp_path, trials=12, pruning=False, executor={"known": {"jobs": slots}}, **given)
    assert max(open_at_a_time) == most


def test_the_other_runs_of_a_failed_trial_are_ended(tmp_path):
    swept(tmp_path, trials=2, executor={"known": {"jobs": 2, "fails": ["trial0000-seed1"]}})
    assert started(tmp_path, "cancel") == ["trial0000-seed2"]
    assert StudyState.read(tmp_path / "toy").records["trial0000-seed2"].state == PRUNED


def test_a_run_without_the_metric_fails_its_trial(tmp_path, monkeypatch):
    read = sweep._CurveReader.read
    monkeypatch.setattr(
        sweep._CurveReader, "read", lambda self: {} if "trial0002-seed1" in str(self._path) else read(self)
    )
    found = swept(tmp_path, trials=4, pruning=False, executor={"known": {"jobs": 1}})
    (failed,) = [trial for trial in found["trials"] if trial["state"] == "failed"]
    assert failed["error"] == "trial0002-seed1: its metrics.jsonl holds no stage3/test_battle_won_mean"


def test_a_curve_is_read_as_its_file_grows_and_shrinks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = sweep._CurveReader(path, load_sweep(values_of(tmp_path)))
    assert reader.read() == {}

    def line(t: int, value: object, stage: str = "stage3") -> str:
        return json.dumps({"stage": stage, "t_env": t, "test_battle_won_mean": value}) + "\n"

    whole = line(3, 0.1) + line(10_003, 0.2) + line(20_009, 0.3)
    for end in range(len(whole) + 1):  # whatever part of it is written
        path.write_text(whole[:end])
        found = dict(reader.read())
    assert found == {0: 0.1, 1: 0.2, 2: 0.3}
    path.write_text(whole + line(30_000, 0.9, "stage1") + line(30_001, None) + line(30_002, True) + "[" + line(3, 1))
    assert reader.read() == found
    path.write_text(line(3, 0.5))  # the run continues from a checkpoint before its second test
    assert reader.read() == {0: 0.5}
    path.write_text(line(3, 0.5) + line(10_001, 0.6))
    assert reader.read() == {0: 0.5, 1: 0.6}


class Following(KnownExecutor):
    """Runs of an earlier start go on; they are in progress from the beginning."""

    def __init__(self, place):
        super().__init__(place)
        self.references = dict(place.references)
        self.jobs = {name: [place.folder / "runs" / name, 0, 0.0] for name in self.references}

    def cancel(self, name):
        self.references.pop(name, None)
        super().cancel(name)


def test_runs_of_trials_that_have_ended_are_ended_and_not_repeated_after_a_kill(tmp_path, monkeypatch):
    """The trial was ended in the journal, and the process killed before it had noted that of the runs."""
    given = {"trials": 12, "pruning": {"after_trials": 4, "after_tests": 1}, "executor": {"known": {"jobs": 2}}}
    found = swept(tmp_path, **given)
    before = StudyState.read(tmp_path / "toy")
    pruned = [name for name, record in before.records.items() if record.state == PRUNED and record.starts]
    complete = next(trial["runs"] for trial in found["trials"] if trial["state"] == "complete")
    file = tmp_path / "toy" / "study.json"
    values = json.loads(file.read_text())
    for entry in values["jobs"]:
        if entry["job"]["name"] in {*pruned, *complete}:
            entry["state"] = "running"
        if entry["job"]["name"] == pruned[0]:
            entry["reference"] = "17_0"
    file.write_text(json.dumps(values))
    monkeypatch.setitem(EXECUTORS._objects, "known", Following)
    begun, ended = started(tmp_path), started(tmp_path, "cancel")
    assert swept(tmp_path, **given)["trials"] == found["trials"]
    assert started(tmp_path) == begun and started(tmp_path, "cancel") == [*ended, pruned[0]]
    after = StudyState.read(tmp_path / "toy").records
    assert {name: record.state for name, record in after.items()} == {
        name: record.state for name, record in before.records.items()
    }
    assert after[pruned[0]].reference == ""
    locked = sweep.locked_study

    def late(folder):
        file.write_text(json.dumps(values))
        return locked(folder)

    monkeypatch.setattr(sweep, "locked_study", late)
    with pytest.raises(UserError, match="another process has run this study in the meantime"):
        swept(tmp_path, **given)


def test_a_lock_that_a_killed_sweep_has_left_costs_no_time(tmp_path):
    swept(tmp_path, trials=2)
    for name in ("lock", "lock.1"):
        (tmp_path / "toy" / f"{trials.JOURNAL}.{name}").symlink_to(trials.JOURNAL)
    began = time.monotonic()
    assert len(swept(tmp_path, trials=3)["trials"]) == 3
    assert time.monotonic() - began < 10
    assert list((tmp_path / "toy").glob("*.lock*")) == []


def test_a_torn_end_is_on_the_disk_before_it_is_cut_off(tmp_path, monkeypatch):
    journal = tmp_path / trials.JOURNAL
    journal.write_bytes(b'{}\n{"op')
    done = []
    fsync, truncate = os.fsync, os.truncate
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("sync") or fsync(handle))
    monkeypatch.setattr(os, "truncate", lambda *args: done.append("cut") or truncate(*args))
    trials._mend(journal)
    assert done[:2] == ["sync", "cut"] and journal.read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seeds": 3}, r"seeds is \[1, 2\] there, \[1, 2, 3\] here"), ({"over_tests": "best"}, "over_tests is last"),
        ({"with": {"test_interval": 5_000}}, "base is "), ({"over_seeds": "iqm"}, "over_seeds is mean"),
    ],
)  # fmt: skip
def test_trials_whose_values_mean_something_else_are_not_mixed(changed, said, tmp_path):
    swept(tmp_path, trials=1)
    with pytest.raises(UserError, match=said):
        swept(tmp_path, trials=2, **changed)


def test_what_is_kept_beside_the_runs_is_that_of_the_last_start(tmp_path):
    swept(tmp_path, trials=2)
    (tmp_path / "toy" / "trials.md").unlink()
    swept(tmp_path, trials=2)
    assert "2 of 2 trials" in (tmp_path / "toy" / "trials.md").read_text()
    swept(tmp_path, trials=3)
    assert yaml.safe_load((tmp_path / "toy" / "sweep.yaml").read_text())["trials"] == 3


def test_the_command_takes_folder_and_executor_and_says_whether_there_is_a_result(tmp_path, capsys, monkeypatch):
    file = tmp_path / "toy.yaml"
    given = values_of(tmp_path / "file", trials=2, executor={"local": {}, "known": {"fails": ["trial0001"]}})
    file.write_text(yaml.safe_dump(given, sort_keys=False))
    unwanted = type("Local", (KnownExecutor,), {"__init__": lambda self, place: pytest.fail("local runs")})
    monkeypatch.setitem(EXECUTORS._objects, "local", unwanted)
    words = ["sweep", str(file), "--executor=known"]
    assert main([*words, f"--results={tmp_path / 'one'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "one" / "toy")
    file.write_text(yaml.safe_dump({**given, "executor": {"known": {"fails": ["trial"]}}}))
    assert main([*words, f"--results={tmp_path / 'two'}"]) == 1
    assert not (tmp_path / "two" / "toy" / "best.yaml").exists() and not (tmp_path / "file").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([*words, "--export-wandb=~/wandb.yaml"]) == 0 and (tmp_path / "wandb.yaml").exists()
    capsys.readouterr()
    assert main([*words, f"--export-wandb={file}/wandb.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--export-wandb={file}/wandb.yaml: cannot be written" in line


def test_the_slices_show_each_trial_at_its_key_and_its_value(tmp_path, monkeypatch):
    rows = [
        {"state": state, "trial": number, "value": number / 10, "keys": {"mixer": mixer}, "error": ""}
        for number, (state, mixer) in enumerate((("complete", "vdn"), ("complete", "qmix"), ("pruned", "vdn")))
    ]
    panel = Figure().subplots()
    sweep_report._slice(panel, Parameter("mixer", "choice", choices=("qmix", "vdn")), rows, 1)
    shown = {points.get_label(): points.get_offsets().tolist() for points in panel.collections}
    assert shown == {"complete": [[1, 0.0]], "pruned, where it ended": [[1, 0.2]], "best": [[0, 0.1]]}
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    found = swept(tmp_path, space={"gamma": SPACE["gamma"], "lr": SPACE["lr"]}, trials=12, pruning=False)
    titles = [panel.get_title(loc="left").partition(":")[0] for panel in drawn[0].axes]
    assert titles == sorted(found["importances"], key=found["importances"].get, reverse=True) == ["lr", "gamma"]


def test_an_error_with_a_bar_keeps_the_columns_of_the_table(tmp_path):
    loaded = load_sweep(values_of(tmp_path, trials=2, executor={"known": {"fails": ["trial0001"]}}))
    found = run_sweep(loaded, lambda line: None, quiet=True)
    for trial in found["trials"]:
        trial["error"] = trial["error"] and "a | b"
    rows = [line for line in sweep_report.markdown(loaded, found).splitlines() if line.startswith("| ")][-4:]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1 and "a \\| b" in rows[-1]


def test_the_best_preset_is_one_that_config_accepts(tmp_path):
    space = {**SPACE, "env_args.reward_win": {"low": 100.0, "high": 300.0}}
    given = {"test_interval": 10_000, "grad_norm_clip": 3.5}
    found = swept(tmp_path, space=space, trials=5, map="8m", **{"with": given})
    best = found["trials"][0]["keys"]
    file = tmp_path / "toy" / "best.yaml"
    config = resolve(str(file), updates={"env_args.map_name": "3m"})
    expected = {**given, "env_args.map_name": "3m", **best}
    assert config.model_dump(exclude={"name"}) == resolve("qmix", updates=expected).model_dump(exclude={"name"})
    assert resolve(str(file)).map_name != "8m" and resolve(str(file)).name == "toy"
    assert file.read_text().startswith(f"# Trial {found['best']} of the sweep toy: test_battle_won_mean ")


def test_tables_and_pictures(tmp_path, capsys):
    given = values_of(tmp_path, trials=12, executor={"known": {"fails": ["trial0002"]}})
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(given))
    assert main(["sweep", str(file)]) == 0
    printed = capsys.readouterr()
    folder = tmp_path / "toy"
    table = (folder / "trials.md").read_text()
    assert table in printed.out and "failed: trial0002-seed1: error: no luck" in table
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    data = json.loads((folder / "trials.json").read_text())
    assert [int(row["trial"]) for row in rows] == [trial["trial"] for trial in data["trials"]]
    assert [row["lr"] for row in rows] == [str(trial["keys"]["lr"]) for trial in data["trials"]]
    for row, trial in zip(rows, data["trials"], strict=True):
        shown = {seed: float(row[f"seed_{seed}"]) for seed in "12" if row[f"seed_{seed}"]}
        assert shown == trial["by_seed"]
        line = next(line for line in table.splitlines() if line.startswith(f"| {trial['trial']} |"))
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        assert cells[2:4] == [f"{shown[seed]:.4g}" if shown else "-" for seed in "12"]
    assert (folder / "slices.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "sweep.yaml").read_text()) == given
    assert main(["sweep", "status", str(folder)]) == 0
    status = capsys.readouterr().out
    assert table in status and "nothing runs it now" in status
    assert main(["sweep", "status", str(tmp_path)]) == 2
    assert main(["sweep"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_importances_of_few_trials_say_so(tmp_path):
    assert "| key | importance (5 trials) |" in table_of(tmp_path, 5)
    assert "| key | importance |" in table_of(tmp_path / "more", 10)


def table_of(folder: Path, trials: int) -> str:
    swept(folder, trials=trials, pruning=False)
    return (folder / "toy" / "trials.md").read_text()


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((7e-6, 0.15), [1e-5, 1e-3, 0.1]), ((5e-4, 0.02), [1e-3, 0.01]), ((4e-4, 6e-3), [5e-4, 1e-3, 2e-3, 5e-3]),
        ((0.0009, 0.0051), [0.001, 0.002, 0.005]), ((0.0015, 0.0045), [0.002, 0.003, 0.004]),
        ((0.0011, 0.0019), [0.00145]),
    ],
)  # fmt: skip
def test_the_ticks_of_a_logarithmic_axis_are_few_and_plain(ends, ticks):
    found = sweep_report.log_ticks(*ends)
    assert found == ticks
    panel = Figure().subplots()
    rows = [{"state": "complete", "trial": i, "value": 0.5, "keys": {"lr": end}} for i, end in enumerate(ends)]
    sweep_report._slice(panel, Parameter("lr", "float", *ends, log=True), rows, None)
    panel.figure.draw_without_rendering()
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert 1 <= len(shown) <= 4 and not any("$" in text for text in shown)
    assert not any(label.get_text() for label in panel.get_xticklabels(minor=True))


@pytest.mark.parametrize(
    ("given", "stages", "whole", "least"),
    [  # 12 trials of 2 seeds: 12 runs take 10 h each, 12 take 30 h; of 100 tests
        ({"trials": 12}, {"stage3": 1.0}, 480.0, 5 / 12 * 480 + 7 / 12 * 480 * 0.02),
        ({"trials": 12, "pruning": {"after_trials": 3, "after_tests": 10}}, {"stage3": 1.0}, 480.0, 120 + 360 * 0.1),
        ({"trials": 12}, {"stage1": 0.25, "stage2": 0.25, "stage3": 0.5}, 480.0, 200 + 280 * (0.5 + 0.5 * 0.02)),
        ({"trials": 12, "stage": "stage1"}, {"stage1": 0.5, "stage3": 0.5}, 480.0, 200 + 280 * 0.5 * 2 / 50),
        ({"trials": 12, "pruning": False}, {"stage3": 1.0}, 480.0, None),
        ({"trials": 5}, {"stage3": 1.0}, 200.0, None),
    ],
)  # fmt: skip
def test_the_estimate_of_a_sweep_has_a_range_by_pruning_and_leaves_nothing(
    given, stages, whole, least, tmp_path, monkeypatch, capsys
):
    probed = []

    def probe(job, seconds, cores):
        probed.append(config_of(job))
        hours = 10.0 if len(probed) == 1 else 30.0
        return {stage: 3600 * hours * part for stage, part in stages.items()}, ""

    monkeypatch.setattr(estimate, "probe", probe)
    space = {**SPACE, "batch_size": {"low": 4, "high": 64}, "mixer": {"choices": ["vdn", "qmix"]}}
    with_ = {"test_interval": 10_000, "t_max": 1_000_000, "graph_pretrain_epochs": 50}
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(values_of(tmp_path / "results", space=space, **{"with": with_, **given})))
    assert main(["sweep", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    found = [(config.lr, config.gamma, config.batch_size, config.mixer) for config in probed]
    assert found == [(1e-5, 0.5, 4, "vdn"), (0.1, 0.99, 64, "qmix")]
    count = f"{given['trials']} trials x 2 seeds = {2 * given['trials']} runs"
    assert f"\n{count}, about {whole:.2f} core-hours without pruning\n" in out
    if least is None:
        assert "\npruning ends no trial: it is off, or there are too few of them\n" in out
    else:
        assert f"\nwith pruning between {least:.2f} core-hours (all trials after the first " in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.yaml"]
    for wrong in ("nan", "0", "inf", "two"):
        assert main(["sweep", str(file), "--dry-run", f"--probe-seconds={wrong}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"--probe-seconds={wrong}: must be a number above 0, in seconds")


def test_a_second_process_is_rejected(tmp_path):
    swept(tmp_path, trials=1)
    with sweep.locked_study(tmp_path / "toy"), pytest.raises(UserError, match="runs this study already"):
        swept(tmp_path, trials=1)


def test_the_space_as_a_wandb_sweep_file(tmp_path, capsys):
    space = {
        **SPACE, "batch_size": {"low": 4, "high": 64}, "buffer_size": {"low": 64, "high": 512, "log": True},
        "n_starts": {"low": 2, "high": 8, "step": 3},
        "mixer": {"choices": ["qmix", "vdn"]},
    }  # fmt: skip
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(values_of(tmp_path, space=space, direction="minimize")))
    assert main(["sweep", str(tmp_path / "toy.yaml"), "--export-wandb", str(tmp_path / "wandb.yaml")]) == 0
    found = yaml.safe_load((tmp_path / "wandb.yaml").read_text())
    assert found["parameters"] == {
        "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "gamma": {"distribution": "uniform", "min": 0.5, "max": 0.99},
        "batch_size": {"distribution": "int_uniform", "min": 4, "max": 64},
        "buffer_size": {"distribution": "q_log_uniform_values", "q": 1, "min": 64, "max": 512},
        "n_starts": {"values": [2, 5, 8]},
        "mixer": {"values": ["qmix", "vdn"]},
        "seed": {"values": [1, 2]},
    }
    assert found["metric"] == {"name": "test_battle_won_mean", "goal": "minimize"}
    assert found["run_cap"] == 24
    words = found["command"]
    assert words[:3] == ["python", "-m", "omagd"] and words[-1] == "${args_no_hyphens}"
    assert "--config=qmix" in words and "test_interval=10000" in words and "use_wandb=True" in words
    assert not (tmp_path / "toy").exists()
