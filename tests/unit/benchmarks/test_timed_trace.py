"""`benchmarks.timed_trace`: what is sampled of a trace, how it is written for vLLM, and the table."""

import json
from pathlib import Path

import pytest

from benchmarks.measuring.request_trace import TracedRequest, TraceError, make_request
from benchmarks.measuring.samples import Records
from benchmarks.timed_trace.__main__ import options_of, report, trace_of
from benchmarks.timed_trace.scaled_trace import TAIL_TOKENS, ScaledTrace, sample_sessions


def request(time_s: float, *blocks: int) -> TracedRequest:
    return make_request(time_s, 512 * len(blocks), list(blocks))


def scaled(*requests: TracedRequest, max_blocks: int = 10) -> ScaledTrace:
    return ScaledTrace(requests=requests, block_tokens=32, max_blocks=max_blocks, duration_s=60.0, output_tokens=4)


def test_sessions_are_drawn_whole_and_sent_in_order() -> None:
    sessions = [[request(number + 10.0 * turn, 0, number) for turn in range(4)] for number in range(1, 8)]
    drawn = sample_sessions([each for session in sessions for each in session], 12, seed=1)
    assert [each.time_s for each in drawn] == sorted(each.time_s for each in drawn)
    assert len(drawn) == 12
    assert all(sum(each in drawn for each in session) in (0, 4) for session in sessions)


def test_a_sample_is_never_larger_than_asked_for_nor_than_the_trace() -> None:
    requests = [request(number, 0, 1) for number in range(5)]
    assert sample_sessions(requests, 3, seed=1) == requests[:3]
    assert sample_sessions([*requests, request(9.0)], 100, seed=1) == requests


def test_what_is_written_repeats_what_the_trace_repeats(tmp_path: Path) -> None:
    trace = scaled(request(100.0, 7, 8), request(105.0, 9), request(120.0, 7, 8, 5, 6), max_blocks=3)
    trace.write(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0.0, 15.0, 60.0]
    assert [line["hash_ids"] for line in lines] == [[0, 1, -1], [2, -2], [0, 1, 3, -3]]
    assert [line["input_length"] for line in lines] == [32 * blocks + TAIL_TOKENS for blocks in (2, 1, 3)]
    assert {line["output_length"] for line in lines} == {4}
    assert trace.prompt_tokens == sum(line["input_length"] for line in lines)
    assert trace.repeated_tokens == 64


def test_requests_that_come_at_once_are_sent_at_once(tmp_path: Path) -> None:
    scaled(request(5.0, 1), request(5.0, 2)).write(tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_text().count('"timestamp": 0.0') == 2


def test_a_trace_is_drawn_from_the_seed_or_read(tmp_path: Path) -> None:
    folder = ["--dir", str(Path(__file__).parent)]
    trace = trace_of(options_of([*folder, "--requests", "50"]))
    assert len(trace.requests) == 50
    assert trace.requests == trace_of(options_of([*folder, "--requests", "50"])).requests
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(TraceError, match="no request"):
        trace_of(options_of([*folder, "--trace", str(empty)]))


@pytest.mark.parametrize("wrong", [["--systems", "other"], ["--requests", "0"], ["--duration-s", "900"]])
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(wrong)


def test_the_report_has_a_line_for_each_system(tmp_path: Path) -> None:
    setup = {
        "hardware": "a machine",
        "versions": "some versions",
        "trace": "generated",
        "num_requests": 10,
        "prompt_tokens": 1000,
        "repeated_tokens": 500,
        "duration_s": 20.0,
        "dtype": "bfloat16",
        "host_gib": 1,
    }
    records = Records(tmp_path / "samples.jsonl", setup, resume=False)
    times = {"median_ttft_ms": 20.0, "p95_ttft_ms": 90.0, "request_throughput": 2.0}
    for number, hits in enumerate([(100, 200), (100, 300)]):
        records.begin(case := f"kvtier-{number}")
        by_source = dict(zip(("device", "host"), hits, strict=True)) | {"disk": 0}
        records.add(case, "replay", system="kvtier", by_source=by_source, prompt_tokens=1000, **times)
        records.done(case)
    lines = report(records).splitlines()
    assert "10 requests in 20 s, 1,000 prompt tokens, of which 50.0% repeat" in lines[2]
    assert lines[-1].startswith("| kvtier | 35.0 (30.0..40.0) % | 70 (60..80) % | device 10%, host 25% | 20 (")
