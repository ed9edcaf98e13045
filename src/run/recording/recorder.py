"""`Recorder`: a policy that acts as another one does and records the episodes of one slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from omagd.components.action_selectors import log_softmax
from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.controllers.types import Decision, Exploration, Policy, Tick
from omagd.envs.frames import AGENTS, Frame
from omagd.envs.protocol import LOST_IN_A_ROW, BatchedEnv
from omagd.modules.graph_reconstructers.graphs import NO_UNIT, obs_to_nodes, units_of_nodes
from omagd.run.recording.recording import FARTHEST, Belief, Episode, Moment, Number, number_of

Views = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Nodes [n, N, D] that the agents see, those with guesses, and which ones [n, N] are guesses."""


def views_of(policy: Any, info: EnvInfo, tick: Tick, decision: Decision) -> Views | None:
    """Return what the agents of slot 0 see and guess at the last tick; None where observations have no units.

    Called before the next tick: what a head says is read from the memory with which the agents have just acted.
    policy: a controller, or scripts, which read `obs`. info: facts of what it plays.
    """
    layout, shown = info.layout, tick.observation
    if layout is None:
        return None
    head, fills, read = (getattr(policy, name, None) for name in ("head", "reconstructor", "read"))
    first = torch.from_numpy(np.array((shown.obs if read is None else read(shown))[:1]))
    nodes = obs_to_nodes(first[0], layout).numpy()
    if head is not None:
        made, guessed = head.filled(first, policy.snapshot()["hidden"][:1])
    elif fills is None or (stored := decision.extras.get(fills.field)) is None:
        return nodes, None, None
    else:
        made, guessed = fills.restore({"obs": first, fills.field: torch.from_numpy(np.array(stored[:1]))})
    return nodes, obs_to_nodes(made[0], layout).cpu().numpy(), guessed[0].cpu().numpy()


class Recorder:
    """Acts as `policy` and records slot 0 of `env`.

    Args:
        policy: a controller. env: what it plays. info: facts of `env`. name: of the policy, for the title. most:
            episodes that each `take` keeps, the first ones.

    Attributes:
        episodes: that were kept.
    """

    def __init__(self, policy: Policy, env: BatchedEnv, info: EnvInfo, name: str, most: int = 10) -> None:
        self._policy, self._env, self._info, self._name, self._most = policy, env, info, name, most
        self._logits = bool(getattr(policy, "outputs_logits", False))
        self._found: list[tuple[Frame, list[Moment]]] = []
        self._open: list[Moment] = []
        self.episodes: list[Episode] = []

    @property
    def wants_full_obs(self) -> bool:
        """Whether the policy reads `full_obs`."""
        return self._policy.wants_full_obs

    def begin(self, n_slots: int) -> None:
        """Prepare for B = `n_slots` slots."""
        self._policy.begin(n_slots)
        self._open = []

    def reset(self, which: np.ndarray) -> None:
        """Reset the memory of the slots `which` [B] bool, where episodes start."""
        self._policy.reset(which)
        if which[0]:
            self._open = []

    def refresh(self) -> None:
        """Use the newest weights."""
        self._policy.refresh()

    def snapshot(self) -> dict[str, Any]:
        """Return the policy's memory; recordings are not part of it."""
        return self._policy.snapshot()

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot`."""
        self._policy.load_snapshot(snapshot)

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose actions as the policy does, and record the moment."""
        decision = self._policy.act(tick, explore)
        if tick.active[0] and (self._open or len(self._found) < self._most + LOST_IN_A_ROW):
            self._record(tick, decision)
        return decision

    def take(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Keep the episodes that were recorded since the last time; `log`: the entries of their `Rollout`.

        Episodes that were lost have no entry and are left out.
        """
        waiting, self._found, kept = iter(self._found), [], 0
        for entry in (entry for entry in log if entry["slot"] == 0):
            found = next((each for each in waiting if len(each[1]) == entry["length"] + 1), None)
            if found is None or kept == self._most:
                break
            values = {name: float(entry[name]) for name in entry.keys() - {"slot", "seed", "length", "task"}}
            results = {name: value for name, value in values.items() if np.isfinite(value)}
            episode = Episode.model_construct(
                env=self._info.name, map_name=str(entry.get("task", self._info.map_name)), seed=int(entry["seed"]),
                policy=self._name, values="probabilities" if self._logits else "Q-values",
                results=dict(sorted(results.items())), scene=found[0].scene, moments=found[1],
            )  # fmt: skip
            self.episodes.append(episode)
            kept += 1

    def _record(self, tick: Tick, decision: Decision) -> None:
        # First: the observation is valid until the environment's next call.
        views = views_of(self._policy, self._info, tick, decision)
        frame = self._env.frame(0)
        n = frame.scene.teams.count(0)
        available = tick.observation.avail_actions[0, :n]
        if not self._open:
            self._found.append((frame, self._open))
        parts = {name: value for name, value in frame.to_dict().items() if name != "scene"}
        layout = self._info.layout
        seen, beliefs = ([], []) if views is None or layout is None else seen_and_believed(layout, views, frame)
        self._open.append(
            Moment.model_construct(
                **parts,
                actions=decision.actions[0, :n].tolist() if self._info.box is None else [],
                values=self._values(decision, available, n),
                seen=seen,
                beliefs=beliefs,
            )
        )

    def _values(self, decision: Decision, available: np.ndarray, n: int) -> list[list[Number | None]]:
        """Return the policy's values of the available actions, [n][A]."""
        if decision.values is None or self._info.box is not None:
            return []
        values = np.asarray(decision.values[0, :n], np.float64)
        if self._logits:
            values = probabilities(values, available)
        rows = zip(np.round(values, 4).tolist(), available.tolist(), strict=True)
        return [[number_of(value) if may else None for value, may in zip(row, mask, strict=True)] for row, mask in rows]


def seen_and_believed(layout: EntityLayout, views: Views, frame: Frame) -> tuple[list[str], list[list[Belief]]]:
    """Return `Moment.seen` and `Moment.beliefs` of a frame. views: of its agents and of agents that it lacks."""
    (nodes, made, guessed), n = views, frame.scene.teams.count(AGENTS)
    units, living = units_of_nodes(layout, n), nodes[:n].any((1, 2)) & np.array(frame.alive[:n])
    sees = nodes[:n].any(-1) & living[:, None] & (units < len(frame.x)) & (units != NO_UNIT)
    seen = [hex(sum(1 << unit for unit in units[i][sees[i]].tolist()))[2:] for i in range(n)]
    if made is None or guessed is None:
        return seen, []
    takes = guessed[:n] & made[:n].any(-1) & living[:, None] & (units < len(frame.x)) & (units != NO_UNIT)
    sight = np.array([one or layout.sight for one in frame.scene.sight or [0.0] * n])
    way = made[:n][..., list(layout.position)].astype(np.float64) * sight[:, None, None]
    place = _within(np.round(np.array([frame.x[:n], frame.y[:n]]).T[:, None] + way, 1), -FARTHEST, FARTHEST)
    health = np.round(_within(made[:n, :, layout.health].astype(np.float64), 0, 1), 2)
    beliefs: list[list[Belief]] = [[] for _ in range(n)]
    for i, node in np.argwhere(takes).tolist():
        unit = int(units[i, node])
        known = layout.health >= 0 and any(frame.scene.health_max) and frame.scene.health_max[unit] > 0
        x, y = map(number_of, place[i, node].tolist())
        share = number_of(health[i, node].item()) if known else None
        beliefs[i].append((unit, x, y, share))
    return seen, beliefs


def probabilities(logits: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Return the probabilities of actions, [n, A], 0 where one is not available [n, A]."""
    with np.errstate(invalid="ignore"):  # of a diverged policy
        return np.exp(log_softmax(logits, available))


def _within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return values between two bounds; NaN and infinities stay what they are."""
    return np.where(np.isfinite(values), values.clip(low, high), values)
