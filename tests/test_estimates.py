"""Estimates (`--dry-run`) of studies: what a probe finds, and what the table makes of it. Sweeps: test_sweeps.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from omagd.config.loading import resolve
from omagd.lab.studies import estimate
from omagd.lab.studies.executors import Job
from omagd.lab.studies.spec import load
from omagd.run.cli.main import config_from
from omagd.utils.run_folder import RunFolder

CARD = {"id": "x", "compared": {"t_max": 1}}


def estimated(monkeypatch, probe, executor: dict, **values) -> str:
    """Return the table of a study whose probes are `probe(job)`."""
    asked = []

    def probed(job, seconds, cores):
        asked.append((job.name, seconds, cores))
        return probe(job)

    monkeypatch.setattr(estimate, "probe", probed)
    monkeypatch.setattr(estimate, "examine", lambda jobs, *_: {job.name: {"card": CARD} for job in jobs})
    study = load({"name": "toy", "config": "qmix", "executor": executor, **values})
    text = estimate.estimate(study, 7.0)
    assert {each[1:] for each in asked} == {(7.0, study.settings.cores)}
    assert len({name.rpartition("-seed")[0] for name, *_ in asked}) == len(asked), "one probe of each kind"
    return text


def row(text: str, *first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(first)] == list(first))


@pytest.mark.parametrize(
    ("executor", "cores"),
    [({"local": {"cores_per_run": 2}}, 2), ({"slurm": {"cpus": 3}}, 3), ({"local": {}}, 1)],
)
def test_core_hours_are_those_of_all_runs_on_all_their_cores(executor, cores, monkeypatch):
    def probe(job):
        hours = (0.5 if job.arm == "a" else 1.0) * (4 if job.map == "8m" else 1)
        return {"stage1": 3600 * hours / 4, "stage3": 3600 * hours * 3 / 4}, ""

    arms = {"a": None, "b": {"config": "vdn"}}
    text = estimated(monkeypatch, probe, executor, arms=arms, environments=["3m", "8m"], seeds=5)
    for arm, place, one, hours in (("a", "3m", "30 min 00 s", 2.5), ("b", "8m", "4 h 00 min", 20.0)):
        assert row(text, arm, "skirmish", place)[3:] == ["5", *one.split(), f"{cores * hours:.2f}"]
    whole = 5 * (0.5 + 1.0) * (1 + 4) * cores
    assert f"\n20 runs, about {whole:.2f} core-hours\n" in text
    assert "warning" not in text


def test_a_failed_probe_is_named_and_the_others_count(monkeypatch):
    def probe(job):
        return (None, "error: no luck") if job.arm == "a" else ({"stage3": 7200.0}, "")

    text = estimated(monkeypatch, probe, {"local": {}}, arms={"a": None, "b": {"config": "vdn"}}, seeds=2)
    assert "unknown: error: no luck" in text and row(text, "a")[-1] == "-"
    assert row(text, "b")[-1] == "4.00"
    assert "\n4 runs, about 4.00 core-hours, without those unknown\n" in text


class Probe:
    """A probe's process on a clock of its own: it logs `rows`, each at its time, and ends at `ends` with `code`."""

    def __init__(self, rows, ends=1e9, code=0, summary=None):
        self.rows, self.ends, self.code, self.summary = sorted(rows, key=lambda row: row[0]), ends, code, summary
        self.clock, self.finished, self.command, self.threads = 0.0, None, [], None

    def start(self, command, log, threads):
        self.command, self.threads, self.log = command, threads, log
        log.write_text("a line\nerror: no luck\n")
        self.folder = RunFolder(log.parent / "probe")
        self.folder.path.mkdir()
        return self

    def sleep(self, seconds):
        assert self.clock < 10_000, "the probe never ends"
        self.clock += seconds

    def poll(self):
        """Write what it has logged by now; return its exit code once it has ended."""
        lines = [json.dumps(row) + "\n" for at, row in self.rows if at <= min(self.clock, self.ends)]
        self.folder.metrics_jsonl.write_text("".join(lines))
        if self.summary:
            self.folder.summary_json.write_text(json.dumps({"stages": self.summary}))
        return self.code if self.clock >= self.ends else None

    def finish(self, process):
        self.finished = self.clock


def probed(monkeypatch, probe: Probe, seconds=20.0, cores=3, config="qmix", **keys):
    monkeypatch.setattr(estimate, "time", SimpleNamespace(monotonic=lambda: probe.clock, sleep=probe.sleep))
    monkeypatch.setattr(estimate, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(estimate, "start_run", probe.start)
    monkeypatch.setattr(estimate, "finish", probe.finish)
    words = (f"--config={config}", "with", *(f"{key}={value}" for key, value in keys.items()))
    found = estimate.probe(Job("a", "a", "skirmish", "3m", 1, words), seconds, cores)
    assert not Path(probe.folder.path).parent.exists(), "something is left"
    assert probe.finished is not None
    return found


def steps(first: float, last: float, speed: float) -> list:
    """Return the rows of stage 3 from `first` to `last` second, one per second, at `speed` steps per second."""
    times = [float(second) for second in range(1, int(last - first) + 1)]
    return [
        (first + t, {"stage": "stage3", "t_env": speed * t, "wall_seconds": t, "time/collect": 0.5, "time/update": 0.5})
        for t in times
    ]


def test_a_probe_trains_as_long_as_asked_once_stage_3_has_begun(monkeypatch):
    slow = [(5.0, {"stage": "stage1", "epoch": 1})]
    probe = Probe([*slow, *steps(30.0, 80.0, speed=10)])
    stages, problem = probed(monkeypatch, probe, t_max=50_000, test_interval=10_000)
    assert problem == "" and stages == {"stage3": pytest.approx(50_000 / 10)}
    assert probe.finished == pytest.approx(31.0 + 20.0, abs=1), "31 s until the first row, then 20 s"
    probe = Probe(slow)
    stages, problem = probed(monkeypatch, probe)
    assert (stages, problem) == (None, "no result within 200 s; give a longer --probe-seconds")
    assert probe.finished == pytest.approx(200, abs=1)


def test_a_probe_that_fails_is_unknown_whatever_it_has_logged_and_one_that_ends_is_not(monkeypatch):
    rows = steps(0.0, 10.0, speed=10)
    assert probed(monkeypatch, Probe(rows, ends=10.5, code=2), t_max=1000) == (None, "error: no luck")
    stages, problem = probed(monkeypatch, Probe(rows, ends=10.5, code=0), t_max=1000)
    assert (stages, problem) == ({"stage3": pytest.approx(100.0)}, "")


def test_a_probe_is_the_run_with_short_stages_and_nothing_kept(monkeypatch):
    ended = {"stage1": {"phases": {"wall": 8.0, "update": 8.0}, "clock": {"epoch": 2}}}
    probe = Probe(steps(0.0, 100.0, speed=10), summary=ended)
    stages, _ = probed(monkeypatch, probe, config="omagd_small", graph_pretrain_epochs=50, t_max=1000, lr=0.125)
    assert stages == {"stage1": pytest.approx(50 * 4.0), "stage3": pytest.approx(100.0)}
    assert probe.threads == 3 and "--unobserved" in probe.command
    config = config_from(probe.command[3:])
    assert (config.name, config.lr, config.t_max, config.graph_pretrain_epochs) == ("omagd_small", 0.125, 1000, 2)
    assert (config.local_results_path, config.unique_token) == (str(probe.log.parent), "probe")
    assert {config.log_interval, config.runner_log_interval, config.learner_log_interval} == {1}
    kept = (
        config.save_model,
        config.enable_checkpointing,
        config.auto_resume,
        config.use_wandb,
        config.use_tensorboard,
    )
    assert not any(kept)
    probe = Probe(steps(0.0, 100.0, speed=10))
    probed(monkeypatch, probe, config="omagd_small", graph_pretrain_epochs=1)
    assert config_from(probe.command[3:]).graph_pretrain_epochs == 1
    probe = Probe(steps(0.0, 100.0, speed=10))
    probed(monkeypatch, probe)
    assert not any("graph_pretrain_epochs" in word for word in probe.command), "it has no such stage"


def test_a_run_takes_its_fixed_time_once_its_steps_and_its_tests():
    """By a model: 9 s of preparation, 0.25 s per step, a test of 6 s per 100 steps; a record per 50."""
    rows, wall = [], 0.0
    for number in range(1, 9):
        parts = {"time/prepare": 9.0 * (number == 1), "time/collect": 5.0, "time/update": 7.5}
        parts |= {} if number % 2 else {"time/test": 6.0}
        wall += sum(parts.values())
        shares = {name: seconds / sum(parts.values()) for name, seconds in parts.items()}
        result = {} if number % 2 else {"test_return_mean": 1.0}
        rows.append({"stage": "stage3", "t_env": 50 * number, "wall_seconds": wall, **result, **shares})
        rows.append({"stage": "stage3", "t_env": 50 * number, "loss_td": 1.0})  # of the learner: without times
    for t_max, interval in ((1000, 100), (3000, 100), (3000, 500)):
        config = resolve("qmix", updates={"t_max": t_max, "test_interval": interval})
        whole = 9.0 + 0.25 * t_max + 6.0 * t_max / interval
        assert estimate._stages([{"stage": "stage1", "t_env": 7, "wall_seconds": 1e6}, *rows], {}, config) == {
            "stage3": pytest.approx(whole)
        }
    assert estimate._stages(rows[:1], {}, config)["stage3"] == pytest.approx(9.0 + 0.25 * 3000), "no test yet"


def test_stages_of_the_graph_take_their_fixed_time_once_and_the_rest_per_epoch():
    phases = {"prepare": 3.0, "collect": 20.0, "replay": 2.0, "finish": 1.0, "update": 10.0, "test": 2.0, "wall": 38.0}
    ended = {name: {"phases": phases, "clock": {"epoch": 4}} for name in ("stage1", "stage2", "stage3")}
    for epochs, tests in ((6, 1), (10, 2), (200, 25)):
        config = resolve("omagd_small", updates={"graph_pretrain_epochs": epochs, "graph_pretrain_eval_interval": 8})
        found = estimate._stages([], ended, config)
        assert found == dict.fromkeys(("stage1", "stage2"), pytest.approx(26.0 + 2.5 * epochs + 2.0 * tests))
        alone = {"stage2": {"phases": phases, "clock": {"epoch": 1}}}
        assert estimate._stages([], alone, config) == {"stage2": 38.0}, "it ended before the probe did"
