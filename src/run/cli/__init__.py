"""Command line: parse arguments, check the configuration, examine the machine. `REGISTRY` maps names to commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from omagd.utils.errors import UserError
from omagd.utils.registry import Registry, in_one_line

if TYPE_CHECKING:
    from omagd.utils.errors import Mistakes

P = ParamSpec("P")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Command:
    """A command that does something else than train.

    Attributes:
        usage: name and arguments. about: for `--help`.
        module: has `arguments(parser)`, which adds its arguments to an `argparse.ArgumentParser`, and `main(options)`,
            which returns the exit code. It is imported when the command is used.
    """

    usage: str
    about: str
    module: str


REGISTRY: Registry[Command] = Registry(
    "command",
    "omagd.commands",
    lazy={
        "evaluate": "omagd.run.cli.main:EVALUATE",
        **{
            name: f"omagd.lab.commands:{name.upper()}"
            for name in "clean doctor plot compare report beliefs study sweep watch weights".split()
        },
    },
)


def command_of(words: list[str]) -> Command | None:
    """Return the command that the first word names; None for another word. Errors: UserError for a broken plug-in."""
    if not words or words[0] not in REGISTRY:
        return None
    found = REGISTRY.get(words[0])
    if not isinstance(found, Command) or not found.module:
        raise UserError(f"command={words[0]}: {found!r} is no Command with a module. See docs/extending.md")
    return found


def tried(mistakes: Mistakes, check: Callable[P, Found], *args: P.args, **kwargs: P.kwargs) -> Found | None:
    """Return what a check returns; None after a UserError, or an error in a plug-in's code, which is noted."""
    with mistakes.caught(), in_one_line():
        return check(*args, **kwargs)
    return None
