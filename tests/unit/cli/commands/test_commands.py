"""The reading commands, unpin and evict: what they say, their JSON, their exit codes, 80 columns."""

import errno
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvtier._pb.cache_pb2 import (
    TIER_DISK,
    DaemonStatus,
    KeyUsage,
    NamespaceStatus,
    PromptBinding,
    PromptStatus,
    SessionStatus,
    Tier,
)
from kvtier.cli.output.durations import format_age, format_duration, format_expiry
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import daemon_details
from kvtier.client.admin import AdminClient
from kvtier.client.trusted_socket import is_stopped, listener_pid
from kvtier.core.ttl import parse_duration
from kvtier.doctor import daemon as doctor_daemon
from kvtier.doctor.report import Status
from kvtier.errors import DaemonSilentError, DaemonUnreachableError, InvalidArgumentError
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.library.values.conversion import from_message, prompt_of
from kvtier.library.values.public_values import DaemonStatus as DaemonValue
from kvtier.version import __version__
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for
from tests.unit.cli.conftest import Kvtier
from tests.unit.deployment.shipped import README_TRANSFER_CONFIG


@pytest.fixture
def prompt(daemon: FakeCacheService) -> PromptStatus:
    """Put a prompt with every field into the daemon."""
    status = PromptStatus(
        name="support-bot",
        pin_id="7" * 32,
        pinned=True,
        state=PromptStatus.CAPTURING,
        model="/srv/models/Qwen3-235B-A22B-Instruct-2507-FP8",
        num_tokens=123456,
        created_unix_s=time.time() - 7200,
        expires_unix_s=time.time() + 2 * 86400,
        num_engines=1,
        num_confirmed=1,
        tokens_digest="abcdef123456",
        recipe_json=json.dumps({"version": 1, "kind": "system", "content": "You are [bold]brave[/bold]. " * 40}),
        bindings=[
            PromptBinding(
                namespace_id="n" * 64,
                covered_tokens=123440,
                num_chunks=7715,
                num_host_chunks=7000,
                num_durable_chunks=6500,
                raw_bytes=25 << 30,
                durable_raw_bytes=21 << 30,
                disk_bytes=17 << 30,
                disk_share_bytes=17 << 30,
                live=True,
            )
        ],
    )
    daemon.prompts[status.name] = status
    return status


def value_of(status: DaemonStatus) -> DaemonValue:
    return from_message(DaemonValue, status)


def assert_narrow(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= 80, text


def test_version(kvtier: Kvtier) -> None:
    assert kvtier("--version").output == f"kvtier {__version__}\n"


def test_empty_list_says_how_to_pin(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    assert "kvtier pin NAME --system FILE" in kvtier("list").output
    assert json.loads(kvtier("list", "--json").output) == []


def test_list_fits_80_columns(prompt: PromptStatus, kvtier: Kvtier) -> None:
    result = kvtier("list")
    assert result.exit_code == 0
    assert_narrow(result.output)
    for cell in ("support-bot", "capturing", "yes", "123456", "6500/7715", "7000", "17.0G", "2h", "2d"):
        assert cell in result.output
    assert "…" in result.output, "a long model name is shortened at its beginning"


def test_priorities_are_shown_when_there_are_any(prompt: PromptStatus, kvtier: Kvtier) -> None:
    assert "PRIO" not in kvtier("list").output
    assert "priority" not in kvtier("show", "support-bot").output
    prompt.priority = -42
    listed = kvtier("list").output
    assert_narrow(listed)
    assert ("PRIO" in listed, "-42" in listed) == (True, True)
    assert "-42" in kvtier("show", "support-bot").output


def test_a_public_prompt_is_shown_as_one(prompt: PromptStatus, kvtier: Kvtier) -> None:
    assert "public" not in kvtier("list").output + kvtier("show", "support-bot").output
    prompt.public = True
    listed = kvtier("list").output
    assert_narrow(listed)
    assert "public" in listed
    assert "cache salt any: the prompt is public" in " ".join(kvtier("show", "support-bot").output.split())
    assert json.loads(kvtier("list", "--json").output)[0]["public"] is True


def test_list_json(prompt: PromptStatus, kvtier: Kvtier) -> None:
    (entry,) = json.loads(kvtier("list", "--json").output)
    assert (entry["name"], entry["state"]) == ("support-bot", "CAPTURING")
    assert entry["bindings"][0]["raw_bytes"] == 25 << 30
    assert not [key for key in entry if "recipe" in key], "the prompt's text is in `show --json`"


def test_show(prompt: PromptStatus, kvtier: Kvtier) -> None:
    result = kvtier("show", "support-bot")
    assert result.exit_code == 0
    assert_narrow(result.output)
    for said in ("chunks are stored as vLLM computes them", "6500/7715", "1.24x", "[bold]brave[/bold]", "(1120"):
        assert said in result.output
    answer = json.loads(kvtier("show", "support-bot", "--json").output)
    assert answer["num_tokens"] == 123456
    assert answer["recipe"]["kind"] == "system"


def test_the_ratio_is_of_the_chunks_that_are_stored(prompt: PromptStatus, kvtier: Kvtier) -> None:
    """It divided the raw bytes of all 24 chunks by the stored bytes of one: 35.64x."""
    binding = prompt.bindings[0]
    binding.num_chunks, binding.num_durable_chunks = 24, 1
    binding.raw_bytes, binding.durable_raw_bytes, binding.disk_bytes = 96 << 20, 4 << 20, 2825000
    shown = kvtier("show", "support-bot").output
    assert "1.48x" in shown
    assert "35.6" not in shown


def test_shared_chunks_are_marked_and_summed_once(
    prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier
) -> None:
    """Two names for one prompt: `list` showed its bytes twice, and nothing said that they are the same."""
    assert "*" not in kvtier("list").output
    assert "shared" not in kvtier("show", "support-bot").output
    prompt.bindings[0].num_shared_chunks, prompt.bindings[0].disk_share_bytes = 6500, 17 << 29
    second = daemon.prompts["second"] = PromptStatus.FromString(prompt.SerializeToString())
    second.name, second.priority = "second", 3
    listed = kvtier("list").output
    assert_narrow(listed)
    assert listed.count("17.0G*") == 2
    said = " ".join(listed.split())
    assert "* Other pinned prompts have some of its chunks too; each chunk is stored once." in said
    assert "DISK adds up to 34.0 GiB. On disk they take 17.0 GiB." in said
    second.owner = "sales"
    listed = kvtier("list", "--owner", "sales").output
    assert_narrow(listed)
    assert "DISK adds up to 17.0 GiB. Their share is 8.50 GiB: a chunk of n prompts is 1/n." in listed
    shown = " ".join(kvtier("show", "second").output.split())
    assert "shared 6500 of 7715 chunks belong to other pinned prompts too" in shown
    assert "its share of the 17.0 GiB on disk is 8.50 GiB" in shown


def test_unknown_name(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    for command in ("show", "unpin", "evict"):
        result = kvtier(command, "nope")
        assert result.exit_code == 1
        assert "no prompt named 'nope'; `kvtier list` shows the names" in result.stderr


def test_unpin_then_evict(prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier) -> None:
    refused = kvtier("evict", "support-bot")
    assert refused.exit_code == 1
    assert "kvtier unpin support-bot" in refused.stderr
    assert "kvtier evict support-bot" in kvtier("unpin", "support-bot").output
    assert not daemon.prompts["support-bot"].pinned
    result = kvtier("evict", "support-bot")
    assert "3 chunks, 3.00 MiB of host memory, 2.00 MiB of disk" in result.output
    assert "other pinned prompts share" in result.output
    assert "forgotten: support-bot" in result.output, "it is gone from the list, and nothing said so"


def test_labels_that_no_pin_has_unpin_nothing(prompt: PromptStatus, kvtier: Kvtier) -> None:
    result = kvtier("unpin", "-l", "team=x")
    assert (result.exit_code, result.output) == (
        0, "nothing was unpinned: no pinned prompt has the labels team=x\n",
    )  # fmt: skip
    assert json.loads(kvtier("unpin", "-l", "team=x", "--json").stdout) == []
    prompt.pinned = False
    assert kvtier("unpin", "--all").output == "nothing was unpinned: no prompt is pinned\n"


@pytest.mark.parametrize("command", ["list", "unpin", "evict", "ready", "verify"])
@pytest.mark.parametrize("labels", ["", " "])
def test_empty_labels_select_nothing(prompt: PromptStatus, kvtier: Kvtier, command: str, labels: str) -> None:
    """`kvtier unpin -l "$LABELS"`, with the variable unset, ended all pins of operators."""
    result = kvtier(command, "-l", labels)
    said = " ".join(result.stderr.replace("\u2502", " ").split())
    assert (result.exit_code, "-l" in said, "write labels like team=support" in said) == (2, True, True), said
    assert prompt.pinned


def test_evicting_from_one_tier_forgets_nothing(prompt: PromptStatus, kvtier: Kvtier) -> None:
    kvtier("unpin", "support-bot")
    assert "forgotten" not in kvtier("evict", "support-bot", "--tier", "disk").output
    assert "support-bot" in kvtier("list").output


def test_an_evict_that_ends_early_says_what_is_gone(
    prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier
) -> None:
    """Of several prompts the first were evicted, and only the error of the next was printed."""
    kvtier("unpin", "support-bot")
    result = kvtier("evict", "support-bot", "typo", "other", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "warning: evicted before that: support-bot\n" in result.stderr
    assert "no prompt named 'typo'" in result.stderr
    assert "evicted before" not in kvtier("evict", "typo").stderr


def test_evicting_several_says_which_are_forgotten(
    prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier
) -> None:
    """One `true` stood for all of them."""
    kvtier("pin", "other", "--tokens", "-", stdin="[1, 2, 3]")
    kvtier("unpin", "support-bot")
    answer = json.loads(kvtier("evict", "support-bot", "other", "--force", "--json").stdout)
    assert (answer["names"], answer["forgotten"]) == (["support-bot", "other"], True)
    assert answer["forgotten_names"] == ["support-bot"]


def test_evict_force(prompt: PromptStatus, kvtier: Kvtier) -> None:
    assert kvtier("evict", "support-bot", "--force").exit_code == 0


def test_unpin_and_evict_answer_in_json(prompt: PromptStatus, kvtier: Kvtier) -> None:
    unpinned = json.loads(kvtier("unpin", "support-bot", "--json").stdout)
    assert unpinned["pinned"] is False
    assert "brave" not in json.dumps(unpinned), "the prompt's text is in `show --json`"
    assert json.loads(kvtier("evict", "support-bot", "--json").stdout) == {
        "num_chunks": 3,
        "host_bytes": 3 << 20,
        "disk_bytes": 2 << 20,
        "num_shared_chunks": 1,
        "forgotten": True,
    }
    assert json.loads(kvtier("evict", "--all", "--json").stdout)["forgotten"] is False


@pytest.mark.parametrize(("option", "tier"), [((), "TIER_ANY"), (("--tier", "host"), "TIER_HOST")])
def test_evict_all(daemon: FakeCacheService, kvtier: Kvtier, option: tuple[str, ...], tier: str) -> None:
    result = kvtier("evict", "--all", *option)
    assert result.exit_code == 0
    assert "evicted: 9 chunks, 9.00 MiB of host memory" in result.output
    assert "kept: 2 chunks that pinned prompts have" in result.output
    (request,) = daemon.evictions
    assert (request.all, request.name, request.force, Tier.Name(request.tier)) == (True, "", False, tier)


def test_evict_a_namespace(prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier) -> None:
    result = kvtier("evict", "--namespace", "nn", "--force")
    assert result.exit_code == 0
    assert "evicted: 9 chunks" in result.output
    (request,) = daemon.evictions
    assert (request.all, request.namespace_id, request.force) == (True, "n" * 64, True)
    assert kvtier("evict", "--namespace", "", "--force").exit_code == 1
    assert len(daemon.evictions) == 1


def test_evict_from_one_tier(prompt: PromptStatus, daemon: FakeCacheService, kvtier: Kvtier) -> None:
    assert kvtier("evict", "support-bot", "--tier", "disk", "--force").exit_code == 0
    (request,) = daemon.evictions
    assert (request.all, request.name, request.force, request.tier) == (False, "support-bot", True, TIER_DISK)


@pytest.mark.parametrize(
    "arguments",
    [(), ("bot", "--all"), ("x", "--tier", "gpu"), ("bot", "--namespace", "n"), ("--namespace", "n", "--all")],
)
def test_evict_takes_a_name_or_all(daemon: FakeCacheService, kvtier: Kvtier, arguments: tuple[str, ...]) -> None:
    assert kvtier("evict", *arguments).exit_code == 2
    assert not daemon.evictions


def test_status(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    daemon.counters = {"acquires": 4711, "fsyncs": 0, "disk_written_bytes_write_back": 1 << 20}
    result = kvtier("status")
    assert result.exit_code == 0
    assert_narrow(result.output)
    for said in (
        "pid 1",
        "up 1m 30s",
        "1.00 GiB of 4.00 GiB (25%), 7 chunks, 256 MiB pinned",
        "No engine is attached",
        "4711",
        "1.00 MiB",
    ):
        assert said in result.output
    assert "fsyncs" not in result.output
    assert "every prompt; what is not pinned is evictable" in result.output
    answered = json.loads(kvtier("status", "--json").output)
    assert answered["counters"]["fsyncs"] == 0
    (namespace,) = answered["namespaces"]
    fingerprint = {"weights": {"mode": "sampled"}, "dtype": "torch.bfloat16", "odd": "{not JSON"}
    assert namespace["fingerprint"] == fingerprint, "JSON was in strings"


def test_a_probe_asks_for_the_exit_code_only(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    answered = kvtier("status", "--quiet")
    assert (answered.exit_code, answered.output) == (0, "")
    assert kvtier("--socket", tmp_path / "none", "status", "-q").exit_code == 3


def test_status_says_how_to_attach_as_the_readme_does(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    """It named the README; the command is there to be copied, quotes and all."""
    given = re.search(r"--kv-transfer-config '(\{.*?\})'", kvtier("status").output, re.DOTALL)
    assert given is not None
    assert README_TRANSFER_CONFIG is not None
    assert json.loads(given[1]) == json.loads(README_TRANSFER_CONFIG[1])


def test_status_says_what_writing_costs_and_that_the_disk_is_off(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    daemon.counters = {
        "packs_written": 2,
        "disk_written_bytes_write_back": 3 << 20,
        "disk_written_bytes_compaction": 1 << 20,
    }
    daemon.counters |= {"written_back_bytes": 5 << 20, "pack_fsyncs": 3, "pack_write_ms": 500}
    daemon.breaker_open_reason = "off after repeated errors: EIO"
    result = kvtier("status")
    assert_narrow(result.output)
    output = " ".join(result.output.split())
    for said in ("write amplification 0.80", "3 packs fsynced", "0.25 s a pack", "SWITCHED OFF: off after"):
        assert said in output


def test_status_says_where_http_is_served_and_why_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    Output().say(*daemon_details(value_of(DaemonStatus(http_url="http://127.0.0.1:9464"))))
    assert re.search(r"^HTTP +http://127.0.0.1:9464 *$", capsys.readouterr().out, re.MULTILINE)
    Output().say(*daemon_details(value_of(DaemonStatus(http_problem="cannot listen there"))))
    assert re.search(r"^HTTP +NOT SERVED: cannot listen there *$", capsys.readouterr().out, re.MULTILINE)
    Output().say(*daemon_details(value_of(DaemonStatus())))
    assert "HTTP" not in capsys.readouterr().out, "switched off"


def test_status_says_what_much_of_prompts_takes_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    Output().say(*daemon_details(value_of(DaemonStatus(num_prompts=3, num_pinned=2, prompt_bytes=25 << 20))))
    assert "3, 2 pinned, 25.0 MiB of memory" in capsys.readouterr().out
    Output().say(*daemon_details(value_of(DaemonStatus(num_prompts=3, num_pinned=2, prompt_bytes=5000))))
    assert "of memory" not in capsys.readouterr().out


def test_status_says_what_is_under_which_key(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        KeyUsage(name="new.0a0b0c0d", writes=True, num_packs=2, num_bytes=3 << 20),
        KeyUsage(name="", num_packs=1, num_bytes=1 << 20),
        KeyUsage(name="old.01020304", is_missing=True, num_packs=1, num_bytes=2 << 20),
    ]
    Output().say(*daemon_details(value_of(DaemonStatus(disk_keys=keys))))
    text = capsys.readouterr().out
    assert_narrow(text)
    for said in (
        "new.0a0b0c0d (writes): 3.00 MiB in 2 packs",
        "plain: 1.00 MiB in 1 pack",
        "(MISSING in disk.key_file)",
    ):
        assert said in " ".join(text.split())
    Output().say(*daemon_details(value_of(DaemonStatus())))
    assert "disk key" not in capsys.readouterr().out


def test_status_with_engines_fits_80_columns(kvtier: Kvtier, capsys: pytest.CaptureFixture[str]) -> None:
    session = SessionStatus(
        engine_id="e" * 36,
        pid=123456,
        namespace_id="n" * 64,
        model_names=["/srv/models/Qwen3-235B-A22B"],
        num_leases=12,
        quarantined=True,
    )
    namespace = NamespaceStatus(namespace_id="n" * 64, model="/srv/models/Qwen3-235B", num_disk_chunks=99999)
    Output().say(*daemon_details(value_of(DaemonStatus(sessions=[session], namespaces=[namespace]))))
    text = capsys.readouterr().out
    assert_narrow(text)
    assert "(lost)" in text


@pytest.mark.parametrize("arguments", [["list"], ["show", "x"], ["unpin", "x"], ["evict", "x"], ["status"], ["warm"]])
def test_without_daemon_the_exit_code_is_3(kvtier: Kvtier, arguments: list[str]) -> None:
    result = kvtier(*arguments)
    assert result.exit_code == 3
    assert "there is no such socket" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["warm"], ["pin", "support-bot", "--text", "s.txt"]])
def test_an_interrupt_says_what_stays_and_ends_with_130(
    prompt: PromptStatus, kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def interrupt(_: VllmClient) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VllmClient, "models", interrupt)
    (tmp_path / "s.txt").write_text("You are a parrot.")
    result = kvtier(*arguments)
    assert (result.exit_code, "interrupted; what was " in result.stderr) == (130, True)


@pytest.mark.parametrize("arguments", [["fly"], ["list", "--loud"], ["show"]])
def test_wrong_usage_is_2(kvtier: Kvtier, arguments: list[str]) -> None:
    assert kvtier(*arguments).exit_code == 2


def test_a_socket_without_a_listener(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with AdminClient(tmp_path / "dead") as client, pytest.raises(DaemonUnreachableError, match="no process listens"):
        client.status()


@pytest.mark.parametrize(
    ("path", "problem"),
    [("/" + "x" * 107, "has 108 bytes, a unix socket's at most 107"), ("~no-such-user/s", "has no home folder")],
)
def test_a_path_that_no_socket_can_have(kvtier: Kvtier, path: str, problem: str) -> None:
    """It was gRPC's trace of its own source, or ours."""
    result = kvtier("--socket", path, "list")
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())
    assert "--socket" in result.stderr
    result = kvtier("--socket", path, "doctor", "--json", "--python", "/bin/false")
    found = {finding["id"]: finding for finding in json.loads(result.stdout)}
    assert (found["socket.path"]["status"], problem in found["socket.path"]["found"]) == ("fail", True)
    assert found["daemon.answers"]["status"] == "skipped"


def test_a_socket_that_one_may_not_read_is_dialed_all_the_same(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line refused it as "not readable", as if it were a file: who owns it was never said."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    result = kvtier("status")
    assert result.exit_code == 3
    assert "no process listens on that socket" in " ".join(result.stderr.split())


def test_forbidden_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched, since root may connect to every socket."""

    class Forbidding(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "denied")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
    monkeypatch.setattr(socket, "socket", Forbidding)
    with AdminClient(tmp_path / "s") as client, pytest.raises(DaemonUnreachableError, match="run as that user"):
        client.status()


def test_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        with (
            AdminClient(tmp_path / "mute", timeout_s=0.2) as client,
            pytest.raises(DaemonUnreachableError, match=r"no answer within 0\.2 s"),
        ):
            client.status()


def test_a_stopped_daemon_is_named_and_how_to_let_it_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said to start a daemon, which the stopped one would have kept from starting."""
    code = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(600)"
    )
    path = tmp_path / "mute"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        wait_for(lambda: listener_pid(path) == process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(process.pid))
        with AdminClient(path, timeout_s=0.2) as client, pytest.raises(DaemonSilentError) as stopped:
            client.status()
        assert f"(pid {process.pid} holds the socket, no answer within 0.2 s: it is stopped)" in str(stopped.value)
        assert f"kill -CONT {process.pid}" in str(stopped.value)
        assert "start `kvtier-daemon`" not in str(stopped.value)
        monkeypatch.setattr(doctor_daemon, "AdminClient", partial(AdminClient, timeout_s=0.2))
        finding = doctor_daemon.ask_daemon(path, None, []).finding
        assert (finding.status, finding.remedy) == (Status.FAIL, stopped.value.remedy)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not is_stopped(process.pid))
        with AdminClient(path, timeout_s=0.2) as client, pytest.raises(DaemonSilentError) as silent:
            client.status()
        assert f"end it (kill -KILL {process.pid}) and start it again" in str(silent.value)
    finally:
        process.kill()
        process.wait()


def test_watch_ends_by_itself(prompt: PromptStatus, tmp_path: Path) -> None:
    with AdminClient(tmp_path / "s") as client:
        assert [status.name for status in client.watch(prompt.pin_id, timeout_s=2.0)] == ["support-bot"]


def test_durations() -> None:
    assert [parse_duration("--ttl", text) for text in ("90s", "1.5h", "7d", "2w", "never")] == [
        90, 5400, 604800, 1209600, 0,
    ]  # fmt: skip
    for text in ("", "7", "-1d", "0s", "0.5s", "1y", " " * 40 + "7d", "7" * 10**7 + "d"):
        with pytest.raises(InvalidArgumentError):
            parse_duration("--ttl", text)
    written = {90061: "1d 1h", 7199: "2h", 7140: "1h 59m", 59.7: "1m", 3599: "59m 59s", 0.2: "0s", -5: "0s", 1e12: "?"}
    assert {seconds: format_duration(seconds) for seconds in written} == written
    assert format_expiry(0) == "never"
    assert format_expiry(1.0) == "expired"


@pytest.mark.parametrize(
    "ttl", ["45s", "1m", "90s", "59m", "60m", "90m", "2h", "12h", "23h", "36h", "7d", "2w", "100d"]
)
def test_a_ttl_that_was_given_just_now_is_shown_as_it_was_given(monkeypatch: pytest.MonkeyPatch, ttl: str) -> None:
    """Of 2h it showed 1h, of 7d 6d."""
    shown = {"90s": "1m 30s", "60m": "1h", "90m": "1h 30m", "36h": "1d 12h", "2w": "14d"}
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for passed_s in (0.0, 0.001, 0.4):
        assert format_expiry(1e9 + parse_duration("--ttl", ttl) - passed_s) == shown.get(ttl, ttl)
    assert format_age(1e9 - 7199) == "1h", "an age is not rounded up"
    assert [format_age(1e9 - age_s) for age_s in (0.2, 59.9, 86399)] == ["0s", "59s", "23h"]
    assert (format_age(math.nan), format_age(-1e300), format_expiry(math.inf)) == ("?", "?", "?")


def test_every_field_is_in_the_json() -> None:
    fields = {field.name for field in PromptStatus.DESCRIPTOR.fields}
    assert to_jsonable(prompt_of(PromptStatus())).keys() == fields - {"recipe_json"}
    assert to_jsonable(prompt_of(PromptStatus()), with_recipe=True).keys() == fields - {"recipe_json"} | {"recipe"}


def test_how_a_prompt_is_pinned_can_be_changed_without_a_vllm(
    daemon: FakeCacheService, prompt: PromptStatus, kvtier: Kvtier
) -> None:
    ends = daemon.prompts["support-bot"].expires_unix_s
    result = kvtier("set", "support-bot", "--priority", "7", "--public")
    assert result.output == "set: support-bot (ends: 2d, priority: 7, public)\n"
    assert daemon.prompts["support-bot"].expires_unix_s == ends
    assert kvtier("set", "support-bot", "--ttl", "never", "--no-public").output == (
        "set: support-bot (ends: never, priority: 7)\n"
    )
    assert json.loads(kvtier("set", "support-bot", "--ttl", "2h", "--json").output)["priority"] == 7


def test_a_ttl_can_be_made_to_slide_and_to_slide_no_more(
    daemon: FakeCacheService, prompt: PromptStatus, kvtier: Kvtier
) -> None:
    assert "each use begins the time again" in kvtier("set", "support-bot", "--ttl", "2h", "--sliding").output
    assert daemon.prompts["support-bot"].sliding
    assert kvtier("set", "support-bot", "--priority", "7").exit_code == 0
    assert daemon.prompts["support-bot"].sliding, "what is not given stays"
    assert "each use" not in kvtier("set", "support-bot", "--no-sliding").output
    assert not daemon.prompts["support-bot"].sliding


def test_set_without_anything_to_set_says_what_there_is(prompt: PromptStatus, kvtier: Kvtier) -> None:
    result = kvtier("set", "support-bot")
    assert result.exit_code == 2
    assert "--ttl, --priority, --public" in result.output
    assert kvtier("set", "support-bot", "--priority", "101").exit_code == 2
    assert kvtier("set", "unknown", "--priority", "1").exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--server", "", "status"),
        ("pin", "bot", "--tokens", "t.json", "--cache-salt", ""),
        ("pin", "bot", "--tokens", "t.json", "--model", ""),
    ],
)
def test_an_empty_value_is_none_that_was_left_out(
    daemon: FakeCacheService, kvtier: Kvtier, arguments: tuple[str, ...]
) -> None:
    """`--server "$CACHE_HOST"`, with the variable unset, meant this machine's daemon; `--cache-salt ""` no salt."""
    result = kvtier(*arguments)
    assert result.exit_code == 2
    assert "is empty; say which, or leave the option out" in " ".join(result.output.replace("│", " ").split())
    assert not daemon.pins
