"""The comparability card: what a result depends on, kept with every result; tables mark rows whose cards differ."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omagd
from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
from omagd.run.training.session import rounds
from omagd.utils.errors import readable
from omagd.utils.owned_folder import read_entry
from omagd.utils.run_folder import RunFolder, plain

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

Card = dict[str, Any]
"""`id`; `kind`: training or evaluation; `compared`: what must agree for two results to be compared; `told`: what may
differ; `reached`: at the end.

`resumed`, where a run has continued: what each of its later starts continued from, and with which versions.
"""

IRRELEVANT = frozenset(
    {"map_name", "difficulty", "game_version", "game_timeout", "debug", "replay_dir", "replay_prefix"}
    | {"jax_platform", "jax_threads"}
)
"""Arguments of environments that results do not depend on, or that the card names by themselves."""

GAME_VERSIONS = {75689: "4.10", 69232: "4.6.2"}
NO_CARD = "no card"


def make_card(config: Config, world_size: int, device: torch.device) -> Card:
    """Return the card of a run that has reached nothing yet.

    Errors: UserError for arguments that the environment does not take, or without the game or the checkpoint.
    """
    from omagd.run.training.build import n_slots

    environments = n_slots(config) * world_size
    compared = {**_world(config), **_effort(config, world_size, environments), "precision": _precision(config)}
    kind = "evaluation" if config.evaluate else "training"
    told = _told(config, world_size, device)
    return {"id": card_id(compared), "kind": kind, "compared": compared, "told": told, "reached": {}}


def card_id(compared: Mapping[str, Any]) -> str:
    """Return a short hash of what must agree."""
    return hashlib.sha256(json.dumps(plain(compared), sort_keys=True).encode()).hexdigest()[:8]


def settled(card: Card, stats: Mapping[str, float], stages: Mapping[str, Any]) -> Card:
    """Return the card at a run's end: with the game as it has named itself, and what was reached.

    Args:
        stats: of the environment; `game_build` is what the game says of itself. stages: as in `summary.json`.
    """
    compared = dict(card["compared"])
    if stats.get("game_build"):
        compared["game"] = game_name(int(stats["game_build"]))
    clock = stages.get("stage3", {}).get("clock", {})
    reached = {}
    if clock.get("updates") and clock.get("t_env"):
        steps, updates = clock["t_env"], clock["updates"]
        reached = {"environment_steps": steps, "updates": updates, "updates_per_environment_step": updates / steps}
    return {**card, "id": card_id(compared), "compared": compared, "reached": reached}


def start_lines(card: Card, sizes: str, batch: str) -> list[str]:
    """Return what a run says of its card when it starts.

    Args:
        sizes: of the environment, in words. batch: ranks, environments and updates, in words.
    """
    compared, told = card["compared"], card["told"]
    world = f"{compared['env']} {compared['map']} ({compared['game']})".replace("  ", " ")
    level = f", difficulty {compared['difficulty']}" if "difficulty" in compared else ""
    other = ", ".join(f"{key.removeprefix('env_args.')}={compared[key]}" for key in _other_args(compared))
    facts = [
        f"{key} {compared[key]:,}" for key in ("t_max", "max_episodes", "graph_pretrain_epochs") if key in compared
    ]
    facts += [f"of a training with card {compared['trained']}"] if "trained" in compared else []
    facts += [f"tests of {compared['test_episodes']} greedy episodes"] if "test_episodes" in compared else []
    facts += [str(compared["precision"]), f"seed {told['seed']}"]
    facts += [f"{name} {number}" for name, number in told["versions"].items()]
    return [
        f"{world}{level}: {sizes}" + (f"; not the usual arguments: {other}" if other else ""),
        batch,
        f"card {card['id']}: {', '.join(facts)}",
    ]


def differences(card: Card | None, first: Card | None) -> str:
    """Return what in `card` must agree with `first` and does not, in words; empty where nothing differs."""
    if card is None or first is None:
        return "" if card is first else f"{NO_CARD}, so it cannot be told" if card is None else "the first row has none"
    ours, theirs = card["compared"], first["compared"]
    names = [name for name in dict.fromkeys([*theirs, *ours]) if ours.get(name) != theirs.get(name)]
    kind, first_kind = (each.get("kind", "training") for each in (card, first))
    words = []
    if kind != first_kind:  # a training has facts that an evaluation does not have, such as its updates
        words = [f"{kind}, not {first_kind}"]
        names = [name for name in names if name.startswith("env_args.") or name in ours and name in theirs]
    return "; ".join([*words, *(f"{name} {_said(ours, name)}, not {_said(theirs, name)}" for name in names)])


def marks(cards: Sequence[Card | None], labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return an asterisk for each row whose card differs from the first row's (else nothing), and the footnotes.

    Args:
        cards: of the rows, None where a run has none. labels: what the footnotes call the rows.
    """
    differ = [differences(card, cards[0]) for card in cards]
    rows: dict[str, dict[str, None]] = {text: {} for text in differ if text}
    for label, text in zip(labels, differ, strict=True):
        if text:
            rows[text][label] = None
    notes = [f"* not comparable with the first row: {', '.join(names)}: {text}" for text, names in rows.items()]
    return ["*" if text else "" for text in differ], notes


def read_card(folder: str | Path) -> Card | None:
    """Return the card in a run's folder, None where there is none that can be read."""
    card = read_entry(RunFolder(folder).card_json)
    return card if is_card(card) else None


def resumed(card: Card | None) -> list[dict[str, Any]]:
    """Return what a card says of the starts that have continued its run."""
    entries = (card or {}).get("resumed", [])
    return [dict(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def versions_of(before: Card | None, now: Card) -> dict[str, Any]:
    """Return the versions of a start that continues a run, and those of the start before where they differ."""
    versions, told = now["told"]["versions"], (before or {}).get("told")
    old = told.get("versions") if isinstance(told, dict) else None
    changed = isinstance(old, dict) and old != versions
    return {"versions": versions, **({"versions_before": old} if changed else {})}


def changed_versions(card: Card) -> str:
    """Return which versions of a run's last start differ from those of the start before, in words; none: nothing."""
    entry = resumed(card)[-1] if resumed(card) else {}
    old, new = entry.get("versions_before", {}), entry.get("versions", {})
    names = [name for name in new if old and old.get(name) != new[name]]
    return ", ".join(f"{name} {new[name]} (was {old.get(name, 'none')})" for name in names)


def is_card(value: object) -> bool:
    """Return whether a value of a JSON file has what a card has."""
    return isinstance(value, dict) and isinstance(value.get("compared"), dict) and isinstance(value.get("id"), str)


def _world(config: Config) -> dict[str, Any]:
    """Return what is played: environment, map, game, difficulty, arguments other than the published ones."""
    from omagd.envs import REGISTRY
    from omagd.envs.factory import validate_env_args

    args = validate_env_args(config.env, dict(config.env_args))
    values = args.model_dump(mode="json")
    module = REGISTRY.get(config.env).__module__
    world = {"env": config.env, "map": str(values.get("map_name", "")), "game": _game(args, module)}
    if "difficulty" in values:
        world["difficulty"] = values["difficulty"]
    return world | {f"env_args.{name}": value for name, value in _differing(args).items()}


def _game(args: BaseModel, module: str) -> str:
    """Return what plays the battles, with its version, as far as it can be known before the start."""
    if "game_version" in type(args).model_fields:
        from omagd.envs.sc2.install import build_of

        return game_name(build_of(args.game_version))  # type: ignore[attr-defined]
    if module == "omagd.envs.smax":
        return f"jaxmarl {version('jaxmarl')}"
    package = module.partition(".")[0]
    if package == "omagd":
        return f"omagd {omagd.__version__}"
    found = packages_distributions().get(package, [])
    return f"{found[0]} {version(found[0])}" if found else package


def game_name(build: int) -> str:
    """Return how results call the game of a build."""
    return f"StarCraft II {GAME_VERSIONS[build]} ({build})" if build in GAME_VERSIONS else f"StarCraft II ({build})"


def _differing(args: BaseModel) -> dict[str, Any]:
    """Return the arguments that differ from the environment's defaults (for battles SMAC's); nested ones dotted."""
    fields, found = type(args).model_fields, {}
    for name, value in args.model_dump(mode="json").items():
        default: Any = fields[name].get_default(call_default_factory=True) if name in fields else None  # type: ignore[call-arg]
        default = default.model_dump(mode="json") if hasattr(default, "model_dump") else default
        usual = _flat(name, list(default) if isinstance(default, tuple) else default)
        if name not in IRRELEVANT:
            flat = _flat(name, value)
            found.update({key: flat[key] for key in flat if key not in usual or usual[key] != flat[key]})
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: item for part, inner in value.items() for key, item in _flat(f"{name}.{part}", inner).items()}


def _effort(config: Config, world_size: int, environments: int) -> dict[str, Any]:
    """Return how much is learned from how much, and how the result is measured."""
    reads = {"observations": "everything (use_full_obs)" if config.use_full_obs else "each agent's own"}
    if config.evaluate:
        folder = find_step_folder(config.checkpoint_path, config.load_step)
        trained = read_card(run_folder_of(folder))
        asked = config.eval_report_episodes or config.test_nepisode
        known = readable(trained["id"]) if trained else NO_CARD
        return reads | {"trained": known, **_tests(asked, environments)}
    if config.stage in {"stage1", "stage2"} or config.pretrain_only or config.evaluation_only:
        return {
            "environments": environments,
            "graph_pretrain_epochs": config.graph_pretrain_epochs,
            "graph_pretrain_episodes": _whole_rounds(config.graph_pretrain_episodes, environments),
            "graph_pretrain_policy": config.graph_pretrain_policy,
            "effective_batch": config.graph_pretrain_batch_size * world_size,
            "held_out_episodes": _whole_rounds(config.graph_pretrain_eval_episodes, environments),
        }
    return reads | {
        "environments": environments,
        "updates_per_round": config.updates_per_iteration,
        **({"ticks_per_round": config.ticks_per_iteration} if config.runner == "ticks" else {}),
        "effective_batch": config.batch_size * world_size,
        "t_max": config.t_max,
        **({} if config.max_episodes is None else {"max_episodes": config.max_episodes}),
        **_tests(config.test_nepisode, environments),
    }


def _tests(asked: int, environments: int) -> dict[str, Any]:
    return {"test_episodes": _whole_rounds(asked, environments), "greedy": True}


def _whole_rounds(episodes: int, environments: int) -> int:
    return rounds(episodes, environments) * environments


def _precision(config: Config) -> str:
    acting = config.acting_precision
    return config.precision if acting == config.precision else f"{config.precision} (acting {acting})"


def _told(config: Config, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return what the card says without asking that it agrees."""
    import torch

    card = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    keys = ("name", "learner", "mac", "agent", "mixer", "use_graph_reconstruction", "lr_scaling", "seed")
    return {
        **{key: getattr(config, key) for key in keys},
        **{key: values for key in COMPONENT_ARGS if (values := getattr(config, key))},
        "ranks": world_size,
        "device": device.type + card,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions on which the bits of a result depend."""
    import numpy
    import torch

    return {
        "omagd": omagd.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "Python": platform.python_version(),
    }


def _other_args(compared: Mapping[str, Any]) -> list[str]:
    return [key for key in compared if key.startswith("env_args.")]


def _said(compared: Mapping[str, Any], name: str) -> str:
    missing = "as usual" if name.startswith("env_args.") else "none"
    return str(compared[name]) if name in compared else missing
