"""Which prefixes of a request are counted, and how they are named."""

import pytest

from kvtier.core.limits import MAX_TOKENS
from kvtier_connector.discovery.observed_requests import ChunkShape
from kvtier_connector.discovery.seen_prefixes import FIXED_TOKENS, prefix_digest, prefix_lengths, seen_request
from kvtier_connector.requests.prefixes import prefix_of
from tests.unit.connector.discovery.vllm_requests import ADAPTER, GROUPS, SHAPE, observed

K = 1024


@pytest.mark.parametrize(
    ("covered", "system", "stable", "expected"),
    [
        (31, None, None, []),
        (K - 32, None, None, []),
        (K, None, None, [K]),
        (1000 * K, None, None, list(FIXED_TOKENS)),
        (1000 * K, 3000, None, [K, 2 * K, 2976, 4 * K, 8 * K, 16 * K, 32 * K]),
        (1000 * K, 3000, 1500, [K, 1472, 2 * K, 2976, 4 * K, 8 * K, 16 * K]),
        (1000 * K, 200 * K, None, [K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 200 * K]),
        (4096, 2 * K, None, [K, 2 * K, 4 * K]),
        (4096, 20, None, [K, 2 * K, 4 * K]),
        (64, 40, 39, [32]),
        (64, 64, 32, [32, 64]),
        (64, 96, 31, []),
        (2 * MAX_TOKENS, MAX_TOKENS, None, [K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, MAX_TOKENS]),
        (2 * MAX_TOKENS, MAX_TOKENS + 32, None, list(FIXED_TOKENS)),
    ],
)
def test_marked_prefixes_come_first_then_fixed_lengths_from_below(
    covered: int, system: int | None, stable: int | None, expected: list[int]
) -> None:
    assert prefix_lengths(SHAPE, covered, system, stable) == expected


def test_fixed_lengths_are_of_whole_chunks() -> None:
    shape = ChunkShape(chunk_tokens=528, hash_tokens=16)
    assert prefix_lengths(shape, 5280, None, None) == [528, 3 * 528, 7 * 528]
    long_chunks = ChunkShape(chunk_tokens=1536, hash_tokens=16)
    assert prefix_lengths(long_chunks, 6 * 1536, None, None) == [1536, 2 * 1536, 5 * 1536], "none of no tokens"


def test_only_the_system_prompt_is_marked_as_one() -> None:
    seen = seen_request(SHAPE, observed(list(range(3000))), None, 1100, 500)
    assert [(prefix.num_tokens, prefix.is_system_prompt) for prefix in seen.prefixes] == [
        (480, False),
        (1024, False),
        (1088, True),
        (2048, False),
    ]
    assert seen.num_tokens == 3000
    assert {len(prefix.digest) for prefix in seen.prefixes} == {16}


def test_names_distinguish_what_kv_distinguishes() -> None:
    tokens = list(range(64))
    requests = [observed(tokens), observed(tokens, salt="a"), observed(tokens, salt="b"), observed([1, *tokens])]
    digests = [prefix_digest(SHAPE, request, 64, None) for request in requests]
    with_adapter = observed(tokens, adapter=ADAPTER)
    digests += [prefix_digest(SHAPE, with_adapter, 64, content) for content in (b"1" * 32, b"2" * 32)]
    assert len(set(digests)) == len(digests)
    longer = observed([*tokens, *range(50)])
    assert prefix_digest(SHAPE, longer, 64, None) == digests[0], "whatever follows"


@pytest.mark.parametrize("content", [None, b"1" * 32])
def test_a_prefix_has_one_name_whether_it_is_found_or_asked_for(content: bytes | None) -> None:
    request = observed(list(range(100)))
    asked = prefix_of(GROUPS, request.block_hashes, 70, content)
    assert asked is not None
    assert asked.digest == prefix_digest(SHAPE, request, asked.num_tokens, content)


def test_equal_prompts_have_equal_digests_also_when_they_have_gone_on() -> None:
    tokens = list(range(75))
    first = seen_request(SHAPE, observed(tokens), None, None, None)
    gone_on = observed(tokens)
    gone_on.tokens.extend([1, 2, 3])
    gone_on.block_hashes.append(b"of an output")
    assert seen_request(SHAPE, gone_on, None, None, None).prompt_digest == first.prompt_digest
    others = [tokens[:-1], [*tokens, 1], [*tokens[:-1], 7], [7, *tokens[1:]]]
    digests = {seen_request(SHAPE, observed(other), None, None, None).prompt_digest for other in others}
    assert len(digests) == 4
    assert first.prompt_digest not in digests
