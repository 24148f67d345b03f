"""What the connector counts, and how it reaches vLLM's /metrics."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtier._pb import engine_pb2 as pb
from kvtier.client.warm_requests import new_request_id
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.metrics.declared import METRICS
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler, hashes_of, vllm_config_of

HOST, MISS, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING
KEYS = [block_hash + bytes(4) for block_hash in hashes_of("sys", 6)]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach()
    made.pin(KEYS)
    return made


def counted(scheduler: Scheduler) -> dict[str, Any]:
    """Return what was counted since the last call, as vLLM's log shows it, without our prefix."""
    stats = scheduler.connector.get_kv_connector_stats()
    reduced = stats.reduce() if stats is not None else {}
    return {name.removeprefix("kvtier_connector_"): value for name, value in reduced.items() if "kvtier" in name}


def ends(scheduler: Scheduler) -> dict[str, int]:
    """Return how lookup rounds ended since the last call."""
    prefix = "lookups:('"
    found = counted(scheduler)
    return {name.removeprefix(prefix).removesuffix("',)"): n for name, n in found.items() if name.startswith(prefix)}


def asked(scheduler: Scheduler, req_id: str = "r") -> tuple[Any, pb.Acquire]:
    """Bring a request of the pin to where it waits for the daemon."""
    request = scheduler.new_request("sys", 8, req_id=req_id)
    assert scheduler.ask(request) is None
    return request, scheduler.sent_one("acquire")


def test_a_whole_hit_its_wait_and_its_chunks(scheduler: Scheduler) -> None:
    request, acquire = asked(scheduler)
    scheduler.clock.now_s += 0.01
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    for _ in range(10):
        scheduler.ask(request)  # vLLM repeats it while it has no blocks; the round ended once
    scheduler.allocate(request, 0, 6 * BLOCK_TOKENS)
    found = counted(scheduler)
    assert found.pop("answer_seconds_sum") == pytest.approx(0.01)
    assert found == {
        "attached": 1,
        "lookups:('whole',)": 1,
        "answer_seconds_count": 1,
        "loaded_chunks:('host',)": 6,
    }
    assert counted(scheduler) == {}


def test_it_is_attached_from_a_sessions_begin_to_its_end(scheduler: Scheduler) -> None:
    def attached() -> float | None:
        scheduler.step()
        found: float | None = counted(scheduler).get("attached")
        return found

    assert attached() == 1
    scheduler.detach()
    assert attached() == 0
    assert attached() is None, "it has not changed"
    scheduler.attach()
    assert attached() == 1
    scheduler.connector.reset_cache()
    assert attached() == 0


def test_promotions_that_are_not_waited_for_make_a_part(scheduler: Scheduler) -> None:
    request, acquire = asked(scheduler)
    scheduler.answer(acquire, [HOST, HOST, *[PROMOTING] * 4], pending_bytes=4000, ready_in_s=0.05)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 1000
    scheduler.ask(request)
    found = counted(scheduler)
    assert found["lookups:('part',)"] == 1
    assert found["promotion_wait_seconds_sum"] == 1000


def test_chunks_that_are_promoted_while_they_are_loaded_come_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, can_load_early=True)
    scheduler.attach()
    scheduler.pin(KEYS)
    request, acquire = asked(scheduler)
    scheduler.answer(acquire, [HOST] * 4 + [PROMOTING] * 2, ready_in_s=0.05)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    scheduler.allocate(request, 0, 6 * BLOCK_TOKENS)
    (job_id,) = scheduler.step().load_jobs
    found = counted(scheduler)
    assert (found["loaded_chunks:('host',)"], found["loaded_chunks:('disk',)"]) == (4, 2)
    assert found["lookups:('whole',)"] == 1
    assert "promotion_wait_seconds_count" not in found
    scheduler.clock.now_s += 0.07
    scheduler.workers_report([job_id])
    assert counted(scheduler)["promotion_wait_seconds_sum"] == pytest.approx(0.07)


def test_chunks_from_disk_are_distinguished(scheduler: Scheduler) -> None:
    request, acquire = asked(scheduler)
    scheduler.answer(acquire, [HOST, *[PROMOTING] * 5], pending_bytes=5000, ready_in_s=0.05)
    assert scheduler.ask(request) is None
    ready = [
        pb.ChunkResidency(index=index, state=HOST, slot=pb.SlotRef(slot=index, generation=1), from_disk=True)
        for index in range(1, 6)
    ]
    scheduler.say(pb.DaemonMessage(acquire_update=pb.AcquireUpdate(acquire_id=acquire.acquire_id, chunks=ready)))
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    scheduler.allocate(request, 0, 6 * BLOCK_TOKENS)
    found = counted(scheduler)
    assert (found["loaded_chunks:('host',)"], found["loaded_chunks:('disk',)"]) == (1, 5)
    assert found["lookups:('whole',)"] == 1


def test_every_other_end_of_a_round_has_its_reason(scheduler: Scheduler) -> None:
    counted(scheduler)
    scheduler.ask(scheduler.new_request("other", 8, req_id="unknown"))
    assert ends(scheduler) == {"unknown": 1}
    scheduler.ask(scheduler.new_request("sys", 6, req_id="own"), num_computed_tokens=6 * BLOCK_TOKENS)
    assert ends(scheduler) == {"prefix_cache": 1}
    request, acquire = asked(scheduler, "none")
    scheduler.answer(acquire, [MISS] * 6)
    scheduler.ask(request)
    assert ends(scheduler) == {"none": 1}
    request, _ = asked(scheduler, "late")
    scheduler.clock.now_s += 1000
    scheduler.ask(request)
    assert ends(scheduler) == {"late": 1}
    scheduler.ask(scheduler.new_request("sys", 8, req_id="open"))
    assert ends(scheduler) == {"breaker_open": 1}
    scheduler.attach()
    scheduler.pin(KEYS)
    request = scheduler.new_request("sys", 8, req_id="failed")
    scheduler.manager.load_failed("failed")
    scheduler.ask(request)
    found = counted(scheduler)
    assert (found["lookups:('failed',)"], found["failed_loads"]) == (1, 1)
    request, _ = asked(scheduler, "broken")
    scheduler.detach()
    scheduler.ask(request)
    assert ends(scheduler) == {"no_session": 1}
    scheduler.ask(scheduler.new_request("sys", 8, req_id="alone"))
    assert ends(scheduler) == {"no_session": 1}


def test_warm_requests_are_distinguished_from_those_of_users(scheduler: Scheduler) -> None:
    """vLLM writes before and behind the id that the API was given."""
    counted(scheduler)
    assert not scheduler.manager.serves_users()
    warm, acquire = asked(scheduler, f"cmpl-{new_request_id()}-0-1234abcd")
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(warm) == 6 * BLOCK_TOKENS
    scheduler.allocate(warm, 0, 6 * BLOCK_TOKENS)
    found = counted(scheduler)
    assert (found["warm_requests"], found["warmed_tokens"]) == (1, 6 * BLOCK_TOKENS)
    assert not scheduler.manager.serves_users()
    user = scheduler.new_request("other", 8)
    assert scheduler.manager.serves_users()
    user.status = RequestStatus.FINISHED_STOPPED
    assert not scheduler.manager.serves_users(), "vLLM tells the connector with its next step only"
    assert "warm_requests" not in counted(scheduler)


def test_stores_are_counted_once_however_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what only the workers know is added up over them."""
    scheduler = Scheduler(monkeypatch, world_size=2)
    scheduler.attach(num_credits=4)
    scheduler.pin(KEYS, held=False)
    request = scheduler.new_request("sys", 6)
    assert scheduler.ask(request) == 0
    (job_id,) = scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))]).store_jobs
    request.num_computed_tokens = 6 * BLOCK_TOKENS
    assert not scheduler.finish(request).store_jobs, "no more slots have come"
    reports = [OffloadingWorkerMetadata(completed_jobs={job_id: 1}) for _ in range(2)]
    for report in reports:
        report.transfer_stats.store.record(1000, 0.5)
    aggregated: Any = reports[0].aggregate(reports[1])
    scheduler.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=aggregated))
    stats = scheduler.connector.get_kv_connector_stats()
    assert stats is not None
    reduced = stats.reduce()
    assert reduced["kvtier_connector_stored_chunks"] == 4
    assert reduced["kvtier_connector_unstored_chunks"] == 2
    assert (reduced["vllm:kv_offload_store_bytes"], reduced["vllm:kv_offload_store_time"]) == (2000, 1.0)


def test_what_was_counted_survives_the_way_to_prometheus(scheduler: Scheduler) -> None:
    """As in vLLM: packed in the engine's process, unpacked in the API server's, which has no connector."""
    request, acquire = asked(scheduler)
    scheduler.answer(acquire, [HOST] * 6)
    scheduler.ask(request)
    stats = scheduler.connector.get_kv_connector_stats()
    assert stats is not None
    payload = MsgpackDecoder(dict[str, Any]).decode(MsgpackEncoder().encode(stats.to_dict()))
    registry = CollectorRegistry()
    types = {kind: _in(registry, kind) for kind in (Counter, Gauge, Histogram)}
    prom = KVTierConnector.build_prom_metrics(vllm_config_of(), types, ["model_name", "engine"], {0: ["llama", "0"]})
    prom.observe(payload, engine_idx=0)
    labels = {"model_name": "llama", "engine": "0"}
    assert registry.get_sample_value("kvtier_connector_lookups_total", {**labels, "result": "whole"}) == 1
    assert registry.get_sample_value("kvtier_connector_answer_seconds_count", labels) == 1
    assert registry.get_sample_value("kvtier_connector_attached", labels) == 1
    families = {family.name for family in registry.collect()}
    assert families >= {metric.name.removesuffix("_total") for metric in METRICS}


def _in(registry: CollectorRegistry, kind: Any) -> Any:
    return lambda **arguments: kind(**arguments, registry=registry)
