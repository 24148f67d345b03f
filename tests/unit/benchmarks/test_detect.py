"""`benchmarks.detect`: traces are read as they are, and its caches count the hits that they would have."""

import json
from pathlib import Path

import pytest

from benchmarks.detect.__main__ import examine_trace, flooded, options_of, text_of
from benchmarks.detect.counting import size_bytes, top_found
from benchmarks.detect.generated_trace import generated_trace
from benchmarks.detect.simulated_caches import OnlinePins, best_blocks, best_pins, exact_counts, lru_hits, static_hits
from benchmarks.measuring.request_trace import BLOCK_TOKENS, TracedRequest, TraceError, make_request, read_trace
from kvtier.discovery.choices import PinCosts, PinRules

COSTS = PinCosts(bytes_per_token=1.0, bytes_per_pin=0.0, prefill_tokens_per_s=1000.0)
RULES = PinRules(min_tokens=1024, min_requests=3, max_bytes=10**9)


def chat(time_s: float, user: int, system: tuple[int, ...] = (1, 2, 3)) -> TracedRequest:
    hash_ids = [*system, user]
    return make_request(time_s, len(hash_ids) * BLOCK_TOKENS, hash_ids, len(system) * BLOCK_TOKENS)


def test_a_trace_is_read_by_time_with_whole_blocks_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    late = {"timestamp": 2000, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 2]}
    early = {"timestamp": 500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 3], "system_length": 600}
    path.write_text(f"{json.dumps(late)}\n{json.dumps(early)}\n")
    first, second = read_trace(path)
    assert (first.time_s, second.time_s) == (0.5, 2.0)
    assert [len(request.blocks) for request in (first, second)] == [2, 2]
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert (first.system_tokens, second.system_tokens) == (512, None)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{",
        '{"timestamp": 0, "input_length": 5}',
        '{"timestamp": -1, "input_length": 5, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": ["x"]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [1e3]}',
    ],
)
def test_a_line_that_is_none_of_a_trace_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 0, "input_length": 5, "hash_ids": [1]}}\n{line}\n')
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path)


def test_an_engine_reports_fixed_lengths_below_the_system_prompt_or_alone() -> None:
    ids = list(range(20))
    alone = make_request(0, 20 * BLOCK_TOKENS, ids).seen()
    assert [each.num_tokens for each in alone.prefixes] == [1024, 2048, 4096, 8192]
    known = make_request(0, 20 * BLOCK_TOKENS, ids, 6 * BLOCK_TOKENS).seen()
    assert [(each.num_tokens, each.is_system_prompt) for each in known.prefixes] == [
        (1024, False),
        (2048, False),
        (3072, True),
    ]


def test_the_caches_hit_what_they_hold() -> None:
    requests = [chat(float(number), 100 + number) for number in range(10)]
    assert static_hits(requests) == 9 * 3 * BLOCK_TOKENS
    assert static_hits(requests, best_blocks(requests, 2)) == 9 * 2 * BLOCK_TOKENS
    assert static_hits(requests, best_pins(requests, RULES, COSTS)) == 9 * 3 * BLOCK_TOKENS
    assert lru_hits(requests, 4) == 9 * 3 * BLOCK_TOKENS
    assert lru_hits(requests, 2) == 9 * 2 * BLOCK_TOKENS
    between = [request for pair in zip(requests, one_offs(10), strict=True) for request in pair]
    assert lru_hits(between, 4) == 0
    assert static_hits(between, best_blocks(between, 3)) == 9 * 3 * BLOCK_TOKENS


def one_offs(number: int) -> list[TracedRequest]:
    return [chat(n + 0.5, 9000 + n, (n * 10 + 1000, n * 10 + 1001, n * 10 + 1002)) for n in range(number)]


def test_pins_hit_after_they_were_chosen_named_and_computed() -> None:
    requests = [chat(float(number), 100 + number) for number in range(10)]
    online = OnlinePins(RULES, COSTS, half_life_s=1e6, interval_s=1.0)
    # Three are counted, the fourth brings the tokens, the fifth computes and stores.
    assert online.hits(requests) == 5 * 3 * BLOCK_TOKENS
    assert (online.num_pinned, online.num_unpinned, online.most_blocks) == (1, 0, 3)


def test_exact_counts_are_what_recall_is_measured_against() -> None:
    requests = [chat(0.0, 1), chat(0.0, 2), chat(0.0, 3, (7, 8))]
    exact = exact_counts(requests)
    assert exact[requests[0].prefix(1536)].requests == 2
    assert top_found(exact.values(), exact.values(), 20).recall == 1.0
    assert top_found([], exact.values(), 20).recall == 0.0


def test_a_flood_takes_no_more_memory_than_its_beginning() -> None:
    memory = flooded(20_000, 3600.0)
    assert memory["bytes"] <= min(1.01 * memory["early_bytes"], 4 * 1024**2)
    assert memory["num_repeated"] == 0
    assert size_bytes([b"x" * 1000]) > 1000


def test_a_generated_trace_is_the_same_for_a_seed_and_gives_a_report() -> None:
    first, second = generated_trace(3, 2000), generated_trace(3, 2000)
    assert first == second
    assert first != generated_trace(4, 2000)
    options = options_of(["--budgets", "4GiB,1TiB", "--flood", "0", "--interval-s", "120"])
    report = examine_trace("generated", first.requests, first.prompts, options)
    small, large = report.budgets
    assert 0 < small.pins < large.pins <= report.ideal
    assert small.most_bytes <= small.max_bytes
    assert small.best_pins <= small.best_blocks <= report.ideal
    assert large.known_share is not None
    assert large.known_share > 0.5
    assert "top 20" in text_of(report)


@pytest.mark.parametrize(
    "arguments",
    [["--budgets", "8XB"], ["--half-life-s", "0"], ["--interval-s", "nan"], ["--flood", "-1"], ["--min-requests", "x"]],
)
def test_a_bad_option_is_refused_by_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(arguments)
    assert f"{arguments[0]}: {arguments[1]!r}" in capsys.readouterr().err
