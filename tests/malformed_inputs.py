"""A grammar of mistakes: commands, configuration files, paths and surroundings that must be refused, by kind.

What is wrong with a value follows from the schema, so that new keys come in by themselves.
"""

from __future__ import annotations

import itertools
import json
import random
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from omagd.config.env_info import EnvInfo
from omagd.config.loading import known_keys, resolve, to_plain
from omagd.config.schema import Config, MaskPredictorConfig, TokenizerConfig
from omagd.run.cli.preflight import NAMED

SECTIONS = {"tokenizer_config": TokenizerConfig, "mask_predictor_config": MaskPredictorConfig}
# Text that names something is wrong when nothing has that name; other text may be anything.
NAMES = frozenset(NAMED)
GRAPHS = ("--config=omagd_small", "with")
PLAIN = ("--config=qmix", "with")
PATHS = (
    "checkpoint_path", "pretrained_tokenizer_path", "pretrained_mask_predictor_path", "pretrain_buffer_path",
    "graph_pretrain_policy",
)  # fmt: skip
# What stands in the folder where every command is typed.
FILES: dict[str, bytes] = {
    "junk": b"\x00\xff\x80 nothing \n",
    "empty.th": b"",
    "junk.th": b"PK\x03\x04 not a zip",
    "folder/readme": b"nothing here",
    "agents/100/agent.th": b"\x80\x02 neither weights nor a pickle",
    "agents/100/opt.th": b"",
    "tokens/tokenizer.th": b"PK\x03\x04",
    "masks/stage2_model.th": b"\x80\x05.",
    "binary.yaml": bytes(range(256)),
    "empty_key.yaml": b": 3\n",
    # Runs: without config.json, with a damaged one, with others that are none, of another map.
    "bare/models/100/agent.th": b"PK\x03\x04",
    "torn/models/100/agent.th": b"PK\x03\x04",
    "torn/config.json": b'{"env": "skirmish", "env_args": {"map_na',
    "listed/models/100/agent.th": b"PK\x03\x04",
    "listed/config.json": b"[1, 2]",
    "foreign/models/100/agent.th": b"PK\x03\x04",
    "foreign/config.json": b'{"learning_rate": 1}',
    "typed/models/100/agent.th": b"PK\x03\x04",
    "typed/config.json": b'{"lr": "fast"}',
    "eight/models/100/agent.th": b"PK\x03\x04",
    "eight/config.json": json.dumps({**to_plain(resolve("qmix")), "use_cuda": False}).encode(),
    "eight/env_info.json": json.dumps(EnvInfo("skirmish", "8m", 8, 14, 80, 168, 120).to_dict()).encode(),
    "half/models/100/agent.th": b"PK\x03\x04",
    "half/config.json": b'{"name": "\\ud800"}',
    "deep/models/100/agent.th": b"PK\x03\x04",
    "deep/config.json": b'{"name": ' * 100_000,
    "sized/models/100/agent.th": b"PK\x03\x04",
    "sized/config.json": json.dumps({**to_plain(resolve("qmix")), "use_cuda": False}).encode(),
    "sized/env_info.json": json.dumps(
        {**EnvInfo("skirmish", "3m", 3, 9, 30, 48, 60).to_dict(), "n_agents": {"a": 1}}
    ).encode(),
    "blank/models/100/agent.th": b"PK\x03\x04",
    "blank/config.json": json.dumps(to_plain(resolve("qmix"))).encode(),
    "blank/env_info.json": b"{",
}


@dataclass(frozen=True)
class Malformed:
    """One input: the words after the program's name, environment variables, and files by relative path."""

    argv: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return repr((self.argv, self.variables, self.files))


@dataclass(frozen=True)
class Kind:
    """What a key takes: base types, literal options, and bounds as (name, number)."""

    bases: frozenset[type]
    options: tuple[str, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """Return what a field of the schema takes."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(inner[0], (*metadata, *inner[1:]))
    if origin in {typing.Union, types.UnionType}:
        parts = [kind_of(part, metadata) for part in inner]
        merged = frozenset().union(*(part.bases for part in parts))
        return Kind(merged, sum((p.options for p in parts), ()), sum((p.bounds for p in parts), ()))
    if origin is Literal:
        return Kind(frozenset({str}), tuple(inner))
    bounds = {(name, number) for item in metadata for name, number in _bounds(item)}
    return Kind(frozenset({origin or annotation}), (), tuple(sorted(bounds)))


def _bounds(item: Any) -> Iterator[tuple[str, float]]:
    for part in (item, *getattr(item, "metadata", ())):
        for name in ("ge", "gt", "le", "lt"):
            if (number := getattr(part, name, None)) is not None:
                yield name, number


def schema() -> dict[str, Kind]:
    """Return what every key takes, by dotted name."""
    kinds = {}
    for key in known_keys():
        section, _, name = key.rpartition(".")
        fields = (SECTIONS[section] if section else Config).model_fields
        kinds[key] = kind_of(fields[name].annotation, tuple(fields[name].metadata))
    return kinds


KINDS = schema()


def wrong_texts(kind: Kind) -> list[str]:
    """Return texts of `key=text` that a key of this kind cannot take; none where it takes any text."""
    if kind.options:
        return [f"{kind.options[0]}x", kind.options[0].upper() + "?", "3", "[]", "", f"{kind.options[0]} "]
    if kind.bases & {Path, str}:
        return []
    common = ["soon", "{'a': 1}", "[1, 'b']", "(", "1,,2", "'", "b'1'", "1 2", "…", "\u0663x", "1_"]
    if bool in kind.bases:
        return [*common, "0", "1", "yes", "on", "2.0", "Tru", "nan"]
    if int in kind.bases:
        return [*common, "1.5", "True", "nan", "inf", "1e400", "-1.0", "0x", "3m", "1j", "", "0b2", "007"]
    if float in kind.bases:
        return [*common, "False", "nan", "inf", "-inf", "1e400", "NaN", "1j", "", "0.1.2", "1,5", "5e", "--1"]
    if tuple in kind.bases:
        return ["a", "1.5", "1,b", "-1", "1,-2", "2,2", "[[1]]", "{1: 2}", "True", "1,True", "nan", "1e400"]
    if dict in kind.bases:
        return ["3", "3m", "[1]", "True", "", "map_name", "nan"]
    raise AssertionError(f"no mistakes are known for {kind}: add some")


def out_of_range(kind: Kind) -> list[str]:
    """Return texts of numbers just beyond, and far beyond, what a key takes."""
    texts = []
    for name, number in kind.bounds:
        beyond = number - 1 if name in {"ge", "gt"} else number + 1
        texts += [str(int(beyond)) if int in kind.bases else str(float(beyond))]
        texts += [str(int(number))] * (name in {"gt", "lt"}) + ["-9" * 5 if name in {"ge", "gt"} else "9" * 30]
    if int in kind.bases:
        texts += ["9" * 400, "0x" + "f" * 6000]
    return texts


def misspelt(chance: random.Random, word: str) -> str:
    """Return another word, near `word`."""
    at = chance.randrange(len(word))
    return chance.choice(
        [
            word[:at] + word[at + 1 :] + "_",
            word[:at] + chance.choice("qzjx") + word[at:],
            word + "s",
            word.upper() + "_",
        ]
    )


# --- kinds of mistakes: each yields inputs without end


def unknown_keys(chance: random.Random) -> Iterator[Malformed]:
    while True:
        key = chance.choice([*KINDS, "tokenizer_config", "env_args"])
        parts = key.split(".")
        place = chance.randrange(len(parts))
        parts[place] = misspelt(chance, parts[place])
        if key == "env_args" or chance.random() < 0.2:
            parts = [*key.split("."), misspelt(chance, "map_name"), *(["x"] * chance.randrange(3))]
        if ".".join(parts) in KINDS:
            continue
        yield Malformed((*chance.choice([GRAPHS, PLAIN]), f"{'.'.join(parts)}={chance.choice(['1', 'x', '', 'None'])}"))


def wrong_types(chance: random.Random) -> Iterator[Malformed]:
    for key, kind in _rounds(chance):
        if texts := wrong_texts(kind):
            yield Malformed((*GRAPHS, f"{key}={chance.choice(texts)}"))


def wrong_ranges(chance: random.Random) -> Iterator[Malformed]:
    for key, kind in _rounds(chance):
        if texts := out_of_range(kind):
            yield Malformed((*GRAPHS, f"{key}={chance.choice(texts)}"))


def missing_values(chance: random.Random) -> Iterator[Malformed]:
    """None where a value must be."""
    for key, kind in _rounds(chance):
        if not kind.bases & {type(None), str}:
            yield Malformed((*GRAPHS, f"{key}={chance.choice(['None', 'null', 'none', 'NULL'])}"))


def wrong_values_in_files(chance: random.Random) -> Iterator[Malformed]:
    """Values that only YAML can say: text where a number must be, numbers where text must be, dates, lists."""
    for number, (key, kind) in enumerate(_rounds(chance)):
        section, _, name = key.rpartition(".")
        values: list[object] = [[1, [2]], {"inner": {"deep": 1}}, float("inf"), b"\x00", {1: 2}]
        values += ["1e-3x"] if str not in kind.bases else [3, 0.5, True, ["omagd"]]
        if dict in kind.bases:
            values = [[1], 3, "3m", {"map_name": ["3m"]}, {"nothing": 1}]
        value: object = {name: chance.choice(values)}
        text = yaml.safe_dump({section: value} if section else value)
        path = f"given_{number}.yaml"
        yield Malformed((f"--config={path}",), {}, {path: text.encode()})


def broken_files(chance: random.Random) -> Iterator[Malformed]:
    """Files that are no configuration."""
    texts = [
        "a: b: c", "lr: [1", "lr: {", "\tlr: 1", "- lr\n- 2", "just words", "3", "lr: 1\n lr2: 2", "lr: &a", "lr: *b",
        "!!python/object/apply:os.getcwd []", "lr: !!python/name:os.system", "lr: !unknown 3", "? [a, b]\n: 3",
        "1: 2", "null: 3", "lr: 0.1\nlr: 0.2", "%YAML 9", "--- 1\n--- 2", "lr: 2020-13-45", "<<: 3", "<<: [1]",
        "env_args: {map_name: 3m, map_name: 8m}", "env_args: &a {me: *a}", "tokenizer_config: [n_codes, 3]",
        "tokenizer_config: {n_codes: 3, n_codes: 4}", "seed: 1:70:99x", "lr: 1" + "0" * 5000, "lr: " + "[" * 3000,
        "lr: \x00", "lr: \x1b[31m", "seed: -1", "Lr: 3", "lr : 1e-3x", "@lr: 1", "`", "env_args: 5", "env_args: [a]",
        "omagd_small", "tokenizer_config:\n  n_code: 3", "mask_predictor_config: nothing", "lr: 0.1\nlr: soon",
        "lr: !!float soon", "seeds: [1, 1]", "seeds: {a: 1}", "seeds: 1, 2", "world_size: 0", "t_max: !!int x",
    ]  # fmt: skip
    for number in itertools.count():
        path = f"broken_{number}.{chance.choice(['yaml', 'yml'])}"
        content = chance.choice(texts).encode()
        content = chance.choice([content] * 6 + [b"\xff\xfe" + content, content + b"\n\x81\x8d"])
        yield Malformed((f"{chance.choice(['--config', '--env-config'])}={path}",), {}, {path: content})


def unknown_configs(chance: random.Random) -> Iterator[Malformed]:
    """Names that no configuration has, paths that lead elsewhere, words that are no names."""
    odd = [
        "", " ", ".", "..", "/", "../algs/qmix", "../../../../etc/passwd", "algs/../qmix", "/etc/passwd", "qmix.yaml",
        "folder.yaml", "~/qmix", "folder", "folder/", "junk", "binary.yaml", "empty_key.yaml", "*", "qmix*", "qm?x",
        "q" * 300, "q/" * 3000, "é" * 200, "☃", "\u202eximq", "qmix\n", "\x1b[2J", "\udcff\udcfe", "qmix;ls", "$HOME",
        "nowhere/qmix.yml", "junk/qmix.yaml", "x" * 5000 + ".yaml", "%s%n", "{0}", "-", "None", "default", "omagd,qmix",
        "/dev/null/x.yaml", "../envs/skirmish", "../default",
    ]  # fmt: skip
    while True:
        option = chance.choice(["--config", "--env-config", "--env_config"])
        name = chance.choice([*odd, misspelt(chance, "omagd_small"), misspelt(chance, "skirmish")])
        yield Malformed((f"{option}={name}",) if chance.random() < 0.7 or name[:1] == "-" else (option, name))


def wrong_words(chance: random.Random) -> Iterator[Malformed]:
    """Words that are no `key=value`, options that there are not, options without a value."""
    words = [
        ("lr=3",), ("with", "lr"), ("with", "lr", "=", "3"), ("with", "lr=", "3"), ("with", "lr", "=3"), ("with", "=3"),
        ("with", ""), ("",), ("with", " "), ("with", "lr =3"), ("with", " lr=3"), ("whit", "lr=3"), ("wiht",),
        ("With", "lr=3"), ("with", "with", "lr=3"), ("with", "="), ("with", "=="), ("with", ".=3"), ("with", "lr.=3"),
        ("with", ".lr=3"), ("with", "env_args.=3"), ("with", "env_args..map_name=3m"), ("with", "tokenizer_config.=1"),
        ("with", "lr:3"), ("with", "lr->3"), ("print_config",), ("print_config", "with", "lr=1"), ("qmix",), ("train",),
        ("with", "x" * 20000 + "=1"), ("with", "lr=" + "x" * 20000), ("with", "ключ=1"), ("with", "lr=\u2028\u2029"),
        ("with", "\x1b[31mlr=1"), ("with", "lr=\r\nerror: two"), ("with", "lr\n=3"), ("with", "\udcff=1"),
        ("with", "lr=\udcff"), ("with", "__class__=1"), ("with", "model_config=1"), ("with", "lr.__class__=1"),
        ("with", "a." * 3000 + "b=1"), ("with", "lr=" + "(" * 5000), ("with", "lr=" + "-" * 5000 + "1"),
        ("with", "lr=1" + "0" * 6000), ("with", "lr=" + "[" * 90 + "]" * 90), ("with", "lr=__import__('os')"),
        ("with", "stage=stage1"), ("with", "map_name=3m"), ("with", "self=1"), ("--", "lr=3"),
        ("--config",), ("--env-config",), ("--config", "--dry-run"), ("--confg=qmix",), ("--conf=qmix",), ("-x",),
        ("-z", "3"),        ("--dry-run=yes",), ("--list=all",), ("--version=2",),
        ("--no-cuda",), ("--t_max=3",), ("--lr", "3"), ("-c",),
        ("--comment",), ("--name",), ("-n",), ("--file_storage",), ("-F",), ("--loglevel",), ("-l",), ("--dryrun",),
        ("-l", "LOUD"), ("--loglevel=",), ("--loglevel=VERBOSE",), ("-F", "junk/deep"), ("--file_storage=junk",),
        ("-F", ""), ("-F", "/proc/omagd"), ("--with", "lr=3"), ("-vvv",), ("---",), ("--=3",), ("--config=qmix", "vdn"),
        ("compare",), ("compare", "nowhere"), ("compare", "folder"), ("compare", "junk"), ("compare", "folder", "with"),
        ("compare", "x" * 5000), ("compare", "\udcff"), ("doctor", "lr=3"), ("doctor", "with", "lr"), ("doctor", "all"),
        ("doctor", "--env-config=chess"), ("doctor", "with", "lr=soon"), ("doctor", "--config=qmx"),
    ]  # fmt: skip
    while True:
        chosen = chance.choice(words)
        before = [(), (), ("--config=qmix",)]
        if chosen[0][:3] not in {"-F", "--f"}:  # where nothing is recorded, any folder will do
            before += [("--dry-run",), ("-u",)]
        yield Malformed((*chance.choice(before), *chosen))


def unknown_names(chance: random.Random) -> Iterator[Malformed]:
    while True:
        key = chance.choice(sorted(NAMES))
        name = chance.choice(
            ["", "nobody", "None", "3", "..", "os:system", "a.b:c", "é", "x" * 400, misspelt(chance, key)]
        )
        yield Malformed((*chance.choice([GRAPHS, PLAIN]), f"{key}={name}"))


def wrong_env_args(chance: random.Random) -> Iterator[Malformed]:
    """Arguments of other environments, and values out of what the environment takes."""
    own: dict[str, list[str]] = {
        "skirmish": [
            "map_name=3x", "map_name=", "map_name=../3m", "map_name=3", "map_name=[3m]", "map_name=None", "map_name=3M",
            "map_name={'a': 1}", "move_amount=[]", "difficulty=0", "difficulty=VeryHard",
            "difficulty=B", "difficulty=11",
            "move_amount=0", "move_amount=-1", "move_amount=far", "move_amount=nan", "move_amount=inf",
            "obs_all_health=perhaps", "obs_last_action=2", "reward_win=-1", "reward_win=nan", "reward_defeat=inf",
            "reward_defeat=nan", "reward_scale_rate=0", "reward_scale_rate=1e400", "reward_death_value=None",
            "payoff=climbing", "n_cues=2", "step_mul=8", "jax_platform=cpu", "conic_fov=False", "map=3m", "maps=3m",
            "map_name.x=3", "seed=None", "game_version=4.10", "walls_cause_death=True", "capability_config.n_units=5",
        ],
        "sc2": ["game_version=4.1.0.0.0", "game_version=3", "game_version=", "game_version=1e6",
            "game_version={'a': 1}"],
        "matrix_game": ["payoff=x", "payoff=3", "penalty=1", "penalty=nan", "penalty=-inf", "penalty=x"],
        "memory_game": ["n_cues=0", "n_cues=1.5", "n_cues=x", "n_cues=-3", "n_agents=0", "n_agents=None"],
    }  # fmt: skip
    while True:
        env = chance.choice(["skirmish", "skirmish", "sc2", "matrix_game", "memory_game"])
        yield Malformed(("--config=qmix", f"--env-config={env}", "with", f"env_args.{chance.choice(own[env])}"))


def wrong_paths(chance: random.Random) -> Iterator[Malformed]:
    """Paths at which nothing fitting lies."""
    odd = [
        "nowhere", "junk", "empty.th", "junk.th", "folder", "agents", "agents/100", "tokens", "masks", ".", "..", "/",
        "/dev/null", "/proc/self/mem", "x" * 300, "x/" * 3000, "~nobody/x", "tokens/tokenizer.th", "~/omagd_nowhere",
        "~nobody_here/x", "masks/stage2_model.th", "\udcff", "é☃", " ", "junk/agent.th", "file:///junk", "binary.yaml", "http://x/y.th",
        "folder/readme", "agents/100/agent.th",
    ]  # fmt: skip
    while True:
        key, path = chance.choice(PATHS), chance.choice(odd)
        if key == "pretrain_buffer_path" and (Path(path).is_absolute() or path in {".", ".."}):
            path = "nowhere"
        if key == "pretrain_buffer_path" and path.partition("/")[0] in {"folder", "agents", "tokens", "masks"}:
            path = "nowhere_else"  # any folder is taken, until it is read
        more = [f"pretrained_tokenizer_path={path}"] if key == "pretrained_mask_predictor_path" else []
        more += chance.choice([[], ["load_step=7"], ["evaluate=True"]]) if key == "checkpoint_path" else []
        yield Malformed((*GRAPHS, *more, f"{key}={path}"))


def unusable_results(chance: random.Random) -> Iterator[Malformed]:
    """Places where no run can write, names that are no names of a folder."""
    places = ["junk", "junk/results", "/proc/omagd", "/dev/null/results", "empty.th/x", "x" * 300, "y/" * 3000]
    tokens = [
        "..",
        ".",
        "../up",
        "a/b",
        "/absolute",
        "../../x",
        "a/",
        "x" * 300,
        "folder/../..",
        "sacred",
        "logs",
        "Sacred",
        ".seeds_x",
        ".hidden",
        " a",
        "a ",
        "\ta",
    ]
    while True:
        word = chance.choice([f"local_results_path={chance.choice(places)}", f"unique_token={chance.choice(tokens)}"])
        yield Malformed((*chance.choice([GRAPHS, PLAIN]), word))


def wrong_evaluations(chance: random.Random) -> Iterator[Malformed]:
    """`evaluate RUN` of folders that hold no run, a damaged one or one of another map, and with wrong words."""
    for words in EVALUATIONS:
        yield Malformed(("evaluate", *words.split()))
    while True:
        yield Malformed(("evaluate", "eight", f"{misspelt(chance, 'test_nepisode')}=3"))


EVALUATIONS = (
    "", "nowhere", "junk", "folder", "empty.th", "bare", "bare/models", "bare/models/100", "torn", "torn/models",
    "listed", "foreign", "typed", "eight", "eight load_step=100", "blank", "test_nepisode=3", "with test_nepisode=3",
    "eight lr", "eight lr=soon", "eight --config=qmix", "eight --env-config=skirmish", "eight evaluate=False",
    "eight checkpoint_path=bare", "eight env_args.map_name=3x", "eight env_args.map=3m", "eight test_nepisode=0",
    "half", "deep", "sized",
    "eight save_replay=True", "eight local_results_path=. unique_token=folder", "eight with with test_nepisode=3",
)  # fmt: skip
CONTRADICTIONS = (
    "save_replay=True", "evaluate=True checkpoint_path=agents save_replay=True", "evaluate=True checkpoint_path=eight",
    "unique_token=folder local_results_path=.", "unique_token=junk local_results_path=.", "checkpoint_path=blank",
    "use_per=True", "epsilon_start=0.1 epsilon_finish=0.2", "batch_size=64 buffer_size=32", "seeds=1,2 unique_token=x",
    "accumulate=33 batch_size=32", "evaluate=True", "evaluation_only=True", "load_step=100", "seeds=3,4,3",
    "reconstructer_stage=stage2", "reconstructer_stage=stage3", "pretrain_only=True reconstructer_stage=stage3",
    "reconstructer_stage=stage1 recontructer_stage=stage2", "use_full_obs=True", "learner=nq_learner", "mac=n_mac",
    "mac=basic_mac", "mask_predictor_config.n_heads=3", "pretrained_mask_predictor_path=masks",
    "run=default world_size=2",
    "evaluate=True pretrain_only=True checkpoint_path=agents", "dist_backend=nccl use_cuda=False",
    "learner=nq_learner_ddp", "reconstructer_stage=stage1 pretrained_tokenizer_path=tokens", "lr=1 lr.x=2",
    "reconstructer_stage=stage2 pretrained_tokenizer_path=tokens pretrained_mask_predictor_path=masks",
    "pretrain_only=True pretrained_tokenizer_path=tokens pretrained_mask_predictor_path=masks", "env_args=3",
    "use_cuda=False max_memory_per_gpu_gb=3", "tokenizer_config=3 tokenizer_config.n_codes=4", "tokenizer_config=None",
    "env_args=[] env_args.map_name=3m", "env_args={'map_name':'3m'} env_args.map_nam=8m",
    "env=matrix_game env_args=None",
    "env=memory_game", "env_args.map_name=3m env_args=8m", "tokenizer_config.n_codes.x=3", "lr={'x':1}", "graph_lr.=1",
    "mask_predictor_config={'d_model':3}", "mask_predictor_config={'d_modell':3}", "mixer=qmix mixer=qmixx",
    "gamma=1 gamma=2", "resume=wrong", "resume=exact,lossy", "resume=True",
)  # fmt: skip


def contradictions(chance: random.Random) -> Iterator[Malformed]:
    for number in itertools.count():
        words = CONTRADICTIONS[number % len(CONTRADICTIONS)].split()
        harmless = chance.sample(["seed=3", "t_max=99", "name=x", "use_wandb=False", "lr=0.1", "gamma=0.5"], 2)
        overlap = {word.partition("=")[0] for word in words} & {"seed", "lr", "gamma"}
        harmless = [word for word in harmless if word.partition("=")[0] not in overlap]
        yield Malformed((*GRAPHS, *words, *(harmless if number >= len(CONTRADICTIONS) else ())))


def wrong_groups(chance: random.Random) -> Iterator[Malformed]:
    """Variables of torchrun that contradict themselves, each other, or the configuration."""
    whole = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    numbers = ["abc", "", "1.5", "0x1", " ", "-1", "nan", "9" * 30, "٣x"]
    while True:
        name = chance.choice(sorted(whole.keys() - {"MASTER_ADDR"}))
        wrong = {
            "RANK": [*numbers, "2", "7"],
            "WORLD_SIZE": [*numbers[:-2], "0"],
            "LOCAL_RANK": [*numbers, "2", "5"],
            "LOCAL_WORLD_SIZE": [*numbers, "0"],
            "MASTER_PORT": [*numbers, "0", "65536", "port"],
        }[name]
        variables = {**whole, name: chance.choice(wrong)}
        if chance.random() < 0.15:
            variables = {
                key: value for key, value in whole.items() if key != chance.choice(["MASTER_PORT", "MASTER_ADDR"])
            }
            if len(variables) == len(whole):
                continue
        words = ["run=ddp"]
        if chance.random() < 0.2:
            variables, words = whole, [chance.choice(["run=ddp world_size=3", "run=default", "run=ddp seeds=1,2"])]
        yield Malformed((*PLAIN, *" ".join(words).split()), variables)


# What shell text does where a script hands it to arithmetic or to a test of numbers.
INJECTED = "PATH[$(touch HIT)`touch HIT`]"
# Scripts, what is typed behind them, their variables, and a word of the line in which they reject that.
SHELL_MISTAKES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("launch.sh", "--node 2", {}, "--node: not understood"),
    ("launch.sh", "", {"NUM_GPUS": INJECTED}, "NUM_GPUS PATH[$("),
    ("launch.sh", "--nodes 1e3", {}, "--nodes 1e3: must be a whole number"),
    ("launch.sh", "--nodes 2 --node-rank 0 --master-addr -x", {}, "--master-addr -x"),
    ("train_ddp.sh", "--epochs 3", {}, "--epochs: not understood"),
    ("train_ddp.sh", "", {"NUM_GPUS": "two"}, "NUM_GPUS two"),
    ("run_pretrain_ddp.sh", "--epochs=3", {}, "--epochs=3: not understood"),
    ("run_pretrain_ddp.sh", "stray", {}, "stray: not understood"),
    ("run_pretrain_ddp.sh", "--config", {}, "--config needs a value"),
    ("run_gnn_stage3_ddp.sh", "-x", {}, "-x: not understood"),
    ("run_gnn_stage3_ddp.sh", "", {"NUM_GPUS": "-1", "TOKENIZER_PATH": "t", "MASK_PREDICTOR_PATH": "m"}, "NUM_GPUS -1"),
    ("quickstart.sh", "--instal", {}, "--instal: not understood"),
    ("quickstart.sh", "\x1b[31mred", {}, "?[31mred: not understood"),
    ("scripts/quick_distributed_test.sh", "--node 2", {}, "--node: not understood"),
    ("scripts/quick_distributed_test.sh", "", {"NUM_GPUS": INJECTED}, "NUM_GPUS PATH[$("),
    ("scripts/quick_distributed_test.sh", "--nodes 2 --master-addr a;b", {}, "--master-addr a;b"),
    ("install_sc2.sh", "--verison 4.10", {}, "--verison"),
    ("slurm/one_node.sbatch", "", {"SLURM_JOB_ID": INJECTED}, "SLURM_JOB_ID="),
    ("slurm/many_nodes.sbatch", "", {"SLURM_JOB_ID": INJECTED}, "SLURM_JOB_ID="),
    ("slurm/many_nodes.sbatch", "", {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID="),
    *(
        (script, "", {"PYTHON": python, "TOKENIZER_PATH": "t", "MASK_PREDICTOR_PATH": "m"}, f"PYTHON={python}: does")
        for script in ("launch.sh", "train_ddp.sh", "run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh")
        for python in ("/nowhere/python", "/bin/false")
    ),
    ("quickstart.sh", "", {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python: does not start"),
    ("run_tests.sh", "", {"PYTHON": "/bin/false"}, "PYTHON=/bin/false: does not start"),
)  # fmt: skip


FAMILIES: dict[str, tuple[Callable[[random.Random], Iterator[Malformed]], int]] = {
    "unknown keys": (unknown_keys, 50),
    "wrong types": (wrong_types, len([kind for kind in KINDS.values() if wrong_texts(kind)])),
    "out of range": (wrong_ranges, len([kind for kind in KINDS.values() if out_of_range(kind)])),
    "no value": (missing_values, 20),
    "wrong values in files": (wrong_values_in_files, 50),
    "broken files": (broken_files, 45),
    "unknown configurations": (unknown_configs, 40),
    "wrong words": (wrong_words, 80),
    "unknown names": (unknown_names, 20),
    "wrong env_args": (wrong_env_args, 35),
    "wrong paths": (wrong_paths, 45),
    "unusable results": (unusable_results, 12),
    "wrong evaluations": (wrong_evaluations, len(EVALUATIONS) + 3),
    "contradictions": (contradictions, len(CONTRADICTIONS)),
    "wrong groups": (wrong_groups, 40),
}


def generate(family: str, seed: int = 5) -> list[Malformed]:
    """Return the inputs of a family, all different: as many as its count says, the same ones for one seed."""
    make, count = FAMILIES[family]
    found: dict[str, Malformed] = {}
    for case in make(random.Random(f"{family} {seed}")):
        found.setdefault(case.key, case)
        if len(found) == count:
            break
    return list(found.values())


def _rounds(chance: random.Random) -> Iterator[tuple[str, Kind]]:
    """Yield every key of the schema, then all of them again in another order, without end."""
    while True:
        yield from chance.sample(sorted(KINDS.items()), len(KINDS))
