"""`kvtier explain`: what it says of chunks that are missing, as text and as JSON."""

import json
import time
from pathlib import Path

from kvtier._pb.cache_pb2 import MissingChunks
from kvtier.cli.commands.operations.explain_requests import _missing
from kvtier.library.values import outcome_values as outcomes
from kvtier.library.values.conversion import from_message
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier

NO_VLLM = "http://127.0.0.1:9"


def test_when_and_why_chunks_are_missing(kvtier: Kvtier, daemon: FakeCacheService, tmp_path: Path) -> None:
    daemon.num_engines = 1
    (tmp_path / "ids.json").write_text(json.dumps(list(range(100))))
    done = kvtier("pin", "bot", "--tokens", "ids.json", "--url", NO_VLLM, "--no-warm")
    assert done.exit_code == 0, done.output
    daemon.capture(4)
    assert kvtier("evict", "bot", "--force").exit_code == 0
    result = kvtier("explain", "--tokens", "ids.json")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "missing: 4 evicted by command 0s ago, 2 never stored, or lost before what the daemon remembers" in said
    assert all(len(line) <= 80 for line in result.output.splitlines())
    values = json.loads(kvtier("explain", "--tokens", "ids.json", "--json").stdout)
    evicted, never = values["explanation"]["prompts"][0]["bindings"][0]["missing"]
    assert (evicted["cause"], evicted["num_chunks"]) == ("EVICTED_BY_COMMAND", 4)
    assert (never["cause"], never["num_chunks"], never["last_unix_s"]) == ("NOT_RECORDED", 2, 0)
    daemon.capture()
    result = kvtier("explain", "--tokens", "ids.json")
    assert "missing:" not in result.output


def test_each_cause_has_its_words() -> None:
    said = []
    for cause in MissingChunks.Cause.keys():  # noqa: SIM118 - of a class of protobuf
        message = MissingChunks(cause=cause, num_chunks=3, last_unix_s=time.time() - 190)
        said.append(_missing(from_message(outcomes.MissingChunks, message)))
    assert said == [
        "3 lost for a reason that a newer daemon knows 3m ago",
        "3 never stored, or lost before what the daemon remembers",
        "3 evicted by command 3m ago",
        "3 evicted for host memory 3m ago",
        "3 evicted for disk space 3m ago",
        "3 dropped as damaged 3m ago",
    ]
