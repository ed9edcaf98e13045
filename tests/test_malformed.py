"""Malformed commands and configurations: each is rejected in one line, with exit code 2, and writes nothing.

Wrong values follow from the schema, so new keys are covered by themselves.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from command_harness import TORCHRUN_VARIABLES

from omagd.config.env_info import EnvInfo
from omagd.config.loading import known_keys, resolve, to_plain
from omagd.config.schema import Config, MaskPredictorConfig, TokenizerConfig
from omagd.run.cli import preflight, trial
from omagd.run.cli.main import main
from omagd.run.reporting import sacred_record

SECTIONS = {"": Config, "tokenizer_config": TokenizerConfig, "mask_predictor_config": MaskPredictorConfig}
GRAPHS = ("--config=omagd_small", "with")
PLAIN = ("--config=qmix", "with")
QMIX = json.dumps({**to_plain(resolve("qmix")), "use_cuda": False}).encode()
EIGHT = EnvInfo("skirmish", "8m", 8, 14, 80, 168, 120).to_dict()
WEIGHTS = b"PK\x03\x04"
# config.json of runs.
RUNS = {
    "torn": b'{"env": "skirmish", "env_args": {"map_na', "listed": b"[1, 2]", "foreign": b'{"learning_rate": 1}',
    "typed": b'{"lr": "fast"}', "half": b'{"name": "\\ud800"}', "deep": b'{"name": ' * 100_000, "blank": QMIX,
    "eight": QMIX, "sized": QMIX,
}  # fmt: skip
# The folder in which every command is typed.
FILES: dict[str, bytes] = {
    "junk": b"\x00\xff\x80 nothing \n", "empty.th": b"", "junk.th": b"PK\x03\x04 not a zip", "folder/readme": b"",
    "agents/100/agent.th": b"\x80\x02 neither weights nor a pickle", "agents/100/opt.th": b"",
    "tokens/tokenizer.th": WEIGHTS, "masks/stage2_model.th": b"\x80\x05.", "binary.yaml": bytes(range(256)),
    "empty_key.yaml": b": 3\n", "blank/env_info.json": b"{", "eight/env_info.json": json.dumps(EIGHT).encode(),
    "sized/env_info.json": json.dumps({**EIGHT, "n_agents": {"a": 1}}).encode(),
    **{f"{run}/models/100/agent.th": WEIGHTS for run in ("bare", *RUNS)},
    **{f"{run}/config.json": content for run, content in RUNS.items()},
}  # fmt: skip


class Malformed(NamedTuple):
    """One input: the words after the program's name, environment variables, and files by relative path."""

    argv: tuple[str, ...]
    variables: dict[str, str] = {}
    files: dict[str, bytes] = {}


def _schema() -> dict[str, list[dict[str, Any]]]:
    """Return for each key the JSON schemas of the values that it takes."""
    fields = {section: model.model_json_schema()["properties"] for section, model in SECTIONS.items()}
    found = {}
    for key in known_keys():
        section, _, name = key.rpartition(".")
        found[key] = fields[section][name].get("anyOf", [fields[section][name]])
    return found


WRONG = {
    "boolean": ("soon", "0", "1", "yes", "on", "2.0", "Tru", "nan", "[1, 'b']", "'"),
    "integer": ("soon", "1.5", "True", "nan", "1e400", "-1.0", "0x", "3m", "", "{'a': 1}", "1,,2"),
    "number": ("soon", "False", "nan", "inf", "1e400", "1j", "", "0.1.2", "1,5", "--1", "b'1'", "1 2", "…", "1_"),
    "array": ("a", "1.5", "1,b", "-1", "2,2", "[[1]]", "{1: 2}", "1,True", "nan"),
    "object": ("3", "3m", "[1]", "True", "", "map_name", "nan"),
}


def wrong_texts(kinds: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return texts of `key=text` that a key of these kinds cannot take; none if it takes any text."""
    if options := [option for kind in kinds for option in kind.get("enum", ())]:
        return f"{options[0]}x", options[0].upper() + "?", "3", "[]", "", f"{options[0]} "
    return WRONG.get(kinds[0]["type"], ())


def out_of_range(kinds: list[dict[str, Any]]) -> list[str]:
    """Return texts of numbers just beyond, and far beyond, what a key takes."""
    whole = kinds[0].get("type") == "integer"
    steps = {"ge": -1, "minimum": -1, "exclusiveMinimum": 0, "le": 1, "maximum": 1}
    beyond = [number + steps[name] for name, number in kinds[0].items() if name in steps]
    return [str(int(number) if whole else float(number)) for number in beyond] + ["9" * 400, "0x" + "f" * 6000] * whole


def _of_keys() -> Iterator[tuple[str, Malformed]]:
    """Yield mistakes in every key of the schema, with their family."""
    for number, (key, kinds) in enumerate(sorted(_schema().items())):
        for family, texts in (("wrong types", wrong_texts(kinds)), ("out of range", out_of_range(kinds))):
            if texts and (number + len(family)) % 2:  # one or the other of each key
                yield family, Malformed((*GRAPHS, f"{key}={texts[number % len(texts)]}"))
        if number % 6:  # of the other mistakes a sixth of the keys shows as much
            continue
        types, turn = {kind["type"] for kind in kinds}, number // 6
        if not types & {"null", "string"}:
            yield "no value", Malformed((*GRAPHS, f"{key}={('None', 'null', 'NULL')[turn % 3]}"))
        yield "unknown keys", Malformed((*(GRAPHS, PLAIN)[turn % 2], f"{key[:-1]}q{key[-1]}={('1', '')[turn % 2]}"))
        values: list[object] = [[1, [2]], {"inner": {"deep": 1}}, float("inf"), b"\x00", {1: 2}]
        values += [3, 0.5, True, ["omagd"]] if "string" in types else ["1e-3x"]
        if "object" in types:
            values = [[1], 3, "3m", {"map_name": ["3m"]}]
        section, _, name = key.rpartition(".")
        value: object = {name: values[turn % len(values)]}
        text, path = yaml.safe_dump({section: value} if section else value), f"given_{number}.yaml"
        yield "wrong values in files", Malformed((f"--config={path}",), {}, {path: text.encode()})


BROKEN_YAML = (
    "a: b: c", "lr: [1", "\tlr: 1", "- lr\n- 2", "just words", "lr: 1\n lr2: 2", "lr: *b", "1: 2", "lr: 0.1\nlr: 0.2",
    "!!python/object/apply:os.system ['touch HIT']", "lr: !unknown 3", "? [a, b]\n: 3", "%YAML 9", "--- 1\n--- 2",
    "<<: 3", "env_args: &a {me: *a}", "tokenizer_config: [n_codes, 3]", "lr: 1" + "0" * 5000, "lr: " + "[" * 3000,
    "lr: \x00", "lr: \x1b[31m", "env_args: " + "{a: " * 2000 + "1" + "}" * 2000, "seeds: 1, 2", "lr: 1\n\udc81\udc8d",
)  # fmt: skip
CONFIGS = (
    "", ".", "/", "../../../../etc/passwd", "qmix.yaml", "folder.yaml", "junk", "binary.yaml", "empty_key.yaml", "*",
    "q" * 300, "q/" * 3000, "\u202eximq", "qmix\n", "\x1b[2J", "\udcff\udcfe", "$HOME", "junk/qmix.yaml", "%s%n", "{0}",
    "/dev/null/x.yaml", "omagd_smal",
)  # fmt: skip
# Words between single spaces.
WORDS = (
    "lr=3", "with lr", "with lr = 3", "with =3", "with ", "", "whit lr=3", "with with lr=3", "with .=3", "with lr.=3",
    "with env_args..map_name=3m", "qmix", "with lr:3", "print_config", "with " + "x" * 20000 + "=1", "with ключ=1",
    "with lr=" + "x" * 20000, "with lr=\u2028\u2029", "with \x1b[31mlr=1", "with lr=\r\nerror:\ttwo", "with \udcff=1",
    "with __class__=1", "with " + "a." * 3000 + "b=1", "with lr=" + "(" * 5000, "with lr=1" + "0" * 6000,
    "with lr=__import__('os')", "with self=1", "-- lr=3", "--config --dry-run", "--conf=qmix", "-z 3", "--dry-run=yes",
    "-c", "-l LOUD", "-F junk/deep", "-F ", "-F /proc/omagd", "--config=qmix vdn", "compare", "compare nowhere",
    "compare " + "x" * 5000, "compare \udcff", "doctor lr=3", "doctor --env-config=chess", "doctor with lr=soon",
)  # fmt: skip
ENV_ARGS = {
    "skirmish": (
        "map_name=3x", "map_name=", "map_name=../3m", "map_name=[3x]", "map_name={'a': 1}", "difficulty=VeryHard",
        "move_amount=0", "move_amount=far", "move_amount=nan", "obs_all_health=perhaps", "reward_defeat=inf", "map=3m",
        "reward_death_value=None", "map_name.x=3",
    ),
    "sc2": ("game_version=4.1.0.0.0", "game_version="),
    "matrix_game": ("payoff=x", "penalty=1", "penalty=nan"),
    "memory_game": ("n_cues=0", "n_cues=1.5", "n_agents=None"),
}  # fmt: skip
PLACES = (
    "nowhere", "junk", "junk.th", "folder", "agents/100", "tokens", "masks", "/dev/null", "/proc/self/mem", "x/" * 3000,
    "~nobody_here/x", "masks/stage2_model.th", "\udcff", " ", "binary.yaml", "http://x/y.th",
)  # fmt: skip
NAMES = ("", "nobody", "None", "3", "..", "os:system", "a.b:c", "é", "x" * 400)
EVALUATIONS = (
    "", "nowhere", "junk", "folder", "bare", "bare/models/100", "torn", "torn/models", "listed", "foreign", "typed",
    "eight", "eight load_step=100", "blank", "test_nepisode=3", "eight lr", "eight --config=qmix", "half", "deep",
    "sized", "eight evaluate=False", "eight checkpoint_path=bare", "eight local_results_path=. unique_token=folder",
)  # fmt: skip
CONTRADICTIONS = (
    "checkpoint_path=agents save_replay=True", "evaluate=True checkpoint_path=eight", "checkpoint_path=blank",
    "unique_token=folder local_results_path=.", "batch_size=64 buffer_size=32", "accumulate=33 batch_size=32",
    "pretrain_only=True reconstructer_stage=stage3", "mac=basic_mac", "run=default world_size=2", "lr=1 lr.x=2",
    "evaluate=True pretrain_only=True checkpoint_path=agents", "dist_backend=nccl use_cuda=False",
    "reconstructer_stage=stage2 pretrained_tokenizer_path=tokens pretrained_mask_predictor_path=masks",
    "tokenizer_config=3 tokenizer_config.n_codes=4", "env_args=[] env_args.map_name=3m", "env=memory_game",
    "env=matrix_game env_args=None", "lr={'x':1}", "mixer=qmix mixer=qmixx", "resume=exact,lossy",
    "learner=ppo_learner mac=ddpg_mac obs_last_action=False action_selector=softmax mixer=none",
)  # fmt: skip
RESULTS = (
    *(f"local_results_path={place}" for place in ("junk", "/proc/omagd", "/dev/null/x", "y/" * 3000)),
    *(f"unique_token={token}" for token in ("..", "../up", "/absolute", "x" * 300, "sacred", " a")),
)  # fmt: skip
GROUP = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
WRONG_GROUPS = (
    *(
        ("run=ddp", {name: text})
        for name, texts in {
            "RANK": ("abc", "", "1.5", "-1", "2"), "WORLD_SIZE": ("abc", "", "nan", "0"), "MASTER_ADDR": (None,),
            "LOCAL_RANK": ("0x1", " ", "2"), "LOCAL_WORLD_SIZE": ("9" * 30, "0", "٣x"),
            "MASTER_PORT": ("port", "0", "65536", None),
        }.items()
        for text in texts
    ),
    ("run=ddp world_size=3", {}), ("run=default", {}), ("run=ddp seeds=1,2", {}),
)  # fmt: skip


def _of_tables() -> Iterator[tuple[str, Malformed]]:
    """Yield the mistakes in the tables, with their family."""
    flags = ("--config", "--env-config", "--env_config")
    for i, text in enumerate(BROKEN_YAML):
        path, content = f"broken_{i}.{('yaml', 'yml')[i % 2]}", text.encode(errors="surrogateescape")
        yield "broken files", Malformed((f"{flags[i % 2]}={path}",), {}, {path: content})
    for i, name in enumerate(CONFIGS):
        yield "unknown configurations", Malformed((f"{flags[i % 3]}={name}",))
    for words in WORDS:
        yield "wrong words", Malformed(tuple(words.split(" ")))
    for i, key in enumerate(sorted(preflight.NAMED)):
        yield "unknown names", Malformed((*GRAPHS, f"{key}={NAMES[i % len(NAMES)]}"))
    for env, text in ((env, text) for env, texts in ENV_ARGS.items() for text in texts):
        yield "wrong env_args", Malformed(("--config=qmix", f"--env-config={env}", "with", f"env_args.{text}"))
    keys = (
        "checkpoint_path", "pretrained_tokenizer_path", "graph_pretrain_policy", "pretrained_mask_predictor_path",
    )  # fmt: skip
    for i, place in enumerate(PLACES):
        key = keys[i % len(keys)]
        more = [f"pretrained_tokenizer_path={place}"] if key == "pretrained_mask_predictor_path" else []
        more += [["evaluate=True"], ["load_step=7"], []][i % 3] if key == "checkpoint_path" else []
        yield "wrong paths", Malformed((*GRAPHS, *more, f"{key}={place}"))
    for word in RESULTS:
        yield "unusable results", Malformed((*PLAIN, word))
    for words in EVALUATIONS:
        yield "wrong evaluations", Malformed(("evaluate", *words.split()))
    for words in CONTRADICTIONS:
        yield "contradictions", Malformed((*GRAPHS, *words.split()))
    for words, changes in WRONG_GROUPS:
        group = {name: text for name, text in {**GROUP, **changes}.items() if text is not None}
        yield "wrong groups", Malformed((*PLAIN, *words.split()), group)


FAMILIES: dict[str, list[Malformed]] = {}
for _family, _case in (*_of_tables(), *_of_keys()):
    FAMILIES.setdefault(_family, []).append(_case)

UNKNOWN_MAP = "--config=qmix --env-config=sc2 with env_args.map_name=x"
# A package beside omagd that is broken: the entry point that it declares, and a command that uses it.
CONFIGS = "omagd.config_dirs x=omagd_broken:CONFIGS"
PLUGINS = [
    ("omagd.config_dirs x=omagd_nothing:CONFIGS", "--config=qmix"),
    ("omagd.config_dirs x=omagd_broken:CONFIG", "--config=qmix"),
    ("omagd.config_dirs x=omagd_raises:CONFIG", "--config=qmix"),
    ("omagd.config_dirs x=omagd_broken.deep:CONFIGS", "--list"),
    *((CONFIGS, f"--config={name}") for name in ("torn", "foreign", "typed", "listed", "folder")),
    (CONFIGS, "--env-config=torn"),
    ("omagd.learners x=omagd_nothing:Learner", "--config=qmix with learner=x"),
    ("omagd.agents x=omagd_broken:Agent", "--config=qmix with agent=x"),
    ("omagd.smac_maps x=omagd_nothing:MAPS", UNKNOWN_MAP), ("omagd.smac_maps x=omagd_broken:CONFIGS", UNKNOWN_MAP),
]  # fmt: skip


def place(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Type the commands in a folder with junk, outside any torchrun; nothing may get as far as a run."""
    folder = tmp_path / "here"
    place(folder, FILES)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sacred_record, "_experiment", lambda: pytest.fail("it runs"))
    return folder


def complaint(code: int, out: str, err: str) -> str:
    """Return what is wrong with a refusal, or nothing."""
    lines = re.fullmatch(r"(error: .{5,1500}\n){1,9}", err) and len(err.splitlines()) == err.count("\n")
    fine = code == 2 and not out and lines and "Traceback" not in err and "\x1b" not in err
    return "" if fine else f"exit code {code}, {out[-200:]!r} {len(err)}: {err[:300]!r}"


def attempt(case: Malformed, folder: Path, capsys, monkeypatch) -> str:
    place(folder, case.files)
    before = set(folder.parent.rglob("*"))
    with monkeypatch.context() as patch:
        for name, value in case.variables.items():
            patch.setenv(name, value)
        try:
            code = main(case.argv)
        except BaseException as error:  # noqa: BLE001 (whatever comes through would be a traceback)
            code = -1
            print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    found = complaint(code, *capsys.readouterr())
    if written := set(folder.parent.rglob("*")) - before:
        found += f" it wrote {written}"
    return f"{str(case)[:500]}: {found}" if found else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mistake_is_one_line(family, here, capsys, monkeypatch):
    wrong = [found for case in FAMILIES[family] if (found := attempt(case, here, capsys, monkeypatch))]
    assert wrong == []


@pytest.mark.parametrize(("point", "words"), PLUGINS)
def test_broken_packages_beside_omagd_are_named(point, words, here, capsys, monkeypatch):
    facts = "Metadata-Version: 2.1\nName: omagd-broken\nVersion: 1.0\n"
    files = {
        "omagd_broken.py": "import os\nCONFIGS = os.path.join(os.path.dirname(__file__), 'configs')\n",
        "omagd_raises.py": "CONFIG = undefined\n", "omagd_broken-1.0.dist-info/METADATA": facts,
        "omagd_broken-1.0.dist-info/entry_points.txt": "[{}]\n{}\n".format(*point.split()),
        "configs/algs/torn.yaml": "lr: [1, 2\n", "configs/envs/torn.yaml": "env: {skirmish\n",
        "configs/algs/foreign.yaml": "learning_rate: 1\n", "configs/algs/typed.yaml": "lr: fast\n",
        "configs/algs/listed.yaml": "- lr\n", "configs/algs/folder.yaml/readme": "",
    }  # fmt: skip
    place(here.parent / "plugin", {name: text.encode() for name, text in files.items()})
    monkeypatch.syspath_prepend(str(here.parent / "plugin"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "omagd_broken", raising=False)
    for name in ("learners", "modules.agents"):
        registry = importlib.import_module(f"omagd.{name}").REGISTRY
        monkeypatch.setattr(registry, "_plugins_read", False)
        monkeypatch.setattr(registry, "_lazy", dict(registry._lazy))
    assert attempt(Malformed(tuple(words.split())), here, capsys, monkeypatch) == ""


def test_networks_that_no_memory_holds_are_refused(here, capsys, monkeypatch):
    def too_large(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 51539607552 bytes.")

    monkeypatch.setattr(trial, "build_learner_once", too_large)
    assert main(["--config=qmix", "with", "rnn_hidden_dim=65536"]) == 2
    out, err = capsys.readouterr()
    assert complaint(2, out, err) == ""
    assert "48.0 GB" in err and "rnn_hidden_dim=65536" in err
