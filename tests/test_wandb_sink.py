"""W&B offline: the real files are read back."""

from __future__ import annotations

import json
import logging
import struct
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from omagd.run.reporting.log_sinks import make_logger
from omagd.run.reporting.wandb_sink import WandbSink, choose_mode, has_key, project_name
from omagd.utils.logging import RunFacts

wandb = pytest.importorskip("wandb")
BLOCK = 32768
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path_factory):
    """No key, no netrc, nothing asked for by the environment."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    return home


def records(path):
    """Return the records of a `.wandb` file, once the exit is among them: LevelDB framing after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    until, found = time.monotonic() + 20, []
    while not any(record.HasField("exit") for record in found) and time.monotonic() < until:
        time.sleep(0.05)  # W&B's own process still writes after `finish` returns
        data, position, piece, found = path.read_bytes(), 7, b"", []
        while position + 7 <= len(data):
            left = BLOCK - position % BLOCK
            _, size, kind = struct.unpack("<IHB", data[position : position + 7])
            if left < 7 or kind == 0:
                position += left
                continue
            piece += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # whole, or last part
                if position <= len(data):
                    found.append(wandb_internal_pb2.Record.FromString(piece))
                piece = b""
    return found


def history(found):
    """Return each logged step as a dictionary."""
    steps = [record.history.item for record in found if record.HasField("history")]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in steps]


def test_stages_are_runs_of_one_group_with_their_own_project_and_step(tmp_path, monkeypatch):
    """A resumed run keeps their ids, and the key of the environment is written nowhere."""
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"lr": 0.0005, "env_args": {"map_name": "5m_vs_6m"}}
    facts = RunFacts(tmp_path, "token_7", "omagd", "skirmish", "5m_vs_6m", 2, config, card={"id": "12ab"})
    logger = make_logger(facts, ["wandb", "jsonl"], logging.getLogger("test"))
    logger.log({"eval/graph_loss": 0.25}, stage="stage1", clock="epoch", t=20)
    logger.log({"eval/graph_loss": 0.125}, stage="stage1", clock="epoch", t=40)
    of_maps = {"test/3m/return_mean": 1.5, "test/4m/return_mean": 2.0, "train/4m/visits": 7.0}
    logger.log({"test_battle_won_mean": 0.5, "loss_td": 0.01, **of_maps}, stage="stage3", clock="t_env", t=10240)
    saved = logger.state_dict()
    logger.close("failed")
    resumed = make_logger(replace(facts, saved=saved), ["wandb"], logging.getLogger("test"))
    resumed.log({"loss_td": 0.25}, stage="stage3", clock="t_env", t=20480)
    assert resumed.state_dict()["W&B"] == saved["W&B"]
    resumed.close()
    runs, ids = {}, set()
    for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"):
        found = records(path)
        (run,) = [record.run for record in found if record.HasField("run")]
        assert run.run_group == "token_7"
        written = {item.key: item.value_json for item in run.config.update}
        assert written["lr"] == "0.0005" and json.loads(written["card"]) == {"id": "12ab"}
        runs.setdefault(run.project, []).extend(history(found))
        ids.add((run.project, run.run_id))
    assert set(runs) == {"5m_vs_6m_reconstruction_stage1_ddp2", "5m_vs_6m_exp_ddp2"} and len(ids) == 2
    stage1 = runs["5m_vs_6m_reconstruction_stage1_ddp2"]
    assert [(row["_step"], row["eval/graph_loss"]) for row in stage1] == [(20, 0.25), (40, 0.125)]
    first, second = sorted(runs["5m_vs_6m_exp_ddp2"], key=lambda row: row["_step"])
    assert (first["_step"], first["test_battle_won_mean"], first["loss_td"]) == (10240, 0.5, 0.01)
    assert (second["_step"], second["loss_td"], "maps" in second) == (20480, 0.25, False)
    (table,) = tmp_path.rglob("*/media/table/maps*.json")
    written = json.loads(table.read_text())
    assert written["columns"] == ["map", "test/return_mean", "train/visits"]
    assert written["data"] == [["3m", 1.5, None], ["4m", 2.0, 7.0]]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if FAKE_KEY.encode() in path.read_bytes()]


def test_a_run_ends_there_with_the_commands_exit_code():
    codes = []
    for state in ("completed", "interrupted", "failed"):
        sink = WandbSink()
        sink._run = SimpleNamespace(finish=lambda exit_code: codes.append(exit_code))
        sink._close(state)
    assert codes == [0, 130, 1]


def test_without_a_key_offline_and_with_one_online(monkeypatch, no_account):
    assert choose_mode() == "offline"
    (no_account / ".netrc").write_text(f"machine example.org login me password {FAKE_KEY}\n")
    (no_account / ".netrc").chmod(0o600)
    assert not has_key()
    (no_account / ".netrc").write_text(f"machine api.wandb.ai login me password {FAKE_KEY}\n")
    assert choose_mode() == "online"
    (no_account / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode() == "disabled"


def test_published_project_names(tmp_path):
    facts = RunFacts(tmp_path, env="skirmish", map_name="3m", world_size=4)
    assert project_name(facts, "stage2") == "3m_reconstruction_stage2_ddp4"
    assert project_name(facts, "stage3") == "3m_exp_ddp4"
    assert project_name(RunFacts(tmp_path, env="memory_game"), "stage3") == "memory_game_exp_ddp1"
    assert project_name(RunFacts(tmp_path, env="skirmish", wandb_project="mine"), "stage1") == "mine"


def test_an_unreachable_service_is_replaced_by_an_offline_run_or_switched_off(tmp_path, monkeypatch, caplog):
    calls, down = [], {"online"}

    def init(**arguments):
        calls.append(arguments["mode"])
        if arguments["mode"] in down:
            raise RuntimeError("service is down")
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda exit_code: calls.append(exit_code)
        )

    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setattr(wandb, "init", init)
    logging.getLogger("omagd").propagate = True
    for mode in ("online", "offline"):
        down.add(mode)
        logger = make_logger(RunFacts(tmp_path), ["wandb", "jsonl"], logging.getLogger("test"))
        for t in (7, 8):
            logger.log({"a": 1.0}, stage="stage3", clock="t_env", t=t)
        logger.close("failed")
    assert calls == ["online", "offline", (7, {"a": 1.0}), (8, {"a": 1.0}), 1, "online", "offline"]
    assert sum("W&B is off" in record.getMessage() for record in caplog.records) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
