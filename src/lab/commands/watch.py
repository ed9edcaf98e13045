"""`watch RUN [key=value …]` plays a trained team, `watch FILE` shows a recording: a page, a GIF, or moments."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from omagd.run.recording import WRITERS
from omagd.run.run_folder import is_word, newest_run
from omagd.utils.errors import UserError, print_out

if TYPE_CHECKING:
    from omagd.config.schema import Config
    from omagd.run.recording.recording import Recording


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `watch`."""
    add = parser.add_argument
    run = "a run's folder, its models/, a step's folder, or a recording (*.json.gz); default: the newest in results/"
    add("source", nargs="?", metavar="RUN", help=run)
    keys = "keys to change, such as env_args.map_name=3m load_step=400000 seed=2"
    add("words", nargs="*", metavar="key=value", help=keys)
    add("--format", default="", help="html (default), gif, or png: moments of a battle")
    where = "default: in replays/ of the run, or beside the recording"
    add("-o", "--output", default="", metavar="FILE", help=where)
    add("--agent", metavar="N", help="the agent whose view is shown, in html the first one; default: 0; png: the one of"
        " whom there is most to see")  # fmt: skip
    add("--steps", default="", metavar="A,B,...", help="png: steps of the battle to show; default: three telling ones")
    add("--episodes", default="1", metavar="N", help="episodes of each map; default: 1")


def main(options: argparse.Namespace) -> int:
    """Play or read the episodes, write the file and print its path. Errors: UserError."""
    if not options.source or is_word(options.source):
        options.words = [*filter(None, [options.source]), *options.words]
        options.source = newest_run("watch")
    kind = _format(options)
    agent = None if options.agent is None else _number("--agent", options.agent, 0)
    episodes, steps = _number("--episodes", options.episodes, 1), _steps(options.steps, kind)
    source = Path(os.path.expanduser(options.source))  # unlike Path.expanduser, no error for an unknown user
    from omagd.run.recording.recording import SUFFIX, Recording

    if played := not os.path.isfile(source):
        recording, beside = _played(options.source, options.words, episodes)
    else:
        if options.words:
            fix = "give the run's folder to play other episodes"
            raise UserError(f"{options.words[0]}: a recording is shown as it is; {fix}")
        recording, beside = Recording.read(source), source.with_name(source.name.removesuffix(SUFFIX))
    most = max(episode.n_agents for episode in recording.episodes)
    if agent is not None and agent >= most:
        raise UserError(f"--agent={agent}: the agents are 0 to {most - 1}")
    path = Path(options.output).expanduser() if options.output else beside.with_name(f"{beside.name}.{kind}")
    try:
        _write(recording, path, kind, agent, steps)
        if played and not options.output:  # beside the page, for `report` and other formats
            recording.write(beside.with_name(beside.name + SUFFIX))
    except OSError as problem:
        raise UserError(
            f"{path}: cannot be written ({problem.strerror or problem}). Give another file with --output"
        ) from None
    for episode in recording.episodes:
        print_out(f"{episode.label}: {episode.outcome} after {episode.length} steps\n")
    print_out(f"{path}\n")
    return 0


def _format(options: argparse.Namespace) -> str:
    """Return the format: as given, else as the output's ending says, else html. Errors: UserError."""
    ending = Path(options.output).suffix.removeprefix(".").lower()
    formats = WRITERS.names()
    kind = str(options.format or {"": "html", "htm": "html"}.get(ending, ending))
    if kind not in formats:
        what = f"--format={kind}:" if options.format else f"--output={options.output}: its ending"
        raise UserError(f"{what} must be {', '.join(formats[:-1])} or {formats[-1]}")
    return kind


def _number(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 6 or int(text) < least:
        raise UserError(f"{flag}={text}: must be a number from {least} on")
    return int(text)


def _played(run: str, words: list[str], episodes: int) -> tuple[Recording, Path]:
    """Play episodes of a run; return them and the path, without ending, of the file to write."""
    from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
    from omagd.run.cli.main import updates
    from omagd.run.run_folder import RunFolder, for_files
    from omagd.run.training.evaluate import evaluation_config

    source, given = f"watch {run}", words if words[:1] == ["with"] else ["with", *words]
    config = evaluation_config(run, updates(given), "watch")
    step = find_step_folder(config.checkpoint_path, config.load_step, source=source)
    recording = record_battles(config, episodes, source)
    if step.name.isdecimal():
        asked = config.load_step not in (0, int(step.name))
        near = f" (of those saved, the nearest to load_step={config.load_step})" if asked else ""
        print_out(f"weights of step {step.name}{near}\n")
    maps = list(dict.fromkeys(episode.map_name for episode in recording.episodes))
    name = "_".join([config.env, *([for_files(maps[0])] if len(maps) == 1 and maps[0] else []), step.name])
    return recording, RunFolder(run_folder_of(step)).replays / name


def record_battles(config: Config, episodes: int = 1, source: str = "checkpoint_path") -> Recording:
    """Play greedy episodes with the saved team and return their recording.

    Args:
        config: from `evaluation_config`. episodes: of each map; of a set, on all its maps. Without a seed of their own
            they are the first test episodes of the run. source: what named the run, for errors.
    Errors: UserError for weights that are missing, damaged, or of another map.
    """
    import torch

    from omagd.envs.factory import make_env
    from omagd.run.checkpoint.weights import find_step_folder
    from omagd.run.recording.recorder import Recorder
    from omagd.run.recording.recording import Recording
    from omagd.run.training.evaluate import each_map, load_mac, policy_name
    from omagd.run.training.tasks import episode_starts
    from omagd.runners.runner import Runner

    torch.set_num_threads(config.torch_threads)
    device, folder = torch.device("cpu"), find_step_folder(config.checkpoint_path, config.load_step, source=source)
    env = make_env(config.env, dict(config.env_args), 1, processes=False)
    try:
        info = env.info
        mac = load_mac(config, info, device, folder, "checkpoint_path")
        recorder = Recorder(mac, env, info, policy_name(config, folder), most=episodes)
        runner = Runner(env, config, info, episode_starts(config, info, "test", 0))
        for _ in each_map(runner, info):
            played = runner.run(recorder, explore=None, episodes_per_slot=episodes, keep=False)
            recorder.take(played.log)
        return Recording(episodes=recorder.episodes)
    finally:
        env.close()


def _steps(text: str, kind: str) -> list[int]:
    """Return the steps to show. Errors: UserError."""
    if text and kind != "png":
        raise UserError(f"--steps={text}: {kind} shows all steps. Use it with --format=png")
    return [_number("--steps", part.strip(), 0) for part in text.split(",")] if text else []


def _write(recording: Recording, path: Path, kind: str, agent: int | None, steps: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "png":
        from omagd.lab.watch.formats import write_png

        write_png(recording, path, agent, steps)
        return
    WRITERS.get(kind)(recording, path, agent or 0)
