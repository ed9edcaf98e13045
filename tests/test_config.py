"""Configuration files, keys and values: accepted values and error messages."""

import json
from pathlib import Path

import pytest

from omagd.config import loading
from omagd.config.env_info import EnvInfo
from omagd.config.loading import REMOVED, known_keys, parse_value, read_saved, resolve, to_plain, validate
from omagd.config.schema import Config, with_removed
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
    assert resolve() == resolve("qmix_fast", "skirmish") and resolve().map_name == "3m"
    assert {resolve(None, name).name for name in OWN["envs"] if name != "skirmish"} == {"qmix"}
    assert resolve("omagd_small").stage == "all"


ARMS = {
    "ff": {"agent": "ff"}, "baseline": {},
    "team_obs": {"use_team_obs": True}, "full_obs": {"use_full_obs": True},
}  # fmt: skip


@pytest.mark.parametrize("arm", ARMS)
def test_arms_differ_from_omagd_small_in_what_agents_read_and_in_nothing_else(arm):
    """Keys of stages 1 and 2 have no effect without reconstruction; learners of these names are the same."""
    given = {"use_graph_reconstruction": False, "learner": "nq_learner_ddp", "name": f"fog_{arm}", **ARMS[arm]}
    made, wanted = (config.model_dump() for config in (resolve(f"fog_{arm}"), resolve("omagd_small", None, given)))
    unused = {key for key in made if key.startswith("graph_") and key != "graph_updates"}
    unused |= {"tokenizer_config", "mask_predictor_config"}
    assert {key for key in made if made[key] != wanted[key]} <= unused


PUBLISHED_VALUES = {
    "batch_size": 128, "buffer_size": 5000, "lr": 1e-3, "graph_lr": 5e-4, "td_lambda": 0.6, "gamma": 0.99,
    "target_update_interval": 200, "graph_pretrain_epochs": 200, "graph_pretrain_episodes": 5000, "ddp_port": 12355,
    "tokenizer_config": {"n_codes": 1024, "code_dim": 32, "ema_decay": 0.9, "commitment": 0.5},
    "mask_predictor_config": {"d_model": 256, "n_layers": 6, "n_heads": 8, "feedforward_dim": 1024},
}  # fmt: skip
SNAKES_VALUES = {  # as printed in the guides: 6,250 games for each of 8 ranks; the defaults of the flags
    "snakes_ddpg_8ranks": {
        "run": "ddp", "world_size": 8, "t_max": 8 * 6250 * 200, "batch_size": 64, "lr": 1e-4, "lr_scaling": "none",
    },
    "snakes_ddpg_defaults": {
        "batch_size": 128, "lr": 3e-4, "gamma": 0.99, "tau": 0.01, "epsilon_speed": 0.9995, "epsilon_start": 0.5,
        "t_max": 50000 * 200, "save_model_interval": 1000 * 200,
    },
}  # fmt: skip


def test_presets_have_the_published_values():
    assert resolve("omagd", updates=PUBLISHED_VALUES) == resolve("omagd")
    for name, matching in (("omagd_hungarian", "type"), ("omagd_origin", "none")):
        assert resolve("omagd", updates={"name": name, "mask_predictor_config.matching": matching}) == resolve(name)
    for name, values in SNAKES_VALUES.items():
        assert resolve(name, "snakes", values) == resolve(name, "snakes")


def test_the_published_keys_exist_and_every_key_has_a_default():
    assert set(PUBLISHED_KEYS) <= {*known_keys(), "env_args"}
    values = loading.read_yaml(loading.HERE / "default.yaml")
    sections = {f"{key}.{inner}" for key in loading.SECTIONS for inner in values[key]}
    assert sections | (set(values) - set(loading.SECTIONS)) == set(known_keys())
    assert Config.model_validate(values).model_dump(mode="json") == values


@pytest.mark.parametrize(("preset", "updates", "t_max"), [
    ("qmix", {"max_episodes": 100000}, 100000 * 60), ("qmix", {"max_episodes": 6250, "t_max": 5000}, 5000),
    ("qmix", {"t_max": 5000, "max_episodes": None}, 5000), ("max_episodes: 100000", {}, 100000 * 60),
    ("max_episodes: 100000", {"t_max": 2000}, 2000),
    ("max_episodes: 100000\nt_max: 3000", {"max_episodes": 9}, 9 * 60),
])  # fmt: skip
def test_max_episodes_replaces_the_t_max_of_a_preset_only(preset, updates, t_max, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{preset}\n")
    name = preset if preset == "qmix" else str(tmp_path / "mine.yaml")
    checked = preflight(resolve(name, "skirmish", {**updates, "run": "default", "mac": "n_mac"})).config
    assert checked.t_max == t_max
    assert preflight(checked).config == checked


def test_numbers_may_have_an_exponent_and_versions_a_last_zero(tmp_path):
    """The same on the command line and in a file: 1e6 is a whole number, 1e-3 a number, and 4.10 is not 4.1."""
    typed = "t_max=1e6 seeds=2e1 lr=1e-3 env_args.game_version=4.10 env_args.other=4.10 target_update_updates=2.0"
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{t_max: 1e6, seeds: 2e1, lr: 1e-3, env_args: {game_version: 4.10, other: 4.10}, target_update_updates: 2.0}"
    )
    for config in (config_from([f"--config={file}"]), config_from(["--config=omagd_small", "with", *typed.split()])):
        whole = [config.t_max, *config.seeds, config.target_update_updates]
        assert (whole, {type(value) for value in whole}) == ([1000000, 20, 2], {int})
        assert (config.lr, config.env_args["game_version"], config.env_args["other"]) == (0.001, "4.10", 4.1)
    assert config_from(["with", "env_args.game_version=None"]).env_args["game_version"] is None


def test_a_saved_run_may_hold_removed_keys_and_keeps_its_identity(tmp_path, monkeypatch):
    """`config.json` and identity of a run that an earlier version has started."""
    config = resolve("qmix", "skirmish", {"env_args.map_name": "3m"})
    today = identity_of(config)
    assert today.startswith("c691d9752f2761bb"), "unfinished runs would start again: see ADDED and ELSEWHERE"
    for key, value in (("sight_range", 6), ("start", "mixed")):
        assert identity_of(config.model_copy(update={"env_args": {**config.env_args, key: value}})) != today
    monkeypatch.setitem(REMOVED, "tokenizer_config.gone", (7, "use another one"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_removed(to_plain(config))))
    assert '"gone": 7' in path.read_text() and '"compile": false' in path.read_text()
    assert validate(read_saved(path, "run")) == config == resolve(str(path))
    assert "tokenizer_config" not in loading.given_keys(str(path), None, {})
    assert identity_of(config) != today
    monkeypatch.undo()
    assert identity_of(config) == today
    paths = [{"checkpoint_path": str(tmp_path / run / "models")} for run in "ab"]
    assert len({identity_of(config.model_copy(update=path)) for path in paths}) == 2, "names are not enough"
    path.write_text(json.dumps({**to_plain(config), "truth_until": 0.9, "truth_all_until": 0.5}))
    assert validate(read_saved(path, "run")) == config, "it shaped training alone"
    gone = {"mark_guesses": True, "gnn_readout": "attention", "tokenizer_config.distance": "cosine"}
    for key, value in gone.items():
        section, _, inner = key.rpartition(".")
        whole = to_plain(config)
        (whole[section] if section else whole)[inner] = value
        path.write_text(json.dumps(whole))
        with pytest.raises(UserError, match=f"^run: trained with {key}={value}, which was removed. Play it with omagd"):
            read_saved(path, "run")


def test_a_key_is_the_map_of_adapters_alone_and_a_run_without_wins_says_its_score():
    config = resolve("qmix", "gymma", {"env_args.key": "foraging"})
    assert (config.map_name, config.model_copy(update={"env": "mine"}).map_name) == ("foraging", "")
    sizes = [EnvInfo("mine", "", 2, 3, 4, 5, 6, has_win=won).sizes for won in (True, False)]
    assert sizes[1] == f"{sizes[0]}; without has_win the score is the return"


def test_both_spellings_of_the_stage_work():
    for keys in (["recontructer_stage"], ["reconstructer_stage"], ["recontructer_stage", "reconstructer_stage"]):
        assert resolve("omagd_small", updates=dict.fromkeys(keys, "stage1")).stage == "stage1"
    assert resolve("qmix").stage == "stage3"


def test_a_file_begins_with_the_keys_of_those_that_it_extends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    Path("more/mine.yaml").write_text("extends: ../second.yml\nlr: 0.5\nmask_predictor_config: {n_heads: 4}\n")
    Path("second.yml").write_text(
        "name: second\nextends: omagd_small\nlr: 0.1\nmixer: vdn\nmax_episodes: 8\n"
        "mask_predictor_config: {d_model: 32}\n"
    )
    mine, shipped = resolve("more/mine.yaml"), resolve("omagd_small")
    of_predictor = {"d_model": 32, "n_heads": 4}
    changes = {"name": "mine", "lr": 0.5, "mixer": "vdn", "max_episodes": 8, "t_max": loading.NO_END_IN_STEPS}
    predictor = shipped.mask_predictor_config.model_copy(update=of_predictor)
    assert mine == shipped.model_copy(update={**changes, "mask_predictor_config": predictor})
    assert loading.read_preset("algs", "second.yml").items() >= {"name": "second", "agent": "n_rnn", "lr": 0.1}.items()
    Path("places.yaml").write_text("extends: skirmish\nenv_args: {map_name: 8m}\n")
    assert resolve("qmix", "places.yaml").env_args == {**resolve("qmix").env_args, "map_name": "8m"}


@pytest.mark.parametrize(("text", "words"), [
    ("extends: qmx", r"bad\.yaml: extends=qmx is not known\. Did you mean 'qmix'"),
    ("extends: qmxi", r"bad\.yaml: extends=qmxi is not known\. Did you mean 'qmix'"),
    ("extends: here.yaml", r"bad\.yaml: extends=here\.yaml: here\.yaml is no file\. The path begins at"),
    ("extends: [qmix, vdn]", r"bad\.yaml: extends=\['qmix', 'vdn'\]: must be one name"),
    ("extends: round.yaml", r"round\.yaml: extends=bad\.yaml: goes in a circle, bad\.yaml -> round\.yaml -> bad"),
    ("extends: more/base.yaml", r"more/base\.yaml: unknown key 'larning_rate'"),
    ("extends: mappo\nlearner_args: 3", r"learner_args=3: must be a mapping"),
])  # fmt: skip
def test_what_cannot_be_extended_is_named(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    Path("round.yaml").write_text("extends: bad.yaml")
    Path("more").mkdir()
    Path("more/base.yaml").write_text("larning_rate: 1")
    with pytest.raises(UserError, match=words):
        resolve("bad.yaml")


def test_a_file_may_empty_a_section_and_must_not_be_called_as_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "extends: mappo\nlearner: nq_learner\nlearner_args:\naction_selector: epsilon_greedy\n"
    )
    assert resolve("mine.yaml").learner_args == {} != resolve("mappo").learner_args
    Path("qmix.yaml").write_text("extends: qmix\nlr: 0.5\n")
    with pytest.raises(UserError, match=r"qmix\.yaml: has the name of the preset qmix\. Add a line `name:`"):
        resolve("qmix.yaml")
    Path("qmix.yaml").write_text("extends: qmix\nname: mine\nlr: 0.5\n")
    assert resolve("qmix.yaml").name == "mine"
    with pytest.raises(UserError, match="with extends=vdn: this is a key of files. Use --config=vdn"):
        resolve(updates={"extends": "vdn"})


def test_a_plug_in_adds_presets(tmp_path, monkeypatch):
    (tmp_path / "algs").mkdir()
    (tmp_path / "algs" / "theirs.yaml").write_text("name: theirs\nlr: 0.5\n")
    monkeypatch.setattr(loading, "config_dirs", lambda: [loading.HERE, tmp_path])
    assert resolve("theirs").lr == 0.5
    assert "theirs" in loading.config_names("algs")


def test_a_word_below_a_section_keeps_what_lies_beside_it():
    words = [f"env_args.capability_config.{word}" for word in ("n_units=10", "n_enemies=11", "start_positions.p=0.25")]
    command = ["--config=qmix", "--env-config=sc2_v2_protoss", "with"]
    plain, changed = (config_from([*command, *more]).env_args["capability_config"] for more in ([], words))
    positions = {**plain["start_positions"], "p": 0.25}
    assert changed == {**plain, "n_units": 10, "n_enemies": 11, "start_positions": positions}


@pytest.mark.parametrize(("text", "current", "value"), [
    ("7", 6, 7), ("-1.5", 0.1, -1.5), ("1e-3", 0.1, 0.001), ("1,2,3", (), (1, 2, 3)), ("[1, 2]", (), [1, 2]),
    ("True", False, True), ("true", False, True), ("None", 1, None), ("null", None, None), ("3m", "8m", "3m"),
    ("1c3s5z", None, "1c3s5z"), ("7", "6", "7"), ("'a b'", "x", "a b"), ("gloo", None, "gloo"),
    ("__import__('os')", None, "__import__('os')"),
])  # fmt: skip
def test_texts_behind_the_equals_sign(text, current, value):
    parsed = parse_value(text, current)
    assert (parsed, type(parsed)) == (value, type(value))
