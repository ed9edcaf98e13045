"""Error messages for rejected configuration values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omagd.config.schema import EXTENDS, REMOVED, SECTIONS, Config, as_whole
from omagd.utils.errors import UserError, foreign, nearest

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
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
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
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
    if first["type"] in BOUNDS:
        words, name = BOUNDS[first["type"]]
        return f"{words} {first['ctx'][name]}"
    if first["type"] == "literal_error":
        return f"one of {', '.join(_options(first))}"
    if first["type"] == "string_pattern_mismatch":
        return f"text that matches {first['ctx']['pattern']}"
    same_key = [item["type"] for item in details]
    if first["type"] in EXPECTED:
        return EXPECTED[first["type"]] + (" or null" if "none_required" in same_key else "")
    return re.sub("^(Input|String) should (be |have )?", "", first["msg"])


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
