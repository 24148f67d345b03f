"""The client that all runs of a benchmark share, without the vLLM in it."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.serving_cost.bench_serve import RATES, TIMES, BenchServe, BenchServeClient, TrafficError

ANSWERS = """
import sys
from multiprocessing.connection import Listener
result, problem = sys.argv[2:]
with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection:
    while True:
        connection.recv()
        if not problem:
            open(result, "w").write(RESULT)
        connection.send(problem)
"""


def _client(home: Path, problem: str = "", completed: int = 2) -> BenchServeClient:
    client = BenchServeClient(home)
    result = {"completed": completed, **dict.fromkeys(("duration", *RATES, *TIMES), 1.5)}
    script = ANSWERS.replace("RESULT", repr(json.dumps(result)))
    client.argv = [sys.executable, "-c", script, str(client._socket), str(client._result), problem]
    return client


@pytest.fixture
def shape(tmp_path: Path) -> BenchServe:
    return BenchServe(model=tmp_path, num_requests=2, input_tokens=8, output_tokens=2, concurrency=1, spread=0.0)


def test_a_new_client_works_after_one_that_was_killed(tmp_path: Path, shape: BenchServe) -> None:
    for _ in range(2):
        with _client(tmp_path) as client:
            for seed in range(2):
                assert client.run(shape, "http://127.0.0.1:1", seed)["duration"] == 1.5
            client.kill()


def test_the_error_of_a_run_is_reported(tmp_path: Path, shape: BenchServe) -> None:
    with _client(tmp_path, "ValueError('no')") as client, pytest.raises(TrafficError, match="ValueError"):
        client.run(shape, "http://127.0.0.1:1", 0)
    with _client(tmp_path, completed=1) as client, pytest.raises(TrafficError, match="1 of 2 requests"):
        client.run(shape, "http://127.0.0.1:1", 0)
    with _client(tmp_path) as client:
        client.kill()
        with pytest.raises(TrafficError, match="it has ended"):
            client.run(shape, "http://127.0.0.1:1", 0)
