"""scripts/find_pretrained.py: the newest tokenizer and predictor that fit, of folders that can be trusted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from command_harness import ROOT

from omagd.modules.graph_reconstructers.pretrained import describe
from omagd.run.checkpoint.weights import PREDICTOR_FILE, TOKENIZER_FILE
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import describe_env
from omagd.run.training.build import new_predictor, new_tokenizer

CPU, SMALL = torch.device("cpu"), "--config=omagd_small"
SIZES = (
    "tokenizer_config.n_codes=8", "tokenizer_config.code_dim=4", "tokenizer_config.hidden_dim=8",
    "mask_predictor_config.d_model=8", "mask_predictor_config.n_heads=2", "mask_predictor_config.feedforward_dim=8",
)  # fmt: skip
TOKENS, MASKS = f"models/pretrain_stage1_best/{TOKENIZER_FILE}", f"models/pretrain_stage2_best/{PREDICTOR_FILE}"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("find_pretrained", ROOT / "scripts" / "find_pretrained.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def add(tmp_path):
    """Return a function that adds a run with pre-trained modules; each is newer than those before."""
    moments = iter(range(10**9, 2 * 10**9, 100))

    def make(name: str, *words: str, only: str = "", results: str = "results") -> Path:
        config = config_from([SMALL, "with", *SIZES, *words])
        info, moment = describe_env(config), next(moments)
        tokens, masks = new_tokenizer(config, info, CPU), new_predictor(config, info, CPU)
        masks.table.copy_(tokens.table())
        for file, module in ((TOKENS, tokens), (MASKS, masks)):
            path = tmp_path / results / name / file
            if only in ("", file):
                path.parent.mkdir(parents=True)
                meta = describe(config, info, predictor=file == MASKS)
                torch.save({"weights": module.state_dict(), "meta": meta}, path)
                os.utime(path, (moment, moment))
        return tmp_path / results / name

    return make


@pytest.fixture
def found(main, tmp_path, capsys):
    """Return a function that returns the run folders of tokenizer and predictor; of a rejection its lines."""

    def call(*words: str) -> list[str]:
        code = main(str(tmp_path / "results"), *words)
        out, err = capsys.readouterr()
        if code:
            assert (code, out) == (2, "")
            return err.splitlines()
        lines = out.splitlines()
        assert [line.partition(": ")[0] for line in err.splitlines()] == ["tokenizer", "mask predictor"]
        assert all(line in err for line in lines)
        runs = [line.removesuffix(f"/{file}") for line, file in zip(lines, (TOKENS, MASKS), strict=True)]
        return [os.path.relpath(run, tmp_path / "results") for run in runs]

    return call


def test_the_newest_that_fit_are_taken(add, found):
    command = (SMALL, "with", *SIZES)
    (line, *_) = found(*command)
    assert line.startswith("error: no tokenizer and mask predictor for skirmish 3m with the sizes of omagd_small in ")
    assert "STAGE=stage1" in line and "TOKENIZER_PATH" in line
    both = add("both")
    add("apart1", "seed=2", only=TOKENS)
    assert found(*command) == ["both", "both"]  # the newer tokenizer has no predictor
    add("apart2", "seed=2", only=MASKS)
    add("other_map", "env_args.map_name=8m")
    add("other_size", "tokenizer_config.code_dim=5")
    assert found(*command) == ["apart1", "apart2"]
    assert found(*command, "env_args.map_name=8m") == ["other_map", "other_map"]
    assert found(*command, f"pretrained_tokenizer_path={both / TOKENS}")[1:] == ["both"]


def test_what_cannot_be_trusted_or_read_is_passed_over(add, found):
    inner = add("good").parent / "inner" / "models"
    planted = add("planted", results="elsewhere")
    (inner.parents[1] / "link").symlink_to(planted)
    inner.mkdir(parents=True)
    for file in (TOKENS, MASKS):
        (inner.parent / file).parent.symlink_to((planted / file).parent)
    add("name\n$(touch HIT)")
    damaged = add("damaged", "seed=3") / TOKENS
    damaged.write_bytes(damaged.read_bytes()[:100])
    (inner.parents[1] / "a file").write_text("nothing")
    assert found(SMALL, "with", *SIZES) == ["good", "good"]


def test_what_was_made_with_another_configuration_is_named_once(add, found):
    """After the quickstart, a command of the published sizes is answered by the quickstart's configuration."""
    record = add("small", "name=omagd_small") / "config.json"
    asked = ("--config=omagd", "with", *(word for word in SIZES if "n_codes" not in word and "d_model" not in word))
    expected = "error: no tokenizer and mask predictor for skirmish 3m with the sizes of omagd in "
    for content in ('{"name": "$(touch HIT)"}', "["):  # not known: every key that differs, of both files
        record.write_text(content)
        (line,) = found(*asked)
        first, tokenizer, predictor = line.split("; not used: ")
        assert first.startswith(expected) and "STAGE=stage1" in first and "HIT" not in first
        assert "was trained with tokenizer_config.n_codes=8, not 1024; set tokenizer_config.n_codes=8" in tokenizer
        assert {"mask_predictor_config.d_model=8", "tokenizer_config.n_codes=8"} <= {*predictor.split()}
    # The configuration that it was made with finds it.
    record.write_text('{"name": "omagd_small"}')
    (line,) = found(*asked, "tokenizer_config.n_codes=8", "mask_predictor_config.d_model=8")
    assert line.startswith(expected) and line.endswith(
        ": those found were made with --config omagd_small. Type CONFIG=omagd_small ./run_gnn_stage3_ddp.sh"
    )
