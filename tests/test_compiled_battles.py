"""Compiled battles: NumPy's rules and recorded battles bit for bit, snapshots, mistakes, and the cache of kernels.

`test_smac_parity` compares them with SMAC itself, `test_simulator` with numbers computed by hand.
"""

import copy
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
from battle_toys import JudgedByNumPy

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled import compiler
from omagd.envs.battle.compiled.engine import SIGHT
from omagd.envs.battle.compiled.movement import STOP_SHORT
from omagd.envs.battle.compiled.tables import OFFSET_X, OFFSET_Y
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.protocol import random_actions
from omagd.utils import compiling
from omagd.utils.seeding import splitmix64

SLOTS = 6
SCRIPTS = ("attack_nearest", "focus_fire", "kiting")
SHOWN = ("avail_actions", "obs", "full_obs", "state")
RESULTS = ("reward", "terminated", "truncated", "info")
ALL = dict(
    obs_all_health=True, obs_own_health=True, obs_last_action=True, obs_pathing_grid=True, obs_terrain_height=True,
    obs_timestep_number=True, state_timestep_number=True, continuing_episode=True, move_amount=1.5,
    reward_only_positive=False, reward_negative_scale=0.3, reward_death_value=7.0, reward_defeat=-3.0,
)  # fmt: skip
FEW = dict(
    obs_all_health=False, obs_own_health=False, obs_instead_of_state=True, state_last_action=False, reward_sparse=True
)
OTHERS = dict(reward_shield_fix=True, reward_scale=False, difficulty="A")


def both(**args):
    """Return the environment that NumPy judges and the compiled one."""
    pair = JudgedByNumPy(SkirmishArgs(**args), SLOTS), SkirmishEnv(SkirmishArgs(**args), SLOTS)
    assert [type(env.rules()).__name__ for env in pair] == ["BattleSemantics", "CompiledSemantics"]
    return pair


def assert_equal(mine, other, what):
    """Compare two arrays or nested dictionaries of them: types and bits."""
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), what
        for name in mine:
            assert_equal(mine[name], other[name], f"{what}.{name}")
    elif isinstance(mine, np.ndarray):
        assert mine.dtype == other.dtype and mine.shape == other.shape, what
        assert np.array_equal(mine, other), f"{what}: {np.argwhere(mine != other)[:3].tolist()}"
    else:
        assert mine == other, what


def assert_equal_parts(names, one, other, step=0):
    for name in names:
        assert_equal(getattr(one, name), getattr(other, name), f"{name} of step {step}")


def play(envs, steps, seed=0, begin=True):
    """Play the same actions in both environments, and compare everything that they return."""
    rng, one = np.random.default_rng(seed), envs[0]
    seeds = 1000 * seed + np.arange(SLOTS)
    if begin:
        for env in envs:
            env.reset(np.ones(SLOTS, bool), seeds)
    for step in range(steps):
        shown = [env.observe(full=True) for env in envs]
        assert_equal_parts(SHOWN, *shown, step)
        # Scripts fight and kill; random actions reach what scripts avoid.
        choose = [env.scripted_actions(SCRIPTS[step % 3], rng) for env in envs]
        assert_equal(*choose, f"script of step {step}")
        actions = random_actions(shown[0].avail_actions, rng) if step % 4 == 3 else choose[0]
        active = ~one.rules().ended if step % 5 else ~one.rules().ended & (rng.random(SLOTS) < 0.7)
        results = [env.step(actions, active) for env in envs]
        assert_equal_parts(RESULTS, *results, step)
        over = results[0].terminated
        if over.any():
            seeds = seeds + 100
            for env in envs:
                env.reset(over, seeds)
    assert_equal(*(env.snapshot() for env in envs), "snapshot")
    assert_equal(*(env.rules().state_parts() for env in envs), "state_parts")
    assert_equal(*(env.rules().visibility() for env in envs), "visibility")
    assert envs[0].frame(1) == envs[1].frame(1)
    assert envs[0].get_stats() == envs[1].get_stats()


@pytest.mark.parametrize(("map_name", "args"), [
    ("3s5z", ALL), ("MMM2", FEW), ("corridor", OTHERS), ("so_many_baneling", FEW), ("2c_vs_64zg", OTHERS),
    ("MMM2", ALL), ("3s_vs_5z", OTHERS), ("3s5z", FEW), ("2c_vs_64zg", ALL), ("2s4z", {}), ("9m_vs_10m", {}),
    ("1c3s5z", {"start": "hidden", "sight_range": 4.3}), ("8m", {"start": "mixed", "sight_range": 12}),
    ("MMM", {"start": "mixed", "sight_range": 6}), ("3m", {"start": "hidden", "sight_range": 2}),
])  # fmt: skip
def test_kernels_obey_rules_and_flags_as_numpy_does(map_name, args):
    play(both(map_name=map_name, **args), 24, seed=1)


# CRC of all units after 60 steps, from two implementations that agreed. Maps that SMAC's recordings do not cover.
AS_BEFORE = {
    "MMM": 4261443349, "MMM2": 1379015264, "2M4m1d_vs_8m": 590736781, "9m_vs_10m": 4123205703,
    "8m_vs_9m mixed": 855563156, "3s_vs_5z hidden": 298279921, "corridor formation 3": 2745658154,
}  # fmt: skip


@pytest.mark.parametrize("words", AS_BEFORE)
def test_battles_go_on_as_they_have_always_gone(words):
    """The physics of healing, of other starts and of maps from names; most maps: `test_smac_parity`."""
    assert digest_of_battles(words) == AS_BEFORE[words]


def digest_of_battles(words):
    keys = dict(zip(("map_name", "start", "difficulty"), words.split(), strict=False))
    env, rng = SkirmishEnv(SkirmishArgs(**keys), SLOTS), np.random.default_rng(4)
    env.reset(np.ones(SLOTS, bool), np.arange(SLOTS))
    for step in range(60):
        mask = env.observe().avail_actions
        actions = random_actions(mask, rng) if step % 4 == 3 else env.scripted_actions(SCRIPTS[step % 3], rng)
        over = env.step(actions, np.ones(SLOTS, bool)).terminated
        if over.any():
            env.reset(over, 10 * step + np.arange(SLOTS))
    units = env.snapshot()["simulator"]
    return zlib.crc32(units["floats"].tobytes() + units["ints"].tobytes())


@pytest.mark.parametrize("name", ["27m_vs_30m", "2c_vs_64zg", "64m"])
def test_a_unit_that_stops_within_its_reach_can_fire_whatever_the_numbers_of_both(name):
    env = SkirmishEnv(SkirmishArgs(map_name=name), 1)
    x, y = env.rules()._backend.tables.unit[[OFFSET_X, OFFSET_Y], : len(env.rules().frame(0).x)]
    apart = np.hypot(x[:, None] - x, y[:, None] - y)[~np.eye(len(x), dtype=bool)]
    assert 0 < apart.min() and apart.max() < STOP_SHORT


@pytest.mark.parametrize("left", ["medivac", "both medivacs", "marine", "nobody"])
def test_who_is_left_decides_alike_where_medivacs_heal(left):
    envs = both(map_name="MMM2")
    n = envs[0].info.n_agents
    kinds = envs[0].spec.allies + envs[0].spec.enemies
    medivacs = {i for i, kind in enumerate(kinds) if kind == "medivac"}
    theirs = {i for i in medivacs if i >= n}
    survivors = {"medivac": theirs, "both medivacs": medivacs, "marine": {0, n}, "nobody": set()}[left]
    dead = [i for i in range(len(kinds)) if i not in survivors and (i >= n or left in ("both medivacs", "nobody"))]
    for env in envs:
        env.reset(np.ones(SLOTS, bool), np.arange(SLOTS))
        snapshot = env.snapshot()
        snapshot["simulator"]["floats"][2, dead] = 0  # health
        snapshot["simulator"]["ints"][2, dead] = 0  # alive
        snapshot["semantics"]["steps"][::2] = env.info.episode_limit - 1  # who ends a battle then did not run into it
        env.restore(snapshot)
    masks = [env.observe().avail_actions for env in envs]
    one, other = (env.step(np.where(masks[0][..., 1], 1, 0), np.ones(SLOTS, bool)) for env in envs)
    assert_equal_parts(RESULTS, one, other)
    # An enemy's medivac alone has lost, and so have allies of whom only medivacs are left.
    assert one.terminated.all() == (left != "marine") and one.info["battle_won"].all() == (left == "medivac")


def test_copies_continue_on_their_own():
    """By a snapshot, as pickles do."""
    env = SkirmishEnv(SkirmishArgs(map_name="2s3z"), SLOTS)
    env.reset(np.ones(SLOTS, bool), np.arange(SLOTS))
    start, other = env.snapshot(), copy.deepcopy(env)
    assert other.seed() == env.seed()
    play((other, env), 6, begin=False)
    for _ in range(3):  # the copy alone
        other.observe()
        other.step(other.scripted_actions("attack_nearest", np.random.default_rng(0)), np.ones(SLOTS, bool))
    assert env.snapshot()["semantics"]["steps"].max() == 6
    env.restore(start)
    assert other.snapshot()["semantics"]["steps"].min() > 3
    with pytest.raises(ValueError, match=f"10 units in 2 slots, not 10 in {SLOTS}"):
        env.restore(SkirmishEnv(env.args, 2).snapshot())


@pytest.mark.parametrize("action", [0, 7, -1, 99])
def test_mistakes_are_the_same_errors(action):
    def said(call):
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    texts = []
    for env in both(map_name="3m"):
        env.reset(np.ones(SLOTS, bool), np.arange(SLOTS))
        env.observe()
        actions = np.ones((SLOTS, 3), np.int64)
        actions[4, 2] = action
        texts.append(said(lambda env=env, actions=actions: env.step(actions, np.ones(SLOTS, bool))))
        # Nothing has happened, and inactive slots may hold anything.
        env.step(actions, np.arange(SLOTS) != 4)
        env.rules().drop(np.arange(SLOTS) == 1)
        texts.append(said(lambda env=env, actions=actions: env.step(actions, np.arange(SLOTS) < 2)))
    assert texts[:2] == texts[2:] and "slot 4, agent 2" in texts[0] and "reset them first" in texts[1]


@pytest.mark.parametrize(("method", "arguments", "error"), [
    ("step", (np.ones((SLOTS - 1, 3), int), np.ones(SLOTS, bool)), ValueError),
    ("step", (np.full((SLOTS, 3), 1.7), np.ones(SLOTS, bool)), TypeError),
    ("step", (np.ones((SLOTS, 3), int), np.ones(SLOTS, int)), TypeError),
    ("reset", (np.ones(50_000, bool), np.arange(SLOTS)), ValueError),
])  # fmt: skip
def test_wrong_shapes_and_types_are_rejected(method, arguments, error):
    """Kernels read memory without checks: another shape would read or write somebody else's."""
    env = SkirmishEnv(SkirmishArgs(map_name="3m"), SLOTS)
    env.reset(np.ones(SLOTS, bool), np.arange(SLOTS))
    env.observe()
    before = env.snapshot()
    with pytest.raises(error, match="must"):
        getattr(env, method)(*arguments)
    assert_equal(env.snapshot(), before, "snapshot")


def test_the_scripted_enemy_sees_further_with_each_difficulty_up_to_seven():
    assert [SIGHT[level] for level in "123456789A"] == [6, 6.5, 7, 7.5, 8, 8.5, 9, 9, 9, 9]


ADDER = """
    import sys
    import numpy as np
    sys.path.insert(0, {folder!r})
    from adder import compiler, add, bonus
    compiler.prepare(lambda: add(np.array([1, 2])))
    print(add(np.array([3, 4])), sum(add.stats.cache_hits.values()))
    print("bonus", bonus())
    try:
        add(np.array([1.5, 2.5]))
    except TypeError:
        print("no other types")
"""
SOURCE = """
from pathlib import Path
from bonus import BONUS
from omagd.utils.compiling import Compiler
compiler = Compiler(Path(__file__).parent, "sums", "1 s")
@compiler.function
def bonus():
    return BONUS
@compiler.kernel
def add(values):
    return values[0] + values[1] + bonus()
"""


def source_of(folder, bonus):
    """Write a package with a kernel; return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adder.py").write_text(SOURCE)
    (folder / "bonus.py").write_text(f"BONUS = {bonus}\n")
    return folder


def run_adder(folder, cache):
    code = textwrap.dedent(ADDER).format(folder=str(folder))
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n"), done.stderr


@pytest.mark.processes
def test_kernels_are_compiled_once_until_their_source_or_their_files_change(tmp_path):
    cache, source = tmp_path / "cache", source_of(tmp_path / "source", 0)
    answer = ["7 0", "bonus 0", "no other types"]
    first, second = run_adder(source, cache), run_adder(source, cache)
    assert first[0][:3] == answer and "Compiling the sums, once" in first[1]
    assert second == (["7 1", *answer[1:], ""], "")
    (data,), (done,) = cache.rglob("*.nbc"), cache.rglob("done")
    data.write_bytes(bytes(byte ^ (at % 1000 == 999) for at, byte in enumerate(data.read_bytes())))
    out, err = run_adder(source, cache)
    assert out[:3] == answer and "damaged files" in err and "Compiling the sums, once" in err
    done.unlink()  # a process was killed while it compiled: its files may be of any length
    data.write_bytes(b"")
    out, err = run_adder(source, cache)
    assert out[:3] == answer and "damaged files" not in err and "Compiling the sums, once" in err
    # Numba alone would not notice: the value is another file's.
    changed = run_adder(source_of(source, 10), cache)
    assert changed[0][0] == "17 0" and "Compiling the sums, once" in changed[1]


def test_a_kernel_contains_only_source_that_its_folder_is_named_after(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, shared = source_of(tmp_path / "source", 0), tmp_path / "shared.py"
    with pytest.raises(ValueError, match="not part of the source of the sums"):
        compiling.Compiler(source, "sums", "1 s").function(source_of)
    monkeypatch.setattr(compiling, "SHARED", (shared,))
    folders = set()
    for content in ("GOLDEN = 1", "GOLDEN = 2"):
        shared.write_text(content)
        folders.add(compiling.Compiler(source, "sums", "1 s").folder)
    monkeypatch.setattr("numba.__version__", "9.9.9")
    folders.add(compiling.Compiler(source, "sums", "1 s").folder)
    assert len(folders) == 3
    compiler.function(splitmix64)  # of all kernels


@pytest.mark.processes
@pytest.mark.parametrize("problem", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, problem):
    cache, source = tmp_path / "cache", source_of(tmp_path / "source", 0)
    if problem == "no folder":
        cache.write_text("a file where a folder should be")
    else:  # Numba's own write fails
        patch = "import numba.core.caching as c\ndef full(*_): raise OSError(28, 'No space left on device')\n"
        (source / "adder.py").write_text(patch + "c.IndexDataCacheFile.save = full\n" + SOURCE)
    out, err = run_adder(source, cache)
    assert out[0] == "7 0" and err.count("compiled at each start") == 1 and "Traceback" not in err
    assert not list(source.rglob("*.nb?"))  # Numba keeps nothing elsewhere: it would not notice changes


def test_users_without_a_home_and_folders_of_somebody_else(monkeypatch, tmp_path):
    """An empty variable is none; a user without a home has a cache that nobody else can have filled."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert compiling.user_cache("a") == tmp_path / ".cache" / "omagd" / "a"

    def nowhere():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path))
    own = tmp_path / f"omagd-{os.getuid()}"
    assert compiling.user_cache("a") == own / "omagd" / "a" and own.stat().st_mode & 0o777 == 0o700
    other = os.getuid() + 1
    own.rename(tmp_path / f"omagd-{other}")
    monkeypatch.setattr(os, "getuid", lambda: other)  # who does not own that folder
    monkeypatch.setattr(compiling.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "mine"))
    assert compiling.user_cache() == tmp_path / "mine" / "omagd"
