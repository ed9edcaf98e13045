"""`omagd doctor`: what this machine has, what it lacks, and the mend, a line each; never a traceback."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from omagd.run.cli.doctor import game, machine, packages
from omagd.run.cli.doctor.findings import Check, Finding, Settings
from omagd.utils.errors import UserError

ALL = frozenset({"all"})
GAMES = frozenset({"sc2", "sc2_v2"})
SHOWN = ("skirmish", "smax", "sc2", "sc2_v2")
"""Environments of which the last line tells whether they can be played."""

CHECKS = (
    Check("python", packages.python, ALL),
    Check("packages", packages.packages, ALL),
    Check("torch", machine.torch, ALL),
    Check("gpu", machine.gpu, mend="see the line on torch"),
    Check("bf16", machine.bf16, mend="leave precision=float32"),
    Check("compiler", machine.compiler, mend="leave compile=False"),
    Check("cores", machine.cores, mend="none is needed"),
    Check("memory", machine.memory, mend="see the line on torch"),
    Check("shared memory", machine.shared_memory, GAMES, mend="mount a tmpfs that can be written at /dev/shm"),
    Check("disk", machine.disk, ALL, mend="give local_results_path=… where there is room"),
    Check("limits", machine.limits, mend="none is needed"),
    Check("ddp port", machine.ddp_port, mend="give another ddp_port=…"),
    Check("smax", packages.smax, frozenset({"smax"}), mend="pip install -e .[smax] -c constraints.txt"),
    Check("game messages", packages.messages, GAMES),
    Check("pysc2", packages.pysc2, GAMES),
    Check("game", game.game, GAMES, mend="./install_sc2.sh"),
    Check("SMAC maps", game.smac_maps, frozenset({"sc2"}), mend=game.GET_MAPS),
    Check("SMACv2 map", game.smacv2_maps, frozenset({"sc2_v2"}), mend=game.GET_MAPS),
    Check("game port", game.game_port, GAMES, mend="end what holds the ports from 25000 to 32000"),
    Check("W&B", packages.wandb, mend="leave use_wandb=False"),
    Check("TensorBoard", packages.tensorboard, mend="leave use_tensorboard=False"),
)


def examine(settings: Settings, checks: Iterable[Check] = CHECKS) -> list[tuple[Check, Finding]]:
    """Return what every check finds. One that fails finds its own failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(check, _look(check, settings)) for check in checks]


def render(found: Sequence[tuple[Check, Finding]], env: str) -> tuple[str, bool]:
    """Return the text, a line for each check and one on the environments, and whether `env` can be played."""
    lines = []
    for check, finding in found:
        mend = f" → {finding.mend}" if finding.mend else ""
        lines.append(f"{finding.mark:<9}{check.name:<15}{' '.join(finding.text.split())}{mend}")
    told = []
    for name in dict.fromkeys((env, *SHOWN)):
        lacking = _lacking(found, name)
        told.append(f"{name} {'cannot be played (' + ', '.join(lacking) + ')' if lacking else 'can be played'}")
    return "\n".join([*lines, "; ".join(told)]) + "\n", not _lacking(found, env)


def _lacking(found: Sequence[tuple[Check, Finding]], env: str) -> list[str]:
    """Return the names of what is missing of what an environment needs."""
    return [check.name for check, finding in found if finding.mark == Finding.MISSING and check.needed & {"all", env}]


def _look(check: Check, settings: Settings) -> Finding:
    try:
        return check.look(settings)
    except UserError as error:  # it names its own mend
        return Finding(Finding.MISSING, error.message)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever is broken here is what is to be said)
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return Finding(Finding.MISSING, f"{type(error).__name__}: {reason}", check.mend)
