"""What an engine says of itself when it attaches."""

from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from kvtier.client.engine_session import NotReadyError
from kvtier_connector import startup
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.session import hello as hello_module
from kvtier_connector.session.hello import HelloMaker
from tests.unit.connector.harness import Scheduler, full_spec, sliding_spec


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> EngineFacts:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr(hello_module, "weights_field", lambda *_: "{}")
    return Scheduler(monkeypatch, world_size=2).facts


@pytest.fixture
def maker(facts: EngineFacts) -> HelloMaker:
    return HelloMaker(facts, takes_joined_keys=True)


def test_vllm_has_chosen_its_hash_seed_before_anything_is_said(
    maker: HelloMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    with pytest.raises(NotReadyError):
        maker.make(0)


def test_weights_are_read_once_however_often_it_attaches(maker: HelloMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes seconds; the daemon may be restarted any number of times."""
    read: list[Any] = []

    def weights_field(*arguments: Any) -> str:
        read.append(arguments)
        return "{}"

    monkeypatch.setattr(hello_module, "weights_field", weights_field)
    assert maker.make(0) == maker.make(0)
    assert len(read) == 1


def test_after_a_reset_an_engine_is_the_same_in_a_namespace_of_its_own(maker: HelloMaker) -> None:
    first, second, third = (maker.make(turn) for turn in range(3))
    assert len({hello.engine_id for hello in (first, second, third)}) == 1
    assert [hello.ephemeral for hello in (first, second, third)] == [False, True, True]
    fields = [dict(hello.fingerprint) for hello in (first, second, third)]
    assert len({tuple(sorted(each.items())) for each in fields}) == 3
    differ = {
        name for each in fields for name in each.keys() | fields[0].keys() if each.get(name) != fields[0].get(name)
    }
    assert len(differ) == 1, "only what tells the turns apart"


def test_where_the_weights_are_from_elsewhere_no_namespace_outlives_the_engine(
    maker: HelloMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hello_module, "weights_are_known", lambda config: False)
    first, second = maker.make(0), maker.make(0)
    assert first.ephemeral
    assert dict(first.fingerprint) == dict(second.fingerprint), "the daemon may be restarted"
    assert caplog.text.count("is not known") == 1


def test_what_it_asks_for_is_what_it_has(maker: HelloMaker) -> None:
    hello = maker.make(0)
    assert hello.layout == maker.layout
    assert hello.takes_joined_keys
    assert (hello.layout.num_ranks, len(hello.layout.groups)) == (2, 1)
    assert hello.store_credits == maker.num_credits > 1
    assert list(hello.model_names) == ["llama", "/models/llama"]


def test_an_engine_that_stores_nothing_asks_for_next_to_no_slots(facts: EngineFacts) -> None:
    """It had as many as a prefill engine, for its whole life, and that one got a smaller share."""
    facts.vllm_config.kv_transfer_config.kv_role = "kv_consumer"
    maker = HelloMaker(facts, takes_joined_keys=True)
    assert maker.make(0).store_credits == maker.num_credits == 1


@pytest.mark.parametrize("window", [None, 8])
def test_pins_in_vllms_cache_are_for_models_of_one_prefix(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    specs = [full_spec()] if window is None else [full_spec(), sliding_spec(window)]
    shape = startup.gpu_shape(Scheduler(monkeypatch, specs).facts)
    assert (shape is None) == (window is not None)
    assert shape is None or (shape.block_tokens, shape.max_step_tokens) == (4, 64)
