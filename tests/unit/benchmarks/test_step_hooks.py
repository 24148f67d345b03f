"""The clock around a connector's calls, and what the report makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_hooks
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.step_hooks import Call, Cost, costs
from benchmarks.systems import timed_connector

WHOLE = """
import json, os, sys, time
from benchmarks.systems import timed_connector
cls = timed_connector.TimedConnector
assert cls.__name__ == "TimedConnector" and cls is timed_connector.TimedConnector
assert "build_prom_metrics" not in vars(cls), "class methods stay as they are"
print(cls.__mro__[1].__name__, "build_connector_meta" in vars(cls))
"""


def test_costs_are_per_step_and_per_request() -> None:
    scheduler = [
        Call("build_connector_meta", 0.0, 4e-6, 3e-6),
        Call("build_connector_meta", 1.0, 2e-6, 1e-6),
        Call("take_events", 1.0, 2e-6, 2e-6),
        Call("update_state_after_alloc", 1.0, 5e-6, 5e-6),
        Call("on_new_request", 1.0, 1e-6, 1e-6),
    ]
    worker = [Call("start_load_kv", 0.0, 8e-6, 6e-6)]
    found = costs([worker, scheduler])
    assert found["scheduler, per step"] == pytest.approx(Cost(4.0, 3.0))
    assert found["scheduler, per step: take_events"] == pytest.approx(Cost(1.0, 1.0))
    assert found["scheduler, per request"] == pytest.approx(Cost(6.0, 6.0))
    assert found["worker, per step"] == pytest.approx(Cost(4.0, 3.0))
    text = step_hooks.report({"one": [found], "other": [found, {}]})
    assert "| scheduler, per step | 4.0 (4.0..4.0), CPU 3.0 | 4.0 (4.0..4.0), CPU 3.0 |" in text


def test_a_hook_that_calls_another_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(timed_connector, "_calls", calls)
    inner = timed_connector._timed("inner", lambda: 1)
    outer = timed_connector._timed("outer", lambda: inner() + 1)
    assert outer() == 2
    assert inner() == 1
    assert [hook for hook, *_ in calls] == ["outer", "inner"]
    failing = timed_connector._timed("failing", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert [hook for hook, *_ in calls] == ["outer", "inner", "failing"]
    assert not timed_connector._inside.hook


@pytest.mark.parametrize(
    ("connector", "base"),
    [("kvtier_connector:KVTierConnector", "KVTierConnector"), ("OffloadingConnector", "OffloadingConnector")],
)
def test_any_connector_can_be_timed(connector: str, base: str, tmp_path: Path) -> None:
    variables = {timed_connector.CONNECTOR_VARIABLE: connector, timed_connector.FOLDER_VARIABLE: str(tmp_path)}
    env = {**os.environ, **variables, "VLLM_PLUGINS": "none", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", WHOLE], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [f"{base} True"], done.stderr


def test_only_the_connector_is_another(tmp_path: Path) -> None:
    engine = Engine(EngineOptions(model="m", kvtier_socket=tmp_path / "s"), tmp_path / "log")
    other = step_hooks.timed(engine, "kvtier_connector:KVTierConnector", tmp_path)
    at = engine.argv.index("--kv-transfer-config") + 1
    before, after = json.loads(engine.argv[at]), json.loads(other.argv[at])
    assert after == before | {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "benchmarks.systems.timed_connector",
    }
    port = engine.argv.index("--port") + 1
    assert other.argv[port] == str(other.port)
    different = [index for index, pair in enumerate(zip(engine.argv, other.argv, strict=True)) if pair[0] != pair[1]]
    assert set(different) <= {at, port}
