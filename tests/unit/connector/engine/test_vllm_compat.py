"""Bridges to other vLLM versions, over objects shaped as theirs; that they are: tests/contract/test_signatures.py."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier.errors import ConfigError
from kvtier_connector import connector as connector_module
from kvtier_connector.admission import Admission
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.engine import vllm_compat
from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.engine.vllm_compat import TensorPlacement, note_allocated_blocks
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.settings import parse_settings
from kvtier_connector.workers import KVTierWorker
from tests.unit.connector.harness import full_spec, kv_cache_config_of


@dataclass
class OldReqContext:
    """Of vLLM 0.26."""

    req_id: str


def test_state_stays_with_a_context_that_has_no_place_for_it() -> None:
    context: Any = OldReqContext("r")
    with pytest.raises(AssertionError, match="on_new_request comes first"):
        vllm_compat.attached(context, dict)
    vllm_compat.attach(context, {"a": 1})
    assert vllm_compat.attached(context, dict) == {"a": 1}


def test_a_version_that_was_not_run_or_is_not_supported_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = {}
    for version in ("0.32.4", "0.30.0", "0.99.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        warnings[version] = vllm_compat.version_warning()
    assert not warnings["0.32.4"]
    assert "vLLM 0.30.0 was never run with kvtier, only 0.31, 0.32 and 0.33 were" in warnings["0.30.0"]
    assert "vLLM 0.99.0 is not supported, only 0.26 to 0.33 is" in warnings["0.99.0"]


def test_failed_requests_by_name_or_by_block() -> None:
    loading = {"a": [1, 2], "b": [3]}
    assert vllm_compat.failed_requests(SimpleNamespace(failed_recving={"b"}), loading) == {"b"}
    assert not vllm_compat.failed_requests(SimpleNamespace(failed_recving=None), loading)
    assert vllm_compat.failed_requests(SimpleNamespace(invalid_block_ids={2, 9}), loading) == {"a"}
    assert not vllm_compat.failed_requests(SimpleNamespace(invalid_block_ids=set()), loading)


def test_placements_of_old_and_new_tensors() -> None:
    old: Any = SimpleNamespace(
        kv_cache_tensors=[
            SimpleNamespace(shared_by=["a", "b"], block_stride=0),
            SimpleNamespace(shared_by=["c"], block_stride=512),
        ]
    )
    assert list(vllm_compat.placements(old)) == [
        TensorPlacement(["a", "b"], None, False),
        TensorPlacement(["c"], 512, True),
    ]
    new: Any = SimpleNamespace(
        kv_cache_tensors=[
            SimpleNamespace(layers=["a"], layer_stride=9999, block_stride=64),
            SimpleNamespace(layers=["b"], layer_stride=64, block_stride=512),
        ]
    )
    assert list(vllm_compat.placements(new)) == [TensorPlacement(["a"], 64, False), TensorPlacement(["b"], 512, True)]


def test_what_an_old_config_does_not_say() -> None:
    config: Any = SimpleNamespace(groups=[object(), object()])
    assert [vllm_compat.group_id_of(config, position) for position in (0, 1)] == [0, 1]
    assert vllm_compat.is_replicated(config) is False
    assert vllm_compat.is_recurrent(SimpleNamespace()) is False
    assert vllm_compat.hash_lookahead_tokens(config) == 0
    groups: Any = SimpleNamespace(kv_cache_groups=[1, 2])
    assert list(vllm_compat.prefix_cacheable_groups(groups)) == [1, 2]


def test_before_vllm_says_the_order_of_bytes_what_decides_it_is_part_of_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another attention backend put KV into other bytes under the same namespace: wrong output, no error."""
    old: Any = SimpleNamespace()
    versions = {"flashinfer-python": "0.6.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    layouts = [vllm_compat.kv_layout_of(old)]
    assert layouts == [vllm_compat.kv_layout_of(old)]
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    layouts.append(vllm_compat.kv_layout_of(old))
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    layouts.append(vllm_compat.kv_layout_of(old))
    versions["flashinfer-python"] = "0.7.0"
    layouts.append(vllm_compat.kv_layout_of(old))
    versions["flash-attn"] = "3.0"
    layouts.append(vllm_compat.kv_layout_of(old))
    assert len({str(layout) for layout in layouts}) == 5


def test_what_a_new_config_says() -> None:
    config: Any = SimpleNamespace(
        groups=[SimpleNamespace(group_id=3)],
        replicated_layout=True,
        kv_cache_layout="NHD",
        num_hash_lookahead_tokens=2,
        kv_cache_groups=[1, 2],
        prefix_cacheable_groups=[2],
    )
    assert vllm_compat.group_id_of(config, 0) == 3
    assert vllm_compat.is_replicated(config) is True
    assert vllm_compat.kv_layout_of(config) == "NHD"
    assert vllm_compat.hash_lookahead_tokens(config) == 2
    assert list(vllm_compat.prefix_cacheable_groups(config)) == [2]
    assert vllm_compat.is_recurrent(SimpleNamespace(requires_cow_source=True)) is True


def test_blocks_are_hashed_as_vllms_engine_hashes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "get_request_block_hasher", lambda *arguments: arguments)
    old: Any = SimpleNamespace()
    new: Any = SimpleNamespace(num_hash_lookahead_tokens=3)
    made: Any = vllm_compat.block_hasher(old, 16, bytes)
    assert made == (16, bytes)
    made = vllm_compat.block_hasher(new, 16, bytes)
    assert made == (16, bytes, 3)


def test_an_old_vllm_serves_only_models_whose_failed_loads_it_can_take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = kv_cache_config_of([full_spec()]), kv_cache_config_of([full_spec(), full_spec()])
    vllm_compat.check_failed_loads_can_be_named(two)
    monkeypatch.setattr(vllm_compat, "names_failed_requests", lambda: False)
    vllm_compat.check_failed_loads_can_be_named(one)
    state = MambaSpec(block_size=4, shapes=((16,),), dtypes=(torch.float32,))
    for refused in (two, kv_cache_config_of([state])):
        with pytest.raises(ConfigError, match=r"vLLM 0\.30 or later for this model"):
            vllm_compat.check_failed_loads_can_be_named(refused)


class FailingWorker(KVTierWorker):
    """Has one failed load, of blocks 5 and 6."""

    def __init__(self) -> None:
        self.num_drained = 0
        self._failed_loads: list[Any] = [
            SimpleNamespace(arena=SimpleNamespace(req_id="r"), blocks=GPULoadStoreSpec([5, 6], [2], [0]))
        ]

    def _submit(self, job: object) -> None:
        raise AssertionError

    def _prepare(self, arena: object) -> None:
        raise ValueError("a cache failure never reaches vLLM")

    def wait(self, job_ids: set[int]) -> None:
        raise AssertionError

    def await_load(self, timeout_s: float) -> None:
        raise AssertionError

    def drain(self) -> None:
        self.num_drained += 1

    def finish_stores(self) -> None:
        raise AssertionError

    def _leave_out(self, job_ids: set[int]) -> None:
        raise AssertionError


def worker_half(worker: FailingWorker) -> KVTierConnector:
    connector = KVTierConnector.__new__(KVTierConnector)
    connector.connector_worker = SimpleNamespace(worker=worker)
    return connector


def test_failed_loads_are_named_by_block_to_an_old_vllm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = worker_half(FailingWorker())
    assert connector.get_block_ids_with_load_errors() == set()
    monkeypatch.setattr(connector_module, "names_failed_requests", lambda: False)
    assert connector.get_block_ids_with_load_errors() == {5, 6}
    assert connector.get_block_ids_with_load_errors() == set()


def test_an_arena_that_cannot_be_prepared_is_nobodys_failure() -> None:
    spec = ArenaSpec(req_id="", arena_id=b"A", arena_path="/a", lock_path="/l", useful_bytes=(), chunks=())
    FailingWorker().prepare(spec)


def test_what_is_loaded_is_split_by_source_where_vllm_does() -> None:
    new: Any = SimpleNamespace(
        get_external_cache_hit_sources=lambda request, num: {vllm_compat.CacheHitSource.HOST: num}
    )
    assert vllm_compat.cache_hit_sources(new, object(), 64) == {"host": 64}
    assert vllm_compat.cache_hit_sources(SimpleNamespace(), object(), 64) == {"external_unspecified": 64}
    assert not any(vllm_compat.cache_hit_sources(new, object(), 0).values())


def test_the_scheduler_half_finds_an_old_vllms_failed_request_by_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    ignored: list[object] = []
    parent: Any = OffloadingConnector
    monkeypatch.setattr(connector_module, "names_failed_requests", lambda: False)
    monkeypatch.setattr(parent, "update_state_after_alloc", lambda *arguments: ignored.append(arguments))
    monkeypatch.setattr(parent, "update_connector_output", lambda *arguments: ignored.append(arguments))
    connector = KVTierConnector.__new__(KVTierConnector)
    manager: Any = SimpleNamespace(
        load_failed=failed.append,
        allocated=lambda *arguments: ignored.append(arguments),
        instructed=lambda req_id: None,
    )
    gpu_pins: Any = SimpleNamespace(allocated=ignored.append)
    connector._manager, connector._gpu_pins, connector._loading = manager, gpu_pins, {}
    connector._admission = Admission(None, ConnectorStats())
    connector.connector_scheduler, manager.stores = None, SimpleNamespace(discard_open=lambda: None)
    for req_id, block_ids, num_tokens in (("a", [1, 2], 32), ("b", [3], 16), ("c", [4], 0)):
        request: Any = SimpleNamespace(request_id=req_id)
        blocks: Any = SimpleNamespace(get_block_ids=lambda block_ids=block_ids: (block_ids,))
        connector.update_state_after_alloc(request, blocks, num_tokens)
    output: Any = SimpleNamespace(invalid_block_ids={2}, finished_recving={"a"}, kv_connector_worker_meta=None)
    connector.update_connector_output(output)
    assert failed == ["a"]
    assert list(connector._loading) == ["b"]


def test_blocks_that_another_connector_loads_into_are_known_to_be_given_out() -> None:
    """Before 0.33 vLLM's offloading scheduler flushed no store of them: the other's bytes were stored as a pin's."""
    scheduler: Any = SimpleNamespace(_current_batch_allocated_block_ids={7})
    groups = [[SimpleNamespace(block_id=0), SimpleNamespace(block_id=3)], [SimpleNamespace(block_id=4)]]
    note_allocated_blocks(scheduler, cast(Any, SimpleNamespace(blocks=groups)))
    assert scheduler._current_batch_allocated_block_ids == {3, 4, 7}
    note_allocated_blocks(SimpleNamespace(), cast(Any, SimpleNamespace(blocks=groups)))  # a vLLM that keeps none


@pytest.mark.parametrize(
    ("version", "num_bound"), [("0.31.0", 2), ("0.32.1", 2), ("0.33.0", 2), ("0.30.0", 0), ("0.320.0", 0)]
)
def test_only_in_a_vllm_that_was_run_its_own_blocks_are_moved_and_its_order_is_changed(
    monkeypatch: pytest.MonkeyPatch, version: str, num_bound: int
) -> None:
    bound: list[object] = []
    monkeypatch.setattr(vllm, "__version__", version)
    connector = KVTierConnector.__new__(KVTierConnector)
    binds: Any = SimpleNamespace(bind=bound.append)
    kv_cache_manager: Any = SimpleNamespace(block_pool=None)
    connector._gpu_pins = connector._admission = binds
    connector._device_blocks = None
    connector.bind_kv_cache_manager(kv_cache_manager)
    assert len(bound) == num_bound


@pytest.mark.parametrize(
    ("is_cuda", "is_attention_free", "layout"),
    [(True, False, "BLHNC"), (True, True, "LBHNC"), (False, False, "LBHNC")],
)
def test_on_cuda_all_layers_of_a_block_are_asked_to_lie_together(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, is_attention_free: bool, layout: str
) -> None:
    """Copies of one layer's block are too short for a GPU's link."""
    monkeypatch.setattr(connector_module, "current_platform", SimpleNamespace(is_cuda=lambda: is_cuda))
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(is_attention_free=is_attention_free),
    )
    assert KVTierConnector.get_required_kvcache_layout(config) == layout
    monkeypatch.setattr(connector_module, "block_major_layout", lambda: None)
    assert KVTierConnector.get_required_kvcache_layout(config) == "LBHNC", "a vLLM that has no such layout"


def test_before_vllm_sleeps_its_kv_cache_is_released() -> None:
    worker = FailingWorker()
    worker_half(worker).unregister_kv_caches()
    assert worker.num_drained == 1


def test_loads_within_a_step_cannot_be_asked_for() -> None:
    """vLLM 0.33: a request already runs while such a load is under way, and that it failed could not be reported."""
    with pytest.raises(ConfigError, match="sync_load_budget_bytes = 1: unknown key"):
        parse_settings({"sync_load_budget_bytes": 1})


def test_the_scheduler_half_has_nothing_to_release() -> None:
    connector = KVTierConnector.__new__(KVTierConnector)
    connector.connector_worker = None
    connector.unregister_kv_caches()
    assert connector.get_block_ids_with_load_errors() == set()
