"""The command line: what it takes, what it prints, how it refuses, and that it writes nothing until it runs."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from command_budgets import BUDGETS

from omagd.config.loading import resolve, to_plain
from omagd.run import run as run_module
from omagd.run.cli import REGISTRY as COMMANDS
from omagd.run.cli import main as command_line
from omagd.run.cli.main import config_from, main
from omagd.run.launch import launcher
from omagd.run.reporting import sacred_record
from omagd.run.reporting.sacred_record import run_recorded
from omagd.utils.errors import UserError

MAIN = Path(__file__).resolve().parents[1] / "src" / "main.py"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test types its command in an empty folder, outside any torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_options_and_keys(capsys):
    keys = "with env_args.map_name=8m seeds=1,2,3 lr=5e-4 use_cuda=false"
    config = config_from(f"--config=qmix --env-config=smax {keys}".split())
    assert (config.name, config.env, config.map_name) == ("qmix", "smax", "8m")
    assert (config.seeds, config.lr, config.use_cuda) == ((1, 2, 3), 5e-4, False)
    assert config_from(f"--config qmix --env_config smax {keys}".split()) == config
    config = config_from("--config=qmix with lr=1 t_max=7 --config=vdn lr=2 t_max=7".split())  # the last value counts
    assert (config.name, config.lr, config.t_max) == ("vdn", 2.0, 7)
    assert "warning: --config=qmix: given again as --config=vdn, which counts alone" in capsys.readouterr().err


# Arguments of the command, and words of the error that name key, value and fix.
MISTAKES = {
    "lr=3": "lr=3 with",
    "--confg=qmix": "--confg=qmix '--config' --help",
    "env_config=skirmish with lr=1": "option: --env-config=skirmish",
    "--config=omagd_smal": "--config=omagd_smal 'omagd_small' Known: qmix",
    "--env-config=sc2": "sc2 skirmish",
    "--config=omagd_small --env-config=matrix_game": "matrix_game layout use_graph_reconstruction",
    "doctor --env-config=sc3": "--env-config=sc3 sc2",
    "evaluate nowhere": "nowhere folder",
    "with n_codes=3": "n_codes=3 'tokenizer_config.n_codes'",
    "with act_in_halves=True": "act_in_halves=True removed",
    "with lr=\"'1e-3'\"": "lr=1e-3 number without quotes",
    "with dist_backend=mpi": "dist_backend=mpi nccl, gloo",
    "--config=omagd_small with recontructer_stage=stage9": "recontructer_stage=stage9 stage1, stage2, stage3, all",
    "with reconstructer_stage=stage1 recontructer_stage=stage2": "stage1 stage2 same",
    "--config=omagd_small with reconstructer_stage=stage3": "stage3 pretrained_tokenizer_path",
    "--config=omagd_small with use_graph_reconstruction=False pretrain_only=True": "pretrain_only=True",
    "with evaluate=True": "evaluate=True checkpoint_path",
    "with epsilon_start=0.1 epsilon_finish=0.2": "epsilon_finish=0.2 epsilon_start=0.1",
    "--config=omagd_small with learner=nq_learner_ddp": "learner=nq_learner_ddp nq_graph_learner_ddp",
    "--config=omagd_small with mac=n_mac": "mac=n_mac n_graph_mac",
    "--config=omagd_small with use_full_obs=True": "use_full_obs=True use_graph_reconstruction=False",
    "with seeds=1,2 unique_token=x": "unique_token=x seeds=1,2",
    "with 'unique_token= a'": "unique_token= space",
    "--config=qmix --env-config=matrix_game with learner=nq_graph_learner": "learner=nq_graph_learner",
    "--config=qmix with world_size=2": "world_size=2 run=ddp",
    "--config=qmix with run=ddp dist_backend=nccl use_cuda=False": "dist_backend=nccl",
    "--config=qmix with env=sc2": "env_args.sight_range skirmish.yaml --env-config=sc2",
    "--config=qmix with save_replay=True": "save_replay=True evaluate=",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing_behind(typed, capsys, empty_folder, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(empty_folder))
    monkeypatch.setattr(sacred_record, "run_recorded", lambda *_, **__: pytest.fail("it runs"))
    assert main(shlex.split(typed)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(line.startswith(("error: ", "Compiling ")) for line in captured.err.splitlines())  # once on a machine
    assert [word for word in MISTAKES[typed].split() if word not in captured.err] == []
    assert "matrix_game layout" not in MISTAKES[typed] or captured.err.count("\n") == 1
    assert list(empty_folder.iterdir()) == []


def test_processes_of_one_group_report_their_mistake_once(capsys, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", slept.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = ["--config=qmix", "with", "run=ddp", "world_size=4"]
    for rank, words, error in (
        ("1", ["--config=qmix"], "run=ddp"),  # run=default is one process
        ("1", wrong, ""),  # rank 0 reports it, and gets the time for it
        ("0", wrong, "error: world_size=4: "),
    ):
        monkeypatch.setenv("RANK", rank)
        assert main(words) == 2
        err = capsys.readouterr().err
        assert error in err and err.count("\n") == bool(error)
    assert slept == [command_line.RANK_0_SECONDS]


def test_dry_run_prints_what_config_takes_again_and_writes_nothing(capsys, empty_folder):
    argv = ["--config=omagd", "with", "env_args.map_name=5m_vs_6m", "world_size=2", "lr=1e-5", "seeds=1,2"]
    assert main(["--dry-run", *argv]) == 0
    text = capsys.readouterr().out
    assert list(empty_folder.iterdir()) == []
    assert yaml.safe_load(text) == to_plain(config_from(argv))
    facts = ("stages: stage1, stage2, stage3", "effective batch: 256 episodes", "environments: 16 (skirmish 5m_vs_6m)")
    assert [fact for fact in facts if f"# {fact}" not in text] == []
    assert "2 ranks: batch 256 (1 rank: 128), environments 16 (1 rank: 8), replay" in text
    (empty_folder / "again.yaml").write_text(text)
    assert config_from(["--config=again.yaml"]) == config_from(argv)


FOREIGN = """\
extends: more.yaml
hidden_dim: 128
optim_eps: 0.00001
target_update_interval_or_tau: 200
agent_output_type: q
use_rnn: true
optimizer: adam
optimizer: rmsprop
mixer: null
lr: fast
batch_size: 64
buffer_size: 32
tokenizer_config: {n_code: 3, n_codes: 1}
"""


def test_one_start_names_every_mistake_and_its_remedy(capsys, empty_folder):
    """Of two files, of the command line, of names, types, ranges and contradictions, and of what only torch knows."""
    (empty_folder / "more.yaml").write_text("n_envs: 4\nlearner: q_learner\naction_selector: soft_policies\n")
    (empty_folder / "foreign.yaml").write_text(FOREIGN)
    words = "epsilon_finish=2 seeds=1,1 agent=rnn_ns env_args.map=3m env_args.move_amount=far learner_args.clip=1 lr"
    assert main(["--config=foreign.yaml", "with", *words.split(), "test_nepisode=1e12", "local_results_path="]) == 2
    lines = capsys.readouterr().err.splitlines()
    remedies = {
        "more.yaml: unknown key 'n_envs'": "batch_size_run", "learner=q_learner": "nq_learner",
        "action_selector=soft_policies": "softmax", "unknown key 'hidden_dim'": "'rnn_hidden_dim'",
        "'optim_eps'": "rmsprop", "'target_update_interval_or_tau'": "target_update_interval (",
        "'agent_output_type'": "Leave it out", "duplicate key 'optimizer'": "Give it once", "mixer=None": "'none'",
        "lr=fast": "a number", "batch_size=64": "at most buffer_size=32", "n_codes=1": "at least 2",
        "'tokenizer_config.n_code'": "'tokenizer_config.n_codes'", "epsilon_finish=2": "at most 1",
        "seeds=1,1": "Give each once", "agent=rnn_ns": "rnn", "env_args.map ": "'env_args.map_name'",
        "env_args.move_amount=far": "a number", "learner_args.clip ": "learner=nq_learner", "with lr:": "key=value",
        "action_selector=softmax": "epsilon_greedy", "test_nepisode=1": "at most 1000000",
        "local_results_path=": "not empty", "'use_rnn'": "agent=ff",
    }  # fmt: skip
    found = {start: [line for line in lines if start in line] for start in remedies}
    assert {start: len(each) for start, each in found.items()} == dict.fromkeys(remedies, 1), lines
    assert [start for start, (line,) in found.items() if remedies[start] not in line] == []
    assert len(lines) == len(remedies) and all(line.startswith("error: ") for line in lines), lines


def test_the_value_of_another_librarys_key_is_checked_too(capsys):
    assert main(["with", "map_name=77m"]) == 2
    keys = [line.split("=")[0] for line in capsys.readouterr().err.splitlines()]
    assert keys == ["error: with map_name", "error: env_args.map_name"]


def test_a_wrong_path_or_value_hides_no_other_mistake(capsys, empty_folder):
    """Neither files behind another path, nor contradictions of keys that one check reads together."""
    typed = "checkpoint_path=gone pretrained_tokenizer_path=gone2 pretrain_buffer_path=gone3 learner=nq_learner"
    assert main(["--config=omagd", "with", *typed.split(), "belief_loss=last"]) == 2
    starts = ("checkpoint_path", "pretrained_tokenizer_path", "pretrain_buffer_path", "learner", "belief_loss")
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("=")[0] for line in lines) == sorted(f"error: {key}" for key in starts), lines


@pytest.mark.parametrize(("typed", "unread"), [
    ("--config=mappo with mixer=qmix tau=0.1", "mixer, tau"),
    ("--config=qmix with td_lambda=0.5 target_update_interval=8 double_q=False use_orthogonal=True", ""),
    ("--config=qmix with tokenizer_config.hidden_dim=128 graph_lr=0.1", "graph_lr, tokenizer_config.hidden_dim"),
    ("--config=mine.yaml", "critic_lr"), ("--config=omagd_small with graph_lr=0.1", ""),
    ("--config=qmix with resident_slots=4", "resident_slots"), ("--config=qmix with per_alpha=0.9", "per_alpha"),
    ("--config=qmix with q_lambda=True td_lambda=0", "q_lambda"),
    ("--config=snakes_iql --env-config=snakes with runner=ticks agent=ff td_lambda=0.9", "td_lambda"),
    ("--config=qmix with target_update_updates=9 target_update_interval=8", "target_update_interval"),
    ("--config=qmix with epsilon_speed=0.99 epsilon_anneal_time=9", "epsilon_anneal_time"),
    ("--config=qmix with action_selector=greedy epsilon_start=0.5", "epsilon_start"),
    ("--config=snakes_iql --env-config=snakes with opponent_pool_size=3", "opponent_pool_size"),
    ("--config=qmix with belief_weight=2 belief_every=1", "belief_every, belief_weight"),
    ("--config=qmix with belief_loss=features belief_weight=2 graph_pretrain_eval_episodes=4", ""),
    ("--config=qmix with belief_loss=features graph_lr=0.1 graph_updates=False", "graph_lr"),
])  # fmt: skip
def test_keys_that_nothing_reads_are_named(typed, unread, capsys, empty_folder):
    (empty_folder / "mine.yaml").write_text("extends: qmix\ncritic_lr: 0.1\ngraph_lr: 0.1\n")
    assert main([*typed.split(), "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {unread}: nothing in this run reads") if unread else err == ""


def test_list_names_everything(capsys):
    assert main(["--list"]) == 0
    names = {"omagd_small", "smax", "nq_graph_learner_ddp", "gnn_graph_mac", "vdn", "27m_vs_30m", "parallel"}
    names |= {"3m_mixed_sight6", "3m_hidden", "smacv2_5_units", "masked", "observation"}
    assert names <= set(capsys.readouterr().out.split())


def test_the_exit_code_stands_after_an_interruption_and_without_standard_error(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full())
        assert main(["--config=nothing"]) == 2
    monkeypatch.setattr(command_line, "_main", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def record(folder: Path, number: int, name: str = "run") -> dict:
    return json.loads((folder / "sacred" / str(number) / f"{name}.json").read_text())


def test_sacred_records_every_key_but_no_secret_and_failures_too(empty_folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    config = resolve("qmix", updates={"local_results_path": str(empty_folder), "seeds": (4, 5)})
    assert run_recorded(config, lambda _run, given, log: 3, observe=False) == 3
    assert list(empty_folder.iterdir()) == []

    def mode(_run, given, log):
        _run.log_scalar("return_mean", 1.5, 10)
        if given.seeds == (4, 5):
            return {"win": 1.0}
        _run.info["folder"] = "run"
        raise UserError("batch_size=7: no")

    assert run_recorded(config, mode, options={"--comment": "why"}) == {"win": 1.0}
    assert to_plain(config).items() <= record(empty_folder, 1, "config").items()
    assert record(empty_folder, 1)["meta"]["comment"] == "why" and record(empty_folder, 1)["status"] == "COMPLETED"
    assert record(empty_folder, 1, "metrics")["return_mean"]["values"] == [1.5]
    with pytest.raises(UserError, match="batch_size=7"):
        run_recorded(config.model_copy(update={"seeds": ()}), mode)
    assert record(empty_folder, 2)["status"] == "FAILED"
    assert not [p for p in empty_folder.rglob("*") if p.is_file() and "very-secret-value" in p.read_text()]


def test_a_rejected_start_is_one_line_without_a_record(empty_folder, monkeypatch, capfd):
    """A list of which one run has started keeps its record."""

    def rejected(config, token, *_, **__):
        raise UserError("local_results_path=x: cannot be written. Give another one")

    def started(config, token, channel, started):
        started(str(empty_folder / token))
        rejected(config, token)

    command = ["--config=qmix", "with", "use_cuda=False"]
    for module, name, replaced, records in (
        (launcher, "locked_folder", rejected, 0),
        (run_module, "launch", started, 1),
    ):
        monkeypatch.setattr(module, name, replaced)
        assert main(command) == 2
        out, err = capfd.readouterr()
        assert err == "error: local_results_path=x: cannot be written. Give another one\n" and "Failed" not in out
        found = [json.loads(path.read_text())["status"] for path in empty_folder.rglob("run.json")]
        assert found == ["FAILED"] * records


def shell(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.processes
def test_help_imports_nothing_heavy():
    done = shell(sys.executable, "-X", "importtime", str(MAIN), "--help")
    assert done.returncode == 0
    assert "with key=value" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert imported & {"torch", "sacred", "wandb", "numpy", "jax"} == set()


@pytest.mark.parametrize("command", COMMANDS.names())
def test_every_command_answers_help_and_does_nothing_else(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.lower().startswith("usage") and command in shown.out and not shown.err
    assert COMMANDS.get(command).usage.split()[0] == command


@pytest.mark.processes
def test_module_script_and_path_are_one_command(empty_folder):
    script = Path(sys.executable).with_name("omagd")
    commands = [
        [sys.executable, str(MAIN)],
        [sys.executable, "-m", "omagd"],
        *([[str(script)]] if script.exists() else []),
    ]
    said = "unrecognized arguments: --confg=qmix. Did you mean '--config'? See --help"
    for command in commands:
        done = shell(*command, "--confg=qmix")
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
    assert list(empty_folder.iterdir()) == []


@pytest.mark.processes
def test_main_keeps_its_folder_off_the_path_and_names_a_foreign_installation(empty_folder):
    copied = empty_folder / "elsewhere" / "src"
    copied.mkdir(parents=True)
    (copied / "main.py").write_text(MAIN.read_text())
    (copied / "yaml.py").write_text("raise SystemExit('shadowed')\n")
    done = shell(sys.executable, str(copied / "main.py"), "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("omagd ")
    assert "warning: running the installed omagd" in done.stderr


@pytest.mark.processes
def test_a_run_in_a_terminal_ends_without_a_traceback(empty_folder):
    """What Python calls at its exit must not write to Sacred's output, which is closed."""
    outer, inner = pty.openpty()
    command = [sys.executable, str(MAIN), "--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "t_max=20"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner) as run:
        os.close(inner)
        shown = b""
        with suppress(OSError):  # of a terminal that everybody has closed
            while part := os.read(outer, 4096):
                shown += part
    os.close(outer)
    assert run.returncode == 0 and b"Completed after" not in shown
    assert set(shown.rstrip().decode().splitlines()[-1]) == {"─"}
