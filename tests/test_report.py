"""What a run reports: its folder, the comparability card, tables over runs, the closing text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sc2_stand_in
import torch
from pydantic import BaseModel

import omagd
from omagd.config.loading import resolve
from omagd.lab.analysis.groups import differences
from omagd.run.api import run
from omagd.run.cli.main import main
from omagd.run.reporting.card import NO_EFFECT, ROUNDING, final_card, make_card, read_card, start_lines
from omagd.run.reporting.report import next_steps, render_summary, write_summary
from omagd.run.run_folder import RunFolder, make_token, write_json
from omagd.run.training.experiment import complete_card
from omagd.utils.errors import UserError

SMALL = {
    "t_max": 40, "batch_size_run": 2, "batch_size": 2, "buffer_size": 8, "test_nepisode": 3, "use_cuda": False,
    "test_interval": 100000, "updates_per_iteration": 2,
}  # fmt: skip


def card_of(config="qmix", env=None, ranks=1, trained=None, **updates):
    values = {key.replace("__", "."): value for key, value in updates.items()}
    return make_card(resolve(config, env, values), ranks, torch.device("cpu"), trained)


def test_a_card_says_what_a_result_depends_on():
    sizes = {"batch_size_run": 4, "batch_size": 16, "updates_per_iteration": 3, "t_max": 1000, "test_nepisode": 20}
    card = card_of(ranks=2, seed=7, **sizes)
    assert card["compared"] == {
        "env": "skirmish", "map": "3m", "game": f"omagd {omagd.__version__}", "difficulty": "7", "t_max": 1000,
        "environments": 8,
        "updates_per_round": 3, "effective_batch": 32, "precision": "float32", "greedy": True,
        "test_episodes": 24,  # whole rounds of all environments
        "observations": "each agent's own",
    }  # fmt: skip
    assert {"ranks": 2, "seed": 7, "device": "cpu"}.items() <= card["recorded"].items()
    assert card["recorded"]["versions"]["torch"] == torch.__version__
    same = [{"seed": 9}, {"lr": 0.1}, {"mixer": "vdn"}, {"torch_threads": 2}, {"local_results_path": "else"},
            {"name": "mine"}, {"log_interval": 5}, {"env_args__difficulty": "7"}]  # fmt: skip
    assert {card_of(**change)["id"] for change in same} == {card_of()["id"]}
    assert card_of(ranks=2, batch_size_run=4, batch_size=8)["id"] == card_of(batch_size_run=8, batch_size=16)["id"]
    changed = card_of(env_args__reward_sparse=True)
    first, _, last = start_lines(changed, "3 agents", "1 rank")
    assert first.endswith(" on skirmish 3m: 3 agents")
    assert last.startswith(f"card {changed['id']} (card.json): env_args.reward_sparse True, seed 1, omagd ")


def other_value(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {"unknown": 1} if isinstance(value, dict) else (7,) if isinstance(value, tuple) else f"{value or ''}x"


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_every_key_is_on_the_card_or_on_the_list_of_keys_without_effect():
    """Of a run of all stages; two lists, and nothing else, decide about a new key."""
    config = resolve("omagd_small", None, {})
    first = make_card(config, 1, torch.device("cpu"))
    for key in type(config).model_fields:
        if key in {"env", "runner", "env_args", "evaluate", "pretrain_only", "evaluation_only"}:
            continue  # tested with values that exist
        other = "nq_learner" if key == "learner" else other_value(getattr(config, key))
        changed = config.model_copy(update={key: other})
        if isinstance(getattr(config, key), BaseModel):
            section = getattr(config, key)
            for name in type(section).model_fields:
                part = section.model_copy(update={name: other_value(getattr(section, name))})
                card = make_card(config.model_copy(update={key: part}), 1, torch.device("cpu"))
                assert card["method"] != first["method"], f"{key}.{name}"
            continue
        card = make_card(changed, 1, torch.device("cpu"))
        assert (card == first) == (key in NO_EFFECT), key
        moved = card["id"] != first["id"] or card["method"] != first["method"]
        assert moved == (key not in NO_EFFECT | ROUNDING | {"name", "seed"}), key
    for updates in ({"runner": "stream"}, {"pretrain_only": True}, {"env_args__move_amount": 3.0}):
        card = card_of("omagd_small", **updates)
        assert (card["id"], card["method"]) != (first["id"], first["method"]), updates


def test_the_card_of_a_set_of_maps_names_those_trained_on_and_those_held_out(tmp_path):
    """Two sets that have one name and differ in a map are not comparable, whichever map it is."""
    ready, file = card_of("hpn_qmix", env_args__map_name="marine-easy")["compared"], tmp_path / "mine.yaml"
    assert (ready["map"], ready["maps"]) == ("marine-easy", "3m 5m 10m")
    assert ready["held_out_maps"] == "4m 6m 7m 8m 9m 11m 12m"
    cards = []
    for training, held_out in (("3m, 5m", "4m"), ("3m, 8m", "4m"), ("3m, 5m", "8m")):
        file.write_text(f"training: [{training}]\nheld_out: [{held_out}]\n")
        cards.append(card_of("hpn_qmix", env_args__map_name=str(file)))
    first = cards[0]
    assert (first["compared"]["map"], first["compared"]["maps"], first["compared"]["held_out_maps"]) == (
        "mine", "3m 5m", "4m"
    )  # fmt: skip
    assert differences(cards[1], first) == "maps 3m 8m, not 3m 5m"
    assert differences(cards[2], first) == "held_out_maps 8m, not 4m"
    assert {"maps", "held_out_maps"}.isdisjoint(card_of()["compared"])


def test_the_method_is_the_same_on_any_number_of_ranks():
    one = card_of("omagd_small", batch_size=32, batch_size_run=16, graph_pretrain_batch_size=32)
    sizes = {"batch_size": 16, "batch_size_run": 8, "graph_pretrain_batch_size": 16}
    assert card_of("omagd_small", ranks=2, **sizes)["method"] == one["method"] != card_of("omagd_small", lr=1)["method"]
    assert card_of("qmix", ranks=2, batch_size=16, batch_size_run=8)["method"] == card_of("qmix")["method"]
    names = [card_of("omagd_small", learner=name)["method"] for name in ("nq_graph_learner", "nq_graph_learner_ddp")]
    assert names[0] == names[1]
    scaled = [card_of(ranks=ranks, lr_scaling="sqrt")["method"] for ranks in (1, 2)]
    assert scaled[0] != scaled[1], "the learning rate depends on the ranks"


DIFFERENCES = [
    ({"t_max": 5}, "t_max 5, not "), ({"batch_size": 5}, "effective_batch 5"),
    ({"batch_size_run": 5}, "environments 5"), ({"updates_per_iteration": 5}, "updates_per_round 5"),
    ({"test_nepisode": 500}, "test_episodes"),
    ({"use_full_obs": True}, "observations everything (use_full_obs), not each agent's own; fair if you compare what"),
    ({"use_team_obs": True}, "observations what any living ally sees (use_team_obs)"),
    ({"belief_loss": "features"}, "a loss of training reads everything (belief_loss=features)"),
    ({"precision": "bf16"}, "precision bf16"), ({"env_args__map_name": "8m"}, "map 8m, not 3m"),
    ({"env_args__difficulty": "3"}, "difficulty 3, not 7"),
    ({"env_args__reward_sparse": True}, "env_args.reward_sparse True, not the default"),
    ({"env": "smax"}, "env smax, not skirmish"), ({"max_episodes": 50}, "max_episodes 50, not none"),
]  # fmt: skip


def test_the_id_depends_on_what_must_agree_and_the_difference_is_named():
    first = card_of()
    assert differences(first, card_of()) == ""
    assert "fair" not in differences(card_of(use_full_obs=True, t_max=5), first), "something else differs, too"
    for change, words in DIFFERENCES:
        other = card_of(**change)
        assert other["id"] != first["id"] and words in differences(other, first), change


def test_pretraining_and_evaluation_have_other_entries():
    pretrained = card_of("omagd", pretrain_only=True, graph_pretrain_epochs=7)["compared"]
    assert pretrained["graph_pretrain_epochs"] == 7 and "t_max" not in pretrained
    paths = {"pretrained_tokenizer_path": "x", "pretrained_mask_predictor_path": "x"}
    for part in ({"evaluation_only": True, **paths}, {"reconstructer_stage": "stage1"}):
        assert card_of("omagd", **part)["compared"].keys() == pretrained.keys(), part
    asked = {"pretrain_only": True, "batch_size_run": 4, "graph_pretrain_episodes": 32}
    more = {**asked, "graph_pretrain_episodes": 33, "graph_pretrain_policy": "random"}
    assert differences(card_of("omagd", **more), card_of("omagd", **asked)) == (
        "graph_pretrain_episodes 36, not 32; graph_pretrain_policy random, not mixed"
    )
    sizes = {"pretrain_only": True, "graph_pretrain_batch_size": 16}
    one, two = (card_of("omagd", ranks=ranks, **sizes) for ranks in (1, 2))
    assert [card["compared"]["effective_batch"] for card in (one, two)] == [16, 32]
    asked = {"evaluate": True, "checkpoint_path": "run", "eval_report_episodes": 64}
    assert card_of(**asked)["compared"]["trained"] == "no card"
    card = card_of(**asked, trained=card_of(t_max=50))["compared"]
    assert (card["trained"], card["test_episodes"]) == (card_of(t_max=50)["id"], 64) and "t_max" not in card


def test_the_game_is_named_as_installed_and_then_as_it_names_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(tmp_path))
    with pytest.raises(UserError, match="StarCraft II"):
        card_of(env="sc2")
    for version in ("4.10", "4.6.2"):
        sc2_stand_in.install(tmp_path, version)
    card, older = card_of(env="sc2"), card_of(env="sc2", env_args__game_version="4.6.2")
    assert card["compared"]["game"] == "StarCraft II 4.10 (75689)"
    assert older["compared"]["game"] == "StarCraft II 4.6.2 (69232)"
    assert final_card(card, {"game_build": 75689.0}, {}) == card
    other = final_card(card, {"game_build": 69232.0}, {"stage3": {"clock": {"t_env": 4000, "updates": 100}}})
    assert (other["compared"], other["id"]) == (older["compared"], older["id"])
    assert other["reached"]["updates_per_environment_step"] == 0.025
    nested = {"n_units": 5, "n_enemies": 7}
    made = card_of(env="sc2_v2_terran", env_args__capability_config=nested, env_args__debug=True)["compared"]
    assert made["env_args.capability_config.n_enemies"] == 7
    assert "env_args.capability_config.n_units" not in made and "env_args.debug" not in made


def summary_of(folder, seed=1, won=0.9, **changes):
    """Return a summary as a finished run writes it."""
    weights = [folder.pretrained("stage1", best=True) / "tokenizer.th"]
    weights += [folder.pretrained("stage2", best=True) / "stage2_model.th", folder.step(205000)]
    clocks = {"epoch": 200, "updates": 200}, {"epoch": 150, "updates": 150}, {"t_env": 205000, "updates": 1600}
    results = {"test_battle_won_mean": won, "best_test_battle_won_mean": 0.95, "test_return_mean": 19.25}
    values = {"graph_loss": 1.5}, {"graph_loss": 1.5}, results
    stages = {
        f"stage{n + 1}": {"clock": clocks[n], "values": values[n], "files": {role: str(weights[n])}}
        for n, role in enumerate(("stage1", "stage2", "agent"))
    }
    facts = {
        "name": "omagd_small", "env": "skirmish", "map_name": "3m", "seed": seed, "world_size": 2, "environments": 16,
        "folder": str(folder.path), "exit_state": "completed", "wall_seconds": 572.3, "stages": stages,
    }  # fmt: skip
    return {**facts, **changes}


def test_a_run_keeps_its_card_and_compare_reads_it(tmp_path, capsys):
    folders, cards = [tmp_path / token for token in ("first", "sparse")], []
    for folder, more in zip(folders, ({}, {"env_args.reward_sparse": True}), strict=True):
        updates = {**SMALL, "local_results_path": str(tmp_path), "unique_token": folder.name, **more}
        summary = run(resolve("qmix", None, updates))
        cards.append(read_card(folder))
        written = json.loads((folder / "summary.json").read_text())
        assert cards[-1] == summary["card"] == written["card"]
        assert written["artifacts"]["card"] == str(folder / "card.json")
        clock = summary["stages"]["stage3"]["clock"]
        assert cards[-1]["reached"]["updates_per_environment_step"] == clock["updates"] / clock["t_env"] > 0
    log = RunFolder(folders[0]).log(0).read_text().splitlines()
    (logged,) = [line for line in log if cards[0]["id"] in line]
    assert "(card.json): seed 1, omagd " in logged
    capsys.readouterr()
    assert main(["compare", "--wide", *map(str, folders)]) == 0
    head, _, *rows, _, note = capsys.readouterr().out.splitlines()
    assert "reward_sparse" in head.split() and [row.split()[1] for row in rows] == ["default", "True"]
    assert head.split()[0] == "run" and [row.split()[0] for row in rows] == ["first", "sparse*"]
    assert [row.split()[-1] for row in rows] == [card["id"] for card in cards]
    assert note.endswith("run sparse: env_args.reward_sparse True, not the default")


def test_a_card_is_completed_even_where_the_environment_has_died_meanwhile(tmp_path):
    def died():
        raise RuntimeError("worker 0 died")

    card, warnings = card_of(), []
    for stats, words in ((died, "worker 0 died"), (lambda: {"game_build": 69232.0}, "4.6.2 (69232), not omagd")):
        session = SimpleNamespace(
            env_stats=stats, logger=SimpleNamespace(warning=warnings.append),
            dist=SimpleNamespace(is_main=True), folder=RunFolder(tmp_path),
        )  # fmt: skip
        final = complete_card(session, card, {"stage3": {"clock": {"t_env": 8, "updates": 4}}})
        assert read_card(tmp_path) == final and final["reached"]["updates_per_environment_step"] == 0.5
        assert (final["id"] == card["id"]) == (stats is died) and words in warnings.pop() and not warnings


def test_two_runs_never_share_a_folder_and_its_name_is_a_file_name(tmp_path):
    token = make_token("my run/2", "skirmish", "3m", 7, now=0)
    assert token.startswith("my-run-2_skirmish_3m_seed7_19") and Path(token).name == token
    assert "_seed7_evaluation_19" in make_token("omagd", "skirmish", "3m", 7, now=0, evaluation=True)
    assert "__" not in make_token("a", "memory_game", "", 1)
    folders = [RunFolder.create(tmp_path / "results", token) for _ in range(3)]
    assert [folder.token for folder in folders] == [token, f"{token}_2", f"{token}_3"]
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "results", token, generated=False)


def test_paths_and_artifacts_are_the_published_ones(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    assert folder.artifacts() == {}
    for step in (900, 10240, 2000):
        folder.step(step).mkdir()
    for path in (folder.pretrained("stage1"), folder.pretrained("stage2", best=True), folder.replays):
        path.mkdir()
    for path in (folder.plots / "curves.png", *folder.files()):
        path.touch()
    assert {name: str(Path(path).relative_to(folder.path)) for name, path in folder.artifacts().items()} == {
        "config": "config.json", "card": "card.json", "env_info": "env_info.json", "metrics": "metrics.jsonl",
        "pretrain_stage1": "models/pretrain_stage1", "pretrain_stage2_best": "models/pretrain_stage2_best",
        "model": "models/10240", "plots/curves": "plots/curves.png", "replays": "replays",
    }  # fmt: skip
    assert (folder.log(1), folder.summary_json) == (tmp_path / "run/logs/rank_1.log", tmp_path / "run/summary.json")


def test_json_is_strict_and_written_whole_or_not_at_all(tmp_path):
    value = {"nan": math.nan, "path": Path("x"), 3: np.arange(2), "n": np.float32(1)}
    path = tmp_path / "deep" / "a.json"
    write_json(path, value)
    assert json.loads(path.read_text()) == {"nan": None, "path": "x", "3": [0, 1], "n": 1.0}
    before = path.read_bytes()
    with pytest.raises(TypeError, match="object"):
        write_json(path, {"good": 1, "bad": object()})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_summary_and_closing_text(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    folder.step(205000).mkdir()
    write_summary(folder, summary_of(folder, won=math.nan))
    read = json.loads(folder.summary_json.read_text())
    expected = {"win_rate": None, "best_win_rate": 0.95, "return": 19.25, "updates": 1950, "world_size": 2}
    assert read.items() >= expected.items()
    values = summary_of(folder)
    assert "win rate 0.900 (best 0.950)" in render_summary(values)
    values["stages"]["stage2"] = {"values": {"top1": 0.25, "test_top1": 0.125}}
    assert "top-1 accuracy 0.125" in render_summary(values), "of the model that is kept"
    for changes in ({"stages": {}}, {"kind": "evaluation"}):
        assert next_steps({**values, **changes}) == []
    (step,) = next_steps({**values, "exit_state": "failed"})
    assert "omagd report " in step


def commands_in(text):
    found = (line.partition("omagd ")[2].partition("   ")[0].strip() for line in text.splitlines())
    return list(filter(None, found))


def test_the_closing_text_has_one_duration_and_commands_that_work_here(tmp_path, monkeypatch):
    """Several stages keep their names; a resumed run's wall time holds earlier starts, so it tells no start-up."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "results", "run")
    values = {**summary_of(folder), "wall_seconds": 81.0}
    text = render_summary(values, 95.0)
    assert " · 1 min 35 s (14 s of them start-up) · completed" in text and "\n  stage3   205,000 steps" in text
    named = [f"{word} results/run" for word in ("watch", "evaluate", "report")]
    assert commands_in(text) == [*named, "compare results"]
    (folder.path / "run.json").touch()  # the newest run needs no name
    assert commands_in(render_summary(values)) == ["watch", "evaluate", "report", "compare results"]
    assert " · 1 min 21 s · completed" in render_summary({**values, "card": {"resumed": [{}]}}, 95.0)
    single = render_summary({**values, "stages": {"stage3": values["stages"]["stage3"]}})
    assert "\n  training   205,000 steps" in single and "stage3" not in single
