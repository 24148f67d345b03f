"""`kvtier verify`, `ready`, `watch`, `top` and `quarantine`: what they say, JSON, exit codes, 80 columns."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvtier._pb.cache_pb2 import Event
from kvtier.cli.output.grid import Bar
from kvtier.cli.output.top_frame import Moment, top_frame
from kvtier.library.values.conversion import from_message, prompt_of
from kvtier.library.values.public_values import DaemonStatus
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm

NAMESPACE = "n" * 64
NO_VLLM = "http://127.0.0.1:9"


@pytest.fixture
def pinned(kvtier: Kvtier, daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> FakeCacheService:
    """Have two durable prompts, `bot` and `faq` (team=sales)."""
    daemon.num_engines, vllm.cached_tokens = 1, 96
    for name, first, labels in (("bot", 0, []), ("faq", 1000, ["--label", "team=sales"])):
        (tmp_path / "ids.json").write_text(json.dumps(list(range(first, first + 100))))
        done = kvtier("pin", name, "--tokens", "ids.json", "--url", NO_VLLM, "--no-warm", *labels)
        assert done.exit_code == 0, done.output
    daemon.capture()
    return daemon


def said(text: str) -> str:
    """Return it as one line."""
    return " ".join(text.split())


def fits(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


def test_verify_says_what_was_compared_and_how(kvtier: Kvtier, pinned: FakeCacheService, vllm: FakeVllm) -> None:
    result = kvtier("verify", "bot", "--url", vllm.url)
    assert result.exit_code == 0, result.output
    assert "checksums ok 6 of 6 chunks on disk and 6 in host memory are as stored" in said(result.output)
    assert "live vLLM ok vLLM 0.32.0 (toy) answered with 96 of 100 tokens from kvtier" in said(result.output)
    assert "verified 1 prompt: 1 ok" in result.output


def test_verify_reports_as_json(kvtier: Kvtier, pinned: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> None:
    result = kvtier("verify", "--all", "--url", vllm.url, "--json", "--report", "report.json")
    values = json.loads(result.stdout)
    assert [(each["name"], each["live"]["verdict"]) for each in values] == [("bot", "EQUAL"), ("faq", "EQUAL")]
    assert json.loads((tmp_path / "report.json").read_text()) == values
    assert "verified 2 prompts" not in result.stdout
    result = kvtier("verify", "-l", "team=sales", "--no-live", "--json")
    (only,) = json.loads(result.stdout)
    assert (only["name"], only["oracle"]) == ("faq", "checksums")
    result = kvtier("verify", "faq", "--no-live", "--json", "--report", ".")
    assert result.exit_code == 2
    assert "--report" in result.stderr
    assert [each["name"] for each in json.loads(result.stdout)] == ["faq"], "the results of hours were lost"


def test_a_difference_quarantines_the_namespace(kvtier: Kvtier, pinned: FakeCacheService, vllm: FakeVllm) -> None:
    vllm.restored_logprob = -2.0
    result = kvtier("verify", "bot", "--url", vllm.url, "--no-quarantine")
    assert (result.exit_code, pinned.quarantine_reasons) == (1, {})
    assert "DIFFERENT" in result.output
    result = kvtier("verify", "bot", "--url", vllm.url)
    assert result.exit_code == 1
    assert pinned.quarantine_reasons[NAMESPACE].startswith("kvtier verify: bot differs from vLLM's own answer")
    assert f"namespace {NAMESPACE[:12]} serves and stores nothing" in said(result.output)
    assert "--release" in result.output
    assert "QUARANTINED since" in kvtier("status").output
    assert kvtier("quarantine", NAMESPACE[:12], "--release").exit_code == 0
    values = json.loads(kvtier("verify", "bot", "--url", vllm.url, "--json").stdout)
    assert values[0]["quarantined_namespace_id"] == NAMESPACE


def test_damage_fails_and_quarantines_nothing(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    pinned.damaged_chunks = 2
    result = kvtier("verify", "bot", "--no-live")
    assert (result.exit_code, pinned.quarantine_reasons) == (1, {})
    assert "checksums DAMAGED 4 of 6 chunks on disk" in said(result.output)
    assert "2 damaged on disk" in said(result.output)


def test_what_cannot_be_compared_is_a_warning(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    result = kvtier("verify", "bot", "--url", NO_VLLM)
    assert result.exit_code == 0
    assert "inconclusive no vLLM answers" in said(result.output)
    assert "warning: not everything could be compared" in said(result.output)
    assert kvtier("verify", "bot", "--url", NO_VLLM, "--strict").exit_code == 1
    for wrong in ([], ["bot", "--all"], ["-l", "a=b", "--all"]):
        assert kvtier("verify", *wrong).exit_code == 2
    assert kvtier("verify", "none").exit_code == 1
    result = kvtier("verify", "-l", "team=none")
    assert (result.exit_code, "nothing was verified" in result.output) == (1, True)


def test_a_prompt_that_is_not_stored_is_skipped(kvtier: Kvtier, pinned: FakeCacheService, tmp_path: Path) -> None:
    pinned.num_engines = 0
    (tmp_path / "ids.json").write_text(json.dumps(list(range(50))))
    kvtier("pin", "new", "--tokens", "ids.json", "--url", NO_VLLM, "--no-warm")
    result = kvtier("verify", "--all", "--no-live")
    assert result.exit_code == 0
    assert "warning: new: not verified" in result.output
    assert "verified 2 prompts: 2 ok, 1 not verified" in result.output
    assert kvtier("verify", "--all", "--no-live", "--strict").exit_code == 1
    result = kvtier("verify", "new", "bot", "--no-live")
    assert result.exit_code == 1, "it was named"
    assert "verified 1 prompt: 1 ok, 1 not verified" in result.output


def test_nothing_verified_is_no_success(kvtier: Kvtier, pinned: FakeCacheService, vllm: FakeVllm) -> None:
    """A script that ran it took exit 0 for a proof."""
    pinned.refuse("faq", "the prompt has 6 tokens, less than one chunk of 16")
    result = kvtier("verify", "faq", "--no-live")
    assert result.exit_code == 1
    assert "faq: not verified: vLLM cannot use it: the prompt has 6 tokens" in said(result.output)
    assert "verified 0 prompts: 1 not verified" in result.output
    pinned.capture(0)  # of `bot`: nothing is stored any longer
    for options in (["--no-live"], ["--url", NO_VLLM]):
        result = kvtier("verify", "--all", *options)
        assert result.exit_code == 1
        assert "checksums not stored 0 of 6 chunks on disk" in said(result.output)
        assert "bot: nothing was compared: no chunk of it is stored; `kvtier warm bot`" in said(result.output)
        assert "verified 0 prompts: 2 not verified" in result.output
        assert "--strict" not in result.output
    pinned.prompts.clear()
    assert kvtier("verify", "--all").exit_code == 0, "nothing is pinned"


def test_ready(kvtier: Kvtier, pinned: FakeCacheService, tmp_path: Path) -> None:
    result = kvtier("ready")
    assert (result.exit_code, result.output) == (
        0, "ready: 2 of 2 prompts are on disk, for every attached engine\n",
    )  # fmt: skip
    (tmp_path / "ids.json").write_text(json.dumps(list(range(50))))
    kvtier("pin", "new", "--tokens", "ids.json", "--url", NO_VLLM, "--no-warm")
    result = kvtier("ready", "--timeout", "0.2")
    assert result.exit_code == 1
    assert "not ready: 2 of 3 prompts" in result.output
    assert "new capturing not on disk yet" in said(result.output)
    assert fits(result.output)
    assert kvtier("ready", "bot", "--tier", "host").exit_code == 0
    result = kvtier("ready", "bot", "--tier", "device")
    assert (result.exit_code, result.output.splitlines()[0]) == (
        0, "ready: 1 of 1 prompts are on disk and in vLLM's prefix cache of every attached engine",
    )  # fmt: skip
    assert kvtier("ready", "-l", "team=sales").exit_code == 0
    result = kvtier("ready", "-l", "team=none", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ready"]) == (1, False)
    assert kvtier("ready", "bot", "-l", "team=sales").exit_code == 2
    assert kvtier("ready", "none").exit_code == 1


def test_ready_does_not_wait_for_what_vllm_refuses(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    """It waited for the whole timeout."""
    pinned.refuse("faq", "the prompt has 6 tokens, less than one chunk of 16")
    result = kvtier("ready", "--timeout", "3600")
    assert result.exit_code == 1
    assert "not ready: 1 of 2 prompts" in result.output
    assert "faq refused an engine cannot recognize it: the prompt has 6 tokens" in said(result.output)
    result = kvtier("ready", "--timeout", "3600", "--json")
    assert [(each["name"], each["state"]) for each in json.loads(result.stdout)["waiting"]] == [("faq", "REFUSED")]


def test_ready_without_a_daemon(kvtier: Kvtier) -> None:
    assert kvtier("ready").exit_code == 3


def test_watch(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    fields = {"reason": "no space", "path": "/x", "chunks": "3", "empty": ""}
    daemon.events.append(Event(name="disk_full", level="warning", unix_s=time.time(), fields=fields))
    result = kvtier("watch", "--timeout", "0.3")
    assert result.exit_code == 0
    assert result.output[8:] == ' warning disk_full chunks=3 empty="" path=/x reason="no space"\n'
    (line,) = kvtier("watch", "--timeout", "0.3", "--json").stdout.splitlines()
    assert json.loads(line)["fields"] == fields
    assert kvtier("watch", "pin_registered", "--timeout", "0.3").output == ""


def test_events_of_a_newer_daemon_are_shown(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    daemon.events.append(Event(name="chunk_teleported", level="notice", unix_s=time.time(), fields={"to": "moon"}))
    assert kvtier("watch", "--timeout", "0.3").output[8:] == " notice chunk_teleported to=moon\n"


@pytest.mark.parametrize("command", [["watch", "--json"], ["top", "--json", "--interval", "0.1"], ["top"]])
def test_ctrl_c_ends_it_well(command: list[str], daemon: FakeCacheService, tmp_path: Path) -> None:
    daemon.events.append(Event(name="disk_full"))
    # A shell's background job, and what it starts, ignores the signal: here it is as in a terminal.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += f"sys.argv[1:] = {['--socket', str(tmp_path / 's'), *command]!r}; "
    out = tmp_path / "out"
    with out.open("wb") as file, subprocess.Popen(
        [sys.executable, "-c", start + "from kvtier.cli.app import main; main()"],
        stdout=file, stderr=subprocess.PIPE, env={**os.environ},
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: b"\n" in out.read_bytes())
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_top(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    pinned.counters = {"hit_chunks_host": 12000, "missed_chunks_absent": 3, "missed_chunks_no_slot": 4}
    result = kvtier("top", "--once")
    assert result.exit_code == 0
    assert fits(result.output)
    shown = said(result.output)
    for part in ("host █", "1.00 GiB of 4.00 GiB, 256 MiB pinned", "Pins: 2 (2 durable)", "No engine is attached.",
                 "restored from host memory 12,000 ", "missed: absent 3", "missed: no slot 4"):  # fmt: skip
        assert part in shown, result.output
    (line,) = kvtier("top", "--once", "--json").stdout.splitlines()  # as --json says
    value = json.loads(line)
    assert (value["status"]["pid"], len(value["prompts"])) == (1, 2)


def test_a_tier_that_is_off_and_a_quarantine_are_loud(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    pinned.breaker_open_reason, pinned.quarantine_reasons = "EIO", {NAMESPACE: "not trusted"}
    shown = said(kvtier("top", "--once").output)
    assert "SWITCHED OFF: EIO" in shown
    assert "nothing: not trusted" in shown


def test_rates_are_since_the_look_before(pinned: FakeCacheService) -> None:
    pinned.counters = {"hit_chunks_host": 10}
    before = Moment(at_s=5.0, status=from_message(DaemonStatus, pinned.GetStatus(None, None)), prompts=[])
    now = replace(before, at_s=7.0, status=replace(before.status, counters={"hit_chunks_host": 15}))
    console = Console(width=80, record=True)
    console.print(*top_frame(now, before, 80))
    assert "restored from host memory 15 2.5" in said(console.export_text())


def test_a_small_screen_shows_the_newest_pins(pinned: FakeCacheService) -> None:
    prompts = [prompt_of(status) for status in pinned.prompts.values()]
    many = [replace(prompts[0], name=f"p{n}", pin_id=str(n), created_unix_s=float(n)) for n in range(100)]
    moment = Moment(at_s=5.0, status=from_message(DaemonStatus, pinned.GetStatus(None, None)), prompts=many)
    console = Console(width=80, record=True)
    console.print(*top_frame(moment, None, 80, height=24))
    shown = console.export_text()
    assert len(shown.splitlines()) <= 24, shown
    assert "p99 " in shown
    assert "p0 " not in shown


@pytest.mark.parametrize(("used", "pinned_share", "shown"), [
    (0.5, 0.25, "██▒▒░░░░"), (0.001, 0.0, "▒░░░░░░░"), (0, 0, "░" * 8), (3.0, 9.0, "█" * 8), (-1.0, -1.0, "░" * 8),
])  # fmt: skip
def test_a_bar(used: float, pinned_share: float, shown: str) -> None:
    console = Console(width=80, record=True)
    console.print(Bar(used=used, pinned=pinned_share, width=8))
    assert console.export_text() == f"{shown}\n"


def test_quarantine_and_release(kvtier: Kvtier, pinned: FakeCacheService) -> None:
    result = kvtier("quarantine", "nnn", "--reason", "not trusted")
    assert result.exit_code == 0
    assert pinned.quarantine_reasons == {NAMESPACE: "not trusted"}
    assert "QUARANTINED since" in result.output
    value = json.loads(kvtier("quarantine", "nnn", "--release", "--json").stdout)
    assert (value["namespace_id"], pinned.quarantine_reasons) == (NAMESPACE, {})
    for wrong in (["nnn"], ["nnn", "--reason", "x", "--release"], ["n", "--release"]):
        result = kvtier("quarantine", *wrong)
        assert result.exit_code == 2, result.output
    assert "NAMESPACE" in result.output
    assert kvtier("quarantine", "x", "--release").exit_code == 1
