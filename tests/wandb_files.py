"""Read what W&B has recorded offline in a run's folder, without this program's own reader."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records_in(path: Path) -> list:
    """Return the records of a `.wandb` file up to a half one: pieces in blocks, each with checksum, size and kind."""
    data, at, found, pieces = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7
        if not kind or at + size > len(data):
            break
        pieces += data[at : at + size]
        at += size
        if kind in (1, 4):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(pieces))
            pieces = b""
    return found


def offline_files(run: Path) -> list[Path]:
    """Return the files of all offline W&B runs in a run's folder, in the order of their last changes."""
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def rows_of(items) -> dict:
    """Return the values of a record of the history or the summary by name."""
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json, parse_constant=str) for item in items}


def history(run: Path) -> dict[str, dict[str, list[dict]]]:
    """Return the rows of all offline files of a run by stage and W&B id; an id without a row is there as well."""
    found = defaultdict(lambda: defaultdict(list))
    for path in offline_files(run):
        rows: list[dict] = []
        for record in records_in(path):
            if record.HasField("run"):
                rows = found[record.run.job_type][record.run.run_id]
            if record.HasField("history"):
                rows.append(rows_of(record.history.item))
    return found


def assert_recorded_once(run: Path) -> None:
    """Check that W&B has every line of metrics.jsonl once, in one W&B run for each stage."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = history(run)
    stages = {line["stage"] for line in lines}
    logs = [path.read_text()[-4000:] for path in run.glob("logs/rank_0.log")]  # none where a logger ran alone
    assert found.keys() == stages, (dict(found), stages, offline_files(run), logs)
    for stage, runs in found.items():
        (rows,) = runs.values()
        clock = "t_env" if stage == "stage3" else "epoch"
        own = [line for line in lines if line["stage"] == stage]
        assert [row["_step"] for row in rows] == [line[clock] for line in own]
        for row, line in zip(rows, own, strict=True):
            expected = {name: value for name, value in line.items() if name not in {"stage", clock}}
            assert {name: row[name] for name in expected} == {
                name: "NaN" if value is None else value for name, value in expected.items()
            }
    stems = {path.stem for path in offline_files(run)}
    assert stems == {f"run-{name}" for runs in found.values() for name in runs}
