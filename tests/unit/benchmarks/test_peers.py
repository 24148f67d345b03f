"""What the comparison with the peers counts and prints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring.chat_requests import Answer, question
from benchmarks.measuring.process_usage import BytesRead
from benchmarks.measuring.storage import allocated_bytes, drop_page_cache, is_in_memory, snapshot
from benchmarks.peers.restart_table import HEADER, table
from benchmarks.peers.restarts_in_turns import Results, Start, is_hit, question_numbers
from benchmarks.systems.all_systems import SYSTEMS
from benchmarks.systems.system import Ending

READER = "import sys, pathlib; len(pathlib.Path(sys.argv[1]).read_bytes()); print('read', flush=True); sys.stdin.read()"
MIB = 2**20


def answer(ttft_s: float, cached: int = 3000, logprob: float = -1.0, token: str = "a", source: str = "disk") -> Answer:
    """Return an answer of two tokens to a prompt of 3,050."""
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=3050,
        cached_tokens=cached,
        by_source={source: cached} if cached else {},
        tokens=("first", token),
        logprobs=(-0.5, logprob),
        read=BytesRead(calls=24 * MIB, device=8 * MIB),
    )


def results_with(first: Answer) -> Results:
    """Return one round of one system whose first request went so."""
    numbers = question_numbers(0, Ending.STOPPED)
    start = Start(round=0, ending=Ending.STOPPED, first=first, again=(answer(0.2),) * (len(numbers) - 1))
    return Results(
        cold={0: [answer(2.0, cached=0)]},
        prefix_hits={0: {number: answer(0.1, source="device") for number in numbers}},
        starts={"some cache": [start]},
        stored_bytes={"some cache": 20 * MIB},
    )


def cells(text: str, system: str) -> dict[str, str]:
    """Return a row of a Markdown table by column."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {system} "))
    return dict(zip(HEADER, (cell.strip() for cell in row.strip("|").split("|")), strict=True))


def test_every_restart_has_new_questions() -> None:
    numbers = [n for number in range(3) for ending in Ending for n in question_numbers(number, ending)]
    assert len({question(number) for number in (0, *numbers)}) == 1 + len(numbers)


def test_every_system_is_measured_after_a_stop_first() -> None:
    # Its first restart follows the session that stored the prompt, which is stopped.
    assert all(system.endings[0] is Ending.STOPPED for system in SYSTEMS.values())


def test_a_row_shows_ratio_reads_and_stored_bytes() -> None:
    row = cells(table(results_with(answer(0.3))), "some cache")
    assert row["first request"] == "hit 1 of 1"
    assert row["x prefix-cache hit"].startswith("3.0 ")
    assert row["read MiB (device)"] == "24.0 (8.0)"
    assert row["on disk MiB"] == "20.0"
    assert row["max logprob difference"] == "0.0000"


def test_a_request_that_computed_its_prompt_is_a_miss() -> None:
    first = answer(2.0, cached=32)
    assert not is_hit(first)
    assert cells(table(results_with(first)), "some cache")["first request"] == "miss"


def test_logprobs_are_compared_as_far_as_the_tokens_agree() -> None:
    assert cells(table(results_with(answer(0.3, logprob=-1.25))), "some cache")["max logprob difference"] == "0.2500"
    parted = answer(0.3, logprob=-9.0, token="b")
    assert cells(table(results_with(parted)), "some cache")["max logprob difference"] == "0.0000"


def test_a_system_that_never_restarted_has_no_row() -> None:
    results = results_with(answer(0.3))
    results.starts.clear()
    assert "some cache" not in table(results)


def test_files_are_counted_by_what_they_occupy(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data").write_bytes(os.urandom(MIB))
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(64 * MIB)
    drop_page_cache(tmp_path)
    assert sorted(path.name for path in snapshot(tmp_path)) == ["data", "sparse"]
    assert MIB <= allocated_bytes(tmp_path) < 2 * MIB
    assert allocated_bytes(tmp_path / "missing") == 0


def test_a_folder_in_memory_is_distinguished_from_one_on_disk(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    mount = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True)
    assert is_in_memory(tmp_path) == (mount.stdout.strip() in ("tmpfs", "ramfs"))


def test_reads_are_counted_for_a_process_group(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"read\n"
        read = BytesRead.by_groups({reader.pid})
        reader.send_signal(signal.SIGKILL)
    assert read.calls >= MIB
    assert (read - read) == BytesRead(calls=0, device=0)
    assert BytesRead.by_groups({reader.pid}) == BytesRead(calls=0, device=0)
