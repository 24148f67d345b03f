"""The suite sends the same to every system, and prints what was measured."""

import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.measuring.samples import Records
from benchmarks.measuring.sized_prompts import SystemPrompt
from benchmarks.measuring.tables import percentile
from benchmarks.serving_cost.bench_serve import BenchServe
from benchmarks.serving_cost.cost_report import ALONE, KVTIER
from benchmarks.serving_cost.cost_report import report as cost_report
from benchmarks.suite.__main__ import DEFAULT_SYSTEMS
from benchmarks.suite.load import KILLED
from benchmarks.suite.matrix import Condition
from benchmarks.suite.plan import ALL_FITS, Plan
from benchmarks.suite.plots import draw_plots
from benchmarks.suite.profiles import PROFILES
from benchmarks.suite.report import report
from benchmarks.suite.reports.summary import compare
from benchmarks.suite.traffic import Traffic, plan

SETUP = {"hardware": "2 x CPU", "versions": "kvtier 1", "profile": "short", "dtype": "bfloat16"}
NUM_USERS, NUM_TURNS = 3, 7
USERS = "16 users"
PROMPTS = [SystemPrompt(variant=number, tokens=9, text=f"You are number {number}.") for number in range(4)]


@pytest.fixture
def add_to(tmp_path: Path) -> tuple[Records, Callable[..., None]]:
    records = Records(tmp_path / "r.jsonl", SETUP, resume=False)

    def add(kind: str, **fields: object) -> None:
        case = str(len(list(records.rows(kind)))) + kind
        records.begin(case)
        records.add(case, kind, **fields)
        records.done(case)

    return records, add


def ttft(system: str, condition: Condition, ttft_s: float, cached: int = 2976) -> dict[str, object]:
    return {
        "system": system, "matrix": "8x512", "tokens": 3000, "round": 0, "variant": 0, "condition": condition.value,
        "ttft_s": ttft_s, "prompt_tokens": 3020, "cached_tokens": cached,
        "by_source": {"host": cached} if cached else {}, "server_cpu_s": 0.0, "engine_cpu_s": 0.0,
    }  # fmt: skip


def turn(ttft_s: float, error: str = "") -> dict[str, object]:
    return {
        "user": 0, "began_s": 0.0, "ttft_s": None if error else ttft_s, "gaps_s": [0.02], "prompt_tokens": 1000,
        "cached_tokens": 900, "error": error,
    }  # fmt: skip


def load(mode: str, turns: list[dict[str, object]]) -> dict[str, object]:
    return {
        "system": "kvtier", "mode": mode, "round": 0, "wall_s": 2.0, "killed_at_turn": 2, "answer_tokens": 16,
        "system_tokens": 930, "by_source": {"device": 1000, "host": 2000, "disk": 0},
        "engine_cpu_s": 1.0, "server_cpu_s": 0.1, "turns": turns,
    }  # fmt: skip


def test_equal_seeds_give_equal_chats_and_other_seeds_give_others() -> None:
    assert plan(NUM_USERS, NUM_TURNS, PROMPTS, 1) == plan(NUM_USERS, NUM_TURNS, PROMPTS, 1)
    assert plan(NUM_USERS, NUM_TURNS, PROMPTS, 1) != plan(NUM_USERS, NUM_TURNS, PROMPTS, 2)


def test_every_user_sends_equally_many_turns_and_each_continues_a_chat_or_starts_one() -> None:
    for turns in plan(NUM_USERS, NUM_TURNS, PROMPTS, 5):
        assert len(turns) == NUM_TURNS
        for earlier, later in pairwise(turns):
            assert len(later) == 2 or later[: len(earlier)] == earlier
        assert {turn[0]["content"] for turn in turns} <= {prompt.text for prompt in PROMPTS}


def test_percentiles_are_samples() -> None:
    assert [percentile([3, 1, 2, 4], percent) for percent in (50, 95, 100)] == [2, 4, 4]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_case_names_are_unique_and_systems_take_turns(profile: object, tmp_path: Path) -> None:
    found = Plan(profile=profile, systems=DEFAULT_SYSTEMS, dtype="bfloat16", home=tmp_path)  # type: ignore[arg-type]
    names = [case.name for case in found.cases()]
    assert len(set(names)) == len(names)
    for number, round_names in (
        (n, [x for x in names if x.startswith("matrix/8x512") and x.endswith(f"/{n}")]) for n in (0, 1)
    ):
        if round_names:
            systems = [name for name in DEFAULT_SYSTEMS if name != ALL_FITS]  # which only the load has
            assert [name.split("/")[2] for name in round_names] == [*systems[number:], *systems[:number]]


def test_a_hit_is_compared_with_a_prefix_cache_hit_and_the_floor(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("floor", memcpy=[10e9], device=[1e9])
    add("ttft", **ttft("vLLM alone", Condition.PREFIX_CACHE_HIT, 0.050))
    add("kept", system="kvtier", matrix="8x512", tokens=3000, round=0, variant=0, disk_bytes=10**7, server_cpu_s=0.1)
    add("ttft", **ttft("kvtier", Condition.HOST, 0.100))
    add("ttft", **ttft("kvtier", Condition.DISK, 0.200))
    text = report(records)
    # 2976 tokens of 8 KiB at 10 GB/s are 2.4 ms; 10 MB at 1 GB/s are 10 ms.
    assert (
        "| kvtier | GPU cache emptied | 100 (100..100) | 2.0 (2.0..2.0) | 1.91 | 1 of 1 | 2976 of 3020 | host |" in text
    )
    assert "| 200 (200..200) | 4.0 (4.0..4.0) | 3.20 |" in text


def test_the_summary_has_a_column_for_each_system_and_says_who_is_ahead(
    add_to: tuple[Records, Callable[..., None]],
) -> None:
    records, add = add_to
    add("floor", memcpy=[10e9], device=[1e9])
    add("ttft", **ttft("vLLM alone", Condition.PREFIX_CACHE_HIT, 0.050))
    for seconds in (0.1, 0.12, 0.14):
        add("ttft", **ttft("LMCache fs", Condition.HOST, 2 * seconds))
        add("ttft", **ttft("kvtier", Condition.HOST, seconds / 2))
        add("ttft", **ttft("vLLM fs tier", Condition.HOST, seconds))
    text = report(records)
    assert "| asked | vLLM alone | kvtier | LMCache fs | vLLM fs tier | kvtier is |" in text
    ahead = "50% ahead of vLLM fs tier, spreads apart"
    assert f"| GPU cache emptied |  | 60, 1.14x | 240, 4.58x | 120, 2.29x | {ahead} |" in text


def test_overlapping_spreads_and_rates_are_compared_the_right_way_round() -> None:
    samples = {"kvtier": [9.0, 10.0, 12.0], "LMCache fs": [7.9, 8.0, 8.1], "vLLM fs tier": [10.0, 11.0, 13.0]}
    assert compare(samples, less_is_better=False) == "9% behind vLLM fs tier, spreads overlap"
    assert compare(samples) == "25% behind LMCache fs, spreads apart"
    assert compare({"kvtier": [1.0], "vLLM alone": [2.0]}) == ""


def test_one_sample_has_no_spread() -> None:
    assert compare({"kvtier": [1.0], "LMCache fs": [2.0]}) == "50% ahead of LMCache fs, one sample"
    assert compare({"kvtier": [1.0, 1.1, 1.2], "LMCache fs": [2.2]}) == "50% ahead of LMCache fs, one sample"


def test_the_summary_of_the_load_has_a_row_for_each_system(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("load", **load(USERS, [turn(0.2)]))
    add("load", **load(USERS, [turn(0.4)]) | {"system": "vLLM fs tier", "wall_s": 4.0})
    text = report(records)
    assert "| 16 users | kvtier | 0.5 |  | 0.20 | 0.20 |  | 0.20 | 10.0% |" in text
    assert (
        "- 16 users: kvtier's turns/s are 100% ahead of vLLM fs tier, one sample; "
        "its p95 is 50% ahead of vLLM fs tier, one sample."
    ) in text


def test_the_memory_of_all_rounds_is_one_row(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    for mib in (10, 30, 20):
        sizes = dict.fromkeys(("resident", "proportional", "anonymous"), mib * 2**20)
        add("memory", system="kvtier", matrix="8x512", process="kvtier-daemon", when="after all prompts", **sizes)
    cell = "20 (10..30)"
    assert f"| kvtier | 8x512 | kvtier-daemon | after all prompts | {cell} | {cell} | {cell} |" in report(records)


def test_a_miss_has_no_ratio_to_the_floor_of_hits(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("floor", memcpy=[10e9], device=[1e9])
    add("ttft", **ttft("vLLM alone", Condition.PREFIX_CACHE_HIT, 0.050))
    add("ttft", **ttft("vLLM alone", Condition.PRESSURE, 1.0, cached=0))
    assert "| vLLM alone | after GPU pressure | 1000 (1000..1000) | 20.0 (20.0..20.0) |  | 0 of 1 |" in report(records)


def test_a_chart_is_drawn_for_each_length_and_for_the_load(
    add_to: tuple[Records, Callable[..., None]], tmp_path: Path
) -> None:
    records, add = add_to
    add("ttft", **ttft("kvtier", Condition.HOST, 0.1))
    add("load", **load(USERS, [turn(0.1)]))
    draw_plots(records, tmp_path / "plots")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["load.png", "ttft-8x512-3000.png"]


def test_under_load_failed_turns_are_counted_and_have_no_times(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("load", **load(USERS, [turn(0.1), turn(0.2), turn(0.3), turn(9.0, "ReadTimeout: ")]))
    text = report(records)
    rates, waits = "3 of 4 | 1.50 (1.50..1.50) |  | 24 (24..24)", "0.20 | 0.30 |  | 0.30 | 0.30 | 20 | 20"
    assert f"| kvtier | 16 users | {rates} | {waits} | 10.0% |" in text
    assert "device 33%, host 67%" in text


def test_load_is_compared_with_a_vllm_in_which_everything_fits(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("load", **load(USERS, [turn(0.2), turn(0.2)]))
    add("load", **load(USERS, [turn(0.1)] * 4) | {"system": "vLLM alone, all fits"})
    assert "| 1.00 (1.00..1.00) | 0.50 | 16 (16..16) | 0.20 | 0.20 | 2.00 |" in report(records)


def test_turns_that_computed_some_of_a_stored_prompt_are_named(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    # 930 tokens have 29 whole blocks of 32: 928 tokens.
    partly, wholly = (turn(0.3) | {"cached_tokens": 896}, turn(0.4) | {"cached_tokens": 0})
    add("load", **load(USERS, [turn(0.1) | {"cached_tokens": 928}, partly, wholly]))
    text = report(records)
    assert "| kvtier | 16 users | 39.2% | 2 of 3 | 1 |" in text
    assert "| kvtier | 16 users | 0 | 0 | 0.00 | 0.30 | 896 of 1000 |" in text


def test_times_before_and_after_a_kill_are_separate(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("load", **load(KILLED, [turn(0.1), turn(0.1), turn(2.0), turn(0.2)]))
    assert "| kvtier | 0.10 | 2.00 | 0.20 | 10.0% | 0 | 2 (2..2) |" in report(records)


def test_turns_without_an_answer_after_a_kill_are_counted(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, add = add_to
    add("load", **load(KILLED, [turn(0.1), turn(0.1), turn(0.1, "ReadTimeout: "), turn(0.1, "ReadTimeout: ")]))
    assert "| kvtier | 0.10 |  |  |  | 2: ReadTimeout | 2 (2..2) |" in report(records)


def test_the_report_names_cases_that_failed_or_were_left_out(add_to: tuple[Records, Callable[..., None]]) -> None:
    records, _ = add_to
    records.begin("matrix/x")
    records.failed("matrix/x", "no venv")
    text = report(records, ["load/kvtier/0"])
    assert "- matrix/x: no venv" in text
    assert "- load/kvtier/0" in text


def test_bench_serve_sends_no_prompt_twice() -> None:
    # A warm-up or a ready check would put the first prompt into vLLM's prefix cache.
    shape = BenchServe(model=Path("/m"), num_requests=4, input_tokens=8, output_tokens=2, concurrency=1)
    flags = dict(pairwise(shape.arguments("http://127.0.0.1:1", 7, Path("/tmp/r.json"))))
    assert (flags["--num-warmups"], flags["--ready-check-timeout-sec"], flags["--seed"]) == ("0", "0", "7")


def test_ratios_of_serving_cost_are_within_pairs(tmp_path: Path) -> None:
    setup = SETUP | dict.fromkeys(
        ("store", "pins", "pin_tokens", "requests", "input_tokens", "output_tokens", "concurrency"), 1
    )
    records = Records(tmp_path / "c.jsonl", setup, resume=False)
    for pair in range(6):
        records.begin(f"pair-0-{pair}")
        for side, factor in ((ALONE, 1.0), (KVTIER, 1.01)):
            # The machine gets slower and slower; the ratio stays.
            numbers = dict.fromkeys(_NUMBERS, factor * 10 / (pair + 1))
            records.add(f"pair-0-{pair}", "run", start=0, pair=pair, side=side, **numbers)
        records.done(f"pair-0-{pair}")
    text = cost_report(records)
    assert "+1.0 % (+1.0..+1.0)" in text
    assert "96.9 %" in text


_NUMBERS = (
    "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms",
    "p99_itl_ms", "EngineCore_cpu_s", "Worker_cpu_s", "engine_cpu_s", "daemon_cpu_s", "stored_mib", "hit_tokens",
)  # fmt: skip


def test_a_user_without_an_answer_leaves() -> None:
    """Each further turn waited again: a peer that hung after its server was killed took a quarter of an hour."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        engine: Any = SimpleNamespace(url=f"http://127.0.0.1:{server.getsockname()[1]}")
        traffic = Traffic(engine, [[[], [], []]], answer_tokens=1, timeout_s=0.1)
        traffic.start()
        traffic.finish()
    assert [turn.error.partition(":")[0] for turn in traffic.turns] == ["ReadTimeout", "not sent", "not sent"]
