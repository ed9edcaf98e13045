"""Recordings of battles to test what shows them: played by a policy that knows everything, and made by hand."""

from __future__ import annotations

import json

import numpy as np

from omagd.config.loading import resolve
from omagd.controllers.types import Decision
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Recording
from omagd.runners.runner import Runner, TaskStarts
from omagd.utils.seeding import EpisodeSeeds


class Oracle:
    """A random policy whose reconstructions are the truth: a recorder must show each guess where the unit is."""

    wants_full_obs, field = False, "recon"

    def __init__(self, info, guesses=True, logits=False):
        self.info, self.outputs_logits, self.seen = info, logits, []
        self.reconstructor = self if guesses else None

    def begin(self, n_slots):
        self.rng = np.random.default_rng(5)

    def reset(self, which):
        pass

    def act(self, tick, explore):
        available = tick.observation.avail_actions
        values = self.rng.normal(size=available.shape).astype(np.float32)
        self.seen.append((tick.observation.obs.copy(), values))
        full = tick.observation.full_obs
        return Decision(random_actions(available, self.rng), {} if full is None else {"recon": full.copy()}, values)

    def restore(self, data):
        obs = obs_to_nodes(data["obs"], self.info.layout)
        living = (data["obs"] != 0).any(-1, keepdim=True)
        return data["recon"], ~obs.any(-1) & living  # also of what it believes to be dead


class Diverged(Oracle):
    """An oracle whose values and guesses have become infinite or no numbers."""

    def act(self, tick, explore):
        decision = super().act(tick, explore)
        decision.values[:, 0] = np.nan
        decision.values[:, 1] = np.inf
        if decision.extras:
            decision.extras["recon"][:, 0] *= np.nan
        return decision


def play(name="skirmish", episodes=1, slots=2, policy=Oracle, **env_args):
    """Return the recording of some episodes of an environment, its entries in the log, and the policy."""
    env = make_env(name, env_args, slots, processes=False)
    try:
        made = policy(env.info)
        recorder = Recorder(made, env, env.info, "a <b>policy</b>", most=episodes)
        stream = (
            TaskStarts(3, "test", weights=[1.0] * len(env.info.tasks)) if env.info.tasks else EpisodeSeeds(3, "test")
        )
        runner = Runner(env, resolve("qmix", None, {}), env.info, stream)
        layout = env.info.layout is not None
        log = runner.run(recorder, explore=None, episodes_per_slot=episodes, full_obs=layout, keep=False).log
        recorder.take(log)
        return Recording(episodes=recorder.episodes), [entry for entry in log if entry["slot"] == 0], made
    finally:
        env.close()


def small_recording() -> dict:
    """A recording with everything that a scene can have: two agents, a medic, an opponent, a thing and a wall."""
    moment = {
        "x": [1.0, 2.0, 8.0, 5.0], "y": [1.0, 2.0, 8.0, 5.0], "alive": [True, True, True, False],
        "health": [1.0, 2.0, 0.0, 0.0], "shield": [3.0, 0.0, 0.0, 0.0], "targets": [-1, 0, 1, -1],
        "bodies": [[1.0, 1.0, 1.0, 2.0], [], [], []], "marked": [1], "score": [1.0, 2.0], "actions": [2, 0],
        "values": [[0.5, None, 1.0], [0.0, 0.0, 0.0]], "seen": ["7", "f"], "beliefs": [[[2, 7.0, 7.0, 0.5]], []],
    }  # fmt: skip
    scene = {
        "ids": ["a0", "a1", "e0", "b0"], "teams": [0, 0, 1, 2], "kinds": ["marine", "medic", "marine", "bean"],
        "team_names": ["agents", "enemies", "beans"], "actions": ["stop", "north"], "health_max": [2, 2, 2, 0],
        "shield_max": [4, 0, 0, 0], "heals": [False, True, False, False], "sight": [3, 0], "reach": [2, 0],
        "bounds": [0, 0, 10, 10], "walls": [[3, 3, 4, 5]], "score": "score",
    }  # fmt: skip
    first = {"env": "e", "map_name": "m", "seed": 1, "policy": "p", "values": "Q-values", "results": {}}
    return {"episodes": [{**first, "scene": scene, "moments": [moment, json.loads(json.dumps(moment))]}]}
