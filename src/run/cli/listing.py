"""Output of `--list` and `--dry-run`."""

from __future__ import annotations

import textwrap
from typing import get_args

import yaml

from omagd import runners
from omagd.config.loading import config_names, to_plain
from omagd.config.schema import Config
from omagd.learners.protocol import learner_class
from omagd.run.cli.preflight import NAMED, PreflightResult, registry_of
from omagd.run.memory_budget import GIGABYTE, data_key, replay_bytes
from omagd.run.reporting.card import beside_one_rank, make_card
from omagd.run.training.build import n_slots
from omagd.run.training.evaluate import trained_card


def listing() -> str:
    """Return all names that the command line accepts, one paragraph per kind."""
    from omagd.envs.battle.maps import MAPS, PRESETS
    from omagd.envs.smax import MapName as SMAX_MAPS
    from omagd.envs.task_sets import NAMED as SETS

    lines = [_paragraph("--config", config_names("algs")), _paragraph("--env-config", config_names("envs"))]
    lines += [_paragraph(key, registry_of(package).names()) for key, package in NAMED.items()]
    lines.append(_paragraph("env_args.map_name (skirmish)", [*SETS, *MAPS]))
    lines += [_paragraph(f"env_args.map_name (skirmish) whose unseen units are of {words}", list(names))
              for words, names in PRESETS.items()]  # fmt: skip
    lines.append(_paragraph("env_args.map_name (smax)", list(get_args(SMAX_MAPS))))
    return "\n".join(lines) + "\n"


def resolved(config: Config, checked: PreflightResult) -> str:
    """Return the configuration as YAML for `--config=FILE`, with derived facts as comments."""
    values = to_plain(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text + "".join(f"# {name}: {value}\n" for name, value in facts(config, checked).items())


def facts(config: Config, checked: PreflightResult) -> dict[str, object]:
    """Return derived facts by name: stages, ranks, effective batch, environments, sizes."""
    info, plan = checked.info, checked.plan
    start = "torchrun" if plan.joins else "spawn" if plan.spawns else "this process"
    device = "cuda" if plan.cuda else "cpu"
    card = make_card(config, plan.world_size, plan.device(0), trained_card(config))
    slots, unit = n_slots(config), runners.REGISTRY.get(config.runner).unit
    stored = "replay" if data_key(config) == "buffer_size" else "on-policy batch"
    sizes = f"{info.n_agents} agents, {info.n_actions} actions, observation {info.obs_dim}, state {info.state_dim}"
    more = beside_one_rank(config, plan.world_size, slots, learner_class(config.learner).data)
    return {
        "stages": ", ".join(checked.stages),
        **({"beside one rank": more} if more else {}),
        "world size": f"{plan.world_size} ({start}, {device})",
        "effective batch": f"{config.batch_size * plan.world_size} {unit} per update",
        "environments": f"{slots * plan.world_size} ({info.name} {info.map_name})".replace(" )", ")"),
        "environment": f"{sizes}, episodes of at most {info.episode_limit} steps",
        "card": f"{card['id']} (docs/card.md)",
        stored: f"at most {replay_bytes(config, info) / GIGABYTE:.2f} GB on each rank, all episodes at their longest",
    }


def _paragraph(title: str, names: list[str]) -> str:
    body = textwrap.fill(
        " ".join(names), width=110, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  "
    )
    return f"{title}:\n{body}"
