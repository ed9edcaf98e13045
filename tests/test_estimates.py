"""Estimates (`--dry-run`) of studies: what a probe finds, and what the table makes of it. Sweeps: test_sweeps.py."""

from __future__ import annotations

import pytest

from omagd.config.loading import resolve
from omagd.lab.studies import estimate
from omagd.lab.studies.spec import load

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
