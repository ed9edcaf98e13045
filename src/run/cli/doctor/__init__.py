"""`omagd doctor`: check this machine and print one line per check: status, finding and fix."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from omagd.run.cli.doctor import checks
from omagd.run.cli.doctor.findings import Check, Finding, Settings
from omagd.utils.errors import UserError

ALL = frozenset({"all"})
GAMES = frozenset({"sc2", "sc2_v2"})
SHOWN = ("skirmish", "smax", "sc2", "sc2_v2")
"""Environments that the last line reports."""

CHECKS = (
    Check("python", checks.python, ALL),
    Check("packages", checks.packages, ALL),
    Check("torch", checks.torch, ALL),
    Check("gpu", checks.gpu, fix="see the line on torch"),
    Check("gpu battles", checks.gpu_battles, fix=checks.INSTALL_GPU),
    Check("compiler", checks.compiler, fix="leave compile=False"),
    Check("memory", checks.memory, fix="see the line on torch"),
    Check("limits", checks.limits, fix="see ulimit -a"),
    Check("shared memory", checks.shared_memory, GAMES, fix="mount a writable tmpfs at /dev/shm"),
    Check("disk", checks.disk, ALL, fix=checks.MORE_ROOM),
    Check("ddp port", checks.ddp_port, fix="give another ddp_port, such as ddp_port=12400"),
    Check("smax", checks.smax, frozenset({"smax"}), fix=checks.INSTALL_SMAX),
    Check("game messages", checks.messages, GAMES),
    Check("pysc2", checks.pysc2, GAMES),
    Check("game", checks.game, GAMES, fix="./install_sc2.sh"),
    Check("SMAC maps", checks.smac_maps, frozenset({"sc2"}), fix=checks.GET_MAPS),
    Check("SMACv2 map", checks.smacv2_maps, frozenset({"sc2_v2"}), fix=checks.GET_MAPS),
    Check("W&B", checks.wandb, fix="leave use_wandb=False"),
    Check("TensorBoard", checks.tensorboard, fix="leave use_tensorboard=False"),
)


def examine(settings: Settings, checks: Iterable[Check] = CHECKS) -> list[tuple[Check, Finding]]:
    """Run the checks and return their findings; the finding of a check that fails is its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(check, _look(check, settings)) for check in checks]


def render(found: Sequence[tuple[Check, Finding]], env: str) -> tuple[str, bool]:
    """Return a line per check and one about the environments, and whether `env` can be played."""
    lines = []
    for check, finding in found:
        fix = f" → {finding.fix}" if finding.fix else ""
        lines.append(f"{finding.mark:<9}{check.name:<15}{' '.join(finding.text.split())}{fix}")
    environments = []
    for name in dict.fromkeys((env, *SHOWN)):
        lacking = _missing(found, name)
        environments.append(f"{name} {'cannot be played (' + ', '.join(lacking) + ')' if lacking else 'can be played'}")
    return "\n".join([*lines, "; ".join(environments)]) + "\n", not _missing(found, env)


def _missing(found: Sequence[tuple[Check, Finding]], env: str) -> list[str]:
    """Return the names of missing things that an environment needs."""
    return [check.name for check, finding in found if finding.mark == "missing" and check.needed & {"all", env}]


def _look(check: Check, settings: Settings) -> Finding:
    try:
        return check.look(settings)
    except UserError as error:  # its message includes a fix
        return Finding("missing", error.message)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the doctor reports whatever is broken)
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return Finding("missing", f"{type(error).__name__}: {reason}", check.fix)
