"""What the tests of W&B share: a clean machine, runs read back from their files, and a server on this machine."""

from __future__ import annotations

import gzip
import http.server
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import wandb
from wandb.proto import wandb_internal_pb2

from cbexp import metrics
from cbexp.config import TrackingConfig
from cbexp.metrics import RoundRecord
from cbexp.tracking import Tracker, start_tracking

KEY = "k" * 40
DEAD_SERVER = "http://127.0.0.1:9"


def a_round(index: int, is_warmup: bool = False) -> RoundRecord:
    requests = [metrics.RequestRecord(index, "r", "eos", 3, 4, 4, 0.5, 1.0, 1 / 3, 2.0, True, "d", None)]
    return metrics.summarize_round(index, is_warmup, 0.0, 1.0 + index / 7, requests, [], None)


def a_step(kind: str = "decode", num_steps: int = 1, duration_s: float = 1.0) -> metrics.StepRecord:
    return metrics.StepRecord(0, 0, kind, num_steps, 1, num_steps, 0, None, 0.0, duration_s, 0, 0, 0.5)


def a_summary(**values: object) -> dict:
    return {"decode_tps": 100.0, "peak_reserved_gib": None, "peak_host_gib": 1.5, **values}


def start(run_dir: Path, mode: str = "offline", **options: object) -> Tracker:
    return start_tracking(TrackingConfig(mode=mode, **options), "seed=1", None, {"seed": 1}, run_dir)


@dataclass
class ReadBack:
    """What an offline run's file holds."""

    run: wandb_internal_pb2.RunRecord | None = None
    history: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    metrics: list[wandb_internal_pb2.MetricRecord] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def config(self) -> dict:
        updates = {item.key: json.loads(item.value_json) for item in self.run.config.update}
        return {key: value for key, value in updates.items() if key != "_wandb"}


def iterate_records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of a .wandb file: a LevelDB log (blocks of 32 KiB) behind a header of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def read_back(run_dir: Path, folder: str = "offline-run-*") -> ReadBack:
    wandb.teardown()  # wandb's own process writes the last records after finish() has returned
    (path,) = run_dir.glob(f"wandb/{folder}/*.wandb")
    found = ReadBack()
    for record in iterate_records(path):
        match record.WhichOneof("record_type"):
            case "run":
                found.run = record.run
            case "history":
                found.history.append(_nested_values(record.history.item))
            case "summary":
                found.summary |= _nested_values(record.summary.update)
            case "metric":
                found.metrics.append(record.metric)
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def _nested_values(items) -> dict:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


class FakeServer(http.server.ThreadingHTTPServer):
    """As much of a W&B server as a run needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class FakeHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = json.dumps(self.answer(body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - the standard library's way

    def answer(self, body: bytes) -> dict:
        if b"mutation UpsertBucket" in body:
            project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "team"}}
            name = json.loads(body)["variables"]["name"]
            bucket = {"id": "x", "name": name, "displayName": "n", "config": "{}", "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}}
        if b"mutation CreateRunFiles" in body:
            return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}}
        if b"query Viewer" in body:
            viewer = {
                "id": "v",
                "entity": "team",
                "username": "u",
                "email": "",
                "flags": "{}",
                "teams": {"edges": []},
            }
            return {"data": {"viewer": viewer}}
        return {"data": {}}

    def log_message(self, *_arguments: object) -> None:
        pass
