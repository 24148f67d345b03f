"""A verification is restored what its own salt would be, stores and reports nothing, and gives a user nothing."""

from typing import Any

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.core.requests.verify_salts import new_restored_salt
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler
from tests.unit.connector.scheduler.test_public_prompts import HOST, Tenants

NUM_BLOCKS = 6
RESTORED, REFERENCE = "kvtier-verify-0123456789abcdef:", "kvtier-reference-0123456789abcdef"


class Verified(Tenants):
    """An engine with a pin that has no salt, one with a salt, and no public one."""

    def __init__(self, patch: pytest.MonkeyPatch, store_mode: pb.StoreMode = pb.STORE_PINNED) -> None:
        super().__init__(patch, store_mode=store_mode)
        self.scheduler.unpin("p")
        self.scheduler.manager._block_hasher = lambda: self.hasher
        self.keys = self.pin(pin_id="plain")
        self.salted_keys = self.pin(pin_id="salted", cache_salt="own")

    @property
    def sent(self) -> list[pb.EngineMessage]:
        return self.scheduler.sent()


def acquired(scheduler: Scheduler, request: Any) -> list[bytes]:
    """Return the keys that a lookup asks for; none if it asks nothing."""
    assert scheduler.ask(request) in (None, 0)
    found = [message.acquire for message in scheduler.sent() if message.HasField("acquire")]
    return list(found[0].keys) if found else []


def test_it_is_restored_what_a_request_with_the_own_salt_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Verified(monkeypatch)
    scheduler = engine.scheduler
    for number, (own_salt, keys) in enumerate((("", engine.keys), ("own", engine.salted_keys))):
        request = engine.request(f"r{number}", salt=new_restored_salt(own_salt))
        assert scheduler.ask(request) is None
        acquire = scheduler.sent_one("acquire")
        assert list(acquire.keys) == keys
        scheduler.answer(acquire, [HOST] * len(keys))
        assert scheduler.ask(request) == NUM_BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("salt", [RESTORED + "guessed", REFERENCE, "tenant", "kvtier-verify-12:own"])
def test_no_other_salt_is_restored_anything(monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    engine = Verified(monkeypatch)
    assert acquired(engine.scheduler, engine.request(salt=salt)) == []


@pytest.mark.parametrize("salt", [RESTORED, REFERENCE])
def test_a_reference_is_no_tenant_of_a_public_prompt(monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    """It would be restored, and not computed by vLLM. A verification is restored by the hashes of its own salt."""
    engine = Tenants(monkeypatch)  # with a public pin, and without a hasher
    assert acquired(engine.scheduler, engine.request(salt=salt)) == []


@pytest.mark.parametrize("salt", [RESTORED, REFERENCE])
@pytest.mark.parametrize("store_mode", [pb.STORE_PINNED, pb.STORE_ALL])
def test_nothing_of_it_is_stored(monkeypatch: pytest.MonkeyPatch, salt: str, store_mode: pb.StoreMode) -> None:
    engine = Verified(monkeypatch, store_mode)
    scheduler = engine.scheduler
    engine.scheduler.hold([*engine.keys, *engine.salted_keys], held=False)
    for name, is_stored in ((salt, False), ("tenant", store_mode == pb.STORE_ALL)):
        request = engine.request(f"r-{name[:12]}", salt=name)
        assert scheduler.ask(request) == 0
        scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])
        request.num_computed_tokens = request.num_tokens
        scheduler.finish(request)
        scheduler.step()
        stores = [message for message in scheduler.sent() if message.HasField("store_begin")]
        assert bool(stores) is is_stored


@pytest.mark.parametrize("salt", [RESTORED, REFERENCE])
def test_it_is_not_observed(monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    engine, seen = Verified(monkeypatch), list[Any]()

    class Observer:
        def observe(self, request: Any, adapter: Any) -> None:
            seen.append(request)

    engine.scheduler.manager._observer = Observer()  # type: ignore[assignment]
    engine.request("verification", salt=salt)
    user = engine.request("user")
    assert seen == [user]


def test_a_hasher_that_fails_leaves_the_request_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Verified(monkeypatch)

    def failing() -> Any:
        raise RuntimeError("another vLLM")

    engine.scheduler.manager._block_hasher = failing
    assert acquired(engine.scheduler, engine.request(salt=new_restored_salt(""))) == []
