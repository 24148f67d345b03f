"""A real daemon process, scraped over HTTP; and whether dashboard and alerts ask for what it exports."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.client.admin import AdminClient
from kvtier.obs.counters import Counters
from kvtier.obs.declare import Kind, metrics_of
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier_connector.metrics.declared import METRICS
from tests.fakes.operator import status_of, until
from tests.fakes.promql import TARGET_LABELS, alert_rules, dashboard, dashboard_targets, expressions, used_in
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, wait_durable

DAEMONS = [metric for record in (Counters, Gauges, Timings) for metric in metrics_of(record)]
KEYS = [chunk_key(number) for number in range(6)]
Exported = Mapping[str, list[tuple[dict[str, str], float]]]


@dataclass
class Served:
    """A daemon process.

    Attributes:
        log: Its lines until it was ready and served its metrics, or could not.
    """

    socket: Path
    log: str
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        return self.log.rpartition("http_served url=")[2].split()[0]

    def scrape(self) -> Exported:
        """Return labels and value of each sample, by name."""
        answer = httpx.get(f"{self.url}/metrics", timeout=10)
        answer.raise_for_status()
        samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
        return samples


@contextmanager
def daemon(folder: Path, listen: str) -> Iterator[Served]:
    """Run a daemon until it has said what became of its metrics."""
    config = config_in(folder)
    for directory in (config.host.arena_dir, config.disk.disk_dir):
        directory.chmod(0o700)
    flags = {"socket": config.server.socket, "disk-dir": config.disk.disk_dir, "arena-dir": config.host.arena_dir}
    flags_given = [f"--{name}={value}" for name, value in flags.items()]
    flags_given += ["--host-bytes=1MiB", f"--http-listen={listen}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.harness.tuned_daemon", *flags_given],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"TUNED_DISK_PACK_LINGER_S": "0.01", "TUNED_DISK_RESERVE_BYTES": "0"},
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " http_" in line or (listen == "off" and " ready " in line):
                break
        yield Served(config.server.socket, "".join(lines), process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Exported]]:
    """A daemon that an engine has stored to and loaded from, and what it exported then."""
    folder = tmp_path_factory.mktemp("daemon")
    with daemon(folder, "127.0.0.1:0") as served:
        asyncio.run(_use(folder))
        deadline_s = time.monotonic() + 30
        while (found := served.scrape())["kvtier_pin_durable_seconds_count"][0][1] < 1:
            assert time.monotonic() < deadline_s, "the pin's durability was not observed"
            time.sleep(0.1)
        yield served, found


async def _use(folder: Path) -> None:
    config = config_in(folder)
    async with grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        async with ScriptedEngine(config) as engine:
            pinned = await stub.Pin(cache_pb2.PinRequest(name="p", tokens=range(96)))
            await engine.bind(pinned.pin_id, KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            await engine.acquire(1, KEYS)
            await engine.release(1)
            await stub.Evict(cache_pb2.EvictRequest(name="p", tier=cache_pb2.TIER_HOST))
            await engine.barrier()
            await engine.acquire(2, [*KEYS, chunk_key("never stored")])

        async def forgotten() -> bool:
            return not (await status_of(stub)).sessions

        await until(forgotten)


def value(exported: Exported, name: str, **labels: str) -> float:
    """Return the one sample with these labels."""
    (found,) = [number for given, number in exported[name] if given == labels]
    return found


def test_a_daemon_exports_every_declared_metric_and_no_other(used: tuple[Served, Exported]) -> None:
    _, exported = used
    names = {name for name in exported if name.startswith("kvtier_")}
    assert names == {name for metric in DAEMONS for name in metric.sample_names}
    for metric in DAEMONS:
        for name in metric.sample_names:
            for labels, _ in exported[name]:
                assert labels.keys() - {"le"} == set(metric.labels)
    assert {name for name in exported if not name.startswith("kvtier_")} >= {"process_cpu_seconds_total"}


def test_the_numbers_are_those_of_what_happened(used: tuple[Served, Exported]) -> None:
    served, exported = used
    num_bytes = 6 * 6000
    assert value(exported, "kvtier_stored_chunks_total") == 6
    assert value(exported, "kvtier_stored_bytes_total") == num_bytes
    assert value(exported, "kvtier_written_back_bytes_total") == num_bytes
    assert value(exported, "kvtier_promoted_bytes_total") == num_bytes
    assert value(exported, "kvtier_hit_chunks_total", tier="host") == 6
    assert value(exported, "kvtier_hit_bytes_total", tier="disk") == num_bytes
    assert value(exported, "kvtier_missed_chunks_total", reason="absent") == 1
    assert value(exported, "kvtier_disk_written_bytes_total", reason="write_back") >= num_bytes
    assert 0 < value(exported, "kvtier_disk_read_bytes_total", reason="promotion") <= num_bytes
    assert value(exported, "kvtier_acquire_seconds_count") == 2
    for timing in ("first_chunk", "promotion"):
        assert value(exported, f"kvtier_{timing}_seconds_count") == 1
    for timing in ("store_seal", "pack_write", "fsync", "ledger_commit", "event_loop_lag"):
        assert value(exported, f"kvtier_{timing}_seconds_count") >= 1
    assert value(exported, "kvtier_pins", state="durable") == 1
    assert value(exported, "kvtier_tier_chunks", tier="disk", kind="pinned") == 6
    assert value(exported, "kvtier_disk_unreserved_bytes") > 0
    assert value(exported, "kvtier_io_errors_total", tier="disk", operation="write") == 0
    assert time.time() - 120 < value(exported, "kvtier_start_time_seconds") <= time.time()
    with AdminClient(served.socket) as client:
        status = client.status()
    assert value(exported, "kvtier_tier_used_bytes", tier="disk") == status.disk.used_bytes
    assert value(exported, "kvtier_tier_limit_bytes", tier="host") == status.host.limit_bytes
    assert status.counters["stored_bytes"] == num_bytes


def test_an_engine_that_dies_is_a_session_cut(used: tuple[Served, Exported]) -> None:
    """The scripted engine breaks its stream off, as a killed vLLM does."""
    served, _ = used
    exported = served.scrape()
    assert value(exported, "kvtier_sessions_ended_total", reason="cut") == 1
    assert value(exported, "kvtier_sessions_ended_total", reason="closed") == 0
    assert value(exported, "kvtier_sessions", state="attached") == 0


@pytest.mark.parametrize("expression", expressions())
def test_dashboard_and_alerts_ask_for_what_is_exported(used: tuple[Served, Exported], expression: str) -> None:
    """Names, labels, and the values that labels are compared with; vLLM's own are checked with a real vLLM."""
    _, exported = used
    labels_known = {"le"} | TARGET_LABELS
    connectors = {name: metric for metric in METRICS for name in metric.sample_names}
    found = used_in(expression)
    assert found.selectors
    for name, matchers in found.selectors:
        if name.startswith("vllm:") or name == "up":
            labels_known |= {"source"} if name.startswith("vllm:") else set()
            continue
        if name in connectors:
            values = {label: set(values) for label, values in connectors[name].labels.items()}
        else:
            assert name in exported, f"{name} is not exported"
            values = {label: {labels[label] for labels, _ in exported[name]} for label in exported[name][0][0]}
        labels_known |= values.keys()
        for label, operator, wanted in matchers:
            assert label in values or label in TARGET_LABELS, f"{name} has no label {label}"
            choices = wanted.split("|") if operator in ("=~", "!~") else [wanted]
            assert label in TARGET_LABELS or set(choices) <= values[label], f"{name} never has {label}={wanted}"
    assert found.grouped_by <= labels_known


def test_counters_are_rated_and_histograms_summed_by_their_buckets(used: tuple[Served, Exported]) -> None:
    kinds = {name: metric.kind for metric in [*DAEMONS, *METRICS] for name in metric.sample_names}
    for expression in expressions():
        found = used_in(expression)
        is_rated = found.functions & {"rate", "increase"}
        for name, _ in found.selectors:
            if kinds.get(name) is Kind.GAUGE:
                assert not is_rated or len(found.selectors) > 1, expression
            if name.endswith("_bucket"):
                assert "histogram_quantile" in found.functions, expression
                assert "le" in found.grouped_by, expression


def test_legends_and_messages_name_labels_that_the_query_keeps() -> None:
    for expression, legend in dashboard_targets():
        assert set(re.findall(r"{{(\w+)}}", legend)) <= used_in(expression).grouped_by, legend
    for rule in alert_rules():
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= used_in(rule["expr"]).grouped_by | TARGET_LABELS, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= rule["annotations"].keys()


@pytest.mark.parametrize("metric", ["kvtier_tampered_chunks_total", "kvtier_key_missing_reads_total"])
def test_what_ends_the_trust_in_the_disk_pages_at_once(metric: str) -> None:
    """A rate would miss what the first scrape after a start finds counted already."""
    (rule,) = (rule for rule in alert_rules() if metric in rule["expr"])
    assert rule["expr"] == f"sum by (instance) ({metric}) > 0"
    assert rule["labels"]["severity"] == "critical"
    assert "for" not in rule


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_a_port_in_use_is_said_and_the_daemon_serves(tmp_path: Path, used: tuple[Served, Exported]) -> None:
    address = used[0].url.removeprefix("http://")
    with daemon(tmp_path, address) as second:
        assert f"start: http.listen = '{address}': cannot listen there: " in second.log
        assert "name another address, or" in second.log
        assert "http_not_served" in second.log
        with AdminClient(second.socket) as client:
            status = client.status()
        assert status.pid == second.process.pid
        assert status.http_url == ""
        assert f"http.listen = '{address}'" in status.http_problem
        assert "restart the daemon" in status.http_problem
        asyncio.run(_use(tmp_path))
        assert second.log.count("http_not_served") == 1
    with AdminClient(used[0].socket) as client:
        assert (client.status().http_url, client.status().http_problem) == (used[0].url, "")


def test_metrics_may_be_off(tmp_path: Path) -> None:
    with daemon(tmp_path, "off") as served, AdminClient(served.socket) as client:
        status = client.status()
        assert status.pid == served.process.pid
        assert (status.http_url, status.http_problem) == ("", "")
