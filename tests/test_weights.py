"""Published policies: a set is made, served over HTTP, checked, used by name, and exported to ONNX."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading

import numpy as np
import onnxruntime
import pytest
import torch

import omagd
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.lab import published
from omagd.lab.commands.weights import MEASURE, export
from omagd.run.cli.main import main

NAME = "skirmish/3m/tiny"


@pytest.fixture(scope="module")
def packed(qmix_run, tmp_path_factory):
    """Return the folder of a set with one policy."""
    folder = tmp_path_factory.mktemp("packed") / "set"
    assert main(["weights", "pack", str(qmix_run), NAME, "--to", str(folder)]) == 0
    return folder


@pytest.fixture
def server(packed, tmp_path, monkeypatch):
    """Return folder and address of a copy of the set; the cache is empty."""
    folder = tmp_path / "set"
    shutil.copytree(packed, folder)
    monkeypatch.setattr(published, "user_cache", lambda *names: tmp_path.joinpath("cache", *names))
    monkeypatch.chdir(tmp_path)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()


def test_a_policy_is_listed_got_and_used_by_its_name(qmix_run, packed, server, capfd):
    assert str(qmix_run.parent) not in (packed / NAME / "config.json").read_text(), "the machine that trained"
    assert main(["weights", "list", "--from", server[1]]) == main(["weights", "get", NAME, "--from", server[1]]) == 0
    listed, *got = capfd.readouterr().out.splitlines()
    assert listed == got[0] and listed.startswith(f"{NAME}: win rate 0.") and "over 1,000 episodes; seed " in listed
    loaded, own = (omagd.load_policy(run).agent.state_dict() for run in (NAME, qmix_run))
    assert all(torch.equal(loaded.pop(name), weight) for name, weight in own.items()) and not loaded
    assert main(["evaluate", NAME, *MEASURE.split()]) == 0
    (summary,) = (server[0].parent / "results").glob("*_evaluation_*/summary.json")
    entry = json.loads((packed / "index.json").read_text())["policies"][NAME]
    assert json.loads(summary.read_text())["return"] == entry["return_mean"]
    assert main(["watch", NAME]) == 0 and "results" not in capfd.readouterr().out.splitlines()[-1]
    changed = {**entry, "files": {file: entry["files"][file] for file in entry["files"] if file != "battle.png"}}
    (server[0] / "index.json").write_text(json.dumps({"policies": {NAME: changed}}))
    assert main(["weights", "get", NAME, "--from", server[1]]) == 0, "it replaces the copy as a whole"
    assert not (published.folder_of(NAME) / "battle.png").exists() and omagd.load_policy(NAME)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", "agent.safetensors is not the file whose checksum index.json has"),
        (NAME, f"{NAME}y", f"is not known. Did you mean '{NAME}y'?"),
        (NAME, "skirmish/../tiny", "is no index of policies (policies/skirmish/../tiny"),
        ("agent.safetensors", "../a.th", f"is no index of policies (policies/{NAME}/files/../a.th"),
        ("{", "<html>", "is no index of policies (the file: Invalid JSON"),
    ],
)
def test_what_is_not_as_it_should_be_is_one_line_and_changes_nothing(server, capsys, old, new, says):
    (folder, address), nobody = server, ("http://127.0.0.1:9", "refused). Check address and network")
    index = folder / "index.json"
    index.write_text(index.read_text().replace(old, new, 1))
    (folder / NAME / published.AGENT).write_bytes(b"damaged")
    for source, part in ((address, says), (str(folder), says), nobody):
        assert main(["weights", "get", NAME, "--from", source]) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if " HTTP/1" not in line)  # the server's
        assert part in line
    assert not (folder.parent / "cache").exists()


def test_a_graph_for_onnxruntime_gives_the_values_of_act_over_an_episode(qmix_run, tmp_path, monkeypatch, capsys):
    policy = omagd.load_policy(qmix_run)
    session = onnxruntime.InferenceSession(str(export(str(qmix_run), tmp_path / "step.onnx")))
    info, slots, mac = policy.info, np.ones(3, bool), policy._mac
    mac.begin(len(slots))
    hidden, taken = policy.agent.init_hidden(len(slots)).numpy(), np.full((len(slots), info.n_agents), -1)
    for step in range(5):
        obs = torch.randn(len(slots), info.n_agents, info.obs_dim).numpy()
        seen = Observation(obs, obs, np.ones((*obs.shape[:2], info.n_actions), bool))  # no agent reads the state
        wanted = mac.act(Tick(seen, slots * step, slots), None)
        values, hidden = session.run(None, {"obs": obs, "last_action": taken, "hidden": hidden})
        np.testing.assert_allclose(values, wanted.values, rtol=1e-4, atol=1e-5)
        taken = wanted.actions
    monkeypatch.setattr(type(policy.agent), "encode", lambda *_: 1 / 0)
    assert main(["weights", "onnx", str(qmix_run), str(tmp_path / "other.onnx")]) == 2
    assert "agent=n_rnn cannot be exported (division by zero)" in capsys.readouterr().err


def test_every_policy_of_the_repository_is_whole_and_small(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "user_cache", lambda *names: tmp_path.joinpath(*names))
    policies = published.read_index(published.SHIPPED).policies
    for name, policy in policies.items():
        assert policy.files.keys() == set(published.FILES)
        assert omagd.load_policy(name).config.name == name.rpartition("/")[2]
    assert policies and sum(file.size for policy in policies.values() for file in policy.files.values()) < 20e6
