"""Error messages for values that the schema rejects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omagd.utils.errors import UserError, nearest

EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "True or False",
    "tuple_type": "a list of whole numbers, such as 1,2,3",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
MOST_NAMES = 200  # characters of known names that fit into the line of an error
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def validation_message(error: ValidationError, prefix: str = "") -> tuple[str, ...]:
    """Return one line with key, value and what is expected, and at most one line of help.

    Args:
        error: of pydantic; the message is about its first entry and names the keys of the others.
        prefix: put before the key ("env_args." for the arguments of an environment).
    """
    details = error.errors(include_url=False, include_context=True)
    first = details[0]
    key = prefix + ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "missing":
        return (f"{key}: has no value. Give {key}=…",)
    if first["type"] == "extra_forbidden":
        return (f"{key}={shorten(first['input'])}: unknown key '{key}'",)
    line = f"{key}={shorten(first['input'])}: must be {_expected(details, first)}{_fix(first)}"
    others = {item["loc"][0] for item in details} - {first["loc"][0]}
    return (line, f"also wrong: {', '.join(sorted(map(str, others)))}") if others else (line,)


def _expected(details: list[ErrorDetails], first: ErrorDetails) -> str:
    """Return the values that the key takes, as text; the branches of an optional key are combined."""
    context = first.get("ctx", {})
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
    if first["type"] in bounds:
        words, name = bounds[first["type"]]
        return f"{words} {context[name]}"
    if first["type"] == "literal_error":
        return f"one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '')}"
    same_key = [item["type"] for item in details if item["loc"][0] == first["loc"][0]]
    if first["type"] in EXPECTED:
        return EXPECTED[first["type"]] + (" or null" if "none_required" in same_key else "")
    return first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _fix(first: ErrorDetails) -> str:
    """Return how to write a number that was given as text."""
    value: Any = first["input"]
    if isinstance(value, str) and NUMBER.fullmatch(value) and first["type"] in {"int_type", "float_type"}:
        return f". This is text: write {value} without quotes"
    return ""


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


def typed_args(section: str, owner: str, model: type[BaseModel], values: Mapping[str, Any]) -> BaseModel:
    """Return the validated keys of a section that a component defines.

    Args:
        section: name of the section ("env_args"). owner: the component as it was chosen ("env=skirmish").
        model: the component's `args_model`. values: as given.
    Errors: UserError for an unknown key, a wrong type, or a value out of range.
    """
    known = sorted(model.model_fields)
    for key, value in values.items():
        if key not in known and model.model_config.get("extra") != "allow":
            names = f"known: {', '.join(known) or 'none'}"
            line = f"{section}.{key} is not an argument of {owner} (given: {shorten(value)}).{nearest(str(key), known)}"
            raise UserError(line, names) if len(names) > MOST_NAMES else UserError(f"{line} {names}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _as_user_error(section, owner, error) from None


def _as_user_error(section: str, owner: str, error: ValidationError) -> UserError:
    """Return the first entry of the error as one line: key, value, fix."""
    first = error.errors()[0]
    key = ".".join([section, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return UserError(f"{key} is missing; {owner} needs it")
    rule = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should", "must")
    )
    hint = ""
    if first["type"] == "literal_error":
        options = [part.strip(" '") for part in first["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = nearest(str(first["input"]), options)
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        rule, hint = "must be text", " Write it in quotes"
    if not first["loc"]:
        return UserError(f"{rule}.")  # about several keys, which it names
    return UserError(f"{key}={shorten(first['input'])}: {rule}.{hint}")
