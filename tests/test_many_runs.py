"""Reading many runs: folders, groups of repetitions, the table of `load_runs`."""

import json
import logging
import os
import sys

import numpy as np
import pytest
from many_runs import STEPS, make_run, make_study

import omagd
from omagd.lab.analysis.groups import differing, groups, settings
from omagd.lab.analysis.runs import load
from omagd.lab.studies.executors import Job
from omagd.lab.studies.results import append, line_of
from omagd.run.run_folder import RunFolder
from omagd.utils.errors import UserError


def test_runs_are_found_in_folders_of_runs_and_in_studies(tmp_path):
    make_study(tmp_path / "many", seeds=(2, 10, 1))
    (tmp_path / "many" / "sacred").mkdir()
    (tmp_path / "study").mkdir()
    make_study(tmp_path / "study" / "runs", rates=(0.001,))
    runs = load([tmp_path / "many"])
    assert [run.seed for run in runs[:3]] == [1, 2, 10] and len(runs) == 9, "numbers in names are sorted by size"
    assert [run.folder.name for run in load([tmp_path / "study"])] == ["lr0.001_3m_seed1", "lr0.001_3m_seed2"]
    one = tmp_path / "many" / "lr0.001_3m_seed1"
    assert [run.folder for run in load([one, one])] == [one], "a folder that is given twice is one run"
    run = runs[0]
    assert (run.name, run.env, run.map_name, run.seed, run.finished) == ("qmix", "skirmish", "3m", 1, True)
    assert (run.kind, run.state, run.test_episodes) == ("training", "completed", 32)
    steps, seconds, won = run.test_curve("test_battle_won_mean")
    assert steps.tolist() == list(STEPS) and np.allclose(seconds, 0.01 * steps) and won[-1] == pytest.approx(0.22)
    assert run.test_curve("loss_pi")[0].size == 0


def damage(folder, how):
    """Spoil a run in one way."""
    if how == "no object":
        (folder / "config.json").write_text("[1]")
        (folder / "summary.json").write_text("{")
    elif how == "a pipe":
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            (folder / name).unlink()
            os.mkfifo(folder / name)
    elif how == "wrong types":
        (folder / "config.json").unlink()
        (folder / "summary.json").write_text(json.dumps({"stages": {"stage3": {"values": {"x": [1]}}}}))


@pytest.mark.parametrize("how", ["no object", "a pipe", "wrong types"])
def test_a_damaged_run_among_many_is_one_warning(tmp_path, how, caplog):
    make_study(tmp_path)
    damage(tmp_path / "lr0.001_3m_seed2", how)
    with caplog.at_level(logging.WARNING, "omagd"):
        runs = load([tmp_path])
    assert len(runs) == 5
    (line,) = caplog.messages
    assert "lr0.001_3m_seed2" in line and "can be read" in line
    with pytest.raises(UserError, match=r"^plot .*lr0.001_3m_seed2"):
        load([tmp_path / "lr0.001_3m_seed2"], "plot")


def test_groups_are_the_keys_that_differ_and_seeds_are_repetitions(tmp_path):
    make_study(tmp_path, maps=("3m", "8m"), seeds=(1, 2, 3))
    runs = load([tmp_path])
    assert differing(runs) == {"lr": [0.0003, 0.001, 0.005]}
    found = groups(runs)
    assert [group.label for group in found] == ["lr=0.0003", "lr=0.001", "lr=0.005"]
    for group in found:
        assert [run.seed for run in group.at("skirmish 3m")] == [1, 2, 3] and len(group.runs) == 6


def test_what_does_not_change_the_method_makes_no_group(tmp_path):
    """Paths, logs, devices, another number of ranks of the same batch, weights of another seed."""
    same = [
        {}, {"use_cuda": False, "torch_threads": 3, "accumulate": 2}, {"log_interval": 7, "save_model": False},
        {"local_results_path": "x", "unique_token": "y"}, {"env_args__difficulty": "7"},
        {"pretrained_tokenizer_path": "results/seed6/tokenizer.th"},
        {"pretrained_tokenizer_path": "results/seed7/tokenizer.th"},
    ]  # fmt: skip
    for seed, updates in enumerate(same):
        make_run(tmp_path / f"seed{seed}", seed=seed, **updates)
    first, given = groups(load([tmp_path]))
    assert [len(group.runs) for group in (first, given)] == [5, 2], "given weights are a method, their path is not"
    make_run(tmp_path / "other weights", seed=6, pretrained_tokenizer_path="results/other/tokenizer.th")
    assert len(groups(load([tmp_path]))) == 4, "where a seed occurs twice, the path tells the runs apart"


def as_study(folder, arm):
    """Write the `study.json` of runs; arm: of a run's name."""
    jobs = [{"job": {"name": name, "arm": arm(name)}} for name in sorted(os.listdir(folder / "runs"))]
    (folder / "study.json").write_text(json.dumps({"jobs": jobs}))


def test_arms_of_a_study_are_groups(tmp_path):
    make_study(tmp_path / "runs")
    names = sorted(os.listdir(tmp_path / "runs"))
    as_study(tmp_path, lambda name: "low" if "0.0003" in name else "high")
    assert {group.label: len(group.runs) for group in groups(load([tmp_path]))} == {"low": 2, "high": 4}
    assert load([tmp_path / "runs" / names[0]])[0].arm == "low"


def test_load_runs_returns_a_row_for_each_test(tmp_path, monkeypatch):
    make_study(tmp_path, rates=(0.001, 0.005))
    make_run(tmp_path / "begun", won=(), finished=False, seed=5, lr=0.001)
    table = omagd.load_runs(tmp_path)
    assert len(table) == 4 * 4 + 1
    assert list(table.columns[:9]) == [
        "run", "arm", "env", "map", "seed", "kind", "finished", "t_env", "wall_seconds",
    ]  # fmt: skip
    final = table.groupby(["config.lr", "seed"]).test_battle_won_mean.last()
    assert final[(0.005, 2)] == pytest.approx(0.44) and np.isnan(final[(0.001, 5)])
    assert not table.set_index("run").loc["begun"].finished
    one, other = tmp_path / "lr0.001_3m_seed1", tmp_path / "lr0.005_3m_seed2"
    assert list(dict.fromkeys(omagd.load_runs([one, str(other)]).run)) == [one.name, other.name]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r'needs pandas: pip install "omagd\[studies\]"'):
        omagd.load_runs(tmp_path)


def test_an_evaluation_is_no_repetition_of_a_training(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"trained{seed}", seed=seed)
    begun = make_run(tmp_path / "played", seed=3, evaluate=True, checkpoint_path="x", finished=False)
    found = groups(load([tmp_path]))
    assert sorted((len(group.runs), *{run.kind for run in group.runs}) for group in found) == [
        (1, "evaluation"), (2, "training"),
    ]  # fmt: skip
    assert len({group.label for group in found}) == 2 and all(group.label.startswith("qmix") for group in found)
    make_run(tmp_path / "other", seed=4, evaluate=True, checkpoint_path="x", lr=0.1)
    assert len(groups(load([tmp_path]))) == 3, "an evaluation with another setting"
    (begun / "card.json").unlink()
    assert load([begun])[0].kind == "evaluation", "known from its configuration alone"


def test_ranks_that_share_the_work_of_one_are_a_repetition_unless_they_scale_the_rate(tmp_path):
    def write(name, ranks, **updates):
        keys = {"config": "omagd_small", "seed": ranks, **updates}
        folder = make_run(tmp_path / name, finished=False, **keys)
        card = json.loads((folder / "card.json").read_text())
        card["recorded"]["ranks"] = ranks
        card["compared"] |= {"effective_batch": 32, "environments": 8}
        (folder / "card.json").write_text(json.dumps(card))

    whole = {"batch_size": 32, "batch_size_run": 8, "graph_pretrain_batch_size": 64}
    write("one", 1, **whole, learner="nq_graph_learner")
    halves = {"batch_size": 16, "batch_size_run": 4, "graph_pretrain_batch_size": 32}
    write("two", 2, **halves, learner="nq_graph_learner_ddp")
    assert [len(group.runs) for group in groups(load([tmp_path]))] == [2]
    write("plain/one", 1, use_graph_reconstruction=False, config="qmix")
    write("plain/two", 2, use_graph_reconstruction=False, config="qmix")
    assert [len(group.runs) for group in groups(load([tmp_path / "plain"]))] == [2], "stage 2 is not played"
    for ranks in (1, 2):
        write(f"scaled/{ranks}", ranks, config="qmix", lr_scaling="linear")
    assert differing(load([tmp_path / "scaled"]))["world_size"] == [1, 2]
    assert len(groups(load([tmp_path / "scaled"]))) == 2


def appended(folder, arm):
    """Append the runs of a study to its results file; return them, and what is read there. arm: of a run."""
    runs, path = load([folder / "runs"]), folder / "results.jsonl"
    for run in runs:
        job = Job(run.folder.name, arm(run), run.env, run.map_name, run.seed, ())
        append(path, line_of("mine", job, RunFolder(run.folder), run.card, "x"))
    return runs, load([path])


def test_the_results_file_of_a_study_is_read_as_its_runs_are(tmp_path, caplog):
    """The lines that a study appends, of runs whose folders may be gone."""
    make_study(tmp_path / "runs", maps=("3m", "8m"))
    runs, again = appended(tmp_path, lambda run: f"rate {run.config['lr']}")
    assert differing(again) == differing(runs) == {"lr": [0.0003, 0.001, 0.005]}
    for one, other in zip(runs, again, strict=True):
        curves = one.test_curve("test_battle_won_mean"), other.test_curve("test_battle_won_mean")
        assert all(np.array_equal(*pair) for pair in zip(*curves, strict=True))
        assert (one.place, one.seed, one.state, one.kind) == (other.place, other.seed, other.state, other.kind)
        assert one.finished and other.finished, "a plot of last tests takes it"
    assert [group.label for group in groups(again)] == ["rate 0.0003", "rate 0.001", "rate 0.005"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"card": {"id": "x", "compared": {}, "recorded": 3}, "summary": {}, "tests": {"t_env": 3}}\n{}\n')
        line = {"card": {"id": "x", "compared": {}, "recorded": {"settings": 5}}, "summary": {}}
        file.write(json.dumps({**line, "job": "huge", "tests": {"t_env": [1, 10**400], "test_a": [10**400, 1]}}) + "\n")
        file.write('{"card": {"id": "x", "comp')  # of a process that was killed while it wrote
    again = load([tmp_path / "results.jsonl"])
    assert len(again) == 14 and again[-1].test_curve("test_a")[0].size == 0
    assert "2 of 16 lines hold no result" in caplog.text


def test_lines_of_results_keep_budgets_and_the_last_of_two_counts(tmp_path):
    make_run(tmp_path / "runs" / "a", seed=1)
    make_run(tmp_path / "runs" / "b", seed=1, t_max=1000, test_nepisode=64, updates_per_iteration=3)
    runs, again = appended(tmp_path, lambda run: run.folder.name)
    assert differing(again) == differing(runs) and {"t_max", "test_nepisode"} < differing(runs).keys()
    assert [run.test_episodes for run in again] == [32, 64]
    assert [settings(run) for run in again] == [settings(run) for run in runs]
    path = tmp_path / "results.jsonl"
    line = json.loads(path.read_text().splitlines()[-1])
    line["summary"]["wall_seconds"] = 7.0
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert [run.summary["wall_seconds"] for run in load([path])] == [60.0, 7.0]
