"""What routers know of pinned prompts in host memory: each block once, after those before it, until it has gone."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvtier.core.layout import suffix_of
from kvtier_connector.kv_events import host_events
from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, router_hashes
from kvtier_connector.kv_events.host_events import REPEAT_S, HostEvents

BLOCK_TOKENS = 4
NOW_S = 1000.0
NAMES: dict[Any, str] = {}
"""Of blocks, by what routers know them by."""


def key(name: str) -> bytes:
    digest = hashlib.sha256(name.encode()).digest()
    NAMES[external(name)] = name
    return digest + suffix_of(0)


def external(name: str) -> Any:
    """What routers know a block by."""
    return maybe_convert_block_hash(BlockHash(hashlib.sha256(name.encode()).digest()))


def prompt(names: Sequence[str], **fields: Any) -> AnnouncedPrompt:
    """A prompt of these blocks; a block's tokens are those of its first letter."""
    tokens = [ord(name[0]) for name in names for _ in range(BLOCK_TOKENS)]
    return AnnouncedPrompt(
        tokens=array("I", tokens), blocks=router_hashes([key(name) for name in names]), blocks_per_chunk=1, **fields
    )


class Routers:
    """One that keeps a set, and one that counts; both refuse a block whose parent they do not know."""

    def __init__(self) -> None:
        self.cache: object = object()
        self.events = HostEvents(EventMaker(BLOCK_TOKENS, 0, "full_attention"), lambda: self.cache)
        self.known: set[Any] = set()
        self.counts: Counter[Any] = Counter()
        self.taken: list[Any] = []

    def step(self, now_s: float = NOW_S) -> list[Any]:
        """A step of vLLM; returns its events."""
        self.taken = list(self.events.take(now_s))
        self.events.step_scheduled(0, now_s)  # the next one, which shows the number of announced blocks
        for event in self.taken:
            assert event.medium == "CPU"
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.known
                assert len(event.token_ids) == BLOCK_TOKENS * len(event.block_hashes)
                self.known.update(event.block_hashes)
                self.counts.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                self.known.difference_update(event.block_hashes)
                self.counts.subtract(event.block_hashes)
        assert {each for each, num in self.counts.items() if num > 0} == self.known
        assert all(0 <= num <= 1 for num in self.counts.values())
        return self.taken

    def clear(self) -> None:
        """vLLM resets its prefix cache, and publishes that all blocks are cleared."""
        self.cache = object()
        self.known.clear()
        self.counts.clear()

    def names(self) -> set[str]:
        """The blocks that routers know."""
        return {NAMES[each] for each in self.known}


def test_a_prompt_is_announced_from_its_root_and_grows_and_shrinks() -> None:
    routers = Routers()
    routers.events.bound("p", prompt(["a", "b", "c", "d"]))
    assert not routers.step()
    routers.events.resident("p", 2)
    (event,) = routers.step()
    assert (event.parent_block_hash, event.token_ids) == (None, [97] * 4 + [98] * 4)
    assert (event.block_size, event.lora_name, event.extra_keys, event.group_idx) == (4, None, [None, None], 0)
    assert not routers.step(), "once"
    routers.events.resident("p", 9)
    (event,) = routers.step()
    assert event.parent_block_hash == external("b")
    assert routers.names() == {"a", "b", "c", "d"}
    routers.events.resident("p", 1)
    assert routers.step()
    assert routers.names() == {"a"}
    routers.events.gone("p")
    routers.step()
    assert not routers.names()
    assert not routers.events._announced
    assert not routers.events._num_pins


def test_blocks_that_prompts_share_leave_with_the_last_one() -> None:
    routers = Routers()
    for name, blocks in (("p", ["a", "b", "c"]), ("q", ["a", "b", "d"]), ("r", ["a"])):
        routers.events.bound(name, prompt(blocks))
        routers.events.resident(name, len(blocks))
    assert len(routers.step()) == 2, "r has nothing of its own"
    routers.events.gone("p")
    routers.step()
    assert routers.names() == {"a", "b", "d"}
    routers.events.bound("q", None)  # unpinned
    routers.step()
    assert routers.names() == {"a"}


def test_what_has_come_back_before_the_step_is_not_removed() -> None:
    routers = Routers()
    routers.events.bound("p", prompt(["a", "b"]))
    routers.events.resident("p", 2)
    routers.step()
    routers.events.resident("p", 0)
    routers.events.resident("p", 2)
    routers.step()
    assert routers.names() == {"a", "b"}


def test_all_is_announced_again_after_a_reset_and_every_few_minutes() -> None:
    routers = Routers()
    for name, blocks in (("p", ["a", "b"]), ("q", ["a", "c"])):
        routers.events.bound(name, prompt(blocks))
        routers.events.resident(name, 2)
    routers.step()
    assert not routers.events.is_pending(NOW_S + 1)
    routers.clear()
    assert routers.events.is_pending(NOW_S + 1), "an idle engine steps once"
    routers.step(NOW_S + 1)
    assert routers.names() == {"a", "b", "c"}
    assert not routers.step(NOW_S + 1 + REPEAT_S / 2)
    routers.step(NOW_S + 2 + REPEAT_S)
    stored = [each for event in routers.taken if isinstance(event, BlockStored) for each in event.block_hashes]
    assert sorted(map(NAMES.__getitem__, stored)) == ["a", "b", "c"]
    assert routers.names() == {"a", "b", "c"}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_events, "_BLOCKS_PER_STEP", 4)
    monkeypatch.setattr(host_events, "_LEAST_BLOCKS", 2)


@pytest.mark.usefixtures("small_steps")
def test_a_step_announces_and_removes_a_bounded_number_of_blocks() -> None:
    routers = Routers()
    for number, length in enumerate((3, 3, 3, 19)):
        routers.events.bound(str(number), prompt([f"{number}-{idx}" for idx in range(length)]))
        routers.events.resident(str(number), length)
    num_steps = 0
    while routers.events.is_pending(NOW_S):
        assert sum(len(event.block_hashes) for event in routers.step()) <= 6
        num_steps += 1
    assert len(routers.names()) == 28
    assert num_steps <= 14
    routers.events.session_ended()
    while routers.events.is_pending(NOW_S):
        assert sum(len(event.block_hashes) for event in routers.step()) <= 4
    assert not routers.names()


@pytest.mark.usefixtures("small_steps")
def test_what_comes_back_while_it_is_removed_is_announced_once() -> None:
    routers = Routers()
    routers.events.bound("p", prompt([str(idx) for idx in range(12)]))
    routers.events.resident("p", 12)
    while routers.events.is_pending(NOW_S):
        routers.step()
    routers.events.resident("p", 0)
    routers.step()  # removes some of it
    assert len(routers.names()) == 8
    routers.events.resident("p", 12)
    while routers.events.is_pending(NOW_S):
        routers.step()
    assert len(routers.names()) == 12


@pytest.mark.usefixtures("small_steps")
def test_many_pins_of_one_prompt_do_not_make_a_long_step() -> None:
    routers = Routers()
    blocks = [str(idx) for idx in range(64)]
    for number in range(10):
        routers.events.bound(str(number), prompt(blocks))
        routers.events.resident(str(number), 64)
    num_steps = 0
    while routers.events.is_pending(NOW_S):
        routers.step()
        num_steps += 1
    assert num_steps > 64 // 4 + 5
    assert len(routers.names()) == 64


def test_what_goes_and_comes_and_goes_between_two_steps_is_removed_once() -> None:
    routers = Routers()
    routers.events.bound("p", prompt(["a", "b"]))
    routers.events.resident("p", 2)
    routers.step()
    for num_chunks in (0, 2, 0):
        routers.events.resident("p", num_chunks)
    (event,) = routers.step()
    assert len(event.block_hashes) == 2


def test_a_reset_makes_removals_void() -> None:
    """vLLM publishes that all is cleared. It must find no work then: it refuses to release its cache while there is."""
    routers = Routers()
    routers.events.bound("p", prompt(["a"]))
    routers.events.resident("p", 1)
    routers.step()
    routers.clear()
    routers.events.session_ended()
    assert not routers.events.is_pending(NOW_S)
    assert not routers.step()


def test_an_idle_engine_repeats_ever_less_often_until_it_computes_again() -> None:
    routers = Routers()
    routers.events.bound("p", prompt(["a"]))
    routers.events.resident("p", 1)
    repeated, now_s = [], NOW_S
    for _ in range(100):  # as the alarm wakes it
        if routers.events.is_pending(now_s) and routers.step(now_s + 0.006):
            repeated.append(round((now_s - NOW_S) / (REPEAT_S + 1)))
        now_s += REPEAT_S + 1
    assert repeated == [0, 1, 3, 7, 15, 31, 63]
    routers.events.step_scheduled(16, now_s)
    assert not routers.events.is_pending(now_s)
    assert routers.events.is_pending(now_s + REPEAT_S)


def test_an_idle_engine_steps_while_there_is_something_to_announce() -> None:
    routers = Routers()
    routers.events.bound("p", prompt(["a"]))
    assert not routers.events.is_pending(NOW_S)
    routers.events.resident("p", 1)
    assert routers.events.is_pending(NOW_S)
    routers.step()
    assert not routers.events.is_pending(NOW_S)
    assert routers.events.is_pending(NOW_S + REPEAT_S)
    routers.events.gone("p")
    assert routers.events.is_pending(NOW_S)
    routers.step()
    assert not routers.events.is_pending(NOW_S + 2 * REPEAT_S)


def test_salt_and_adapter_are_named_as_vllm_names_them() -> None:
    lora = SimpleNamespace(name="support", lora_name="support", path="/a", lora_path="/a")
    for salt, lora_name in (("tenant", ""), ("", "support"), ("tenant", "support")):
        announced = prompt(["a", "b", "c"], cache_salt=salt, lora_name=lora_name)
        request: Any = SimpleNamespace(
            cache_salt=salt or None, lora_request=lora if lora_name else None, mm_features=(), prompt_embeds=None
        )
        of_vllm = to_event_extra_keys(
            generate_block_hash_extra_keys(request, idx * BLOCK_TOKENS, (idx + 1) * BLOCK_TOKENS, 0)[0]
            for idx in range(3)
        )
        maker = EventMaker(BLOCK_TOKENS, 0, "full_attention")
        whole: Any = maker.stored(announced, 0, 3)
        assert whole.extra_keys == of_vllm
        assert whole.lora_name == (lora_name or None)
        rest: Any = maker.stored(announced, 1, 3)
        assert rest.extra_keys == (of_vllm or [])[1:]


def test_a_chunk_of_several_blocks_is_announced_as_its_blocks() -> None:
    routers = Routers()
    blocks = prompt(["a", "b", "c", "d"])
    routers.events.bound("p", AnnouncedPrompt(tokens=blocks.tokens, blocks=blocks.blocks, blocks_per_chunk=2))
    routers.events.resident("p", 1)
    routers.step()
    assert routers.names() == {"a", "b"}
