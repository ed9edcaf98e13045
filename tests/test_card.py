"""The comparability card: what it says, what its id depends on, and how tables use it."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import sc2_stand_in
import torch
from command_harness import summary_of
from documented import questions

from omagd.config.loading import resolve
from omagd.run.api import run
from omagd.run.cli.main import main
from omagd.run.reporting.card import differences, make_card, marks, read_card, settled, start_lines
from omagd.run.reporting.report import runs_table, seeds_table
from omagd.run.training.records import complete_card
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder, write_json

CPU = torch.device("cpu")
SMALL = {
    "t_max": 120, "batch_size_run": 2, "batch_size": 2, "buffer_size": 8, "test_nepisode": 3, "use_cuda": False,
    "test_interval": 100000, "updates_per_iteration": 2,
}  # fmt: skip


def card_of(config: str = "qmix", env: str | None = None, ranks: int = 1, **updates: object) -> dict:
    values = {key.replace("__", "."): value for key, value in updates.items()}
    return make_card(resolve(config, env, values), ranks, CPU)


def test_a_card_says_what_a_result_depends_on():
    sizes = {"batch_size_run": 4, "batch_size": 16, "updates_per_iteration": 3, "t_max": 1000, "test_nepisode": 20}
    card = card_of(ranks=2, seed=7, **sizes)
    compared = card["compared"]
    assert (compared["env"], compared["map"], compared["game"]) == ("skirmish", "3m", "omagd 0.1.0")
    assert (compared["environments"], compared["updates_per_round"], compared["effective_batch"]) == (8, 3, 32)
    assert (compared["t_max"], compared["difficulty"], compared["precision"]) == (1000, "7", "float32")
    assert (compared["test_episodes"], compared["greedy"]) == (24, True), "whole rounds of all battles"
    assert not [key for key in compared if key.startswith("env_args")], "all as usual"
    assert (card["told"]["ranks"], card["told"]["seed"], card["told"]["device"]) == (2, 7, "cpu")
    assert card["told"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "change",
    [{"seed": 9}, {"lr": 0.1}, {"mixer": "vdn"}, {"torch_threads": 2}, {"local_results_path": "else"}, {"name": "mine"},
     {"log_interval": 5}, {"env_args__difficulty": "7"}],
    ids=str,
)  # fmt: skip
def test_the_id_does_not_depend_on_what_is_compared_or_where(change):
    assert card_of(**change)["id"] == card_of()["id"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"t_max": 5}, "t_max 5, not "),
        ({"batch_size": 5}, "effective_batch 5"),
        ({"batch_size_run": 5}, "environments 5"),
        ({"updates_per_iteration": 5}, "updates_per_round 5"),
        ({"test_nepisode": 500}, "test_episodes"),
        ({"use_full_obs": True}, "observations everything (use_full_obs)"),
        ({"precision": "bf16"}, "precision bf16"),
        ({"env_args__map_name": "8m"}, "map 8m, not 3m"),
        ({"env_args__difficulty": "3"}, "difficulty 3, not 7"),
        ({"env_args__reward_sparse": True}, "env_args.reward_sparse True, not as usual"),
        ({"env": "smax"}, "env smax, not skirmish"),
    ],
    ids=str,
)
def test_the_id_depends_on_what_must_agree_and_the_difference_is_named(change, words):
    other, first = card_of(**change), card_of()
    assert other["id"] != first["id"]
    assert words in differences(other, first)
    assert differences(first, card_of()) == ""


def test_ranks_are_compared_by_what_they_amount_to():
    assert card_of(ranks=2, batch_size_run=4, batch_size=8)["id"] == card_of(batch_size_run=8, batch_size=16)["id"]


def test_arguments_within_arguments_are_named_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path)))
    usual = {"n_units": 5, "n_enemies": None}
    card = card_of(env="sc2_v2_terran", env_args__capability_config={**usual, "n_enemies": 7}, env_args__debug=True)
    named = {key: value for key, value in card["compared"].items() if key.startswith("env_args.capability")}
    assert named["env_args.capability_config.n_enemies"] == 7
    assert "env_args.capability_config.n_units" not in named and "env_args.debug" not in card["compared"]


def test_pretraining_and_playing_have_cards_of_their_own(tmp_path):
    pretrained = card_of("omagd", pretrain_only=True, graph_pretrain_epochs=7)["compared"]
    assert pretrained["graph_pretrain_epochs"] == 7 and "t_max" not in pretrained
    folder = RunFolder.create(tmp_path, "run")
    (folder.step(50)).mkdir()
    (folder.step(50) / "agent.th").touch()
    asked = {"evaluate": True, "checkpoint_path": str(folder.path), "eval_report_episodes": 64}
    assert card_of(**asked)["compared"]["trained"] == "no card"
    write_json(folder.card_json, card_of(t_max=50))
    card = card_of(**asked)
    assert card["compared"]["trained"] == card_of(t_max=50)["id"] and card["compared"]["test_episodes"] == 64
    assert "t_max" not in card["compared"]


def test_the_game_is_named_as_installed_and_then_as_it_names_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(tmp_path))
    with pytest.raises(UserError, match="StarCraft II"):
        card_of(env="sc2")
    sc2_stand_in.install(tmp_path, "4.10")
    sc2_stand_in.install(tmp_path, "4.6.2")
    card = card_of(env="sc2")
    assert card["compared"]["game"] == "StarCraft II 4.10 (75689)"
    assert card_of(env="sc2", env_args__game_version="4.6.2")["compared"]["game"] == "StarCraft II 4.6.2 (69232)"
    same = settled(card, {"game_build": 75689.0}, {})
    assert same == card
    clock = {"stage3": {"clock": {"t_env": 4000, "updates": 100}}}
    other = settled(card, {"game_build": 69232.0}, clock)
    assert other["compared"]["game"] == "StarCraft II 4.6.2 (69232)" and other["id"] != card["id"]
    assert other["id"] == card_of(env="sc2", env_args__game_version="4.6.2")["id"]
    assert other["reached"]["updates_per_environment_step"] == 0.025


def test_rows_are_marked_against_the_first_and_footnotes_name_the_difference():
    first, longer = card_of(), card_of(t_max=7)
    asterisks, notes = marks([first, longer, None, card_of(seed=5), longer], ["a", "b", "c", "d", "e"])
    assert asterisks == ["", "*", "*", "", "*"]
    assert [note.partition(" row: ")[2] for note in notes] == [
        f"b, e: t_max 7, not {first['compared']['t_max']}", "c: no card, so it cannot be told",
    ]  # fmt: skip
    assert marks([None, None], ["a", "b"]) == (["", ""], [])
    assert marks([], []) == ([], [])


def result(tmp_path, seed: int, card: dict | None) -> dict:
    values = {"test_battle_won_mean": 0.5}
    stages = {"stage3": {"clock": {"t_env": 9}, "values": values}}
    facts = {"name": "qmix", "env": "skirmish", "map_name": "3m", "folder": str(tmp_path / f"run{seed}"), "card": card}
    return {**facts, "seed": seed, "stages": stages, "exit_state": "completed", "wall_seconds": 3.0}


def test_tables_mark_rows_with_another_card(tmp_path):
    results = [result(tmp_path, 1, card_of()), result(tmp_path, 2, card_of(env_args__move_amount=3.0))]
    for text in (seeds_table(results), runs_table(results)):
        assert text.count("*") == 2
        assert text.splitlines()[-1].startswith("* not comparable with the first row: ")
        assert text.splitlines()[-1].endswith("2: env_args.move_amount 3.0, not as usual")
    assert "2*" in seeds_table(results) and "run2*" in runs_table(results)
    assert "*" not in seeds_table(results[:1] * 2)


def test_an_evaluation_beside_a_training_is_marked_as_one(tmp_path):
    """What only a training has is no difference; what both have is."""
    training = card_of()
    compared = {name: training["compared"][name] for name in ("env", "map", "game", "precision")}
    played = {"test_episodes": 6, "greedy": True, "trained": training["id"]}
    evaluation = {**training, "id": "0", "kind": "evaluation", "compared": {**compared, **played}}
    rows = [result(tmp_path, 1, training), {**result(tmp_path, 2, evaluation), "kind": "evaluation"}]
    head, _, first, second, _, note = runs_table(rows).splitlines()
    assert [line.split()[-2] for line in (head, first, second)] == ["kind", "training", "evaluation"]
    episodes = training["compared"]["test_episodes"]
    assert note.endswith(f"run run2: evaluation, not training; test_episodes 6, not {episodes}")
    assert "kind" not in runs_table(rows[:1])


def test_a_run_keeps_its_card_and_compare_reads_it(tmp_path, capsys, caplog):
    caplog.set_level("INFO", logger="omagd")
    summaries = [
        run(resolve("qmix", None, {**SMALL, "local_results_path": str(tmp_path), "unique_token": token, **more}))
        for token, more in (("first", {}), ("same", {"seed": 2}), ("sparse", {"env_args.reward_sparse": True}))
    ]
    folders = [tmp_path / token for token in ("first", "same", "sparse")]
    cards = [read_card(folder) for folder in folders]
    assert [summary_of(folder)["card"] for folder in folders] == cards == [summary["card"] for summary in summaries]
    assert [card["id"] == cards[0]["id"] for card in cards] == [True, True, False]
    reached, clock = cards[0]["reached"], summaries[0]["stages"]["stage3"]["clock"]
    assert reached["updates_per_environment_step"] == clock["updates"] / clock["t_env"] > 0
    said = [line for line in (folders[0] / "logs" / "rank_0.log").read_text().splitlines() if cards[0]["id"] in line]
    assert len(said) == 1 and "seed 1" in said[0] and "tests of 4 greedy episodes" in said[0]
    assert json.loads((folders[0] / "summary.json").read_text())["artifacts"]["card"] == str(folders[0] / "card.json")
    capsys.readouterr()
    (words,) = [words for words in questions() if words[0] == "compare" and shlex.join(words).count("results") == 2]
    assert main([words[0], *map(str, folders)]) == 0
    head, _, *rows, _, note = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "run" and [row.split()[0] for row in rows] == ["first", "same", "sparse*"]
    assert [row.split()[-1] for row in rows] == [card["id"] for card in cards]
    assert note == "* not comparable with the first row: run sparse: env_args.reward_sparse True, not as usual"


def test_a_card_is_completed_even_where_the_environment_has_died_meanwhile(tmp_path):
    said = []

    def gone():
        raise RuntimeError("worker 0 died")

    session = SimpleNamespace(
        env_stats=gone, logger=SimpleNamespace(warning=said.append),
        dist=SimpleNamespace(is_main=True), folder=RunFolder(tmp_path),
    )  # fmt: skip
    final = complete_card(session, card_of(), {"stage3": {"clock": {"t_env": 8, "updates": 4}}})
    assert final["id"] == card_of()["id"] and final["reached"]["updates_per_environment_step"] == 0.5
    assert read_card(tmp_path) == final and len(said) == 1 and "worker 0 died" in said[0]


def test_compare_names_what_is_no_run(tmp_path, capsys):
    assert main(["compare"]) == 2
    assert main(["compare", str(tmp_path)]) == 2
    (tmp_path / "summary.json").write_text("[1]")
    assert main(["compare", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: compare") for line in lines)


def test_start_lines_are_few_and_say_what_is_not_usual():
    card = card_of(env_args__reward_sparse=True)
    lines = start_lines(card, "3 agents", "1 rank")
    assert len(lines) == 3 and lines[0].startswith("skirmish 3m (omagd 0.1.0), difficulty 7: 3 agents; ")
    assert "reward_sparse=True" in lines[0] and card["id"] in lines[2]


@pytest.mark.processes
def test_a_run_in_the_game_names_the_build_that_the_game_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII")))
    updates = {**SMALL, "local_results_path": str(tmp_path), "unique_token": "game", "t_max": 40}
    summary = run(resolve("qmix", "sc2", updates))
    assert summary["exit_state"] == "completed"
    assert summary["card"]["compared"]["game"] == "StarCraft II 4.10 (75689)"
    assert summary["card"]["reached"]["environment_steps"] >= 40
    assert sc2_stand_in.running(tmp_path / "StarCraftII") == []
