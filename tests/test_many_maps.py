"""A policy of several maps: tests of each map, its evaluation, and play on maps that it was not trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruption import json_of

import omagd
from omagd.config.loading import resolve, validate
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.lab.commands.watch import record_battles
from omagd.run.checkpoint.resuming import identity_of, locked_folder
from omagd.run.cli.main import main
from omagd.run.cli.preflight import preflight
from omagd.run.run_folder import write_json
from omagd.run.training.evaluate import evaluation_config
from omagd.utils.errors import UserError

TINY: dict[str, Any] = {
    "batch_size_run": 4, "batch_size": 4, "t_max": 200, "test_nepisode": 8, "test_interval": 10**6, "rnn_hidden_dim": 8,
    "learner_args": {"critic": "set", "critic_hidden": 8, "epochs": 1}, "agent_args": {"hyper_dim": 8},
    "checkpoint_interval": 1000.0, "use_cuda": False,
}  # fmt: skip
MAPS = ("3m", "4m_vs_3m", "1m", "5m")


def trained_on(folder: Path, map_name: str, config: str = "hpn_mappo", **updates: Any) -> dict[str, Any]:
    given = {**TINY, "env_args.map_name": map_name, "local_results_path": str(folder), **updates}
    return omagd.run(resolve(config, "skirmish", given))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """Return the summary of a run on two maps, with two more for tests."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "mine.yaml").write_text("training: [3m, 4m_vs_3m]\nheld_out: [1m, 5m]\n")
    return trained_on(folder, str(folder / "mine.yaml"), name="first", task_weights={"3m": 1.0})


def require_means(
    values: dict[str, float], lines: list[dict[str, Any]], maps: tuple[str, ...], n_training: int
) -> None:
    """Compare all results of tests with those of the episodes' lines."""
    for name, key in (("return", "return"), ("ep_length", "length"), ("battle_won", "battle_won")):
        each = [np.mean([line[key] for line in lines if line["task"] == of]) for of in maps]
        assert [values[f"test/{of}/{name}_mean"] for of in maps] == pytest.approx(each)
        assert values[f"test_{name}_mean"] == pytest.approx(np.mean(each[:n_training]))
        if n_training < len(maps):
            assert values[f"test_held_out_{name}_mean"] == pytest.approx(np.mean(each[n_training:]))


def test_a_run_trains_on_its_maps_and_tests_each(trained):
    folder, values = Path(trained["folder"]), trained["stages"]["stage3"]["values"]
    assert {f"test/{of}/battle_won_mean" for of in MAPS} < values.keys()
    assert values["test_return_mean"] == pytest.approx(
        (values["test/3m/return_mean"] + values["test/4m_vs_3m/return_mean"]) / 2
    )
    played = [json.loads(line)["task"] for line in (folder / "episodes" / "rank_0.jsonl").open()]
    assert set(played) == set(MAPS[:2]) and abs(played.count("3m") - len(played) / 2) <= 1, "held-out maps are not"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    last = [line for line in lines if "train/3m/return_mean" in line][-1]
    assert "train/5m/return_mean" not in last and "return_mean" in last
    info = json_of(folder / "env_info.json")
    assert (info["tasks"], info["n_training"], info["n_agents"]) == (list(MAPS), 2, 5)
    assert folder.name.startswith("first_skirmish_mine_seed1") and trained["map_name"] == "mine"
    compared = trained["card"]["compared"]
    assert [compared[key] for key in ("map", "maps", "held_out_maps")] == ["mine", "3m 4m_vs_3m", "1m 5m"]


def test_an_evaluation_counts_the_episodes_of_each_map(trained, tmp_path, capsys):
    """What `watch` records are episodes of an evaluation: the same seeds, and the same team plays them."""
    found = record_battles(evaluation_config(trained["folder"], {}, "watch"), episodes=2).episodes
    assert [episode.map_name for episode in found] == [of for of in MAPS for _ in range(2)]
    steps = next(Path(trained["folder"]).glob("models/*"))
    assert found[0].policy == f"first, seed 1 after {int(steps.name):,} steps"
    for words, maps, n_training in (
        ((), MAPS, 2), (("env_args.map_name=1m,6m_vs_2m",), ("1m", "6m_vs_2m"), 2),
        (("env_args.map_name=7m",), ("7m",), 0),
    ):  # fmt: skip
        where = tmp_path / str(len(words) + len(maps))
        given = ["-u", "test_nepisode=8", f"local_results_path={where}", *words]
        assert main(["evaluate", trained["folder"], *given]) == 0
        (folder,) = where.iterdir()
        lines = [json.loads(line) for line in (folder / "episodes" / "rank_0.jsonl").open()]
        assert json_of(folder / "card.json")["compared"]["test_episodes"] * len(maps) == len(lines) == 8 * len(maps)
        values = json_of(folder / "summary.json")["stages"]["stage3"]["values"]
        if n_training:
            require_means(values, lines, maps, n_training)
            assert f"test return by map: {'1m' if n_training else ''}" in capsys.readouterr().out
        else:
            assert values["test_return_mean"] == pytest.approx(np.mean([line["return"] for line in lines]))
        for of in MAPS if not words else ():
            first = [line for line in lines if line["task"] == of and line["slot"] == 0][:2]
            mine = [episode for episode in found if episode.map_name == of]
            assert [(each.seed, each.length, each.results["return"]) for each in mine] == [
                (line["seed"], line["length"], pytest.approx(line["return"])) for line in first
            ]


def test_a_loaded_policy_plays_any_map_as_an_evaluation_does(trained, tmp_path):
    policy = omagd.load_policy(trained["folder"])
    updates = {"evaluate": True, "checkpoint_path": trained["folder"], "batch_size_run": 1, "eval_report_episodes": 2}
    for of in ("3m", "8m_vs_9m"):
        values = trained_on(tmp_path, of, **updates)["stages"]["stage3"]["values"]
        totals = omagd.play(policy, omagd.make("skirmish", map_name=of), episodes=2)["totals"]
        assert {name: totals[name.removeprefix("test_")] for name in values} == pytest.approx(values)


def test_a_run_does_not_need_the_file_of_its_maps_again(trained, tmp_path, capsys):
    """Moved or changed afterwards; a run that would be resumed with another content is another run, in one line."""
    run, file = Path(trained["folder"]), Path(trained["folder"]).parent / "mine.yaml"
    before, saved = file.read_text(), validate(json_of(run / "config.json"))
    assert saved.env_args["map_name"] == {"name": "mine", "training": list(MAPS[:2]), "held_out": list(MAPS[2:])}
    given = resolve("hpn_mappo", "skirmish", {**TINY, "env_args.map_name": str(file), "name": "first"})
    given = given.model_copy(update={"local_results_path": str(tmp_path), "auto_resume": True})
    begun = preflight(given).config
    assert identity_of(begun) == identity_of(preflight(begun).config)
    with locked_folder(begun, "begun"):
        pass
    write_json(tmp_path / "begun" / "run.json", {"identity": identity_of(begun)})  # killed
    try:
        file.write_text("training: [3m, 5m]\nheld_out: [2m]\n")
        changed = preflight(given).config
        assert identity_of(changed) != identity_of(begun)
        with locked_folder(changed, "other") as lock:
            assert Path(lock.path).name == "other"
        file.unlink()
        assert main(["evaluate", str(run), "test_nepisode=8", f"local_results_path={tmp_path}"]) == 0
    finally:
        file.write_text(before)
    (summary,) = [json_of(path) for path in tmp_path.glob("*/summary.json")]
    assert {f"test/{of}/return_mean" for of in MAPS} <= summary["stages"]["stage3"]["values"].keys()
    compared = json_of(run / "card.json")["compared"]
    assert (compared["map"], compared["maps"], compared["held_out_maps"]) == ("mine", "3m 4m_vs_3m", "1m 5m")


def test_training_continues_on_other_maps(trained, tmp_path):
    before = omagd.load_policy(trained["folder"])._mac.agent.state_dict()
    for other in ("5m_vs_6m,7m", "3m,4m_vs_3m", "3m"):
        with pytest.raises(UserError, match=r"run on mine cannot continue on .*\. Give its models/"):
            trained_on(tmp_path / "none", other, checkpoint_path=trained["folder"], t_max=400)
    assert not (tmp_path / "none").exists()
    weights = f"{trained['folder']}/models"
    continued = trained_on(tmp_path, "5m_vs_6m,7m", checkpoint_path=weights, t_max=400, seed=2)
    assert continued["stages"]["stage3"]["clock"]["t_env"] >= 400
    after = omagd.load_policy(continued["folder"])._mac.agent.state_dict()
    torch.testing.assert_close(after, before, atol=0.02, rtol=0)  # some small steps, not another start


def test_what_cannot_play_another_map_says_why(trained, tmp_path):
    policy = omagd.load_policy(trained["folder"])
    with pytest.raises(UserError, match=r"policy was trained on skirmish mine; units of skirmish 2s3z have other"):
        omagd.play(policy, omagd.make("skirmish", map_name="2s3z"), episodes=1)
    with pytest.raises(UserError, match="map_name=3m,5m: make one battle of 3m, 5m"):
        omagd.make("skirmish", map_name="3m,5m")
    numbered = omagd.load_policy(trained_on(tmp_path, "3m", obs_agent_id=True, test_nepisode=4)["folder"])
    with pytest.raises(UserError, match="policy was trained on skirmish 3m, not on skirmish 5m"):
        numbered.on(make_env("skirmish", {"map_name": "5m"}, 1, processes=False).info)


def test_what_an_environment_reports_is_of_the_slots_and_battles_of_the_set(monkeypatch):
    env = make_env("skirmish", {"map_name": "3m,5m"}, 5, processes=False)
    env.set_tasks(np.ones(5, bool), np.array([1, 0, 0, 1, 1]))
    env.reset(np.ones(5, bool), np.arange(5))
    found = [pool for pool in env._pools if (pool.outer == 4).any()]
    (pool,), (inner,) = found, np.flatnonzero(found[0].outer == 4)
    finish, lost = pool.env.step_finish, np.arange(pool.env.n_slots) == inner
    monkeypatch.setattr(pool.env, "step_finish", lambda which: replace(finish(which), lost=lost))
    monkeypatch.setattr(pool.env, "busy_slots", lambda: {int(inner): 77})
    actions = random_actions(env.observe().avail_actions, np.random.default_rng(0))
    assert env.step(actions, np.ones(5, bool)).lost.tolist() == [False] * 4 + [True]
    assert env.busy_slots() == {4: 77}
    for each in env._pools:
        monkeypatch.setattr(each.env, "get_stats", lambda: {"game_build": 75689.0, "restarts": 1.0})
    assert env.get_stats() == {"game_build": 75689.0, "restarts": float(len(env._pools))}
    env.close()
