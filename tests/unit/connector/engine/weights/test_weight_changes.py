"""vLLM's engine says when a method runs in its workers that may change the weights; the call is done all the same."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from kvtier_connector.engine.weights.weight_changes import watch_weight_changes


class FakeExecutor:
    """Notes what its workers are asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, timeout: float | None, args: Any, kwargs: Any) -> Any:
        self.calls.append((method, timeout, args, kwargs))
        return ["done"]


class Connector:
    """Something that can be watched; with others within, as in a MultiConnector."""

    def __init__(self, *connectors: "Connector") -> None:
        self._connectors = connectors


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    original = EngineCore.collective_rpc
    EngineCore.collective_rpc = getattr(original, "_kvtier_original", original)
    yield
    EngineCore.collective_rpc = original


def engine_with(connector: Connector | None) -> Any:
    made: Any = EngineCore.__new__(EngineCore)
    made.model_executor, made.scheduler = FakeExecutor(), SimpleNamespace(connector=connector)
    return made


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def engine(connector: Connector) -> Any:
    return engine_with(connector)


def my_update(worker: object) -> None:
    """What a program may have its workers run."""


@pytest.mark.parametrize(
    ("method", "reported"),
    [
        ("update_weights", ["update_weights"]),
        ("reload_weights", ["reload_weights"]),
        ("of_an_extension", ["of_an_extension"]),
        (my_update, ["my_update"]),
        ("compute_weight_checksums", []),
        ("my_statistics", []),
    ],
)
def test_a_method_that_may_change_weights_is_reported_before_it_runs(
    engine: Any, connector: Connector, method: Any, reported: list[str]
) -> None:
    reports: list[tuple[str, int]] = []
    watch_weight_changes(
        connector, lambda name: reports.append((name, len(engine.model_executor.calls))), {"my_statistics"}
    )
    assert engine.collective_rpc(method, 5.0, (1,), {"two": 2}) == ["done"]
    assert reports == [(name, 0) for name in reported]
    assert engine.model_executor.calls == [(method, 5.0, (1,), {"two": 2})]


def test_of_several_engines_in_a_process_each_says_its_own() -> None:
    first, second, within = Connector(), Connector(), Connector()
    reports: list[str] = []
    watch_weight_changes(first, lambda method: reports.append(f"first {method}"))
    watch_weight_changes(second, lambda method: reports.append(f"second {method}"))
    watch_weight_changes(within, lambda method: reports.append(f"within {method}"))
    for called in (first, Connector(within, Connector()), None, second):
        engine = engine_with(called)
        engine.collective_rpc("update_weights")
        assert len(engine.model_executor.calls) == 1
    assert reports == ["first update_weights", "within update_weights", "second update_weights"]


def test_a_connector_that_is_gone_is_not_kept() -> None:
    def watched() -> "weakref.ref[Connector]":
        connector = Connector()
        watch_weight_changes(connector, lambda method: setattr(connector, "method", method))  # it knows the connector
        return weakref.ref(connector)

    gone = watched()
    gc.collect()
    assert gone() is None


def test_a_report_that_fails_does_not_fail_the_call(
    engine: Any, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ValueError("no such thing")

    watch_weight_changes(connector, fail)
    assert engine.collective_rpc("update_weights") == ["done"]
    assert "was not noted (update_weights)" in caplog.text
