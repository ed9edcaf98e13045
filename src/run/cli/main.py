"""Command line: parse `[options] with key=value …`, check the configuration and run it; errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omagd.run import REGISTRY
from omagd.run.cli import REGISTRY as COMMANDS
from omagd.run.cli import Command, command_of
from omagd.run.launchers import is_main, join_tasks, require_one_task
from omagd.run.run_folder import is_word, newest_run
from omagd.run.signals import Stopped
from omagd.utils.errors import (
    USER_ERROR_EXIT_CODE,
    Mistakes,
    RunFailed,
    UserError,
    collected,
    drop_lost_output,
    exit_line,
    libraries_of,
    nearest,
    print_out,
    print_warning,
    visible,
)
from omagd.utils.registry import explained, in_one_line

if TYPE_CHECKING:
    from omagd.config.schema import Config

# Modules that need other packages are imported where they are used: `doctor` must work without those packages.
INTERRUPTED_EXIT_CODE = 130
RANK_0_SECONDS = 5.0
"""Seconds that another rank waits for rank 0 to print their common error: torchrun ends all ranks with the first."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
HELP = """\
Usage: python src/main.py [--config=NAME] [--env-config=NAME] [options] with key=value ...
       omagd …, python -m omagd … and torchrun --nproc_per_node=W src/main.py … take the same arguments.

What runs:
  --config=NAME        algorithm: a name from --list or a YAML file (default: qmix_fast; elsewhere than
                       in skirmish, qmix)
  --env-config=NAME    environment: a name from --list or a YAML file (default: skirmish)
  with key=value ...   any key of the configuration; `env_args.map_name=3m`, `seeds=1,2,3`, `t_max=200000`
Instead of training:
  --dry-run            check everything, print the resolved configuration, write nothing
  --list               show the known configurations, maps, learners, agents, ...
  --help, --version
{commands}
Sacred's options:
  -c, --comment=TEXT   a comment for the record
  -n, --name=NAME      the experiment's name in the record
  -F, --file_storage=DIR  where Sacred's records go (default: <local_results_path>/sacred)
  -l, --loglevel=LEVEL DEBUG, INFO, WARNING, ERROR
  -u, --unobserved     no Sacred record

Examples:
  omagd with env_args.map_name=5m_vs_6m
  python src/main.py --config=qmix --env-config=skirmish with env_args.map_name=3m t_max=200000
  python src/main.py --config=omagd with env_args.map_name=5m_vs_6m run=ddp world_size=2
  python -m omagd evaluate results/<run> test_nepisode=256

A run writes <local_results_path>/<unique_token>/: config.json, metrics.jsonl, summary.json, models/, logs/.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Exit codes: 0; 1 when a run failed; 2 for a user error; 130, 143 and 129 after SIGINT, SIGTERM and SIGHUP.

    Args:
        argv: arguments without the program's name; None means sys.argv.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if error.__cause__ is not None and _wants_tracebacks(sys.argv[1:] if argv is None else argv):
            _print_error("".join(traceback.format_exception(error.__cause__)).rstrip())
        if not error.said_by_rank_0 or is_main():
            _print_error(error.render())
        else:
            time.sleep(RANK_0_SECONDS)
        return USER_ERROR_EXIT_CODE
    except Exception as error:
        if (failed := error if isinstance(error, RunFailed) else explained(error)) is None:
            raise
        _print_error(failed.render())
        return 1
    except SystemExit as error:  # raised by an environment that is checked
        _print_error(f"error: {exit_line(error)}")
        return 1
    except Stopped as stop:
        if is_main():
            _print_error(visible(stop.render()))
        return stop.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED_EXIT_CODE


def _wants_tracebacks(argv: Sequence[str]) -> bool:
    """Return whether `--loglevel=DEBUG` is among the arguments."""
    return any(re.fullmatch(r"((--loglevel|-l)=?)?DEBUG", word, re.IGNORECASE) for word in argv)


def _print_error(text: str) -> None:
    """Write to standard error; if that fails (full disk, closed terminal), the exit code still reports the error."""
    drop_lost_output()
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def config_from(argv: Sequence[str], mistakes: Mistakes | None = None) -> Config:
    """Return the resolved configuration of the arguments `argv`.

    mistakes: collects what is wrong. Errors: UserError without it.
    """
    with collected(mistakes) as found:
        options = _options(argv, found)
        return _resolve(options, updates(options.words, found), found)


def _options(argv: Sequence[str], mistakes: Mistakes) -> argparse.Namespace:
    """Return options and words. mistakes: collects unknown options. Errors: UserError for wrong values of others."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action=_Last)
    parser.add_argument("--env-config", "--env_config", action=_Last)
    for flags in (("--dry-run",), ("--list",), ("--help", "-h"), ("--version",), ("--unobserved", "-u")):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("--print-config", "--print_config", "-p", dest="dry_run", action="store_true")
    parser.add_argument("--force", "-f", action="store_true")
    for name, short in (("--comment", "-c"), ("--name", "-n"), ("--file_storage", "-F"), ("--mongo_db", "-m")):
        parser.add_argument(name, short)
    parser.add_argument("--loglevel", "-l", type=str.upper, choices=LOG_LEVELS)
    parser.add_argument("words", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        near = nearest(unknown[0].partition("=")[0], parser.flags())
        mistakes.add(f"unrecognized arguments: {' '.join(unknown)}.{near} See --help")
        mistakes.complete = False
    if options.mongo_db is not None:
        raise UserError("--mongo_db: its password would be visible in the process list; use -F")
    if options.file_storage == "":
        raise UserError("--file_storage=: give a folder, or leave it out")
    return options


def _main(argv: list[str]) -> int:
    command = command_of(argv)
    if command is not None and command != EVALUATE:
        require_one_task(argv[0])
        return _own(command, argv)
    mistakes = Mistakes()
    options = _options(argv, mistakes)
    if options.help:  # of `evaluate` too, which takes the same options
        mistakes.raise_any()
        print_out(HELP.format(commands="\n".join(map(_line, COMMANDS.names()))))
        return 0
    if (command := command_of(options.words)) == EVALUATE:
        _run(options, _evaluation(options, options.words[1:], mistakes), {}, mistakes)
        return 0
    if command is not None:
        raise UserError(f"{options.words[0]}: give the command first: omagd {options.words[0]} …")
    texts = updates(options.words, mistakes)
    if options.version or options.list:
        mistakes.raise_any()
    if options.version:
        from omagd import __version__

        print_out(f"omagd {__version__}\n")
    elif options.list:
        from omagd.run.cli.preflight import listing

        print_out(listing())
    else:
        _run(options, _resolve(options, texts, mistakes), texts, mistakes)
    return 0


def _line(name: str) -> str:
    """Return a command's line of `--help`; of a broken plug-in, what is wrong with it."""
    try:
        command = command_of([name])
    except UserError as error:
        return f"  {name:<19}  {error.message}"
    return f"  {command.usage:<19}  {command.about}" if command else ""


def _own(command: Command, argv: list[str]) -> int:
    """Run a command that has arguments of its own."""
    with in_one_line(f"command={argv[0]} cannot be used", command.module.partition(".")[0]):
        module = import_module(command.module)
        parser = _Parser(prog=f"omagd {argv[0]}", description=command.about, allow_abbrev=False)
        module.arguments(parser)
    try:
        options = parser.parse_intermixed_args(argv[1:])
    except SystemExit:  # --help; an error is a UserError
        return 0
    with libraries_of(argv[0]):
        return int(module.main(options))


def _run(options: argparse.Namespace, config: Config, texts: Mapping[str, Any], found: Mistakes) -> None:
    """Check the configuration, then print it (`--dry-run`) or run it.

    texts: what the command line sets. found: mistakes so far.
    """
    from omagd.config.loading import given_keys

    with found.caught():
        join_tasks()
    if not options.dry_run and not found:
        from omagd.run.launch.processes import preload

        preload(config)
    from omagd.run.cli.preflight import preflight, resolved

    checked = preflight(config, found, given_keys(options.config, options.env_config, texts))
    config = checked.config
    if is_main():
        for line in checked.warnings:
            print_warning(line)
    if options.dry_run:
        print_out(resolved(config, checked))
        return
    from omagd.run.reporting.sacred_record import run_recorded

    sacred_options = {f"--{name}": getattr(options, name) for name in ("comment", "name", "loglevel")}
    run_recorded(
        config,
        REGISTRY.get(config.run),
        observe=not options.unobserved and is_main(),
        folder=options.file_storage,
        options={flag: value for flag, value in sacred_options.items() if value is not None},
    )


def _resolve(options: argparse.Namespace, texts: Mapping[str, Any], found: Mistakes) -> Config:
    """Return the configuration. found: collects what is wrong."""
    from omagd.config.loading import apply_texts, base_values, validate

    return validate(apply_texts(base_values(options.config, options.env_config, found), texts, found), found)


def _evaluation(options: argparse.Namespace, words: Sequence[str], mistakes: Mistakes) -> Config:
    """Return the configuration of `evaluate RUN [key=value …]`. Errors: UserError."""
    if not words or is_word(words[0]):
        words = [newest_run("evaluate"), *words]
    for flag, given in (("--config", options.config), ("--env-config", options.env_config)):
        if given is not None:
            raise UserError(f"{flag}={given}: evaluate takes the run's own config.json. Leave it out")
    from omagd.run.training.evaluate import evaluation_config

    run, *rest = words
    texts = updates(rest if rest[:1] == ["with"] else ["with", *rest], mistakes)
    return evaluation_config(run, texts, mistakes=mistakes)


def updates(words: Sequence[str], mistakes: Mistakes | None = None) -> dict[str, Any]:
    """Return {key: text} from the words `with key=value …`; the last value of a repeated key counts.

    A word that is the path of a YAML or JSON file stands for its keys: {path: values}.
    mistakes: collects wrong words. Errors: UserError without it.
    """
    updates: dict[str, Any] = {}
    first, *rest = words or ("with",)
    with collected(mistakes) as found:
        if first != "with":
            found.add(f"{first}: {_misplaced(words)}")
            found.complete = False
            return updates
        for word in rest:
            with found.caught():
                key, value = _update(word, found)
                updates.pop(key, None)  # it counts where it is given last
                updates[key] = value
    return updates


def _misplaced(words: Sequence[str]) -> str:
    """Return what to do about words that stand before `with`."""
    first, equals, value = words[0].partition("=")
    if first == "print_config":
        return "use --dry-run"
    if first in COMMANDS:
        return "not understood; give it before the options"
    if not equals:
        near = nearest(first, COMMANDS.names())
        return f"not understood; see --help{'.' * bool(near)}{near}"
    if (option := first.replace("_", "-")) in ("config", "env-config"):
        return f"not understood; it is an option: --{option}={value}"
    return f"not understood; put `with` before it: with {' '.join(word for word in words if word != 'with')}"


def _update(word: str, found: Mistakes) -> tuple[str, Any]:
    """Return key and text of `key=text`, or path and values of a file. Errors: UserError."""
    key, equals, text = word.partition("=")
    if key and equals and "/" not in key:  # else a path, such as runs/lr=0.1/config.json
        return key, text
    from omagd.config.loading import SUFFIXES, read_yaml

    if word.endswith(SUFFIXES):
        return word, read_yaml(Path(word), found)
    raise UserError(f"with {word}: expected key=value, without spaces around `=`, or a file of such keys")


class _Last(argparse.Action):
    """Stores an option of which the last value counts: a second file does not add to the first one."""

    def __call__(self, parser: object, options: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        if (first := getattr(options, self.dest)) not in (None, value) and is_main():
            print_warning(f"{flag}={first}: given again as {flag}={value}, which counts alone")
        setattr(options, self.dest, value)


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError."""

    def flags(self) -> list[str]:
        """Return all options."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help")


EVALUATE = Command(
    "evaluate [RUN] [key=value ...]",
    "evaluate a trained run (default: the newest in results/); RUN: its folder, its models/ or a step's folder",
    __name__,
)
"""Takes the options of a training, unlike other commands."""
