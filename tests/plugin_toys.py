"""Plug-ins: the example package in this process, a package with what is required and no more, and our own names."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from omagd import learners
from omagd.modules import graph_reconstructers
from omagd.utils.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, RESEARCH = ROOT / "examples" / "omagd_example", ROOT / "research" / "reconstruction"
CONFIGS, RESEARCH_CONFIGS = EXAMPLE / "omagd_example" / "config", RESEARCH / "omagd_reconstruction" / "config"


def add_example(folder: Path = EXAMPLE) -> None:
    """Register all components of a package, the example, as its entry points do; may be called twice."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    for package in ("envs", "learners", "controllers", "modules.mixers"):
        points = groups.get(f"omagd.{package.removeprefix('modules.')}", {})
        import_module(f"omagd.{package}").REGISTRY._lazy.update(points)
    graph_reconstructers.REGISTRY._lazy.update(groups.get("omagd.predictors", {}))
    learners.PREDICTORS._lazy.update(groups.get("omagd.predictor_learners", {}))


POINTS = """\
[omagd.envs]
my_env = my_package:MyEnv
my_batched = my_package:MyBatched
[omagd.learners]
my_learner = omagd.learners.nq_learner:NQLearner
[omagd.agents]
my_agent = omagd.modules.agents.agent:NRNNAgent
[omagd.runners]
my_runner = omagd.runners.runner:ParallelRunner
[omagd.run]
my_run = omagd.run.run:run
[omagd.config_dirs]
my_package = my_package:CONFIG_DIR
"""

CODE = '''\
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult

CONFIG_DIR = Path(__file__).parent / "my_config"


class MyArgs(BaseModel, extra="forbid", frozen=True):
    size: int = Field(default=5, ge=2)


class MyEnv(MultiAgentEnv):
    """Two walkers on a ring, moved by an unseeded generator."""

    args_model = MyArgs

    def __init__(self, args):
        self.args, self.rng = args, np.random.default_rng()
        self.reset()

    def reset(self, seed=None):
        self.t, self.place = 0, self.rng.integers(0, self.args.size, 2)

    def step(self, actions):
        self.t += 1
        self.place = (self.place + actions + self.rng.integers(0, 2, 2)) % self.args.size
        done = self.t >= 4
        return float(self.place[0] == self.place[1]), done, {"battle_won": done and bool(self.place[0] == 0)}

    def get_obs(self, no_range_limit=False):
        return np.stack([self.place, np.full(2, self.t)], 1).astype(np.float32)

    def get_state(self):
        return np.array([*self.place, self.t], np.float32)

    def get_avail_actions(self):
        return np.ones((2, 3), bool)

    def get_env_info(self):
        return {"n_agents": 2, "n_actions": 3, "obs_shape": 2, "state_shape": 3, "episode_limit": 4}


class MyBatched(BatchedEnv):
    """A clock, batched; it has no snapshots."""

    args_model = MyArgs

    def __init__(self, args, n_slots):
        self.n_slots, self.t, self.info = n_slots, np.zeros(n_slots, int), EnvInfo("my_batched", "", 2, 3, 2, 3, 4)

    def reset(self, which, seeds):
        self.t[which] = 0

    def step(self, actions, active):
        self.t += active
        done = active & (self.t >= 4)
        return StepResult(active.astype(np.float32), done, np.zeros(self.n_slots, bool), {"battle_won": done * 1.0})

    def observe(self, full=False):
        clock = np.tile(self.t[:, None, None], (1, 2, 3)).astype(np.float32)
        return Observation(clock[..., :2], clock[:, 0], np.ones(clock.shape, bool), clock[..., :2] if full else None)
'''


def install(site: Path) -> None:
    """Put the package into `site`, a folder on Python's path, as pip would."""
    files = {
        "my_package.py": CODE,
        "my_config/algs/mine.yaml": "learner: my_learner\nmac: n_mac\n",
        "my_config/envs/ring.yaml": "env: my_env\nenv_args:\n  size: 4\n",
        "my_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n",
        "my_package-1.0.dist-info/entry_points.txt": POINTS,
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def own_names(registry: Registry) -> list[str]:
    """Return the names of a registry that this repository defines, sorted."""
    plugins = {point.name for point in entry_points(group=registry.group)}
    return sorted(name for name, place in registry._lazy.items() if place.startswith("omagd.") and name not in plugins)
