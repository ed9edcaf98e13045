"""What can be wrong with the values of one configuration, and how it is said.

First the contradictions between keys, then the messages about wrong values, unknown keys and arguments of components.
Checks that need the environment or the devices are in `omagd.run`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omagd.config.schema import EXTENDS, REMOVED, SECTIONS, Config, as_whole
from omagd.utils.errors import UserError, collected, foreign, nearest, together

# Built-in names that cannot use reconstruction; plug-ins are not checked.
PLAIN_LEARNERS = {"nq_learner", "nq_learner_ddp", "ddpg_learner", "ddpg_learner_ddp"}
PLAIN_MACS = {"basic_mac", "n_mac", "ddpg_mac"}
PATHS = (
    "local_results_path",
    "checkpoint_path",
    "pretrained_tokenizer_path",
    "pretrained_mask_predictor_path",
    "pretrain_buffer_path",
    "graph_pretrain_policy",
)
RESERVED = frozenset({"sacred", "logs"})
"""Other folders in local_results_path: the records of Sacred and of launch.sh."""

LONGEST_NAME = 200
"""Bytes of a folder's name: file systems allow 255, and a number may be appended."""


def check(config: Config) -> None:
    """Check for contradictions. Errors: UserError with key, value and fix of each."""
    with collected(None) as found:
        for rule in RULES:
            with found.caught():
                together(rule)(config)


def pretrained_file(key: str, path: str, file_name: str) -> Path:
    """Return the weights file at `path`: the file itself, or `file_name` in the folder.

    Args:
        key: the configuration key, for the message. path: as given, relative to the working directory.
        file_name: name of the file in its folder.

    Errors: UserError if there is no such file.
    """
    given = Path(path).expanduser()
    file = given / file_name if given.is_dir() else given
    if file.is_file():
        return file
    what = f"there is no {file_name} in this folder" if given.is_dir() else "no such file or folder"
    raise UserError(f"{key}={path}: {what}. Give the {file_name} that pre-training wrote, or its folder")


def unusable(config: Config) -> dict[str, str]:
    """Return what is wrong with text that cannot be encoded, and with invalid paths, by their keys.

    Whether the file of a path exists is checked later.
    """
    found = {}
    for key, value in dict(config).items():
        try:
            (value if isinstance(value, str) else "").encode(errors="surrogateescape")  # as a file's name
            if key in PATHS:
                Path(value).expanduser().stat()
        except UnicodeEncodeError:  # as in JSON "\\ud800"
            found[key] = f"{key}={value}: cannot be written (a lone surrogate). Give another value"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, RuntimeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            found[key] = f"{key}={value}: invalid path ({reason}). Give another one"
    return found


def _token(config: Config) -> Iterator[str]:
    token = config.unique_token
    if token and (Path(token).name != token or token[0] == "." or token.strip() != token or not token.isprintable()):
        rule = "no `/`, no dot at the beginning, no space around it"
        yield f"unique_token={token}: names a folder in local_results_path: {rule}"
    if token.casefold() in RESERVED:
        yield f"unique_token={token}: this folder of local_results_path is reserved. Give another name"


def _name(key: str, config: Config) -> Iterator[str]:
    if len(getattr(config, key).encode(errors="surrogateescape")) > LONGEST_NAME:
        yield f"{key}={getattr(config, key)}: is part of a folder's name: at most {LONGEST_NAME} bytes"


def _stages(config: Config) -> Iterator[str]:
    one, other = config.reconstructer_stage, config.recontructer_stage
    if one and other and one != other:
        yield f"reconstructer_stage={one} and recontructer_stage={other} are the same key: give one of them"
    given = one or other
    if given and not config.use_graph_reconstruction:
        if given != "stage3":
            yield (
                f"reconstructer_stage={given}: use_graph_reconstruction=False has only stage 3. "
                "Use --config=omagd, or use_graph_reconstruction=True"
            )
        return
    if config.pretrain_only and config.stage == "stage3":
        why = "without graph reconstruction" if not config.use_graph_reconstruction else "reconstructer_stage=stage3"
        yield f"pretrain_only=True: there is nothing to pre-train ({why}). Drop one of the two"
    if not config.use_graph_reconstruction or config.evaluate:
        return
    for stage, key in (("stage1", "pretrained_tokenizer_path"), ("stage2", "pretrained_mask_predictor_path")):
        if config.stage == stage and getattr(config, key) and not config.evaluation_only:
            yield f"{key}: reconstructer_stage={stage} trains that module from scratch. Drop one of the two"
    if config.pretrain_only and config.pretrained_mask_predictor_path and not config.evaluation_only:
        yield (
            "pretrain_only=True: pretrained_mask_predictor_path is given, so nothing is left to train. Drop one of the"
            " two"
        )


def _full_obs(config: Config) -> Iterator[str]:
    if config.use_full_obs and config.use_team_obs:
        yield "use_team_obs=True: use_full_obs=True shows everything already. Drop one of the two"


def _belief(config: Config) -> Iterator[str]:
    if config.belief_loss == "none":
        return
    given = f"belief_loss={config.belief_loss}"
    for key in ("use_graph_reconstruction", "use_full_obs", "use_team_obs"):
        if getattr(config, key):
            yield f"{given}: is for agents that read what they see, and {key}=True shows more. Add {key}=False"
    if config.belief_loss == "tokens" and not config.pretrained_tokenizer_path and not config.evaluate:
        yield (
            f"{given}: predicts the codes of stage 1, and pretrained_tokenizer_path is empty. Train one with"
            " --config=omagd_small with reconstructer_stage=stage1, and give its models/pretrain_stage1_best/"
        )


def _reconstruction(config: Config) -> Iterator[str]:
    if not config.use_graph_reconstruction:
        return
    if config.use_full_obs:
        yield "use_full_obs=True: nothing is left to reconstruct. Add use_graph_reconstruction=False"
    if config.use_team_obs:
        yield (
            "use_team_obs=True: reconstructions complete what an agent sees itself. Add use_graph_reconstruction=False"
        )
    if config.learner in PLAIN_LEARNERS:
        graph = "nq_graph_learner_ddp" if config.learner.endswith("_ddp") else "nq_graph_learner"
        yield f"learner={config.learner}: use_graph_reconstruction=True needs learner={graph}"
    if config.mac in PLAIN_MACS:
        yield (
            f"mac={config.mac}: reads no reconstruction (use_graph_reconstruction=True). "
            "Use mac=n_graph_mac or mac=gnn_graph_mac"
        )


def _predictor(config: Config) -> Iterator[str]:
    if not config.use_graph_reconstruction:
        return
    predictor = config.mask_predictor_config
    if predictor.kind != "masked" and predictor.decode == "argmax":
        yield (
            f"mask_predictor_config.decode=argmax: kind={predictor.kind} predicts features, not codes. Use decode=mean"
        )
    if predictor.d_model % predictor.n_heads:
        yield (
            f"mask_predictor_config.n_heads={predictor.n_heads}: must divide "
            f"mask_predictor_config.d_model={predictor.d_model}"
        )


def _playing(config: Config) -> Iterator[str]:
    if config.evaluate and not config.checkpoint_path:
        yield "evaluate=True: needs checkpoint_path=<run folder>. Or run: python -m omagd evaluate <run folder>"
    if config.save_replay and not config.evaluate:
        yield "save_replay=True: replays are written by evaluations only. Add evaluate=True"
    given = config.pretrained_tokenizer_path or config.pretrained_mask_predictor_path
    if config.evaluation_only and not (config.use_graph_reconstruction and given):
        yield (
            "evaluation_only=True: evaluates pre-trained graph modules: it needs --config=omagd and"
            " pretrained_tokenizer_path=… (and pretrained_mask_predictor_path=…). To evaluate an agent:"
            " python -m omagd evaluate <run folder>"
        )
    if config.evaluate and config.pretrain_only:
        yield "evaluate=True and pretrain_only=True contradict each other: drop one of the two"


def _step(config: Config) -> Iterator[str]:
    if config.load_step and not config.checkpoint_path:
        yield f"load_step={config.load_step}: needs checkpoint_path=… to choose from"


def _seeds(config: Config) -> Iterator[str]:
    if len(set(config.seeds)) != len(config.seeds):
        yield f"seeds={_listed(config)}: a seed is given twice. Give each once"
    if config.seeds and config.unique_token:
        yield (
            f"unique_token={config.unique_token}: names one folder, seeds={_listed(config)} makes several. "
            "Drop unique_token"
        )


def _ranks(config: Config) -> Iterator[str]:
    if config.run == "default" and (config.world_size or 1) > 1:
        yield f"world_size={config.world_size}: run=default is one process. Use run=ddp"


def _epsilon(config: Config) -> Iterator[str]:
    if config.epsilon_finish > config.epsilon_start:
        yield f"epsilon_finish={config.epsilon_finish}: must be at most epsilon_start={config.epsilon_start}"


def _parts(config: Config) -> Iterator[str]:
    if config.accumulate > config.batch_size:
        yield (
            f"accumulate={config.accumulate}: must be at most batch_size={config.batch_size}, one episode in each part"
        )


def _listed(config: Config) -> str:
    return ",".join(map(str, config.seeds))


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _token, partial(_name, "unique_token"), partial(_name, "name"), _stages, _full_obs, _belief,
    _reconstruction, _predictor, _playing, _step, _seeds, _ranks, _epsilon, _parts,
)  # fmt: skip
"""Each yields a message for every contradiction. One that reads a wrong value ends there, so they are small."""

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",  # texts, which models of `env_args` read as numbers
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "string_too_short": "text, not empty",
    "bool_type": "True or False",
    "bool_parsing": "True or False",
    "tuple_type": "a list of whole numbers, such as 1,2,3",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
BOUNDS = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "more than"}
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


class ArgsError(UserError):
    """Keys of a component's section that do not fit. `wrong`: the keys in that section that the messages are about."""

    wrong: frozenset[str] = frozenset()


def typed_args(
    section: str, owner: str, model: type[BaseModel], values: Mapping[str, Any], fix_of: Callable[[str], str]
) -> BaseModel:
    """Return the validated keys of a section that a component defines.

    Args:
        section: name of the section ("env_args"). owner: the component as it was chosen ("env=skirmish").
        model: the component's `args_model`. values: as given.
        fix_of: returns the fix for an unknown key, empty where it knows none.
    Errors: ArgsError for all unknown keys, wrong types, and values out of range. Nothing is converted implicitly,
        unless a field says `strict=False`; of environments, whose arguments may be any objects, their model decides.
    """
    known, messages = sorted(model.model_fields), dict[str, str]()
    strange = [] if model.model_config.get("extra") == "allow" else [key for key in values if key not in known]
    for fix, keys in _by_fix(strange, known, section, fix_of).items():
        what = "is not an argument" if len(keys) == 1 else "are not arguments"
        given = ", ".join(f"{section}.{key}" for key in keys)
        shown = f" (given: {shorten(values[keys[0]])})" if len(keys) == 1 else ""
        messages |= dict.fromkeys(map(str, keys), f"{given} {what} of {owner}{shown}.{fix}")
    fitting = {key: value for key, value in values.items() if str(key) not in messages}
    try:
        if section != "env_args":
            # From JSON, since a list there is a tuple or a set as well.
            text = json.dumps({key: as_whole(value) for key, value in fitting.items()})
            model.model_validate_json(text, strict=True)
        typed = model.model_validate(fitting)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UserError(f"{section}: a value cannot be saved as JSON (a lone surrogate)") from None
        messages |= validation_messages(error, f"{section}.")
    except (TypeError, ValueError, RecursionError) as problem:
        raise UserError(f"{section}: a value cannot be saved as JSON ({' '.join(str(problem).split())})") from None
    if messages:
        rejected = ArgsError(*dict.fromkeys(messages.values()))
        rejected.wrong = frozenset(key.partition(".")[0] for key in messages)
        raise rejected
    return typed


def _by_fix(keys: list[str], known: list[str], section: str, fix_of: Callable[[str], str]) -> dict[str, list[str]]:
    """Return unknown keys of a section by what the user should do."""
    none = f" It takes none: leave it out. A line `{section}:` without keys drops what another file sets"
    found: dict[str, list[str]] = {}
    for key in keys:
        row = foreign("key", key)
        here = row is not None and row.here.startswith(f"{section}.") and row.here.partition(".")[2] in known
        hint = row.hint() if row and here else nearest(str(key), known)
        fix = fix_of(key) or (f"{hint} Known: {', '.join(known)}" if known else none)
        found.setdefault(fix, []).append(key)
    return found


def validation_messages(error: ValidationError, prefix: str = "") -> dict[str, str]:
    """Return a line for each wrong key, by its first part: key, value and what is expected.

    prefix: written before the keys ("env_args." for the arguments of an environment).
    """
    groups: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False, include_context=True):
        path = [part for part in item["loc"] if isinstance(part, str) and not _is_branch(part)]
        groups.setdefault(".".join(path), []).append(item)
    return {path: _message(details, prefix) for path, details in groups.items()}


def _message(details: list[ErrorDetails], prefix: str) -> str:
    """Return the line about one key."""
    first = details[0]
    if not first["loc"]:  # a rule about several keys, which its message names
        return f"{first['msg'].removeprefix('Value error, ')}."
    key = prefix + ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "missing":
        return f"{key}: has no value. Give {key}=…"
    given = f"{key}={shorten(first['input'])}"
    if first["type"] == "extra_forbidden":
        return f"{given}: unknown key '{key}'"
    if first["type"] == "value_error":  # the sentence of a validator, which may name the key itself
        sentence = first["msg"].removeprefix("Value error, ")
        return sentence if sentence.startswith(f"{key}=") else f"{given}: {sentence}"
    return f"{given}: must be {_expected(details, first)}{_fix(first, key)}"


def _expected(details: list[ErrorDetails], first: ErrorDetails) -> str:
    """Return in words what the key takes; an optional key's types together."""
    if first["type"] == "literal_error":
        return f"one of {', '.join(_options(first))}"
    if first["type"] in EXPECTED:
        return EXPECTED[first["type"]] + " or null" * any(item["type"] == "none_required" for item in details)
    expected = re.sub("^(Input|String) should (be |have )?", "", first["msg"])
    return re.sub("|".join(BOUNDS), lambda words: BOUNDS[words[0]], expected)


def _fix(first: ErrorDetails, key: str) -> str:
    """Return what to write instead, where that is known."""
    value: Any = first["input"]
    if row := foreign(key, value):
        return f".{row.hint()}"
    if value is None:
        return ". Leave it out"
    if first["type"] == "literal_error":
        close = nearest(str(value), _options(first))
        return f".{close}" if close else ""
    if isinstance(value, str) and NUMBER.fullmatch(value) and first["type"] in {"int_type", "float_type"}:
        return f". This is text: write {value} without quotes"
    return ". Write it in quotes" if first["type"] == "string_type" and isinstance(value, int | float) else ""


def _options(literal_error: ErrorDetails) -> list[str]:
    return str(literal_error["ctx"]["expected"]).replace(" or ", ", ").replace("'", "").split(", ")


def _is_branch(part: int | str) -> bool:
    """Return whether a part of a location is pydantic's name for a branch of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in {"int", "float", "str", "bool", "none"})


def unknown_key(key: str, source: str, value: Any) -> str:
    """Return the message about an unknown key: what it is here, else the one that is spelled almost alike."""
    given = f"with {key}={shorten(value)}" if source == "with" else source
    if key in REMOVED:
        return f"{given}: {f'{key}: ' * (source != 'with')}this key was removed: {REMOVED[key][1]}"
    if key == EXTENDS:
        return f"{source} {key}={shorten(value)}: this is a key of files. Use --config={shorten(value)}"
    row = foreign("key", key)
    return f"{given}: unknown key '{key}'.{row.hint() if row else _spelled_alike(key, source)}"


def _spelled_alike(key: str, source: str) -> str:
    """Return the hint for a key by its spelling: in its section, else among all keys and those of one section only."""
    section, dot, inner = key.rpartition(".")
    if section in SECTIONS:
        hint = nearest(inner, SECTIONS[section].model_fields).replace("'", f"'{section}.", 1)
    else:
        hint = nearest(key, [*Config.model_fields, *([] if source == "with" else [EXTENDS])])
        owners = [name for name, model in SECTIONS.items() if key in model.model_fields]
        hint = hint or (f" Did you mean '{owners[0]}.{key}'?" if len(owners) == 1 else "")
    return hint or " `--dry-run` shows all keys"


def shorten(value: Any) -> str:
    """Return `value` as text of at most 60 characters."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits
        text = f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."
