"""Configuration files, keys and values: accepted values and error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from every_key import ELSEWHERE, RUNS
from hypothesis import given, settings
from hypothesis import strategies as st

from omagd.config import loading
from omagd.config.loading import (
    REMOVED,
    apply_updates,
    base_values,
    known_keys,
    parse_value,
    read_saved,
    resolve,
    to_plain,
    validate,
)
from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import identity_of
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import preflight
from omagd.utils.errors import UserError

PUBLISHED_KEYS = """
    recontructer_stage reconstructer_stage use_graph_reconstruction pretrain_only pretrained_tokenizer_path
    pretrained_mask_predictor_path graph_pretrain_epochs graph_pretrain_episodes graph_pretrain_batch_size
    graph_pretrain_eval_interval graph_pretrain_eval_episodes pretrain_buffer_path save_pretrain_buffer evaluation_only
    eval_report_episodes graph_lr tokenizer_config.n_codes mask_predictor_config.matching use_ddp world_size ddp_port
    run learner mac agent mixer env_args use_cuda cpu_inference buffer_cpu_only save_model save_model_interval
    test_interval test_nepisode log_interval runner_log_interval learner_log_interval t_max local_results_path use_wandb
    wandb_project wandb_entity use_tensorboard evaluate checkpoint_path load_step save_replay
""".split()

OWN = {kind: sorted(path.stem for path in (loading.HERE / kind).glob("*.yaml")) for kind in ("algs", "envs")}


def test_every_file_resolves_and_the_defaults_play_the_embedded_battle():
    assert [resolve(name).name for name in OWN["algs"]] == OWN["algs"]
    for name in OWN["envs"]:
        env = resolve("qmix", name).env
        races = (f"{env}_terran", f"{env}_protoss", f"{env}_zerg")
        assert name in (env, *races) or (name, env) == ("snakes", "snakes_3v3")
    config = resolve()
    assert (config.name, config.env, config.map_name, config.stage, config.run) == (
        "omagd_small", "skirmish", "3m", "all", "ddp",
    )  # fmt: skip


def test_published_sizes_of_omagd():
    config = resolve("omagd")
    predictor, tokenizer = config.mask_predictor_config, config.tokenizer_config
    assert (predictor.d_model, predictor.n_layers, predictor.n_heads, predictor.feedforward_dim) == (256, 6, 8, 1024)
    assert (tokenizer.n_codes, tokenizer.code_dim, tokenizer.ema_decay, tokenizer.commitment) == (1024, 32, 0.9, 0.5)
    assert (config.batch_size, config.buffer_size, config.lr, config.graph_lr) == (128, 5000, 1e-3, 5e-4)
    assert (config.td_lambda, config.gamma, config.target_update_interval) == (0.6, 0.99, 200)
    assert (config.graph_pretrain_epochs, config.graph_pretrain_episodes, config.ddp_port) == (200, 5000, 12355)
    plain = {name: to_plain(resolve(name)) for name in ("omagd", "omagd_hungarian", "omagd_origin")}
    matching = [(values.pop("name"), values["mask_predictor_config"].pop("matching")) for values in plain.values()]
    assert matching[1:] == [("omagd_hungarian", "type"), ("omagd_origin", "none")]
    assert plain["omagd"] == plain["omagd_hungarian"] == plain["omagd_origin"]


def test_keys_are_the_published_ones_and_do_not_multiply():
    """A new key is a decision: add it to the list too, with `python tests/test_config.py`."""
    assert set(PUBLISHED_KEYS) <= {*known_keys(), "env_args"}
    assert known_keys() == Path(__file__).with_name("config_keys.txt").read_text().split()
    values = loading.read_yaml(loading.HERE / "default.yaml")
    sections = {f"{key}.{inner}" for key in loading.SECTIONS for inner in values[key]}
    assert sections | (set(values) - set(loading.SECTIONS)) == set(known_keys())
    assert Config.model_validate(values).model_dump(mode="json") == values


def test_presets_of_the_guides_for_snakes():
    """As printed in the guides: 6,250 games for each of 8 ranks; the defaults of the flags; games as a key."""
    eight, defaults = resolve("snakes_ddpg_8ranks", "snakes"), resolve("snakes_ddpg_defaults", "snakes")
    assert (eight.run, eight.world_size, eight.t_max) == ("ddp", 8, 8 * 6250 * 200)
    assert (eight.batch_size, eight.lr, eight.lr_scaling) == (64, 1e-4, "none")
    values = (defaults.batch_size, defaults.lr, defaults.gamma, defaults.tau, defaults.epsilon_speed)
    assert values == (128, 3e-4, 0.99, 0.01, 0.9995)
    assert (defaults.epsilon_start, defaults.t_max, defaults.save_model_interval) == (0.5, 50000 * 200, 1000 * 200)
    typed = resolve("snakes_ddpg", "snakes", {"max_episodes": 100000})  # longer than the preset's t_max
    assert preflight(typed).config.t_max == 100000 * 200


def test_max_episodes_replaces_the_t_max_of_a_preset_only(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nmax_episodes: 100000\n")
    both = tmp_path / "both.yaml"
    both.write_text("name: both\nmax_episodes: 100000\nt_max: 3000\n")
    for preset, updates, t_max in (
        ("qmix", {"max_episodes": 100000}, 100000 * 60),
        ("qmix", {"max_episodes": 6250, "t_max": 5000}, 5000),
        ("qmix", {"t_max": 5000, "max_episodes": 6250}, 5000),
        ("qmix", {"max_episodes": 50, "t_max": 5000}, 50 * 60),
        ("qmix", {"t_max": 5000, "max_episodes": None}, 5000),
        (str(file), {}, 100000 * 60),
        (str(file), {"t_max": 2000}, 2000),
        (str(both), {}, 3000),
        (str(both), {"max_episodes": 9}, 9 * 60),
    ):
        checked = preflight(resolve(preset, "skirmish", {**updates, "run": "default", "mac": "n_mac"})).config
        assert checked.t_max == t_max, (preset, updates)
        assert preflight(checked).config == checked


def test_every_key_has_a_run_with_a_value_that_is_not_its_default():
    """A new key joins a run of tests/every_key.py, or its list of keys that another test must give."""
    default = flat(loading.read_yaml(loading.HERE / "default.yaml"))
    given = {"env", "local_results_path"}  # of the runs' files and of where they go
    for run in RUNS.values():
        values = flat({**run.updates, **run.needs})
        given |= {key for key, value in values.items() if value != default[key]}
    assert set(ELSEWHERE) & given == set()
    assert set(known_keys()) - given - set(ELSEWHERE) == set()
    for key, (_, test) in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / test).read_text()
        assert re.search(rf"\b{key}[\"']?(=|:)", text), f"{test} gives {key} no value"
    assert {resolve("qmix", run.env).env for run in RUNS.values()} >= {"matrix_game", "snakes_3v3"}


def flat(values: dict[str, object]) -> dict[str, object]:
    """Return the values by dotted key."""
    plain = {key: value for key, value in values.items() if key not in loading.SECTIONS}
    return plain | {f"{key}.{name}": values[key][name] for key in loading.SECTIONS for name in values.get(key, {})}


def test_later_layers_win_and_leave_their_neighbours_alone(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nlr: 0.01\ntokenizer_config:\n  n_codes: 16\nenv_args:\n  map_name: 8m\n")
    config = resolve(str(mine), updates={"tokenizer_config.hidden_dim": 8, "env_args.move_amount": 3})
    assert (config.lr, config.map_name, config.env_args["move_amount"]) == (0.01, "8m", 3)
    assert config.env_args["reward_win"] == 200
    assert (config.tokenizer_config.n_codes, config.tokenizer_config.hidden_dim) == (16, 8)
    assert config.tokenizer_config.n_layers == resolve().tokenizer_config.n_layers
    assert resolve(str(mine), updates={"lr": 0.02, "tokenizer_config": {"n_codes": 8}}).tokenizer_config.n_codes == 8


def test_a_configuration_is_frozen_survives_yaml_and_leaves_its_base_alone():
    config = resolve(updates={"seeds": (1, 2), "lr": 1e-5, "tokenizer_config.n_codes": 16})
    assert validate(yaml.safe_load(yaml.safe_dump(to_plain(config)))) == config
    values = base_values()
    before = yaml.safe_dump(values)
    apply_updates(values, {"env_args.map_name": "8m", "tokenizer_config.n_codes": 3, "lr": 1})
    assert yaml.safe_dump(values) == before
    with pytest.raises(ValueError, match="frozen"):
        config.lr = 2.0  # type: ignore[misc]
    config = resolve(updates={"lr": 1, "seeds": [3, 4]})
    assert (config.lr, config.seeds) == (1.0, (3, 4))
    assert resolve(updates={"seeds": 3}).seeds == (3,)


def test_numbers_may_have_an_exponent_and_versions_a_last_zero(tmp_path):
    """The same on the command line and in a file: 1e6 is a whole number, 1e-3 a number, and 4.10 is not 4.1."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "t_max: 1e6\nseeds: 2e1\ntarget_update_updates: 2.0\nlr: 1e-3\nenv_args: {game_version: 4.10, other: 4.10}\n"
    )
    typed = (
        "t_max=1e6 seeds=2e1 target_update_updates=2.0 lr=1e-3 env_args.game_version=4.10 env_args.other=4.10".split()
    )
    for config in (config_from([f"--config={file}"]), config_from(["--config=omagd_small", "with", *typed])):
        whole = (config.t_max, config.seeds, config.target_update_updates)
        assert whole == (1000000, (20,), 2)
        assert [type(value) for value in (config.t_max, config.seeds[0], config.target_update_updates)] == [int] * 3
        assert (config.lr, config.env_args["game_version"], config.env_args["other"]) == (0.001, "4.10", 4.1)
    assert config_from(["with", "env_args.game_version=None"]).env_args["game_version"] is None


@pytest.mark.parametrize(
    ("config", "updates", "words"),
    [
        (None, {"lerner": "x"}, ["with lerner=x", "unknown key 'lerner'", "Did you mean 'learner'?"]),
        (
            None,
            {"tokenizer_config.n_code": 3},
            ["tokenizer_config.n_code=3", "Did you mean 'tokenizer_config.n_codes'?"],
        ),
        (None, {"n_codes": 3}, ["with n_codes=3", "Did you mean 'tokenizer_config.n_codes'?"]),
        (None, {"act_in_halves": True}, ["with act_in_halves=True", "removed", "leave it out"]),
        (None, {"lr.scale": 3}, ["with lr.scale=3", "unknown key 'lr.scale'"]),
        (None, {"lr": "abc"}, ["lr=abc", "must be a number"]),
        (None, {"lr": "1e-3"}, ["lr=1e-3", "must be a number", "write 1e-3 without quotes"]),
        (None, {"t_max": "2e6"}, ["t_max=2e6", "write 2e6 without quotes"]),
        (None, {"t_max": 2.5}, ["t_max=2.5", "whole number"]),
        (None, {"t_max": 1e-6}, ["t_max=1e-06", "whole number"]),
        (None, {"lr": 0}, ["lr=0", "more than 0"]),
        (None, {"lr": float("inf")}, ["lr=inf", "finite number"]),
        (None, {"gamma": 1.5}, ["gamma=1.5", "at most 1"]),
        (None, {"world_size": 0}, ["world_size=0", "at least 1"]),
        (None, {"use_cuda": 1}, ["use_cuda=1", "True or False"]),
        (None, {"dist_backend": "mpi"}, ["dist_backend=mpi", "nccl, gloo"]),
        (None, {"seeds": "1;2"}, ["seeds=1;2", "such as 1,2,3"]),
        (None, {"seeds": (1, 1)}, ["seeds=1,1", "twice"]),
        (None, {"env_args": 3}, ["env_args=3", "mapping"]),
        (None, {"tokenizer_config.n_codes": 1}, ["tokenizer_config.n_codes=1", "at least 2"]),
        (None, {"tokenizer_config.n_codes": 40000}, ["tokenizer_config.n_codes=40000", "at most 32000"]),
        (None, {"recontructer_stage": "stage9"}, ["recontructer_stage=stage9", "stage1, stage2, stage3, all"]),
        (None, {"lr": 0, "gamma": 2}, ["also wrong", "gamma"]),
        (None, {"reconstructer_stage": "stage1", "recontructer_stage": "stage2"}, ["stage1", "stage2", "same key"]),
        (None, {"recontructer_stage": "stage2"}, ["stage2", "pretrained_tokenizer_path"]),
        (None, {"reconstructer_stage": "stage3"}, ["stage3", "pretrained_tokenizer_path"]),
        (
            None,
            {"reconstructer_stage": "stage3", "pretrained_tokenizer_path": "x"},
            ["stage3", "pretrained_mask_predictor_path"],
        ),
        (None, {"use_graph_reconstruction": False, "pretrain_only": True}, ["pretrain_only=True"]),
        ("qmix", {"recontructer_stage": "stage1"}, ["stage1", "use_graph_reconstruction"]),
        (None, {"use_per": True}, ["use_per=True", "use_per=False"]),
        (None, {"evaluate": True}, ["evaluate=True", "checkpoint_path"]),
        (None, {"load_step": 100}, ["load_step=100", "checkpoint_path"]),
        (None, {"mask_predictor_config.n_heads": 3}, ["n_heads=3", "d_model=64"]),
        (None, {"epsilon_start": 0.1, "epsilon_finish": 0.2}, ["epsilon_finish=0.2", "epsilon_start=0.1"]),
        (None, {"learner": "nq_learner_ddp"}, ["learner=nq_learner_ddp", "nq_graph_learner_ddp"]),
        (None, {"mac": "n_mac"}, ["mac=n_mac", "n_graph_mac"]),
        (None, {"use_full_obs": True}, ["use_full_obs=True", "use_graph_reconstruction=False"]),
        ("qmix", {"world_size": 2}, ["world_size=2", "run=ddp"]),
        (None, {"seeds": (1, 2), "unique_token": "x"}, ["unique_token=x", "seeds=1,2"]),
        (None, {"unique_token": "sacred"}, ["unique_token=sacred", "reserved"]),
        (None, {"unique_token": "logs"}, ["unique_token=logs", "reserved"]),
        (None, {"unique_token": ".seeds_x"}, ["unique_token=.seeds_x", "no dot at the beginning"]),
        (None, {"unique_token": " a"}, ["unique_token= a", "no space around it"]),
    ],
)
def test_errors_name_key_value_and_fix(config, updates, words):
    with pytest.raises(UserError) as caught:
        resolve(config, updates=updates)
    text = caught.value.render()
    assert [word for word in words if word not in text] == [] and len(text.splitlines()) <= 3


def test_a_saved_run_may_hold_removed_keys_and_keeps_its_identity(tmp_path, monkeypatch):
    """`config.json` and identity of a run that an earlier version has started."""
    config = resolve("qmix", "skirmish", {"env_args.map_name": "3m"})
    today = identity_of(config)
    monkeypatch.setitem(REMOVED, "gone", (7, "use another one"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**to_plain(config), "gone": 7}))
    assert validate(read_saved(path, "run")) == config
    assert identity_of(config) != today
    monkeypatch.undo()
    assert identity_of(config) == today


def test_both_spellings_of_the_stage_work():
    path = {"pretrained_tokenizer_path": "x"}
    assert resolve(updates={"recontructer_stage": "stage2", **path}).stage == "stage2"
    assert resolve(updates={"reconstructer_stage": "stage2", **path}).stage == "stage2"
    assert resolve(updates={"reconstructer_stage": "stage1", "recontructer_stage": "stage1"}).stage == "stage1"
    assert resolve("qmix").stage == "stage3"


def test_unknown_names_show_the_nearest_and_all():
    with pytest.raises(UserError, match="--config=omagd_smal.*Did you mean 'omagd_small'") as caught:
        resolve("omagd_smal")
    assert "qmix" in caught.value.render()
    with pytest.raises(UserError, match="--env-config=skirmich.*Did you mean 'skirmish'"):
        resolve(env_config="skirmich")


def test_a_wrong_file_is_an_error_of_one_line_and_cannot_construct_objects(tmp_path, monkeypatch):
    target, file = tmp_path / "made", tmp_path / "bad.yaml"
    evil = f"name: !!python/object/apply:os.mkdir ['{target}']\n"
    for text, words in (
        ("- a\n- b\n", ""), ("lr: [1\n", ""), ("7\n", ""), ("\x00", ""), (evil, ""), ("lr: 1\nlr: 2\n", "duplicate"),
        ("larning_rate: 1\n", "unknown key 'larning_rate'"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UserError, match=rf"bad\.yaml: .*{words}") as caught:
            resolve(str(file))
        assert "\n" not in caught.value.message
    assert not target.exists()
    (tmp_path / "algs").mkdir()
    (tmp_path / "algs" / "theirs.yaml").write_text("name: theirs\nlr: 0.5\n")
    monkeypatch.setattr(loading, "config_dirs", lambda: [loading.HERE, tmp_path])  # of a plug-in
    assert resolve("theirs").lr == 0.5
    assert "theirs" in loading.config_names("algs")


@pytest.mark.parametrize(
    ("text", "current", "value"),
    [
        ("1e-3", 0.1, 0.001),
        ("1,2,3", (), (1, 2, 3)),
        ("[1, 2]", (), [1, 2]),
        ("True", False, True),
        ("true", False, True),
        ("None", 1, None),
        ("null", None, None),
        ("3m", "8m", "3m"),
        ("1c3s5z", None, "1c3s5z"),
        ("7", "6", "7"),
        ("'a b'", "x", "a b"),
        ("gloo", None, "gloo"),
        ("__import__('os')", None, "__import__('os')"),
    ],
)
def test_texts_behind_the_equals_sign(text, current, value):
    parsed = parse_value(text, current)
    assert parsed == value
    assert type(parsed) is type(value)


VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.lists(st.integers())
)


@settings(deadline=None, derandomize=True)
@given(VALUES, st.text(max_size=12))
def test_a_python_literal_is_read_back_and_text_stays_text_for_a_text_key(value, text):
    assert parse_value(repr(value)) == value
    assert isinstance(parse_value(text, "current"), str)


if __name__ == "__main__":
    Path(__file__).with_name("config_keys.txt").write_text("\n".join(known_keys()) + "\n")
