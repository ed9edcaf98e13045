"""Writes docs/configuration.md: every key with its type, default and meaning; and tables of coming_from_pymarl.md.

Types, ranges and meanings come from `src/config/schema.py` (the comment behind a key), defaults and sections from
`src/config/default.yaml`, arguments of environments from their `args_model` and its docstring, presets from
`src/config/algs/`. Run it after a change of any of them: `python docs/make_configuration.py`.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from omagd.config.loading import HERE, base_values, read_preset, read_yaml
from omagd.config.schema import SECTIONS, Config
from omagd.envs import REGISTRY as ENVS
from omagd.envs.adapters import AdapterArgs, RewardArgs, Rewards
from omagd.envs.battle.args import BattleArgs, SkirmishArgs, SmacArgs
from omagd.run.reporting.card import flattened
from omagd.utils.errors import KEYS, NAMES, Row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
FOREIGN = ROOT / "docs" / "coming_from_pymarl.md"
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
BEYOND = 65535  # bounds that only keep out what no machine could hold
UNSHOWN = {"name", "extends", "log_interval", "runner_log_interval", "learner_log_interval", "test_interval"}
"""Keys of presets that the page leaves out."""
INTRODUCTION = """\
# Configuration

<!-- Made by docs/make_configuration.py; edit src/config/schema.py and default.yaml instead. -->

Set a key by `with key=value`, and a key of a section by its dotted name (`tokenizer_config.n_codes=512`). Later values
override earlier ones: `default.yaml`, the environment's file (`--env-config`), the algorithm's file (`--config`),
`with`. `--config` and `--env-config` take a name from `--list` or the path of a YAML or JSON file; `with` also takes
such a path. A run's `config.json` repeats that run. `--dry-run` prints the result without running.

One start names all mistakes, each in one line with the remedy, and ends with exit code 2. A key that no part of the run
reads is a warning.

Parentheses hold the default, then the range or the other choices. *Steps* are environment steps over all ranks; sizes
are per rank unless the meaning says otherwise. Numbers may be written as `1e-3` or `1e6`.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    meanings = comments("Config")
    values = read_yaml(ROOT / "src" / "config" / "default.yaml")
    for title, keys in sections():
        plain = [key for key in keys if key not in SECTIONS]
        rows = [(key, kind(Config, key), values[key], meanings.get(key, "")) for key in plain]
        parts.append(f"## {title}\n\n" + entries(rows))
        for key in keys:
            if key in SECTIONS:
                parts.append(nested(key, values[key]))
    parts.append(presets())
    parts.append("## Arguments of the environments\n\n`env_args.<key>=value`; each environment has its own.\n")
    alike: dict[str, list[str]] = {}
    for name in shipped("envs"):
        alike.setdefault(base_values(env_config=name)["env"], []).append(name)
    parts += [environment(*names) for names in alike.values()]
    return "\n".join(parts)


def shipped(kind: str) -> list[str]:
    """Return the names of the files in `algs` or `envs` of this repository; those of plug-ins are not its own."""
    return sorted(path.stem for path in (HERE / kind).glob("*.yaml"))


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield title and keys of each section of default.yaml (`# --- title`), in order."""
    title, keys = "", []
    for line in (ROOT / "src" / "config" / "default.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("# --- "):
            if keys:
                yield title, keys
            title, keys = line.removeprefix("# --- ").capitalize(), []
        elif match := re.match(r"(\w+):", line):
            keys.append(match[1])
    yield title, keys


def comments(class_name: str) -> dict[str, str]:
    """Return the comment behind each key of a class in schema.py."""
    source = (ROOT / "src" / "config" / "schema.py").read_text(encoding="utf-8")
    body = source.partition(f"class {class_name}(")[2].partition("\nclass ")[0]
    return {match[1]: match[2].strip() for match in re.finditer(r"^    (\w+): [^#\n]+#(.*)$", body, re.MULTILINE)}


def nested(section: str, values: dict[str, Any]) -> str:
    """Return the table of the keys below `section`."""
    model = SECTIONS[section]
    meanings = comments(model.__name__)
    rows = [(f"{section}.{key}", kind(model, key), values[key], meanings.get(key, "")) for key in model.model_fields]
    return f"### `{section}`\n\n" + entries(rows)


def kind(model: type[BaseModel], key: str) -> str:
    """Return the type and the range of a key, as in `int ≥ 1`."""
    field = model.model_fields[key]
    return _kind(field.annotation, tuple(field.metadata))


def _kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _kind(inner, (*metadata, *more))
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, types.UnionType) or "Union" in str(get_origin(annotation)):
        return " or ".join(_kind(part) for part in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "section"
    name = "none" if annotation is type(None) else annotation.__name__
    text = " ".join([name, *_limits(metadata)])
    return text.replace(" ≥ 0.0 ≤ 1.0", " 0 to 1").replace(" > 0.0 < 1.0", " between 0 and 1")


def _limits(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        found = [item, *getattr(item, "metadata", [])]
        for limit in found:
            bounds = ((sign, getattr(limit, name)) for name, sign in SIGNS.items() if hasattr(limit, name))
            yield from (f"{sign} {bound}" for sign, bound in bounds if bound < BEYOND)
            if pattern := getattr(limit, "pattern", None):
                yield f"like `{pattern}`"


def entries(rows: list[tuple[str, str, Any, str]]) -> str:
    """Return a Markdown list of (key, type, default, meaning)."""
    lines = []
    for key, typed, value, meaning in rows:
        text = re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", meaning).replace("\n", " ")
        lines.append(f"- `{key}` ({shown(value, typed)}): {text}")
    return "\n".join(lines) + "\n"


def shown(value: Any, typed: str) -> str:
    """Return a default as it is typed on the command line, with its range or the other choices."""
    text = "none" if value is None else "empty" if value in ("", {}, []) else f"`{value}`"
    shows_itself = {text, "none", "str", "section"} | ({"bool"} if value is not None else set())
    others = [part for part in typed.split(" or ") if part not in shows_itself]
    if value not in (None, "", {}, []):  # the default itself shows the type
        others = [re.sub(r"^(int|float|str|list of \w+) ?", "", each) for each in others]
    others = [
        re.sub(r"^(\w+ )?[≥>] [01](\.0)?$", r"\1", each).strip() for each in others
    ]  # without bounds that nobody tries
    return ", ".join(part for part in (text, *others) if part)


def presets() -> str:
    """Return what each `--config` sets: how it differs from the defaults or from the preset that is most like it."""
    default = flattened(read_yaml(ROOT / "src" / "config" / "default.yaml"))
    whole = {name: default | flattened(read_preset("algs", name)) for name in shipped("algs")}
    done, lines = {"the defaults": default}, []
    for name in sorted(whole, key=lambda each: len(_changed(default, whole[each]))):
        alike = [one for one, values in done.items() if values.keys() <= whole[name].keys()]
        # The defaults are the better beginning unless another preset saves four keys.
        base = min(alike, key=lambda one: len(_changed(done[one], whole[name])) + 3 * (one != "the defaults"))
        lines.append(f"- `{name}`, as {base}: {' '.join(_changed(done[base], whole[name])) or 'no change'}")
        done[f"`{name}`"] = whole[name]
    head = ["## Algorithms: what `--config` sets", "", "Without the intervals of logs and tests.", ""]
    return "\n".join([*head, *sorted(lines)]) + "\n"


def _changed(before: dict[str, Any], values: dict[str, Any]) -> list[str]:
    pairs = values.items()
    return [f"`{key}={value}`" for key, value in pairs if key not in UNSHOWN and before.get(key, "") != value]


OWN = ", ".join(f"`{key}`" for key in SkirmishArgs.model_fields if key not in BattleArgs.model_fields)
# Arguments that an environment shares with another one, and the sentence that replaces them.
SHARED: dict[str, tuple[type[BaseModel], str]] = {
    "sc2": (BattleArgs, f"every key of `skirmish` but {OWN}, with the same defaults"),
    "sc2_v2": (SmacArgs, "every other key of `sc2`, with the same defaults"),
    "pettingzoo": (RewardArgs, "the keys of `gymma`"),
    **dict.fromkeys(("lbf", "mpe", "rware"), (RewardArgs, "the keys of `gymma` but `key`")),
    "jaxmarl": (Rewards, "`common_reward`, `reward_scalarisation`, `time_limit` and `continuing_episode` of `gymma`"),
    "pymarl": (AdapterArgs, "`key` and `new_each_episode` of `gymma`"),
}


def environment(name: str, *others: str) -> str:
    """Return the arguments of one environment; its other files are named, and their values left out."""
    values = base_values(env_config=name)
    model: type[BaseModel] = ENVS.get(values["env"]).args_model  # type: ignore[attr-defined]
    base, words = SHARED.get(values["env"], (None, ""))
    rows = arguments(model, values["env_args"], base)
    title = ", ".join(f"`--env-config={one}`" for one in (name, *others))
    parts = [entries(rows)] * bool(rows) + [f"{'and ' * bool(rows)}{words}.\n"] * bool(words)
    return f"### {title}\n\n" + "\n".join(parts)


def arguments(
    model: type[BaseModel], values: dict[str, Any], base: type[BaseModel] | None = None, prefix: str = ""
) -> list[tuple[str, str, Any, str]]:
    """Return the rows of a model and of the models in it, without the keys that are those of `base`."""
    rows, meanings = [], attributes(model)
    for key, field in model.model_fields.items():
        if base is not None and key in base.model_fields and field.annotation == base.model_fields[key].annotation:
            if key != "map_name" or base is BattleArgs:
                continue
        part = next((one for one in (field.annotation, *get_args(field.annotation)) if _is_model(one)), None)
        if part is not None:
            rows += arguments(part, values.get(key) or {}, prefix=f"{prefix}{key}.")
        else:
            default = "no default" if field.is_required() else field.default
            rows.append((prefix + key, kind(model, key), values.get(key, default), meanings.get(key, "")))
    return rows


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def attributes(model: type[BaseModel]) -> dict[str, str]:
    """Return the texts under `Attributes:` in the docstrings of a class and its bases, by key."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in model.__mro__ if cls is not BaseModel and issubclass(cls, BaseModel)]):
        text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?=    \w)", text):
            names, _, meaning = entry.strip().partition(": ")
            first, *others = (key.strip() for key in names.split(","))
            found[first] = " ".join(meaning.split()).rstrip(".")
            found |= dict.fromkeys(others, f"see `{first}`")
    return found


def foreign(page: str) -> str:
    """Return docs/coming_from_pymarl.md with the tables of `src/utils/errors.py` between its marks."""
    names = [("`" + kind + "` ", row) for kind, rows in NAMES.items() for row in rows if not _known(kind, row)]
    for mark, rows in (("keys", [("", row) for row in KEYS]), ("names", names)):
        lines = [f"- {kind}{_code(row.there)}: {_here(row)}" for kind, row in rows]
        begin = f"<!-- {mark}: made by docs/make_configuration.py from src/utils/errors.py -->"
        end = f"<!-- {mark} end -->"
        table = "\n".join(lines)
        before, after = page.partition(begin)[0], page.partition(end)[2]
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def _known(kind: str, row: Row) -> bool:
    """Return whether an environment's row only repeats names of `--env-config`."""
    files = {word for each in NAMES["--env-config"] for word in each.there.split()}
    return kind == "env" and set(row.there.split()) <= files


def _code(words: str) -> str:
    return ", ".join(f"`{word}`" for word in words.split())


def _here(row: Row) -> str:
    start = f"`{row.here}`" if row.here else f"nearest: `{row.near}`" if row.near else ""
    return f"{start} ({row.why})" if start and row.why else start or row.why


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    FOREIGN.write_text(foreign(FOREIGN.read_text(encoding="utf-8")), encoding="utf-8")
