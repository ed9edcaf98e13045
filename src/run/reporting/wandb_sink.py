"""Sends values to Weights & Biases (`use_wandb=True`): one W&B run per stage, grouped; offline without a key.

A kill costs W&B what it has not written yet: up to 15 s, and always the last step. So a start that resumes reads the
last step from W&B's files and sends every later line of `metrics.jsonl`: the files together have each step once. Steps
that W&B's server has got online it ignores.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from omagd.config.loading import base_values, config_names
from omagd.config.schema import COMPONENT_ARGS
from omagd.run.reporting.card import COVERED, METHOD, ROUNDING, flattened, recorded_of
from omagd.run.reporting.log_sinks import logged_before
from omagd.run.run_folder import keep_json, plain, read_entry, unlinked
from omagd.utils.logging import Record, RunFacts, Sink
from omagd.utils.storage import listed, opened

LOCAL_SECONDS, INIT_SECONDS, AGAIN_SECONDS = 120.0, 30.0, 3600.0
"""How long to wait for W&B's own process (a busy machine starts it late) and for the server; after a server's failure
no run of this process waits for it again that long.
"""

BEST = frozenset({"test_battle_won_mean", "test_return_mean"})
"""Values whose maximum W&B's summary gets as `best_<name>`: with `define_metric` their own entry would be no number."""

APART = frozenset({"name", "test_nepisode", "acting_precision"})
"""Keys of the card that tell no methods apart in the names of groups."""

BLOCK = 1 << 15
EXIT_CODES = {"completed": 0, "interrupted": 130}
LONGEST_NAME, LONGEST_TAG = 128, 64
"""Characters of a project or group and of a tag that W&B accepts."""


class WandbSink(Sink):
    """Logs values to W&B with the stage's clock as step. Errors are logged; training continues.

    `unreachable_at` is when the service could last not be reached, on the monotonic clock: within `AGAIN_SECONDS` no
    other run of this process waits for it.
    """

    name = "W&B"
    unreachable_at: ClassVar[float] = -math.inf

    def __init__(self) -> None:
        self._run: Any = None
        self._stage = ""
        self._best: dict[str, float] = {}

    def _open(self, facts: RunFacts) -> None:
        if "wandb" not in sys.modules:  # the service of a parent process may be gone, or hold the id of a killed run
            os.environ.pop("WANDB_SERVICE", None)
        import wandb  # noqa: F401  (fail at the start, not at the first log)

        unlinked(facts.folder, "wandb")
        self._mode, self._sent = "", -1
        self._note = facts.folder / "wandb.json"
        own = read_entry(self._note)
        if not own and (facts.folder / "wandb").is_dir():
            own = self.saved  # of a version that kept them in the checkpoints
            if self._note.exists():
                logging.getLogger("omagd").warning("W&B: %s is damaged: the run gets a W&B run of its own", self._note)
        ids = own.get("ids")
        self._ids = {str(stage): str(name) for stage, name in ids.items()} if isinstance(ids, dict) else {}
        self._projects: dict[str, str] = dict(own.get("projects", {}))
        # A resumed run stays where it is; versions without the key `wandb_naming` used the published names.
        self._naming = str(own.get("naming", "published") if self._ids else facts.config.get("wandb_naming"))
        ended = {*list(self._ids)[:-1]}
        logged = logged_before(facts.folder)
        self._earlier = [record for record in logged if record.stage not in ended]

    def _log(self, record: Record) -> None:
        self._send_earlier()
        self._send(record)

    def _send_earlier(self) -> None:
        """Send what earlier starts have logged, if W&B has not got it."""
        earlier, self._earlier = self._earlier, []
        for record in earlier:
            self._send(record)

    def _send(self, record: Record) -> None:
        if self._run is None or record.stage != self._stage:
            self._finish(0)
            self._start(record.stage)
        for name in BEST & record.values.keys():
            if record.values[name] > self._best.get(name, -math.inf):
                self._best[name] = self._run.summary[f"best_{name}"] = record.values[name]
        if record.t > self._sent:
            self._run.log(dict(record.values), step=record.t)
        elif record.t == self._sent:  # the run was stopped after its last step, before its last results
            self._run.summary.update(record.values)

    def _picture(self, name: str, path: Path, record: Record) -> None:
        import wandb

        if self._run is not None and record.stage == self._stage and record.t > self._sent:
            moving = path.suffix == ".gif"
            shown = wandb.Video(str(path), format="gif") if moving else wandb.Image(str(path))
            self._run.log({name: shown}, step=record.t)

    def _close(self, exit_state: str) -> None:
        if exit_state == "completed":  # else the next start sends it
            self._send_earlier()
        self._finish(EXIT_CODES.get(exit_state, 1))

    def _start(self, stage: str) -> None:
        """Start the W&B run of a stage; offline without a key, and where the service could not be reached before."""
        self._stage = stage
        if stage not in self._ids:
            self._ids[stage] = secrets.token_hex(4)
            self._projects[stage] = names(self.facts, stage, self._naming)[0]
            keep_json(self._note, {"ids": self._ids, "naming": self._naming, "projects": self._projects})
        where = f"recording offline under {self.facts.folder / 'wandb'} (`wandb sync` uploads it)"
        log = logging.getLogger("omagd")
        if not self._mode:
            self._mode = choose_mode()
            if self._mode == "online" and time.monotonic() - WandbSink.unreachable_at < AGAIN_SECONDS:
                self._mode = "offline"
                log.warning("W&B could not be reached before, %s", where)
            elif self._mode == "offline" and not os.environ.get("WANDB_MODE"):
                log.info("W&B: no key found, %s", where)
        try:
            self._run = self._init(self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            log.warning("W&B cannot be reached, %s: %s", where, " ".join(str(error).split())[:200])
            self._mode, WandbSink.unreachable_at = "offline", time.monotonic()
            _forget()
            self._run = self._init(self._mode)
        files = ("offline-run-",) if self._mode == "online" else ("offline-run-", "run-")
        on_disk = last_step(self.facts.folder / "wandb", self._ids[stage], files)
        self._sent = max(on_disk, getattr(self._run, "starting_step", 0) - 1)  # online: after what the server has

    def _init(self, mode: Any) -> Any:
        import wandb

        facts = self.facts
        project, group, tags = names(facts, self._stage, self._naming)
        project = self._projects.get(self._stage, project)  # a resumed run may have other ranks
        published = self._naming == "published"
        shown = f" {self._stage}" * bool(facts.config.get("use_graph_reconstruction"))
        about = {"stage": self._stage, "world_size": facts.world_size, "token": facts.token, "card": facts.card}
        about["made_by"] = facts.made_by
        return wandb.init(
            id=self._ids[self._stage],
            resume="allow",
            project=project,
            entity=facts.config.get("wandb_entity") or None,
            group=group,
            name=f"{facts.token}_{self._stage}" if published else f"seed {facts.config.get('seed')}{shown}",
            job_type=self._stage,
            tags=tags,
            config={**facts.config, **about, "method": method_of(facts)},
            dir=str(facts.folder),
            mode=mode,
            reinit="finish_previous",
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=INIT_SECONDS, x_service_wait=LOCAL_SECONDS
            ),
        )

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)


def _forget() -> None:
    """End W&B's service, which holds the id of a run that could not begin online."""
    import wandb

    with suppress(SystemExit):  # how W&B reports that its service had failed
        wandb.teardown()


def last_step(folder: Path, name: str, prefixes: tuple[str, ...]) -> int:
    """Return the last step in the files of a W&B run; -1 if there is none. No link is followed.

    Args:
        folder: `wandb/` of the run's folder. name: id of the W&B run. prefixes: of the names of folders to look in.
    """
    last = -1
    for place in listed(folder):
        if place.name.startswith(prefixes) and place.is_dir(follow_symlinks=False):
            last = max([last, *_steps(Path(place.path) / f"run-{name}.wandb")])
    return last


def _steps(path: Path) -> Iterator[int]:
    """Yield the steps in a W&B file until its end or a damaged record.

    The file is a LevelDB log of protocol buffers: 7 bytes and blocks of 32 KiB with pieces of records, each behind its
    checksum (4 bytes), size (2) and kind (1): 1 whole, 2 first, 3 middle, 4 last. Fewer than 7 bytes at the end of a
    block are unused. Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record as Entry  # type: ignore[attr-defined]

    with suppress(OSError, DecodeError), opened(path, os.O_NOFOLLOW | os.O_NONBLOCK) as handle:
        at, whole = 7, b""
        while block := os.pread(handle, BLOCK - at % BLOCK, at):
            at += len(block)
            while len(block) >= 7:
                size, kind = struct.unpack_from("<4xHB", block)
                if kind not in (1, 2, 3, 4) or 7 + size > len(block):
                    return
                whole, block = whole + block[7 : 7 + size], block[7 + size :]
                if kind in (1, 4):
                    entry, whole = Entry.FromString(whole), b""
                    if entry.HasField("history"):
                        yield entry.history.step.num


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
        project, group = f"{facts.env} {facts.map_name}".strip(), f"{method_of(facts, *changes(facts))}_{stage}_{ranks}"
        tags = [stage, ranks, facts.name, method_of(facts)]
    valid = facts.config.get("wandb_project") or re.sub(r"[/\\#?%:\s]+", "_", project)[:LONGEST_NAME]
    return valid, group[-LONGEST_NAME:], [tag[:LONGEST_TAG] for tag in dict.fromkeys(tags) if tag]


def changes(facts: RunFacts) -> list[str]:
    """Return the keys that make this another method than its preset, as key=value; not those of machine and length."""
    known = {*METHOD, *COMPONENT_ARGS, *recorded_of(facts.card).get("settings", {}), *COVERED} - ROUNDING - APART
    preset = facts.name if facts.name in config_names("algs") else None
    usual = flattened({key: value for key, value in base_values(preset).items() if key in known})
    here = flattened({key: value for key, value in facts.config.items() if key in known})
    return [f"{key}={value}" for key, value in here.items() if plain(value) != plain(usual.get(key))]


def method_of(facts: RunFacts, *words: str) -> str:
    """Return the name of the configuration and `words`, with the card's hash of the method if there is one."""
    return "_".join(filter(None, (" ".join([facts.name or "run", *words]), str(facts.card.get("method", "")))))


def choose_mode() -> str:
    """Return the W&B mode: WANDB_MODE if it is set, else online with a key and offline without one."""
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Return whether W&B has a key for its server, wherever it looks for one; a damaged one counts."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.errors.AuthenticationError:  # at its start W&B says what is wrong with it
        return True
