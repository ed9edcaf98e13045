"""Keys of learners, agents and mixers: `learner_args`, `agent_args`, `mixer_args`."""

from __future__ import annotations

import json

import pytest
import yaml
from command_budgets import BUDGETS
from pydantic import BaseModel, ConfigDict, Field

import omagd
from omagd.config.schema import COMPONENT_ARGS
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.nq_learner import NQLearner
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents.rnn_agent import NRNNAgent
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.modules.mixers.vdn import VDNMixer
from omagd.run.checkpoint import resuming
from omagd.run.cli.main import config_from, main


class ScaleArgs(BaseModel):
    """Keys of the mixer below."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    factor: float = Field(default=1.0, gt=0.0)
    shift: float = 0.0
    names: list[str] = []


class ScaledVDN(VDNMixer):
    """A sum that its own keys scale and shift."""

    args_model = ScaleArgs

    def __init__(self, config, info):
        super().__init__(config, info)
        self.args = ScaleArgs.model_validate(config.mixer_args)

    def forward(self, agent_qs, state):
        return super().forward(agent_qs, state) * self.args.factor + self.args.shift


class Unreadable(VDNMixer):
    """Its defaults cannot be read back from a file."""

    class args_model(ScaleArgs):  # noqa: N801
        pair: tuple[int, int] = (1, 2)


@pytest.fixture
def words(monkeypatch, tmp_path):
    """Return the beginning of a command that uses both mixers' and an agent's keys."""
    mixers = {**MIXERS._objects, "scaled": ScaledVDN, "unreadable": Unreadable}
    monkeypatch.setattr(MIXERS, "_objects", mixers)
    for registry, base in ((AGENTS, NRNNAgent), (LEARNERS, NQLearner)):
        found = type("Scaled", (base,), {"args_model": ScaleArgs})
        monkeypatch.setattr(registry, "_objects", {**registry._objects, "scaled": found})
    (tmp_path / "mine.yaml").write_text("name: mine\nrun: default\nmixer: scaled\nmixer_args: {factor: 2}\n")
    return [f"--config={tmp_path}/mine.yaml", "--env-config=matrix_game"]


def test_keys_of_components_reach_them_from_files_and_commands(words, capsys, tmp_path):
    given = ["with", "mixer_args.shift=5e-1", "agent=scaled", "agent_args={'names': ['a', 'b']}"]
    given += ["learner=scaled", "learner_args={'shift': 3}"]
    assert main([*words, "--dry-run", *given]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["mixer_args"] == {"factor": 2.0, "shift": 0.5, "names": []}
    assert shown["learner_args"]["shift"] == 3.0
    assert shown["agent_args"] == {"factor": 1.0, "shift": 0.0, "names": ["a", "b"]}
    assert main([*words, "-F", f"{tmp_path}/sacred", *given, *BUDGETS, f"local_results_path={tmp_path}/runs"]) == 0
    (folder,) = (tmp_path / "runs").glob("*")
    saved, card = (json.loads((folder / name).read_text()) for name in ("config.json", "card.json"))
    assert saved["mixer_args"] == card["told"]["mixer_args"] == shown["mixer_args"]
    assert omagd.load_policy(folder)
    assert main(["evaluate", str(folder), "test_nepisode=2", "use_cuda=False"]) == 0


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("mixer_args.factr=3", ["mixer_args.factr", "mixer=scaled", "3", "'factor'?", "factor, names, shift"]),
        ("mixer_args.factor=far", ["mixer_args.factor=far"]),
        ("mixer_args.shift=1e999", ["mixer_args.shift=inf", "finite"]),
        ("mixer_args.factor=-1", ["mixer_args.factor=-1", "more than 0"]),
        ("mixer_args=3", ["mixer_args=3"]),
        ("mixer=qmix", ["mixer_args.factor", "mixer=qmix", "takes none"]),
        ("learner_args.clip=0.1", ["learner_args.clip", "0.1", "learner=nq_learner", "takes none"]),
        ("mixer=unreadable", ["mixer_args.pair=[1, 2]"]),
    ],
)
def test_wrong_keys_of_components_are_rejected_in_one_line(words, capsys, tmp_path, given, parts):
    assert main([*words, "with", given, f"local_results_path={tmp_path}/runs"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in parts), line
    assert not (tmp_path / "runs").exists()


def test_keys_of_components_make_another_run_and_empty_ones_that_of_earlier_versions(words, monkeypatch):
    hashed, dumps = [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: hashed.append(value) or dumps(value, **options))
    config = config_from(words)
    others = [config.model_copy(update={"mixer_args": values}) for values in ({}, {"factor": 2}, {"factor": 3})]
    assert len({*map(resuming.identity_of, others)}) == 3
    found = [next(value for value in hashed if value.get("mixer_args", {}) == other.mixer_args) for other in others]
    assert [set(COMPONENT_ARGS) & value.keys() for value in found] == [set(), {"mixer_args"}, {"mixer_args"}]
