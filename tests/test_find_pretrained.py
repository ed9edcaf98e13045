"""scripts/find_pretrained.py: the newest tokenizer and predictor that fit, of folders that can be trusted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from command_harness import ROOT

from omagd.modules.graph_reconstructers.reconstructor import describe
from omagd.run.checkpoint.weights import PREDICTOR_FILE, TOKENIZER_FILE
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import describe_env
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.utils.run_folder import RunFolder

CPU = torch.device("cpu")
SIZES = (
    "tokenizer_config.n_codes=8", "tokenizer_config.code_dim=4", "tokenizer_config.hidden_dim=8",
    "mask_predictor_config.d_model=8", "mask_predictor_config.n_heads=2", "mask_predictor_config.feedforward_dim=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def finder():
    spec = importlib.util.spec_from_file_location("find_pretrained", ROOT / "scripts" / "find_pretrained.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Results:
    """A folder of results; each pre-training that is put there is newer than those before."""

    def __init__(self, path: Path) -> None:
        self.path, self.time = path, 10**9

    def add(self, name: str, *words: str, seed: int = 1, tokenizer: bool = True, predictor: bool = True) -> Path:
        config = config_from(["with", *SIZES, *words, f"seed={seed}"])
        info = describe_env(config)
        tokens = new_tokenizer(config, info, CPU)
        masks = new_predictor(config, info, CPU)
        masks.table.copy_(tokens.table())
        folder = RunFolder(self.path / name)
        for stage, module, file, wanted in (
            ("stage1", tokens, TOKENIZER_FILE, tokenizer), ("stage2", masks, PREDICTOR_FILE, predictor),
        ):  # fmt: skip
            if wanted:
                meta = describe(config, info, predictor=stage == "stage2")
                path = folder.pretrained(stage, best=True) / file
                path.parent.mkdir(parents=True)
                torch.save({"weights": module.state_dict(), "meta": meta}, path)
                os.utime(path, (self.time, self.time))
        self.time += 100
        return folder.path


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results")


def found(finder, results: Results, capsys, *words: str) -> list[str]:
    """Return the run folders of tokenizer and predictor; of a rejection its first line."""
    capsys.readouterr()
    code = finder.main(str(results.path), "with", *SIZES, *words)
    output = capsys.readouterr()
    if code:
        assert (code, output.out) == (2, "")
        return output.err.splitlines()[:1]
    lines = output.out.splitlines()
    assert [line.partition(": ")[0] for line in output.err.splitlines()] == ["tokenizer", "mask predictor"]
    assert all(line in output.err for line in lines)
    assert [Path(line).name for line in lines] == [TOKENIZER_FILE, PREDICTOR_FILE]
    return [str(Path(line).relative_to(results.path).parts[0]) for line in lines]


def test_the_newest_that_fit_are_taken(finder, results, capsys):
    (line,) = found(finder, results, capsys)
    assert line.startswith("error: no tokenizer and mask predictor for skirmish 3m with the sizes of omagd_small in ")
    assert "STAGE=stage1" in line and "TOKENIZER_PATH" in line
    results.add("both")
    results.add("apart1", seed=2, predictor=False)
    assert found(finder, results, capsys) == ["both", "both"]  # the newer tokenizer has no predictor
    results.add("apart2", seed=2, tokenizer=False)
    assert found(finder, results, capsys) == ["apart1", "apart2"]
    results.add("other_map", "env_args.map_name=8m")
    results.add("other_size", "tokenizer_config.code_dim=5")
    assert found(finder, results, capsys) == ["apart1", "apart2"]
    assert found(finder, results, capsys, "env_args.map_name=8m") == ["other_map", "other_map"]
    given = results.path / "both" / "models" / "pretrain_stage1_best" / TOKENIZER_FILE
    assert found(finder, results, capsys, f"pretrained_tokenizer_path={given}")[1:] == ["both"]


def test_what_cannot_be_trusted_or_read_is_passed_over(finder, results, capsys, tmp_path):
    results.add("good")
    elsewhere = Results(tmp_path / "elsewhere")
    elsewhere.time = results.time
    planted = elsewhere.add("planted")
    (results.path / "link").symlink_to(planted)
    inner = results.path / "inner"
    (inner / "models").mkdir(parents=True)
    (inner / "models" / "pretrain_stage1_best").symlink_to(planted / "models" / "pretrain_stage1_best")
    (inner / "models" / "pretrain_stage2_best").symlink_to(planted / "models" / "pretrain_stage2_best")
    results.add("name\n$(touch HIT)")
    damaged = RunFolder(results.add("damaged", seed=3)).pretrained("stage1", best=True) / TOKENIZER_FILE
    damaged.write_bytes(damaged.read_bytes()[:100])
    (results.path / "a file").write_text("nothing")
    assert found(finder, results, capsys) == ["good", "good"]


def test_what_was_made_with_another_configuration_is_named_once(finder, results, capsys):
    """After the quickstart, a command of the published sizes is answered by the quickstart's configuration."""
    made = RunFolder(results.add("small", "name=omagd_small"))
    asked = ("--config=omagd", "with", *(word for word in SIZES if "n_codes" not in word and "d_model" not in word))
    expected = "error: no tokenizer and mask predictor for skirmish 3m with the sizes of omagd in "
    ours = ("tokenizer_config.n_codes=8", "mask_predictor_config.d_model=8", "mask_predictor_config.n_layers=1")

    def answer(*words: str) -> list[str]:
        assert finder.main(str(results.path), *asked, *words) == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err.splitlines()

    # No record of the configuration, or one that is not known: every key that differs, of both files.
    for record in (None, '{"name": "$(touch HIT)"}', "["):
        if record is not None:
            made.config_json.write_text(record)
        first, tokenizer, predictor = answer()
        assert first.startswith(expected) and "STAGE=stage1" in first and "HIT" not in first
        assert "tokenizer.th was trained with tokenizer_config.n_codes=8, not 1024; set tokenizer_config.n_codes=8" in (
            tokenizer
        )
        assert set(ours) <= set(predictor.partition("; set ")[2].split())
    # The configuration that it was made with finds it.
    made.config_json.write_text('{"name": "omagd_small"}')
    (line,) = answer("tokenizer_config.n_codes=8", "mask_predictor_config.d_model=8")
    assert line.startswith(expected) and line.endswith(
        ": those found were made with --config omagd_small. Type CONFIG=omagd_small ./run_gnn_stage3_ddp.sh"
    )
