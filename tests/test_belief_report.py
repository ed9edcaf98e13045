"""Test episodes of stage 2: they select nothing, and survive interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from command_budgets import BUDGETS
from interruption import interrupted_run
from run_equality import differences, reproducible_lines

from omagd.config.schema import Config
from omagd.lab.beliefs import judge as judging
from omagd.run.checkpoint.store import folders, read_checkpoint
from omagd.run.checkpoint.weights import PREDICTOR_FILE, checksum
from omagd.run.cli.main import config_from, main
from omagd.run.cli.preflight import preflight
from omagd.run.launch.launcher import launch
from omagd.run.run_folder import RunFolder
from omagd.run.training.judges import JUDGES, Judge, Verdict
from omagd.run.training.stages.pretraining import TEST, PretrainStage, Stage2
from omagd.utils.errors import UserError
from omagd.utils.storage import read_json

SMALLEST = (
    "--config=omagd", "--env-config=skirmish", "with", *BUDGETS, "env_args.map_name=3m", "run=default",
    "pretrain_only=True", "checkpoint_interval=0", "auto_resume=True", "max_checkpoints_to_keep=50",
)  # fmt: skip


def config(results: Path, *more: str) -> Config:
    return config_from([*SMALLEST, f"local_results_path={results}", "graph_pretrain_test_episodes=6", *more])


def logged(folder: Path, prefix: str) -> list[dict]:
    lines = [{k: v for k, v in line.items() if k.startswith(prefix)} for line in reproducible_lines(folder)]
    return [line for line in lines if line]


def count(batches):
    return sum(batch.packing.n_episodes for batch in batches)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that nothing interrupted, and what its stage 2 did with how many episodes."""
    seen, play, fit, judge = [], Stage2._play, judging.fit_baselines, judging.judge
    with pytest.MonkeyPatch.context() as patch:

        def playing(self, purpose, into):
            seen.append((purpose, self.clock.epoch))
            return play(self, purpose, into)

        def fitting(training, validation, *rest):
            seen.append(("fit", count(training()), count(validation())))
            return fit(training, validation, *rest)

        def judge_all(learner, batches, *rest):
            kept = list(batches)
            seen.append(("judge", count(kept)))
            return judge(learner, kept, *rest)

        patch.setattr(Stage2, "_play", playing)
        patch.setattr(judging, "fit_baselines", fitting)
        patch.setattr(judging, "judge", judge_all)
        folder = launch(config(tmp_path_factory.mktemp("whole")), "run")["folder"]
    return RunFolder(folder), seen


def test_nothing_is_learned_from_what_judges(whole, tmp_path):
    folder, seen = whole
    fitted = ("fit", 8, 4), ("judge", 4), ("judge", 4)  # 8 episodes to learn from; 4 held out, once an epoch
    assert seen == [*[(TEST, 0)] * 3, *fitted, ("judge", 6)], "2 battles at a time, 6 episodes"
    other = launch(config(tmp_path, "graph_pretrain_test_episodes=2"), "run")["folder"]
    found = differences(folder.path, Path(other))
    assert len(found) == 1 and "stage2 ['test/" in found[0], found
    (one,), (two,) = (logged(path, "test/") for path in (folder.path, Path(other)))
    assert one.keys() >= {"test/error", "test/error_ridge", "test/error_map_constant", "test/top1", "test/dead_ece"}
    assert one["test/error"] != two["test/error"]
    stages = [read_json(Path(path) / "summary.json")["stages"]["stage2"] for path in (folder.path, other)]
    assert [stage["beliefs"]["episodes"] for stage in stages] == [6, 2]
    assert stages[0]["values"]["test_error"] == stages[0]["beliefs"]["rows"][0]["mse"]["predictor"]


class Watching(Judge):
    """A judge of another package."""

    seen: ClassVar[list[str]] = []

    def predictor(self, learner, batches):
        self.seen.append(checksum(learner.predictor.state_dict()))
        return Verdict({"watched": float(count(batches))}, {"watched": [1]})

    def saved(self):
        return {"watched": torch.ones(1)}


def test_all_judges_see_the_best_predictor(tmp_path, monkeypatch):
    """The best one is made another one than the last, which a run this short may end with."""
    seen, finish = Watching.seen, PretrainStage.finish

    def finishing(self):
        if isinstance(self, Stage2):
            best = {**self.best[2], "head.bias": self.best[2]["head.bias"] + 1}
            self.best, last = (*self.best[:2], best), checksum(self.trained.state_dict())
            seen.extend((checksum(best), last))
        return finish(self)

    monkeypatch.setattr(PretrainStage, "finish", finishing)
    monkeypatch.setitem(JUDGES._objects, "watching", Watching)
    summary = launch(config(tmp_path), "run")
    best, last, reported = seen[-3:]
    assert best == reported != last
    found, folder = summary["stages"]["stage2"], RunFolder(summary["folder"])
    assert found["values"]["test_watched"] == 6 and found["beliefs"]["watched"] == [1] and found["beliefs"]["rows"]
    file = torch.load(folder.pretrained("stage2", best=True) / PREDICTOR_FILE, weights_only=True)
    assert {"watched", "baselines"} <= file.keys()


def test_a_run_that_is_interrupted_among_its_test_episodes_ends_with_the_same_bits(whole, tmp_path):
    given = config(tmp_path)
    last = read_checkpoint(folders(whole[0].checkpoints)[0]).manifest["iteration"]
    for iteration in (last - 4, last - 3, last - 2):
        folder, _ = interrupted_run(given, iteration)
    assert read_checkpoint(folders(folder.checkpoints)[0]).manifest["stage"] == "stage2"
    stages = launch(given, "another")["stages"]
    assert differences(whole[0].path, folder.path) == []
    assert stages["stage2"]["beliefs"] == read_json(whole[0].summary_json)["stages"]["stage2"]["beliefs"]


def test_the_predictors_file_has_the_baselines_for_later_runs(whole, tmp_path):
    given = [
        f"pretrained_tokenizer_path={whole[0].pretrained('stage1', best=True)}",
        f"pretrained_mask_predictor_path={whole[0].pretrained('stage2', best=True)}", "evaluation_only=True",
    ]  # fmt: skip
    stages = launch(config(tmp_path / "given", *given), "run")["stages"]
    assert {"error", "error_ridge"} <= stages["stage2"]["values"].keys()
    same = launch(config(tmp_path / "same", *given, "eval_report_episodes=6"), "run")["stages"]["stage2"]["values"]
    (tested,) = logged(whole[0].path, "test/")
    assert same["error"] == tested["test/error"], "on the test episodes: the held-out ones chose the model"
    file = whole[0].pretrained("stage2", best=True) / PREDICTOR_FILE
    content = torch.load(file, weights_only=True)
    bare = tmp_path / PREDICTOR_FILE
    torch.save({name: value for name, value in content.items() if name != "baselines"}, bare)
    given[1] = f"pretrained_mask_predictor_path={bare}"
    summary = launch(config(tmp_path / "bare", *given), "run")
    values = summary["stages"]["stage2"]["values"]
    assert "error" not in values and values["error_all"] == stages["stage2"]["values"]["error_all"]
    assert RunFolder(summary["folder"]).log(0).read_text().count(f"{bare} has no baselines") == 1
    infinite = {**content["baselines"], "bounds": content["baselines"]["bounds"] / 0}
    torch.save({**content, "baselines": infinite}, bare)
    with pytest.raises(UserError, match=r"stage2_model.th: its baselines do not fit \(bounds is missing"):
        preflight(config(tmp_path / "harm", *given))  # noticed before a run, not after its last stage


def test_a_run_is_measured_beside_guesses_on_battles_of_its_team(small_run, capfd):
    assert main(["beliefs", "--reconstruction", str(small_run), "--episodes=8", "with", "seed=3"]) == 0
    title, head, *rows = capfd.readouterr().out.strip().splitlines()
    assert "skirmish 3m, omagd_small, seed 3" in title and "reconstruction" in head and head.endswith("taken for dead")
    everything, never = (next(row for row in rows if row.startswith(name)) for name in ("all", "never"))
    assert int(everything.split()[1].replace(",", "")) >= int(never.split()[1].replace(",", "")) > 0
    *errors, dead = map(float, everything.split()[2:])
    assert all(0 < error < 30 for error in errors) and 0 <= dead <= 1


@pytest.mark.parametrize(("words", "message"), [
    (["census"], "beliefs: name a run, as in: omagd beliefs --reconstruction results/<run>"),
    (["--reconstruction=RUN", "--episodes=3"], "--episodes=3: must be a number from 8 to 100,000"),
    (["--reconstruction=RUN", "--episodes=8"], "--reconstruction=RUN: predicts nothing. Give a run with"),
    (["--reconstruction=gone"], "gone"),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_line(words, message, qmix_run, capfd):
    assert main(["beliefs", *(word.replace("RUN", str(qmix_run)) for word in words)]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert message.replace("RUN", str(qmix_run)) in line
