"""What the connector sees to when vLLM makes it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_connector.engine import vllm_compat
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker
from tests.unit.connector.harness import Scheduler, full_spec, sliding_spec


def test_its_log_goes_where_vllms_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM configures its own logger only: nothing of ours would be seen."""
    handler, ours = logging.NullHandler(), [logging.getLogger(name) for name in ("kvtier", "kvtier_connector")]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    for logger in ours:
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("kvtier"), "handlers", mine := [logging.NullHandler()])
    Scheduler(monkeypatch)
    assert [logger.handlers for logger in ours] == [mine, [handler]], "a configured logger stays as it is"
    assert [logger.propagate for logger in ours] == [True, False]
    assert ours[1].level == logging.getLogger("vllm").getEffectiveLevel()


def test_where_the_root_logger_is_configured_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = logging.getLogger("kvtier_connector")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [logging.NullHandler()])
    Scheduler(monkeypatch)
    assert (ours.handlers, ours.propagate) == ([], True)


def test_a_model_whose_failed_loads_an_old_vllm_cannot_take_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "names_failed_requests", lambda: False)
    Scheduler(monkeypatch)
    with pytest.raises(ConfigError, match=r"vLLM 0\.30 or later for this model"):
        Scheduler(monkeypatch, [full_spec(), sliding_spec(8)])


def test_a_worker_maps_the_arena_once_and_a_process_without_one_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(KVTierCPUWorker, "prepare", lambda _, arena: prepared.append(arena))
    scheduler = Scheduler(monkeypatch)
    scheduler.attach()
    connector, began, later = scheduler.connector, scheduler.step(), scheduler.step()
    connector.bind_connector_metadata(began)
    assert prepared == []
    worker: Any = SimpleNamespace(worker=object.__new__(KVTierCPUWorker))
    connector.connector_worker = worker
    for metadata in (began, later):
        connector.bind_connector_metadata(metadata)
    assert [arena.arena_path for arena in prepared] == ["/arena"]
