"""Sends values to Weights & Biases (`use_wandb=True`): one W&B run per stage, grouped; offline without a key."""

from __future__ import annotations

import logging
import netrc
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from omagd.utils.logging import Record, RunFacts, Sink
from omagd.utils.metrics import of_maps

EXIT_CODES = {"completed": 0, "interrupted": 130}
LONGEST_NAME, LONGEST_TAG = 128, 64
"""Characters of a project or group and of a tag that W&B accepts."""


class WandbSink(Sink):
    """Logs values to W&B with the stage's clock as step. Errors are logged; training continues."""

    name = "W&B"

    def __init__(self) -> None:
        self._run: Any = None
        self._stage = ""

    def _open(self, facts: RunFacts) -> None:
        self._ids: dict[str, str] = dict(self.saved.get("ids", {}))
        # A resumed run stays where it is; versions without the key `wandb_naming` used the published names.
        self._naming: str = self.saved.get("naming", "published") if self._ids else facts.wandb_naming
        import wandb  # noqa: F401  (fail at the start, not at the first log)

    def state_dict(self) -> dict[str, Any]:
        """Return the W&B id of each stage's run and their naming; a resumed run keeps both."""
        return {"ids": dict(self._ids), "naming": self._naming}

    def _log(self, record: Record) -> None:
        if self._run is None or record.stage != self._stage:
            self._finish(0)
            self._start(record.stage)
        values: dict[str, Any] = dict(record.values)
        if maps := of_maps(record.values):
            values["maps"] = _table(maps)
        self._run.log(values, step=record.t)

    def _picture(self, name: str, path: Path, record: Record) -> None:
        import wandb

        if self._run is not None and record.stage == self._stage:
            moving = path.suffix == ".gif"
            shown = wandb.Video(str(path), format="gif") if moving else wandb.Image(str(path))
            self._run.log({name: shown}, step=record.t)

    def _close(self, exit_state: str) -> None:
        self._finish(EXIT_CODES.get(exit_state, 1))

    def _start(self, stage: str) -> None:
        """Start the W&B run of a stage, offline if the service cannot be reached."""
        mode, log = choose_mode(), logging.getLogger("omagd")
        if mode == "offline" and not os.environ.get("WANDB_MODE") and not self._stage:
            place = self.facts.folder / "wandb"
            log.info("W&B: no key found, recording offline under %s (`wandb sync` uploads it)", place)
        self._stage = stage
        self._ids.setdefault(stage, secrets.token_hex(4))
        try:
            self._run = self._init(mode)
        except Exception as error:
            if mode != "online":
                raise
            log.warning("W&B cannot be reached, recording offline: %s", " ".join(str(error).split())[:200])
            self._run = self._init("offline")

    def _init(self, mode: Any) -> Any:
        import wandb

        facts = self.facts
        project, group, tags = names(facts, self._stage, self._naming)
        about = {"stage": self._stage, "world_size": facts.world_size, "token": facts.token, "card": facts.card}
        about["made_by"] = facts.made_by
        return wandb.init(
            id=self._ids[self._stage],
            resume="allow",
            project=project,
            entity=facts.wandb_entity or None,
            group=group,
            name=f"{facts.token}_{self._stage}",
            job_type=self._stage,
            tags=tags,
            config={**facts.config, **about, "method": method_of(facts)},
            dir=str(facts.folder),
            mode=mode,
            reinit="finish_previous",
            settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        )

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)


def _table(maps: Mapping[str, Mapping[str, float]]) -> Any:
    """Return a W&B table with a row for each map; a value that a map lacks is empty."""
    import wandb

    names = sorted({name for values in maps.values() for name in values})
    rows = [[task, *(values.get(name) for name in names)] for task, values in maps.items()]
    return wandb.Table(columns=["map", *names], data=rows)


def names(facts: RunFacts, stage: str, naming: str) -> tuple[str, str, list[str]]:
    """Return W&B's project, group and tags of a stage; `wandb_project` replaces the project.

    `environment`: a project for each environment and map; a group has the repetitions of one method with other seeds.
    `published`: a project for each map, stage and number of ranks; a group has the stages of a run.
    """
    ranks = f"ddp{facts.world_size}"
    if naming == "published":
        kind = "exp" if stage == "stage3" else f"reconstruction_{stage}"
        project, group = f"{facts.map_name or facts.env}_{kind}_{ranks}", facts.token
        tags = [facts.env, facts.map_name, stage]
    else:
        project, group = f"{facts.env} {facts.map_name}".strip(), f"{method_of(facts)}_{stage}_{ranks}"
        tags = [stage, ranks, facts.name, method_of(facts)]
    valid = facts.wandb_project or re.sub(r"[/\\#?%:\s]+", "_", project)[:LONGEST_NAME]
    return valid, group[-LONGEST_NAME:], [tag[:LONGEST_TAG] for tag in dict.fromkeys(tags) if tag]


def method_of(facts: RunFacts) -> str:
    """Return the name of the configuration, with the card's hash of the method if there is one."""
    return "_".join(filter(None, (facts.name or "run", str(facts.card.get("method", "")))))


def choose_mode() -> str:
    """Return the W&B mode: WANDB_MODE if it is set, else online with a key and offline without one."""
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Return whether there is a W&B key in the environment or in the netrc file; the key itself is not used."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    default = Path.home() / ("_netrc" if sys.platform == "win32" else ".netrc")
    try:
        return netrc.netrc(os.environ.get("NETRC", str(default))).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
