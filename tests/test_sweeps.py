"""Sweeps: the file, the search, pruning, what is kept over kills, and what is written."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sockets import wait_until
from sweep_stand_in import BEST_GAMMA, BEST_LR, KnownExecutor

from omagd.config.loading import resolve
from omagd.lab.studies import EXECUTORS, scheduler, sweep
from omagd.lab.studies.state import DONE, FAILED, PRUNED, StudyState
from omagd.lab.studies.sweep import run_sweep
from omagd.lab.studies.sweep_spec import load_sweep
from omagd.run.cli.main import main
from omagd.utils.errors import UserError

SPACE = {"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "gamma": {"low": 0.5, "high": 0.99}}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The executor `known`, polls without pauses, no check that needs torch."""
    monkeypatch.setitem(EXECUTORS._objects, "known", KnownExecutor)
    monkeypatch.setattr(EXECUTORS, "names", lambda: ["known", "local", "slurm"])
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)
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


def test_trials_that_fall_behind_are_ended_early(tmp_path):
    found = swept(tmp_path, trials=20, executor={"known": {"jobs": 2, "tests": 5}})
    by_state = {state: [t for t in found["trials"] if t["state"] == state] for state in ("complete", "pruned")}
    assert len(by_state["complete"]) + len(by_state["pruned"]) == 20
    assert len(by_state["pruned"]) >= 5 and min(t["trial"] for t in by_state["pruned"]) >= sweep.AFTER_TRIALS
    assert {2} <= {t["pruned_after_test"] for t in by_state["pruned"]} <= {2, 3}
    assert max(t["value"] for t in by_state["pruned"]) < max(t["value"] for t in by_state["complete"])
    state = StudyState.read(tmp_path / "toy")
    for trial in by_state["pruned"]:
        assert {state.records[name].state for name in trial["runs"]} <= {PRUNED, DONE}
        assert not all(state.is_finished(name) for name in trial["runs"])
    assert started(tmp_path, "cancel")
    for trial in found["trials"]:
        seconds = [state.records[name].seconds for name in trial["runs"]]
        assert 0 < sum(seconds) == pytest.approx(trial["seconds"])


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
def test_a_sweep_that_is_killed_loses_and_repeats_no_trial(tmp_path):
    """By SIGKILL, in a process of its own, a while after its first trials began; this process continues it."""
    program = (
        "import sys; from omagd.lab.studies import EXECUTORS, scheduler, sweep; from omagd.run.cli.main import main\n"
        "from sweep_stand_in import KnownExecutor; EXECUTORS._objects['known'] = KnownExecutor\n"
        "EXECUTORS.names = lambda: ['known']; scheduler.POLL_SECONDS = 0.05; sweep.examine = lambda *_: {}\n"
        "main(sys.argv[1:])"
    )
    given = values_of(tmp_path, trials=10, executor={"known": {"jobs": 2, "tests": 4}})
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(given))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", program, "sweep", str(tmp_path / "toy.yaml")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(started(tmp_path)) > 3 if (tmp_path / "toy" / "started").exists() else False)
    process.kill()
    process.wait()
    assert len(json.loads((tmp_path / "toy" / "trials.json").read_text())["trials"]) < 10, "it is not over"
    found = swept(tmp_path, trials=10, executor={"known": {"jobs": 2, "tests": 4}})
    assert sorted(trial["trial"] for trial in found["trials"]) == list(range(10))
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "pruned"}
    for trial in found["trials"]:
        if trial["state"] == "complete":
            for name in trial["runs"]:
                text = (tmp_path / "toy" / "runs" / name / "metrics.jsonl").read_text()
                assert text.count("test_battle") == 4  # no test was played twice


@pytest.mark.processes
def test_a_sweep_of_real_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.1)
    given = {
        "name": "toy", "results": str(tmp_path), "config": "qmix", "env_config": "matrix_game", "seeds": 1, "trials": 1,
        "with": {"t_max": 30, "test_interval": 10, "test_nepisode": 8, "batch_size_run": 8, "save_model": False},
        "metric": "test_return_mean", "executor": {"local": {"jobs": 1}},
        "space": {"env_args.payoff": {"choices": ["climbing", "monotonic"]}},
    }  # fmt: skip
    checked = []
    monkeypatch.setattr(sweep, "examine", lambda jobs, *_: checked.extend((job.arm, job.name) for job in jobs))
    found = run_sweep(load_sweep(given), lambda line: None, quiet=True)
    assert checked == [("", ""), ("space.env_args.payoff", "climbing"), ("space.env_args.payoff", "monotonic")]
    (trial,) = found["trials"]
    folder = tmp_path / "toy" / "runs" / trial["runs"][0]
    assert json.loads((folder / "config.json").read_text())["env_args"]["payoff"] == trial["keys"]["env_args.payoff"]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    tests = [line["test_return_mean"] for line in lines if "test_return_mean" in line]
    assert trial["state"] == "complete" and len(tests) >= 3 and trial["value"] == pytest.approx(tests[-1])
    advice = (tmp_path / "toy" / "trials.md").read_text().partition("Train with it: `")[2].partition("`")[0]
    assert main([*advice.split(), "--dry-run"]) == 0
    assert trial["keys"]["env_args.payoff"] in capsys.readouterr().out


def test_folders_of_others_are_rejected(tmp_path):
    swept(tmp_path, trials=2)
    with pytest.raises(UserError, match=r"belongs to another sweep \(space\.lr is .* there, .* here\)"):
        swept(tmp_path, trials=2, space={**SPACE, "lr": {"low": 1e-4, "high": 1e-1, "log": True}})
    trials = tmp_path / "toy" / "trials.json"
    for damage in ("{", "[]", '{"trials": [{}]}'):
        trials.write_text(damage)
        with pytest.raises(UserError, match=r"trials\.json: is damaged"):
            swept(tmp_path, trials=2)
    trials.unlink()
    with pytest.raises(UserError, match="is the folder of a study"):
        swept(tmp_path, trials=2)


@pytest.mark.parametrize(("given", "said"), [
    ({"space": {}}, "space: is empty"),
    ({"space": {"lr": {"low": 0, "high": 0.1, "log": True}}}, "space.lr: low=0, high=0.1: "),
    ({"trials": 5001}, "trials: 5001 x seeds: 2 = 10002 runs, more than 10000. Lower one"),
    ({"space": {"batch_size": {"low": 0.5, "high": 8}}}, "space.batch_size: takes whole numbers"),
    ({"space": {"seed": {"low": 1, "high": 9}}}, "space.seed: give seeds: at the top"),
    ({"space": {"test_interval": {"low": 1, "high": 9}}}, "space.test_interval: has a value in with:"),
    ({"space": {"t_max": {"low": 1000, "high": 9000}}}, "space.t_max: trials have different tests then"),
    ({"pruning": {"percentile": 50}}, "pruning={'percentile': 50}: "),
    ({"space": {"mixer": {"choices": ["qmix", "vdn"], "low": 1}}}, "give values that differ, without low:"),
])  # fmt: skip
def test_what_a_sweep_file_gets_wrong_is_one_line(given, said, tmp_path):
    with pytest.raises(UserError) as caught:
        load_sweep(values_of(tmp_path, **given))
    assert said in caught.value.message
    assert caught.value.message.startswith("sweep: ")
    assert list(tmp_path.iterdir()) == []


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


def test_tables_and_status(tmp_path, capsys):
    """Of the executor and in the folder that the command names; the exit code says whether there is a result."""
    given = values_of(tmp_path / "else", trials=5, executor={"local": {}, "known": {"fails": ["trial0002"]}})
    file, words = tmp_path / "toy.yaml", ["--executor=known", f"--results={tmp_path}"]
    file.write_text(yaml.safe_dump(given))
    assert main(["sweep", str(file), *words]) == 0
    printed = capsys.readouterr()
    folder = tmp_path / "toy"
    table = (folder / "trials.md").read_text()
    assert table in printed.out and "failed: trial0002-seed1: error: no luck" in table
    data = json.loads((folder / "trials.json").read_text())
    for trial in data["trials"]:
        shown = trial["by_seed"]
        line = next(line for line in table.splitlines() if line.startswith(f"| {trial['trial']} |"))
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        assert cells[2:4] == [f"{shown[seed]:.4g}" if shown else "-" for seed in "12"]
    assert yaml.safe_load((folder / "sweep.yaml").read_text()) == given
    assert main(["sweep", "status", str(folder)]) == 0
    status = capsys.readouterr().out
    assert table in status and "nothing runs it now" in status
    assert main(["sweep", "status", str(tmp_path)]) == 2
    assert main(["sweep"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    file.write_text(yaml.safe_dump({**given, "name": "none", "trials": 1, "executor": {"known": {"fails": ["trial"]}}}))
    assert main(["sweep", str(file), *words]) == 1 and not (tmp_path / "none" / "best.yaml").exists()
