"""`omagd weights list | get NAME | pack RUN NAME --to FOLDER | onnx RUN FILE` (docs/weights.md)."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from scipy.stats import binomtest

from omagd.config.loading import to_plain
from omagd.lab import published
from omagd.lab.commands.watch import record_battles
from omagd.lab.watch.formats import write_png
from omagd.modules.agents.agent import AgentInputs
from omagd.run import api
from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
from omagd.run.reporting.card import NO_EFFECT, read_card, recorded_of
from omagd.run.run_folder import RunFolder, write_json
from omagd.run.training.evaluate import evaluation_config, policy_path
from omagd.utils.errors import UserError, print_out, require_extra
from omagd.utils.storage import replace_file

WORDS = {"list": (), "get": ("NAME",), "pack": ("RUN", "NAME", "--to FOLDER"), "onnx": ("RUN", "FILE")}
BATTLES, EPISODES = 50, 1000
MEASURE = f"test_nepisode={EPISODES} batch_size_run={BATTLES} test_greedy=True"
"""How an index measures: `omagd evaluate NAME` with this plays the same episodes again."""

LOCAL = {"checkpoint_path", "load_step", "pretrain_buffer_path", "graph_pretrain_policy"}
"""Keys that name what only the machine of the training has."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `weights`."""
    parser.add_argument("what", choices=WORDS, help=", ".join(" ".join([what, *WORDS[what]]) for what in WORDS))
    names = "RUN: a run's folder, its models/, a step's folder, or a NAME, such as skirmish/3m/qmix_fast"
    parser.add_argument("words", nargs="*", metavar="WORD", help=names)
    where = "list, get: folder or http(s) address of a set; default: weights/ of the repository"
    parser.add_argument("--from", dest="source", default="", metavar="SET", help=where)
    parser.add_argument("--to", default="", metavar="FOLDER", help="pack: the set that takes the policy")


def main(options: argparse.Namespace) -> int:
    """Run the command. Errors: UserError."""
    what, words, source, to = options.what, options.words, options.source, options.to
    given = [*words, *[f"--to {to}"] * bool(to)]
    if len(given) != len(WORDS[what]) or (what == "pack") != bool(to) or (source and what in ("pack", "onnx")):
        typed = " ".join([what, *given, *[f"--from {source}"] * bool(source)])
        raise UserError(f"weights {typed}: not understood. Give `omagd weights {' '.join([what, *WORDS[what]])}`")
    source = source or published.SHIPPED
    if what == "list":
        policies = published.read_index(source).policies
        print_out("".join(f"{name}: {policy.line()}\n" for name, policy in sorted(policies.items())))
    elif what == "get":
        print_out(_got(words[0], *published.fetch(words[0], source)))
    elif what == "pack":
        run, name = words
        print_out(f"{name}: {pack(run, name, Path(to).expanduser()).line()}\n")
    else:
        require_extra("weights onnx", "onnx", "onnx", "onnxscript")
        alone = _agent_alone(words[0], f"weights onnx {words[0]}")
        print_out(f"{export(alone, Path(words[1]).expanduser())}\n")
    return 0


def _got(name: str, copy: Path, policy: published.Policy) -> str:
    """Return what to do with a policy."""
    uses = f"  omagd watch {name}\n  omagd evaluate {name} {MEASURE}\n  omagd.load_policy({name!r})\n"
    return f"{name}: {policy.line()}\n{copy}\n{uses}It is for acting: training cannot continue from it.\n"


def _agent_alone(run: str, source: str) -> api.LoadedPolicy:
    """Return the policy of a run. Errors: UserError for one that consists of more than its agent."""
    policy = api.load_policy(run)
    if policy.config.use_graph_reconstruction:
        raise UserError(f"{source}: this team also acts by a tokenizer and a predictor, and only agents are stored")
    return policy


def pack(run: str, name: str, to: Path) -> published.Policy:
    """Put the last policy of a run into the set in the folder `to`, and return what its index says of it.

    Args:
        run: see `load_policy`. name: `<env>/<map>/<name>`. Errors: UserError.
    """
    policy = _agent_alone(run, f"weights pack {run}")
    config, info, place = policy.config, policy.info, to / name
    if not re.match(published.NAME, name) or name.partition("/")[0] != config.env:
        raise UserError(f"weights pack {run} {name}: give a name such as {config.env}/{info.map_name}/{config.name}")
    index = published.read_index(str(to)) if (to / published.INDEX).exists() else published.Index()
    trained = RunFolder(run_folder_of(step := find_step_folder(policy_path(run))))
    with tempfile.TemporaryDirectory() as folder:
        texts = {**dict(word.split("=") for word in MEASURE.split()), "local_results_path": folder}
        summary = api.run(evaluation_config(run, texts))
    card, won = read_card(trained.path) or {}, summary.get("win_rate")
    write_json(place / "config.json", {k: v for k, v in to_plain(config).items() if k not in NO_EFFECT | LOCAL})
    write_json(place / "card.json", card)
    replace_file(place / "env_info.json", trained.env_info_json.read_bytes())
    replace_file(place / published.AGENT, save({k: v.contiguous() for k, v in policy.agent.state_dict().items()}))
    with contextlib.suppress(UserError):  # an environment that has no units to show
        write_png(record_battles(evaluation_config(run, {})), place / "battle.png")
    share = None if won is None else binomtest(round(won * EPISODES), EPISODES).proportion_ci(method="wilson")
    contents = {file: (place / file).read_bytes() for file in published.FILES if (place / file).exists()}
    index.policies[name] = published.Policy(
        files={file: published.Stored.of(content) for file, content in contents.items()},
        win_rate=won,
        interval=share and (float(share.low), float(share.high)),
        return_mean=summary["return"],
        episodes=EPISODES,
        seed=config.seed,
        steps=int(step.name) if step.name.isdecimal() else 0,
        version=str(recorded_of(card).get("versions", {}).get("omagd", "unknown")),
    )
    write_json(to / published.INDEX, index.model_dump())
    return index.policies[name]


def export(policy: api.LoadedPolicy, path: Path) -> Path:
    """Write the acting step of a team as an ONNX file, and return its path.

    Inputs: `obs` [B, n, obs_dim] float32, `last_action` [B, n] int64 (-1 at an episode's start), `hidden` [B, n, H]
    (zeros at the start). Outputs: `values` [B, n, A] of all actions, also of those that are not available, and
    `new_hidden` [B, n, H]. B is free.

    Errors: UserError for an agent that has no such form, and for a file that cannot be written.
    """

    class Step(torch.nn.Module):
        """The acting step as a function of tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.agent = policy.agent

        def forward(self, obs: Any, last_action: Any, hidden: Any) -> Any:
            return self.agent.step(AgentInputs(obs, last_action), hidden)

    for name in ("torch.onnx", "onnxscript", "onnx_ir"):  # they say at length what does not concern this graph
        logging.getLogger(name).setLevel(logging.ERROR)
    blank = AgentInputs.blank(2, policy.info, next(policy.agent.parameters()))
    values = blank.features, blank.last_action, policy.agent.init_hidden(2).contiguous()
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            # `DYNAMIC` is an error where the batch would become a constant; a name for it would not be.
            free = ({0: torch.export.Dim.DYNAMIC},) * len(values)
            step = torch.export.export(Step().eval(), values, dynamic_shapes=free)
            names = {"input_names": ["obs", "last_action", "hidden"], "output_names": ["values", "new_hidden"]}
            made = torch.onnx.export(step, (), dynamo=True, verbose=False, **names)
        replace_file(path, made.model_proto.SerializeToString())
    except OSError as problem:
        raise UserError(f"{path}: cannot be written ({problem.strerror}). Give another file") from problem
    except Exception as problem:
        why = str(problem).partition("\n")[0]
        raise UserError(f"weights onnx: agent={policy.config.agent} cannot be exported ({why})") from problem
    return path
