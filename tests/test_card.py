"""The comparability card: its contents, what its id depends on, and how tables use it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sc2_stand_in
import torch
from command_harness import summary_of

from omagd.config.loading import resolve
from omagd.run.api import run
from omagd.run.cli.main import main
from omagd.run.reporting.card import differences, final_card, make_card, marks, read_card, start_lines
from omagd.run.reporting.report import runs_table, seeds_table
from omagd.run.training.records import complete_card
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder

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
        "env": "skirmish", "map": "3m", "game": "omagd 0.1.0", "difficulty": "7", "t_max": 1000, "environments": 8,
        "updates_per_round": 3, "effective_batch": 32, "precision": "float32", "greedy": True,
        "test_episodes": 24,  # whole rounds of all environments
        "observations": "each agent's own",
    }  # fmt: skip
    assert {"ranks": 2, "seed": 7, "device": "cpu"}.items() <= card["told"].items()
    assert card["told"]["versions"]["torch"] == torch.__version__
    same = [{"seed": 9}, {"lr": 0.1}, {"mixer": "vdn"}, {"torch_threads": 2}, {"local_results_path": "else"},
            {"name": "mine"}, {"log_interval": 5}, {"env_args__difficulty": "7"}]  # fmt: skip
    assert {card_of(**change)["id"] for change in same} == {card_of()["id"]}
    assert card_of(ranks=2, batch_size_run=4, batch_size=8)["id"] == card_of(batch_size_run=8, batch_size=16)["id"]
    changed = card_of(env_args__reward_sparse=True)
    first, _, last = start_lines(changed, "3 agents", "1 rank")
    assert first.startswith("skirmish 3m (omagd 0.1.0), difficulty 7: 3 agents; ") and first.endswith(
        "reward_sparse=True"
    )
    assert changed["id"] in last


DIFFERENCES = [
    ({"t_max": 5}, "t_max 5, not "),
    ({"batch_size": 5}, "effective_batch 5"),
    ({"batch_size_run": 5}, "environments 5"),
    ({"updates_per_iteration": 5}, "updates_per_round 5"),
    ({"test_nepisode": 500}, "test_episodes"),
    ({"use_full_obs": True}, "observations everything (use_full_obs)"),
    ({"precision": "bf16"}, "precision bf16"),
    ({"env_args__map_name": "8m"}, "map 8m, not 3m"),
    ({"env_args__difficulty": "3"}, "difficulty 3, not 7"),
    ({"env_args__reward_sparse": True}, "env_args.reward_sparse True, not the default"),
    ({"env": "smax"}, "env smax, not skirmish"),
]


def test_the_id_depends_on_what_must_agree_and_the_difference_is_named():
    first = card_of()
    assert differences(first, card_of()) == ""
    for change, words in DIFFERENCES:
        other = card_of(**change)
        assert other["id"] != first["id"] and words in differences(other, first), change


def test_pretraining_and_evaluation_have_other_entries():
    pretrained = card_of("omagd", pretrain_only=True, graph_pretrain_epochs=7)["compared"]
    assert pretrained["graph_pretrain_epochs"] == 7 and "t_max" not in pretrained
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


def result(seed, card):
    stages = {"stage3": {"clock": {"t_env": 9}, "values": {"test_battle_won_mean": 0.5}}}
    facts = {"name": "qmix", "env": "skirmish", "map_name": "3m", "folder": f"run{seed}", "card": card, "seed": seed}
    return {**facts, "kind": card["kind"], "stages": stages, "exit_state": "completed", "wall_seconds": 3.0}


def test_tables_mark_rows_with_another_card_and_footnotes_name_the_difference():
    first, longer = card_of(), card_of(t_max=7)
    asterisks, notes = marks([first, longer, None, card_of(seed=5), longer], ["a", "b", "c", "d", "e"])
    assert asterisks == ["", "*", "*", "", "*"] and " row: c: no card" in notes[1]
    assert notes[0].endswith(f" row: b, e: t_max 7, not {first['compared']['t_max']}")
    assert marks([None, None], ["a", "b"]) == (["", ""], []) and marks([], []) == ([], [])
    results = [result(1, first), result(2, card_of(env_args__move_amount=3.0))]
    for text, row in ((seeds_table(results), "2*"), (runs_table(results), "run2*")):
        assert text.count("*") == 2 and row in text
        assert text.splitlines()[-1].endswith("2: env_args.move_amount 3.0, not the default")
    assert "*" not in seeds_table(results[:1] * 2)


def test_an_evaluation_beside_a_training_is_marked_as_one():
    """Entries that only a training has are no difference; those that both have are."""
    training = card_of(test_nepisode=32)
    played = card_of(evaluate=True, checkpoint_path="run", test_nepisode=64, trained=training)
    head, _, first, second, _, note = runs_table([result(1, training), result(2, played)]).splitlines()
    assert [line.split()[-2] for line in (head, first, second)] == ["kind", "training", "evaluation"]
    assert note.endswith("run run2: evaluation, not training; test_episodes 64, not 32")
    assert "kind" not in runs_table([result(1, training)])


def test_a_run_keeps_its_card_and_compare_reads_it(tmp_path, capsys):
    folders, cards = [tmp_path / token for token in ("first", "sparse")], []
    for folder, more in zip(folders, ({}, {"env_args.reward_sparse": True}), strict=True):
        updates = {**SMALL, "local_results_path": str(tmp_path), "unique_token": folder.name, **more}
        summary = run(resolve("qmix", None, updates))
        cards.append(read_card(folder))
        assert cards[-1] == summary["card"] == summary_of(folder)["card"]
        assert summary_of(folder)["artifacts"]["card"] == str(folder / "card.json")
        clock = summary["stages"]["stage3"]["clock"]
        assert cards[-1]["reached"]["updates_per_environment_step"] == clock["updates"] / clock["t_env"] > 0
    (logged,) = [
        line for line in (folders[0] / "logs" / "rank_0.log").read_text().splitlines() if cards[0]["id"] in line
    ]
    assert "seed 1" in logged and "tests of 4 greedy episodes" in logged
    capsys.readouterr()
    assert main(["compare", *map(str, folders)]) == 0
    head, _, *rows, _, note = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "run" and [row.split()[0] for row in rows] == ["first", "sparse*"]
    assert [row.split()[-1] for row in rows] == [card["id"] for card in cards]
    assert note.endswith("run sparse: env_args.reward_sparse True, not the default")
    (tmp_path / "summary.json").write_text("[1]")
    for no_run in ([], [str(folders[0] / "logs")], [str(tmp_path)]):
        assert main(["compare", *no_run]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: compare") for line in lines)


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
