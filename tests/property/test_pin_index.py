"""The pin that a request is attributed to is the one that a look at every pin would find."""

import hashlib
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import GroupShape, PromptHashes
from kvtier_connector.outcomes.pin_index import PinIndex, PinShare

GROUP = GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0)
OTHER = GroupShape(group_idx=1, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0)
PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(tuple)
Change = tuple[str, tuple[int, ...] | None, bool]


def hashes(prompt: tuple[int, ...], salt: str = "") -> list[bytes]:
    """Chain, as vLLM's do."""
    return [hashlib.sha256(f"{salt}{prompt[:end]}".encode()).digest() for end in range(1, len(prompt) + 1)]


def keys(group: GroupShape, prompt: tuple[int, ...]) -> list[ChunkKey]:
    return [group.key(hashes(prompt), index, None) for index in range(len(prompt))]


def all_keys(prompt: tuple[int, ...]) -> list[ChunkKey]:
    return [*keys(GROUP, prompt), *keys(OTHER, prompt)]


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (mine, its) in enumerate(pairs) if mine != its), min(len(one), len(other)))


def check(found: PinShare | None, pins: dict[str, tuple[tuple[int, ...], bool]], prompt: tuple[int, ...]) -> None:
    whole = [each for each in pins.values() if prompt[: len(each[0])] == each[0]]
    if not whole and not any(num_shared(pin, prompt) for pin, _ in pins.values()):
        assert found is None
        return
    assert found is not None
    pin, pinned = pins[found.pin_id]
    length = max((len(each) for each, _ in whole), default=0)
    most = length or max(num_shared(each, prompt) for each, _ in pins.values())
    assert (found.is_whole, found.num_tokens) == (bool(whole), most * 4)
    assert num_shared(pin, prompt) == most
    assert found.ends_inside == (most == len(prompt))
    if whole:
        assert len(pin) == length
        assert pinned == any(is_pinned for each, is_pinned in whole if len(each) == length)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.none() | PROMPTS.filter(len), st.booleans()), max_size=12), PROMPTS
)
def test_the_pin_is_that_of_a_search_through_all(changes: list[Change], prompt: tuple[int, ...]) -> None:
    """Pins come, change and go, in two groups; a request without a salt, and one that shares them as public prompts."""
    index = PinIndex([GROUP, OTHER])
    pins: dict[str, tuple[tuple[int, ...], bool]] = {}
    for pin_id, pin, pinned in changes:
        ended = pins.pop(pin_id, None)
        counts = Counter(key for each, _ in pins.values() for key in all_keys(each))
        assert {*index.remove(pin_id)} == {key for key in all_keys(ended[0] if ended else ()) if not counts[key]}
        if pin is not None:
            pins[pin_id] = (pin, pinned)
            counts.update(all_keys(pin))
            index.add(pin_id, all_keys(pin), pinned=pinned)
        assert {key: index.num_pins(key) for key in index.owners} == +counts
        check(index.find(PromptHashes(hashes(prompt))), pins, prompt)
        salted = PromptHashes(hashes(prompt, "salt"), None, hashes(prompt))
        check(index.find(salted), pins, prompt)


def test_of_a_model_with_windows_only_a_whole_pin_is_found() -> None:
    """Its pins have their last windows, and none of the chunks before."""
    sliding = GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=2)
    pin = (1, 2, 3, 4)
    index = PinIndex([sliding])
    index.add("p", keys(sliding, pin)[2:], pinned=True)
    assert index.find(PromptHashes(hashes((*pin, 5)))) == PinShare("p", 16, True, False)
    assert index.find(PromptHashes(hashes((1, 2, 3, 9)))) is None


def test_an_old_version_does_not_take_requests_from_the_pin() -> None:
    """Both share as much with a request: the one that is pinned is named, whichever came first."""
    for order in (("pin", "old"), ("old", "pin")):
        prompts = {"pin": (0, 0, 1), "old": (0, 0, 0)}
        index = PinIndex([GROUP])
        for name in order:
            index.add(name, keys(GROUP, prompts[name]), pinned=name == "pin")
        prompt = PromptHashes(own=hashes((0, 0, 7)), public=(), adapter_digest=None)
        found = index.find(prompt)
        assert found is not None
        assert (found.pin_id, found.num_tokens, found.is_whole) == ("pin", 8, False)
