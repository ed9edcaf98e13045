"""Error messages for rejected configuration values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omagd.config.schema import as_whole
from omagd.utils.errors import UserError, nearest

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
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


def typed_args(
    section: str, owner: str, model: type[BaseModel], values: Mapping[str, Any], fix_of: Callable[[str], str]
) -> BaseModel:
    """Return the validated keys of a section that a component defines.

    Args:
        section: name of the section ("env_args"). owner: the component as it was chosen ("env=skirmish").
        model: the component's `args_model`. values: as given.
        fix_of: returns the fix for an unknown key, empty where it knows none.
    Errors: UserError for an unknown key, a wrong type, or a value out of range. Nothing is converted implicitly, unless
        a field says `strict=False`; of environments, whose arguments may be any objects, their model decides.
    """
    known = sorted(model.model_fields)
    for key, value in values.items():
        if key not in known and model.model_config.get("extra") != "allow":
            none = f" It takes none: leave it out. A line `{section}:` without keys drops what another file sets"
            fix = fix_of(key) or (f"{nearest(str(key), known)} Known: {', '.join(known)}" if known else none)
            raise UserError(f"{section}.{key} is not an argument of {owner} (given: {shorten(value)}).{fix}")
    try:
        if section != "env_args":
            # From JSON, since a list there is a tuple or a set as well.
            text = json.dumps({key: as_whole(value) for key, value in values.items()})
            model.model_validate_json(text, strict=True)
        return model.model_validate(values)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UserError(f"{section}: a value cannot be saved as JSON (a lone surrogate)") from None
        raise UserError(validation_message(error, f"{section}.")) from None
    except (TypeError, ValueError, RecursionError) as problem:
        raise UserError(f"{section}: a value cannot be saved as JSON ({' '.join(str(problem).split())})") from None


def validation_message(error: ValidationError, prefix: str = "") -> str:
    """Return a line with key, value and what is expected.

    Args:
        error: from pydantic; the line is about its first entry and names the other keys.
        prefix: written before the key ("env_args." for the arguments of an environment).
    """
    details = error.errors(include_url=False, include_context=True)
    first = details[0]
    if not first["loc"]:  # a rule about several keys, which its message names
        return f"{first['msg'].removeprefix('Value error, ')}."
    key = prefix + ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "missing":
        return f"{key}: has no value. Give {key}=…"
    if first["type"] == "extra_forbidden":
        return f"{key}={shorten(first['input'])}: unknown key '{key}'"
    given = f"{key}={shorten(first['input'])}"
    if first["type"] == "value_error":  # the sentence of a validator, which may name the key itself
        sentence = first["msg"].removeprefix("Value error, ")
        line = sentence if sentence.startswith(f"{key}=") else f"{given}: {sentence}"
    else:
        line = f"{given}: must be {_expected(details, first)}{_fix(first)}"
    others = {item["loc"][0] for item in details if item["loc"]} - {first["loc"][0]}
    return f"{line} (also wrong: {', '.join(sorted(map(str, others)))})" if others else line


def _expected(details: list[ErrorDetails], first: ErrorDetails) -> str:
    """Return in words what the key takes; an optional key's types together."""
    if first["type"] in BOUNDS:
        words, name = BOUNDS[first["type"]]
        return f"{words} {first['ctx'][name]}"
    if first["type"] == "literal_error":
        return f"one of {', '.join(_options(first))}"
    if first["type"] == "string_pattern_mismatch":
        return f"text that matches {first['ctx']['pattern']}"
    same_key = [item["type"] for item in details if item["loc"][:1] == first["loc"][:1]]
    if first["type"] in EXPECTED:
        return EXPECTED[first["type"]] + (" or null" if "none_required" in same_key else "")
    return re.sub("^(Input|String) should (be |have )?", "", first["msg"])


def _fix(first: ErrorDetails) -> str:
    """Return what to write instead, where that is known."""
    value: Any = first["input"]
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


def shorten(value: Any) -> str:
    """Return `value` as text of at most 60 characters."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits
        text = f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."
