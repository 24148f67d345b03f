"""vLLM's executor says when it loads an adapter; its load is done whatever becomes of the report."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.executor.abstract import Executor

from kvtier_connector.engine.lora.loads import watch_lora_loads

REQUEST = LoRARequest("sql", 1, "/adapters/sql")


class FakeExecutor(Executor):
    """Notes what its workers are asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((method, kwargs["args"]))
        return [True]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    original = Executor.add_lora
    yield
    Executor.add_lora = original


def test_a_load_is_reported_before_it_is_done() -> None:
    executor, num_calls = FakeExecutor(), list[int]()
    watch_lora_loads(lambda lora: num_calls.append(len(executor.calls)))
    assert executor.add_lora(REQUEST)
    assert num_calls == [0]
    assert executor.calls == [("add_lora", (REQUEST,))]


def test_of_two_engines_in_a_process_the_last_is_called() -> None:
    executor, reports = FakeExecutor(), list[str]()
    watch_lora_loads(lambda lora: reports.append("first"))
    watch_lora_loads(lambda lora: reports.append("second"))
    executor.add_lora(REQUEST)
    assert reports == ["second"]
    assert len(executor.calls) == 1


def test_a_report_that_fails_does_not_fail_the_load(caplog: pytest.LogCaptureFixture) -> None:
    def fail(lora: LoRARequest) -> None:
        raise ValueError("no such thing")

    watch_lora_loads(fail)
    assert FakeExecutor().add_lora(REQUEST)
    assert "was not noted" in caplog.text
