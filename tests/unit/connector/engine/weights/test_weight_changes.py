"""vLLM's engine says when a method runs in its workers that may change the weights; the call is done all the same."""

from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    original = EngineCore.collective_rpc
    yield
    EngineCore.collective_rpc = original


@pytest.fixture
def engine() -> Any:
    made: Any = EngineCore.__new__(EngineCore)
    made.model_executor = FakeExecutor()
    return made


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
    engine: Any, method: Any, reported: list[str]
) -> None:
    reports: list[tuple[str, int]] = []
    watch_weight_changes(lambda name: reports.append((name, len(engine.model_executor.calls))), {"my_statistics"})
    assert engine.collective_rpc(method, 5.0, (1,), {"two": 2}) == ["done"]
    assert reports == [(name, 0) for name in reported]
    assert engine.model_executor.calls == [(method, 5.0, (1,), {"two": 2})]


def test_of_two_engines_in_a_process_the_last_is_called(engine: Any) -> None:
    reports: list[str] = []
    watch_weight_changes(lambda name: reports.append("first"))
    watch_weight_changes(lambda name: reports.append("second"))
    engine.collective_rpc("update_weights")
    assert reports == ["second"]
    assert len(engine.model_executor.calls) == 1


def test_a_report_that_fails_does_not_fail_the_call(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> None:
        raise ValueError("no such thing")

    watch_weight_changes(fail)
    assert engine.collective_rpc("update_weights") == ["done"]
    assert "was not noted (update_weights)" in caplog.text
