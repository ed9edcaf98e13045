"""Published policies: a set is made, served over HTTP, checked, used by name, and exported to ONNX."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from contextlib import closing

import numpy as np
import onnxruntime
import pytest
import torch

import omagd
from omagd.config.loading import resolve
from omagd.controllers.types import Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.lab import published
from omagd.lab.commands.weights import MEASURE, export
from omagd.modules.agents.agent import NRNNAgent
from omagd.run.api import LoadedPolicy
from omagd.run.cli.main import main
from omagd.run.training.build import PretrainedModules, build_mac

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


@pytest.mark.parametrize(("old", "new", "says"), [
    ("", "", "agent.safetensors is not the file whose checksum index.json has"),
    (NAME, f"{NAME}y", f"is not known. Did you mean '{NAME}y'?"),
    (NAME, "skirmish/../tiny", "is no index of policies (policies/skirmish/../tiny"),
    ("agent.safetensors", "../a.th", f"is no index of policies (policies/{NAME}/files/../a.th"),
    ("{", "<html>", "is no index of policies (the file: Invalid JSON"),
])  # fmt: skip
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


@pytest.mark.parametrize(
    ("name", "map_name", "more"),
    [("qmix", "3m", {}), ("qmix", "3m", {"share_parameters": False, "obs_agent_id": False}), ("hpn_qmix", "MMM", {}),
     ("hpn_qmix", "MMM", {"agent": "attention_rnn"}), ("gnn_qmix", "5m_vs_6m", {})],
)  # fmt: skip
def test_a_graph_for_onnxruntime_gives_the_values_of_act_over_an_episode(name, map_name, more, tmp_path):
    updates = {"env_args.map_name": map_name, "use_cuda": False, "rnn_hidden_dim": 16, **more}
    config = resolve(config=name, env_config="skirmish", updates=updates)
    with closing(make_env("skirmish", {"map_name": map_name}, 1, processes=False)) as env:
        info = env.info
    mac = build_mac(config, info, torch.device("cpu"), PretrainedModules())
    policy, slots = LoadedPolicy(config, info, mac), np.ones(3, bool)
    session = onnxruntime.InferenceSession(str(export(policy, tmp_path / "step.onnx")))
    mac.begin(len(slots))
    hidden, taken = policy.agent.init_hidden(len(slots)).numpy(), np.full((len(slots), info.n_agents), -1)
    for step in range(5):
        obs = torch.randn(len(slots), info.n_agents, info.obs_dim).numpy()
        obs[0, :, info.obs_dim // 3 : info.obs_dim // 2] = 0  # units that are not seen
        seen = Observation(obs, obs, np.ones((*obs.shape[:2], info.n_actions), bool))  # no agent reads the state
        wanted = mac.act(Tick(seen, slots * step, slots), None)
        values, hidden = session.run(None, {"obs": obs, "last_action": taken, "hidden": hidden})
        np.testing.assert_allclose(values, wanted.values, rtol=1e-4, atol=1e-5)
        taken = wanted.actions


def test_what_cannot_be_done_is_one_line(qmix_run, small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(NRNNAgent, "encode", lambda *_: 1 / 0)
    monkeypatch.setattr(published, "SHIPPED", str(tmp_path / "weights"))
    monkeypatch.setattr(published, "user_cache", lambda *names: tmp_path.joinpath(*names))
    for typed, says in (
        (["weights", "onnx", str(qmix_run), "x.onnx"], "agent=n_rnn cannot be exported (division"),
        (["weights", "onnx", str(small_run), "x.onnx"], "also acts by a tokenizer and a predictor"),
        (["weights", "onnx", "a", "b", "--from", "c"], "not understood. Give `omagd weights onnx RUN FILE`"),
        (["weights", "pack", "a", NAME, "--to", "b", "--from", "c"], "Give `omagd weights pack RUN NAME --to FOLDER`"),
        (["weights", "get", NAME, "--to", "b"], "Give `omagd weights get NAME`"),
        (["weights", "list"], "come with a clone of the repository"),
        (["watch", NAME], "come with a clone of the repository"),
    ):
        assert main(typed) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_a_broken_transfer_is_one_line(server, capsys, monkeypatch):
    folder, address = server
    agent, files = (folder / NAME / published.AGENT).read_bytes(), http.server.SimpleHTTPRequestHandler
    third, whole = len(agent) // 3 + 1, files.do_GET

    def do_get(handler):
        """Send a third of the agent, and say that it is whole."""
        if not handler.path.endswith(published.AGENT):
            return whole(handler)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(agent)))
        handler.end_headers()
        return handler.wfile.write(agent[:third])

    monkeypatch.setattr(files, "do_GET", do_get)
    assert main(["weights", "get", NAME, "--from", address]) == 2
    assert f"(broke off after {third:,} bytes). Check address and network" in capsys.readouterr().err
    assert not (folder.parent / "cache").exists()


def test_every_policy_of_the_repository_is_whole_and_small(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "user_cache", lambda *names: tmp_path.joinpath(*names))
    policies = published.read_index(published.SHIPPED).policies
    for name, policy in policies.items():
        assert policy.files.keys() == set(published.FILES)
        assert omagd.load_policy(name).config.name == name.rpartition("/")[2]
    assert policies and sum(file.size for policy in policies.values() for file in policy.files.values()) < 20e6
