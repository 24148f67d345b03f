"""What is reported of one request."""

from dataclasses import replace

import pytest

from kvtier_connector.discovery.request_reader import RequestReader, TemplateKnowledge, wanted_tokens
from kvtier_connector.discovery.seen_prefixes import prefix_digest
from kvtier_connector.engine.lora.adapter_digests import Adapter
from tests.unit.connector.discovery.vllm_requests import ADAPTER, SHAPE, observed

OPENING = (900, 901)
SYSTEM = list(range(1000, 1200))


def reader_of(text: str = "x", adapter_digest: bytes | None = b"a" * 32) -> RequestReader:
    def digest_of(adapter: Adapter) -> bytes | None:
        assert adapter == ADAPTER
        return adapter_digest

    template = TemplateKnowledge(OPENING, 0, lambda tokens: " ".join(map(str, tokens)) + text)
    return RequestReader(SHAPE, digest_of, template)


def test_the_system_prompt_is_named_by_vllms_hash() -> None:
    request = observed([*SYSTEM, *OPENING, 7])
    reading = reader_of().read(request)
    assert reading is not None
    (prefix,) = reading.seen.prefixes
    assert (prefix.num_tokens, prefix.is_system_prompt) == (192, True)
    assert prefix.digest == prefix_digest(SHAPE, request, 192, None)


def test_without_a_template_fixed_lengths_stand_in() -> None:
    reader = RequestReader(SHAPE, lambda adapter: None, None)
    for number in range(20):
        reading = reader.read(observed([*SYSTEM, number, *range(2000), *OPENING]))
        assert reading is not None
        assert [(each.num_tokens, each.is_system_prompt) for each in reading.seen.prefixes] == [
            (1024, False),
            (2048, False),
        ]
        assert reading.changing is None


def test_a_request_waits_for_nothing_that_is_unknown_of_its_adapter() -> None:
    request = observed([*SYSTEM, *OPENING], adapter=ADAPTER)
    assert reader_of(adapter_digest=None).read(request) is None
    digests = set()
    for content in (b"a", b"b"):
        reading = reader_of(adapter_digest=content).read(request)
        assert reading is not None
        digests.add(reading.seen.prefixes[0].digest)
    assert len(digests) == 2


@pytest.mark.parametrize("text", ["", "é" * 2000, "\0\ud800"], ids=["short", "long", "no text"])
def test_a_changing_middle_says_what_changes_within_bounds(text: str) -> None:
    reader = reader_of(text)
    readings = [reader.read(observed([*SYSTEM, number, *range(300), *OPENING, 7])) for number in range(8)]
    assert [reading.changing is not None for reading in readings if reading is not None] == [False] * 7 + [True]
    reading = readings[-1]
    assert reading is not None
    assert reading.changing is not None
    changing = reading.changing
    assert (changing.num_stable_tokens, changing.num_tokens, changing.num_prompts) == (200, 501, 8)
    stable = next(each for each in reading.seen.prefixes if each.num_tokens == 192)
    assert changing.digest == stable.digest, "what is stable is counted from now on"
    assert not stable.is_system_prompt
    assert len(changing.before.encode()) <= 1024
    assert all(len(example.encode()) <= 256 and "\0" not in example for example in changing.examples)
    before, shown = " ".join(map(str, SYSTEM[-40:])) + text, [changing.before, *changing.examples]
    if "é" in text:
        assert before.endswith(changing.before), "what stands next to the place is shown"
        assert [each.split("é")[0].split()[0] for each in changing.examples] == ["5", "6", "7"]
        assert [len(each.encode()) for each in shown] == [1024, 256, 256, 256], "as much as may be sent"
    if not text:
        assert changing.before == " ".join(map(str, SYSTEM[-40:]))
        assert [example.split()[0] for example in changing.examples] == ["5", "6", "7"]


def test_a_middle_that_changes_within_the_first_chunk_has_no_prefix_before_it() -> None:
    reader = reader_of()
    readings = [reader.read(observed([*SYSTEM[:31], number, *range(300), *OPENING, 7])) for number in range(8)]
    (changing,) = [reading.changing for reading in readings if reading is not None and reading.changing is not None]
    assert (changing.num_stable_tokens, changing.digest) == (31, b"")


def test_wanted_tokens_are_sent_once_with_what_decides_their_kv() -> None:
    request = observed([*SYSTEM, *OPENING, 7], adapter=ADAPTER, salt="tenant")
    reading = reader_of().read(request)
    assert reading is not None
    digest = reading.seen.prefixes[0].digest
    wanted = {digest, b"another"}
    (tokens,) = wanted_tokens(SHAPE, request, reading.seen, wanted)
    assert list(tokens.tokens) == SYSTEM[:192]
    assert (tokens.digest, tokens.lora_name, tokens.lora_path, tokens.cache_salt) == (
        digest,
        "style",
        "/adapters/style",
        "tenant",
    )
    assert wanted == {b"another"}
    assert list(wanted_tokens(SHAPE, request, reading.seen, wanted)) == []


def test_where_layers_have_windows_the_next_token_is_sent_too() -> None:
    """A pin of exactly whole chunks does not reach its last chunk there: it was kept short, or could not be bound."""
    windowed = replace(SHAPE, is_windowed=True)
    request = observed([*SYSTEM, *OPENING, 7])
    reading = reader_of().read(request)
    assert reading is not None
    digest = reading.seen.prefixes[0].digest
    (tokens,) = wanted_tokens(windowed, request, reading.seen, {digest})
    assert list(tokens.tokens) == request.tokens[:193]
    wanted = {digest}
    exact = observed(SYSTEM[:192])
    assert list(wanted_tokens(windowed, exact, reading.seen, wanted)) == []
    assert wanted == {digest}, "a longer request brings it"
    (tokens,) = wanted_tokens(windowed, observed(SYSTEM[:193]), reading.seen, wanted)
    assert list(tokens.tokens) == SYSTEM[:193]
