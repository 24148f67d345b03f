"""The course of the matrix with fake systems: the order of the requests, and what the end of vLLM counts as."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.measuring.chat_requests import Answer
from benchmarks.measuring.process_usage import BytesRead
from benchmarks.measuring.sized_prompts import SystemPrompt
from benchmarks.suite import matrix
from benchmarks.suite.matrix import Condition, MatrixRun
from benchmarks.suite.profiles import PROFILES

ANSWER = Answer(
    ttft_s=0.1,
    prompt_tokens=10,
    cached_tokens=8,
    by_source={},
    tokens=(),
    logprobs=(),
    read=BytesRead(calls=0, device=0),
)


class Process:
    """Something with a name and an id."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, 0

    def kill(self) -> None:
        """Die."""


class FakeSystem:
    """A system that keeps prompts, with one server."""

    name, keeps, has_server = "fake", True, True

    def __init__(self, folder: Path) -> None:
        self.disk_dir, self.events = folder, list[str]()

    @contextmanager
    def server(self) -> Iterator[list[Process]]:
        yield [Process("server")]

    @contextmanager
    def engine(self) -> Iterator[Process]:
        self.events.append("engine")
        yield Process("engine")

    @contextmanager
    def serving(self) -> Iterator[tuple[Process, list[Process]]]:
        self.events.append("serving")
        yield Process("engine"), []

    def keep(self, engine: Process, name: str, text: str) -> None:
        self.events.append("keep")

    def evict_prefetched(self, names: Sequence[str]) -> None:
        self.events.append("evict prefetched")

    def revive(self, server: Process, engine: Process) -> None:
        self.events.append("revive")

    def forget_host_memory(self) -> None:
        self.events.append("forget host memory")


class FakeAlone(FakeSystem):
    """Nothing beside vLLM."""

    name, keeps, has_server = "alone", False, False


@pytest.fixture(autouse=True)
def nothing_real(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(resident=0, proportional=0, anonymous=0)
    stand_ins: dict[str, Any] = {
        "ask": lambda *_: ANSWER, "greet": lambda *_: None, "forget_device_cache": lambda *_: None,
        "memory_of": lambda *_: memory, "pids_of": lambda *_: [], "cpu_s": lambda *_: 0.0,
        "make_prompt": lambda _, tokens, variant: SystemPrompt(variant=variant, tokens=tokens, text="x"),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(matrix, name, stand_in)


def measured(system: FakeSystem) -> list[tuple[str, dict[str, Any]]]:
    """Measure with the smoke profile's shape; return kinds and fields."""
    rows: list[tuple[str, dict[str, Any]]] = []
    shape, given = PROFILES["smoke"].matrices[0], system
    fake: Any = given
    MatrixRun(
        system=fake, shape=shape, model=Path(), round=0, add=lambda kind, **fields: rows.append((kind, fields))
    ).measure()
    return rows


def conditions(rows: list[tuple[str, dict[str, Any]]], kind: str = "ttft") -> list[str]:
    return [fields["condition"] for name, fields in rows if name == kind]


def test_every_prompt_is_asked_once_in_every_condition(tmp_path: Path) -> None:
    asked = conditions(measured(FakeSystem(tmp_path)))
    assert {name: asked.count(name) for name in asked} == {condition.value: 2 for condition in Condition}


def test_only_the_disk_has_the_prompts_in_the_last_condition(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    measured(system)
    assert system.events[-3:] == ["forget host memory", "serving", "evict prefetched"]


def test_alone_there_is_one_phase(tmp_path: Path) -> None:
    system = FakeAlone(tmp_path)
    asked = conditions(measured(system))
    assert set(asked) == {Condition.COLD.value, Condition.PREFIX_CACHE_HIT.value, Condition.PRESSURE.value}
    assert system.events == ["engine"]


def test_a_vllm_that_ends_with_its_server_is_a_result_and_the_disk_is_measured_anyway(tmp_path: Path) -> None:
    """LMCache's server, killed and started under a running vLLM, once took vLLM with it."""

    class Fragile(FakeSystem):
        def revive(self, server: Process, engine: Process) -> None:
            raise httpx.ConnectError("All connection attempts failed\nmore")

    rows = measured(Fragile(tmp_path))
    assert conditions(rows, "lost") == [Condition.SERVER_RESTARTED.value] * 2
    assert rows[-1][1]["condition"] == Condition.DISK.value
    reasons = {fields["reason"] for kind, fields in rows if kind == "lost"}
    assert reasons == {"All connection attempts failed"}


def test_a_vllm_that_answers_nothing_after_its_server_was_started_again_is_soon_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's answers a greeting then, and no further request."""

    class Silent(FakeSystem):
        def revive(self, server: Process, engine: Process) -> None:
            self.events.append("revive")

    system = Silent(tmp_path)

    def ask(_engine: object, _processes: object, _messages: object, timeout_s: float) -> Answer:
        if system.events[-1] == "revive":
            assert timeout_s == matrix.REVIVED_TIMEOUT_S
            raise TimeoutError("no answer")
        assert timeout_s > matrix.REVIVED_TIMEOUT_S
        return ANSWER

    monkeypatch.setattr(matrix, "ask", ask)
    monkeypatch.setattr(MatrixRun, "_flood", lambda *_: None)
    assert conditions(measured(system), "lost") == [Condition.SERVER_RESTARTED.value] * 2
