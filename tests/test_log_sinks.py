"""Log sinks: console, metrics.jsonl, TensorBoard, Sacred and W&B; the files of the last two are read back."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
import wandb
from command_harness import records
from sockets import wait_until
from wandb_files import assert_recorded_once, history, offline_files, records_in, rows_of

from omagd.config.loading import resolve
from omagd.run.checkpoint.store import pack
from omagd.run.launch import processes
from omagd.run.launch.launcher import Notes
from omagd.run.launch.processes import Ranks
from omagd.run.reporting import wandb_sink
from omagd.run.reporting.card import make_card
from omagd.run.reporting.log_sinks import MOST, REGISTRY, ConsoleSink, SacredScalars, SacredSink, make_logger
from omagd.run.reporting.wandb_sink import WandbSink, choose_mode, has_key, names
from omagd.utils.errors import UserError
from omagd.utils.logging import Record, RunFacts, Sink

LOG = logging.getLogger("omagd.test")
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"
CLOCKS = {"stage1": "epoch", "stage2": "epoch", "stage3": "t_env"}


class FakeRun:
    """A Sacred run."""

    def __init__(self, number=None, error=None):
        self.scalars, self.error, self._id = [], error, number

    def log_scalar(self, name, value, step):
        if self.error:
            raise self.error
        self.scalars.append((name, value, step))


def log_to(sinks, logs, facts, exit_state="completed", **options):
    """Log (stage, time, values) and return the states of the sinks after each log."""
    logger, states = make_logger(facts, sinks, LOG, **options), []
    for stage, t, values in logs:
        logger.log(values, stage=stage, clock=CLOCKS[stage], t=t)
        states.append(logger.state_dict(pack))
    logger.close(exit_state)
    return states


def test_json_lines_hold_one_object_per_log_and_survive_nan_and_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "stage1", "ep')
    logger = make_logger(RunFacts(tmp_path), ["jsonl"], LOG)
    logger.log({"a": math.nan, "b": 2, "c": math.inf}, stage="stage1", clock="epoch", t=20)
    logger.log({"a": torch.tensor(1.5)}, stage="stage3", clock="t_env", t=400)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: every line is flushed
    assert [json.loads(line) for line in lines[1:]] == [
        {"stage": "stage1", "epoch": 20, "a": None, "b": 2.0, "c": None},
        {"stage": "stage3", "t_env": 400, "a": 1.5},
    ]
    logger.close()


def test_an_unknown_sink_is_an_error_and_a_plug_in_gets_every_record(tmp_path, monkeypatch):
    class Own(Sink):
        def _log(self, record):
            seen.append((self.facts.label, record.stage, record.t, record.values))

        def _close(self, exit_state):
            seen.append(exit_state)

    with pytest.raises(UserError, match="jsonl"):
        make_logger(RunFacts(tmp_path), ["jsnl"], LOG)
    seen = []
    monkeypatch.setattr(REGISTRY, "_objects", {"own": Own})
    facts = RunFacts(tmp_path, env="skirmish", map_name="8m")
    log_to(["jsonl"], [("stage2", 3, {"a": 1.0})], facts, "interrupted")
    assert seen == [("skirmish 8m", "stage2", 3, {"a": 1.0}), "interrupted"]


def test_a_failing_sink_warns_once_and_the_others_continue(tmp_path, caplog):
    run, logs = FakeRun(error=RuntimeError("no\nspace")), [("stage3", t, {"a": 1.0}) for t in range(3)]
    log_to(["sacred", "jsonl"], logs, RunFacts(tmp_path), sacred=run)
    (warning,) = caplog.records
    assert SacredSink.name in warning.getMessage() and "no space" in warning.getMessage()
    assert len(records(tmp_path)) == 3


class Counting(Sink):
    def _log(self, record):
        self.saved = {"seen": self.saved.get("seen", 0) + 1}

    def state_dict(self):
        return self.saved


def test_faulty_plug_ins_are_switched_off_with_one_warning_each_and_states_are_kept_apart(
    tmp_path, monkeypatch, caplog
):
    class Refuses(Counting):
        def __init__(self):
            raise RuntimeError("refused")

    class Bare(Counting):
        def __init__(self):
            """Do not call the base class."""

    def returning(make):
        return type("Bad", (Counting,), {"state_dict": lambda self: make()})

    bad_states = (lambda: 1 / 0, lambda: {"x": object()}, lambda: {"x": IntEnum("Kind", "A").A}, lambda: {1: 2}, list)
    faulty = {"refuses": Refuses, "foreign": dict, **{f"bad_{i}": returning(make) for i, make in enumerate(bad_states)}}
    monkeypatch.setattr(REGISTRY, "_objects", {**faulty, "bare": Bare, "other": Counting})
    logs, facts = [("stage3", t, {"a": 1.0}) for t in range(2)], RunFacts(tmp_path, saved={"other": {"seen": 5}})
    states = log_to(["jsonl"], logs, facts)
    assert [(state["bare"], state["other"]) for state in states] == [({"seen": i}, {"seen": 5 + i}) for i in (1, 2)]
    assert len(records(tmp_path)) == 2
    off = [record.getMessage() for record in caplog.records]
    assert sorted(line.split(" is off from here on: ")[0] for line in off) == sorted(faulty)


def test_sacred_gets_finite_values_with_the_stage_in_the_name(tmp_path):
    run = FakeRun(3)
    logs = [("stage1", 20, {"eval/graph_loss": 1.0, "bad": math.nan}), ("stage3", 30, {"loss_td": 2.0})]
    log_to(["sacred"], logs, RunFacts(tmp_path), sacred=run)
    assert run.scalars == [("stage1/eval/graph_loss", 1.0, 20), ("loss_td", 2.0, 30)]


def send_values(rank, dies, connection):
    notes = Notes(rank, connection)
    for t in range(5000):
        notes.log_scalar("x", 0.5, t)
    if dies:
        os._exit(1)
    notes.done({"return": 3.0})


@pytest.fixture
def forked(monkeypatch):
    """Let ranks be forked from here: they need no imports of their own."""
    monkeypatch.setattr(processes, "start_method", lambda: "fork")


@pytest.mark.parametrize("dies", [False, True])
def test_sacred_receives_all_that_a_rank_has_sent_before_its_end(dies, forked):
    run = FakeRun()
    ranks = Ranks(sacred=run)
    ranks.start(send_values, (dies,), 1)
    failed = ranks.watch()
    assert run.scalars == [("x", 0.5, t) for t in range(5000)] and failed == ({0: 1} if dies else {})
    assert dies or (ranks.summary() == {"return": 3.0} and ranks.without_result() == {})


def test_sacred_gets_at_most_500_values_of_a_name(tmp_path):
    run, facts = FakeRun(), RunFacts(tmp_path, totals={"t_env": 10 * MOST})
    times = range(3, 10 * MOST + 1)
    log_to(["sacred"], [("stage3", t, {"loss": 0.5 * t}) for t in times], facts, sacred=run)
    assert run.scalars == [("loss", 0.5 * t, t) for t in [*range(3, 10 * MOST, 10), 10 * MOST]]  # the last one always


def test_sacred_gets_what_a_restart_logs_again_once_and_seeds_apart():
    run = FakeRun()
    for seed in (1, 2):
        target = SacredScalars(run, f"seed{seed}/")
        for t in (10, 20, 20, 30):
            target.log_scalar("x", t + seed, t)
    assert run.scalars == [(f"seed{seed}/x", t + seed, t) for seed in (1, 2) for t in (10, 20, 30)]


def test_tensorboard_files_hold_values_by_stage_and_show_once_what_a_resumed_run_logs_again(tmp_path):
    def write(*values):
        logs = [("stage3", t, {"loss": loss}) for t, loss in values] + [("stage1", 20, {"eval/graph_loss": 0.25})]
        log_to(["jsonl", "tensorboard"], logs, RunFacts(tmp_path))
        time.sleep(1.1)  # the names of files hold whole seconds

    def cut(n):
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(lines[:n]))  # as a resumed run cuts it

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # a second, in one process

    def read(stage, name):
        events = EventAccumulator(str(tmp_path / "tb" / stage))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    metrics = tmp_path / "metrics.jsonl"
    write((100, 1.0), (200, 0.5), (300, 7.0))
    cut(2)
    write((300, 0.25), (400, 0.125))
    assert read("stage3", "loss") == [(100, 1.0), (200, 0.5), (300, 0.25), (400, 0.125)]
    assert read("stage1", "eval/graph_loss")[0] == (20, 0.25)
    cut(0)  # killed before its first checkpoint
    write((200, 3.0))
    assert read("stage3", "loss") == [(200, 3.0)]


@pytest.fixture
def home(monkeypatch, tmp_path_factory):
    """Return a home without a W&B key; the environment requests nothing from W&B."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    wandb.teardown()  # it remembers settings and keys
    return home


@pytest.mark.parametrize("naming", ["environment", "published"])
def test_stages_are_runs_of_their_own_with_project_group_and_step(tmp_path, monkeypatch, home, naming):
    """A resumed run keeps their ids and names, and the key of the environment is written nowhere."""
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"seed": 4, "lr": 0.0005, "env_args": {"map_name": "5m_vs_6m"}, "wandb_naming": naming}
    card = {"id": "12ab", "method": "34cd"}
    facts = RunFacts(tmp_path, "token_7", "omagd", "skirmish", "5m_vs_6m", 2, config, card=card)
    logs = [("stage1", t, {"eval/graph_loss": loss}) for t, loss in ((20, 0.25), (40, 0.125))]
    of_maps = {"test/3m/return_mean": 1.5, "test/4m/return_mean": 2.0, "train/4m/visits": 7.0}
    last = {"won": 0.5, "loss_td": 0.01, **of_maps}
    log_to(["wandb"], [*logs, ("stage3", 10240, last)], facts, "failed")
    other = "published" if naming == "environment" else "environment"
    later = replace(facts, config={**config, "wandb_naming": other}, world_size=2 if naming == "environment" else 1)
    log_to(["wandb"], [("stage3", 20480, {"loss_td": 0.25})], later)
    runs = {}
    for path in offline_files(tmp_path):
        # W&B's own process still writes after `finish` returns.
        assert wait_until(lambda path=path: any(record.HasField("exit") for record in records_in(path)))
        found = records_in(path)
        (run,) = [record.run for record in found if record.HasField("run")]
        written = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (written["lr"], written["card"], written["method"]) == (0.0005, card, "omagd_34cd")
        stage, ranks = written["stage"], f"ddp{written['world_size']}"
        if naming == "published":
            assert (run.run_group, list(run.tags)) == ("token_7", ["skirmish", "5m_vs_6m", stage])
        else:
            assert run.run_group == f"omagd_34cd_{stage}_ddp2" and written["token"] == "token_7"
            assert run.display_name == "seed 4"
            assert set(run.tags) == {stage, ranks, "omagd", "omagd_34cd"}
        steps = [{item.nested_key[0]: item.value_json for item in record.history.item} for record in found]
        values = [{name: float(step[name]) for name in step if name[0] != "_" or name == "_step"} for step in steps]
        runs.setdefault((run.project, run.run_id), []).extend(filter(None, values))
    published = ("5m_vs_6m_reconstruction_stage1_ddp2", "5m_vs_6m_exp_ddp2")
    projects = published if naming == "published" else ("skirmish_5m_vs_6m",) * 2
    expected = (
        [{"_step": t, **values} for _, t, values in logs],
        [{"_step": 10240, **last}, {"_step": 20480, "loss_td": 0.25}],
    )
    found = [(project, sorted(rows, key=lambda row: row["_step"])) for (project, _), rows in runs.items()]
    assert sorted(found, key=lambda pair: pair[1][0]["_step"]) == list(zip(projects, expected, strict=True))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if FAKE_KEY.encode() in path.read_bytes()]


def test_a_group_names_what_differs_and_the_summary_has_the_best_test_of_all_starts(tmp_path, monkeypatch, home):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for preset, changed in (("qmix_fast", {}), ("mappo", {}), ("qmix_fast", {"lr": 0.5, "t_max": 9, "seed": 4})):
        config = resolve(preset, updates=changed)
        values, card = config.model_dump(mode="json"), make_card(config, 1, torch.device("cpu"))
        facts = RunFacts(tmp_path, "run", config.name, "skirmish", "3m", config=values, card=card)
        words = f"{preset} lr=0.5" if changed else preset
        assert names(facts, "stage3", "environment")[1] == f"{words}_{card['method']}_stage3_ddp1"
    for t, won, state in ((10, 0.75, "interrupted"), (20, 0.25, "completed")):
        log_to(["jsonl", "wandb"], [("stage3", t, {"test_battle_won_mean": won})], facts, state)
    wandb.teardown()  # its process has written everything
    records = [record for path in offline_files(tmp_path) for record in records_in(path)]
    assert {record.run.display_name for record in records if record.HasField("run")} == {"seed 4"}
    summary = {}
    for record in records:
        summary |= rows_of(record.summary.update)
    assert (summary["test_battle_won_mean"], summary["best_test_battle_won_mean"]) == (0.25, 0.75)


def test_mode_and_names(monkeypatch, home):
    game = RunFacts(home, env="memory_game", name="n" * 200)
    assert names(game, "stage2", "published")[0] == "memory_game_reconstruction_stage2_ddp1"
    assert names(game, "stage2", "environment")[0] == "memory_game"
    project, group, tags = names(replace(game, map_name="a/b #1"), "stage3", "environment")
    assert project == "memory_game_a_b_1" and len(group) == 128 and {len(tag) for tag in tags} == {6, 4, 64}
    groups = {names(RunFacts(home, name="n" * 200, world_size=n), f"stage{n}", "environment")[1] for n in (1, 2)}
    assert len(groups) == 2, "a long name keeps stages and ranks apart"
    for naming in ("published", "environment"):
        assert names(RunFacts(home, config={"wandb_project": "my own"}), "stage1", naming)[0] == "my own"
    assert choose_mode() == "offline"
    own = home / ".config" / "wandb" / "settings"  # as `wandb login --host` writes it
    own.parent.mkdir(parents=True)
    hosts = [("example.org", False), ("api.wandb.ai", True), ("api.forge.coreweave.com", True)]
    for host, known in [*hosts, ("localhost:8080", True)]:
        own.write_text(f"[default]\nbase_url = http://{host}\n" if ":" in host else "")
        (home / ".netrc").write_text(f"machine {host} login me password {FAKE_KEY}\n")
        (home / ".netrc").chmod(0o600)
        wandb.teardown()
        assert has_key() == known
    (home / ".netrc").unlink()
    own.unlink()
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode() == "disabled"


def test_an_unreachable_service_is_waited_for_once_and_everything_is_recorded_offline(
    tmp_path, monkeypatch, caplog, home
):
    """By the installed W&B, at a closed port; the second run is the next one of a list of seeds."""
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_sink, "INIT_SECONDS", 1.0)
    monkeypatch.setattr(WandbSink, "unreachable_at", -math.inf)
    logs = [(stage, t, {"a": t / 3, "b": math.nan}) for stage in ("stage1", "stage2", "stage3") for t in (7, 8)]
    codes = {"failed": 1, "interrupted": 130}
    for state in codes:
        (tmp_path / state).mkdir()
        log_to(["jsonl", "wandb"], logs, RunFacts(tmp_path / state, state), state)
    wandb.teardown()  # its process has written everything
    said = [record.getMessage() for record in caplog.records if record.name == "omagd"]
    assert len(said) == len(codes) and said[0].startswith("W&B cannot be reached, recording offline"), said
    assert len(list(tmp_path.glob("*/wandb/run-*"))) == 1, "the service was asked more than once"
    for state, code in codes.items():
        assert_recorded_once(tmp_path / state)
        files = [records_in(path) for path in offline_files(tmp_path / state)]
        assert [records[-1].exit.exit_code for records in files] == [0, 0, code]
        summary = {}
        for record in files[-1]:
            summary |= rows_of(record.summary.update)
        assert (summary["_step"], summary["a"], summary["b"]) == (8, 8 / 3, "NaN")


def test_lines_that_wandb_has_not_written_are_sent_by_the_next_start_and_no_link_is_followed(
    tmp_path, monkeypatch, home
):
    """Also those of a run that used no W&B before; a planted link to another run's record says nothing of this one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    logs = [("stage1", 5, {"c": 0.5}), *(("stage3", t, {"a": t / 7, "text" * 10_000: 1.0}) for t in range(10, 40, 10))]
    run, other = tmp_path / "run", tmp_path / "other"
    log_to(["jsonl"], logs[:2], RunFacts(run))
    log_to(["jsonl", "wandb"], [logs[2]], RunFacts(run), "interrupted")
    wandb.teardown()  # its process has written everything
    (*_, last) = offline_files(run)
    other.mkdir()
    (other / last.name).write_bytes(last.read_bytes())
    with last.open("r+b") as file:  # as a kill leaves it
        file.truncate(last.stat().st_size - 9000)
    (run / "wandb" / "offline-run-9").symlink_to(other)
    log_to(["jsonl", "wandb"], [logs[3]], RunFacts(run))
    wandb.teardown()
    (other / last.name).unlink()
    (run / "wandb" / "offline-run-9").unlink()
    assert_recorded_once(run)
    assert len(offline_files(run)) == 3 and [len(rows) for rows in history(run)["stage3"].values()] == [3]
    for folder in (run / "wandb").glob("offline-run-*"):  # as starts with a network leave them
        folder.rename(folder.with_name(folder.name.removeprefix("offline-")))
    sent: list[int] = []
    summary: dict[str, float] = {}  # of what has a step that has arrived
    fake = SimpleNamespace(log=lambda _, step: sent.append(step), finish=lambda exit_code: None, summary=summary)
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    for mode in ("online", "offline"):
        monkeypatch.setenv("WANDB_MODE", mode)
        log_to(["jsonl", "wandb"], [("stage3", {"online": 40, "offline": 50}[mode], {"a": 1.0})], RunFacts(run))
    assert sent == [10, 20, 30, 40, 40, 50], "what was sent online may not have arrived"
    log_to(["jsonl", "wandb"], [("stage3", 30, {"absolute": 2.0})], RunFacts(run))
    assert 30 not in sent[6:] and summary["absolute"] == 2.0
    monkeypatch.setenv("WANDB_MODE", "online")
    fake.starting_step, before = 51, len(sent)  # all has arrived there
    log_to(["jsonl", "wandb"], [("stage3", 50, {"absolute": 3.0})], RunFacts(run))
    assert len(sent) == before and summary["absolute"] == 3.0


def test_a_minute_has_twenty_lines_and_an_hour_a_hundred_however_many_records_there_are(tmp_path, caplog, monkeypatch):
    logger, clock = logging.getLogger("console of a test"), 0.0
    monkeypatch.setattr("omagd.run.reporting.log_sinks.time.monotonic", lambda: clock)
    sink = ConsoleSink(logger)
    sink.open(RunFacts(folder=tmp_path, totals={"t_env": 36_000}))
    with caplog.at_level(logging.INFO, logger.name):
        sink.log(Record({"policy/error": 0.5}, "stage3", "t_env", 0))
        assert not caplog.messages, "no column shows it"
        for t in range(36_000):  # ten records a second
            clock = t / 10
            tested = {"test_return_mean": float(t)} if t % 5 == 1 else {}
            sink.log(Record({"loss_td": 0.5, **tested}, "stage3", "t_env", t))
            if t == 600:
                assert 15 <= len(caplog.messages) <= 23 and caplog.messages[-1].split()[1] == "596", "the newest test"
        assert 80 <= len(caplog.messages) <= 120
        sink.close("interrupted")
    assert caplog.messages[-1].split()[0] == "35,999", "the last one"


def test_the_console_shows_a_line_per_log_or_all_values(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("omagd.run.reporting.log_sinks.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("omagd.run.reporting.log_sinks.LEAST_OF_ALL", 0.0)
    logger = logging.getLogger("console of a test")
    values = {"test_battle_won_mean": 0.5, "q_taken_mean": 2.0, "steps_per_second": 100.0}
    learned = {"loss_pg": 0.25, "epsilon": 1.0}  # of a plug-in; not before the first update
    said, selector = {}, {"action_selector": "epsilon_greedy"}
    for detail, totals in (("line", {"t_env": 3000}), ("line", {"episode": 30}), ("full", {"t_env": 3000})):
        caplog.clear()
        sink = ConsoleSink(logger)
        sink.open(RunFacts(folder=tmp_path, config={"log_detail": detail, **selector}, totals=totals))
        with caplog.at_level(logging.INFO, logger.name):
            for t in (1000, 2000):
                counts = {"updates": t - 1000.0, "episode": t / 100}
                sink.log(Record({**values, **counts, **(learned if t > 1000 else {})}, "stage3", "t_env", t))
        said[detail, *totals] = caplog.messages
    for end in ("t_env", "episode"):  # names once; 1,000 steps or 10 episodes are left, at 100 steps a second
        _, _, *lines = (line.split() for line in said["line", end])
        assert lines == [["2,000", "0.500", "1.00", "0.250", "100", "10", "s"]]
    blocks = [("q_taken_mean" in block, "left: 10 s" in block) for block in said["full", "t_env"]]
    assert blocks == [(True, False), (True, True)]
