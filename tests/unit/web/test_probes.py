"""Metrics and probes over HTTP, over real sockets."""

import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.obs.declare import counter, series, timed
from kvtier.obs.exposition import Reading
from kvtier.obs.histogram import Histogram
from tests.unit.web.http_rig import served_door

CHUNKS = counter("chunks", "Chunks.", tier=("host", "disk"))


@dataclass
class Record:
    host: int = series(CHUNKS, "host")
    disk: int = series(CHUNKS, "disk")
    wait: Histogram = timed("wait_seconds", "Waiting.", (0.5, 1.0))


def reading() -> Reading:
    record = Record(host=3)
    record.wait.observe(0.7)
    return [record]


@contextmanager
def served(host: str = "127.0.0.1", read: object = reading) -> Iterator[str]:
    with served_door(read=read, host=host) as server:
        yield f"{server.url}/metrics"


def test_a_scrape_is_what_prometheus_reads() -> None:
    with served() as url:
        answer = httpx.get(url)
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert {sample.labels["tier"]: sample.value for sample in families["kvtier_chunks"].samples} == {
        "host": 3,
        "disk": 0,
    }
    assert (families["kvtier_chunks"].type, families["kvtier_chunks"].documentation) == ("counter", "Chunks.")
    assert [(s.name, s.labels.get("le"), s.value) for s in families["kvtier_wait_seconds"].samples] == [
        ("kvtier_wait_seconds_bucket", "0.5", 0),
        ("kvtier_wait_seconds_bucket", "1.0", 1),
        ("kvtier_wait_seconds_bucket", "+Inf", 1),
        ("kvtier_wait_seconds_count", None, 1),
        ("kvtier_wait_seconds_sum", None, 0.7),
    ]
    assert "process_resident_memory_bytes" in families


def test_a_scrape_may_be_compressed_and_in_openmetrics() -> None:
    with served() as url, httpx.stream("GET", url, headers={"Accept-Encoding": "gzip"}) as answer:
        assert b"kvtier_chunks_total" in gzip.decompress(b"".join(answer.iter_raw()))
    with served() as url:
        answer = httpx.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert answer.text.endswith("# EOF\n")


def test_other_paths_say_where_the_metrics_are() -> None:
    with served() as url:
        answer = httpx.get(url.removesuffix("/metrics") + "/nothing")
        assert answer.status_code == 404
        assert answer.json()["detail"].endswith("the metrics are at /metrics")
        assert (httpx.post(url).status_code, httpx.head(url).status_code) == (405, 200)


def test_an_event_loop_that_does_not_answer_fails_the_scrape() -> None:
    def stuck() -> Reading:
        raise TimeoutError

    with served(read=stuck) as url:
        answer = httpx.get(url)
    assert (answer.status_code, answer.text) == (503, "the daemon's event loop does not answer\n")


def test_a_defect_answers_the_scrape_and_logs_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Reading:
        raise KeyError("host")

    with served(read=broken) as url:
        answer = httpx.get(url)
    assert (answer.status_code, answer.text) == (500, "a defect of kvtier: the daemon's log has its traceback\n")
    assert caplog.records[-1].levelname == "ERROR"
    assert caplog.records[-1].exc_info is not None


def test_a_client_that_says_nothing_delays_no_other() -> None:
    with served() as url:
        port = httpx.URL(url).port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)):
            assert httpx.get(url, timeout=5).status_code == 200


def test_ipv6() -> None:
    try:
        with served("::1") as url:
            assert url.startswith("http://[::1]:")
            assert httpx.get(url).status_code == 200
    except OSError:
        pytest.skip("no IPv6 on this machine")


def test_an_address_in_use_is_an_error_and_a_closed_server_leaves_it() -> None:
    with served() as url:
        port = httpx.URL(url).port
        assert port is not None
        with pytest.raises(OSError, match="in use"), served_door(port=port):
            pass
    with served_door(port=port):
        pass


def test_health_says_that_the_process_serves_and_readiness_what_is_awaited() -> None:
    problem = ""
    with served_door(why_not_ready=lambda: problem) as server:
        health, ready = f"{server.url}/healthz", f"{server.url}/readyz"
        assert (httpx.get(health).status_code, httpx.get(health).text) == (200, "ok\n")
        assert (httpx.get(ready).status_code, httpx.get(ready).text) == (200, "ready\n")
        problem = "prompt p is not durable yet"
        assert (httpx.get(ready).status_code, httpx.get(ready).text) == (503, "prompt p is not durable yet\n")
        assert httpx.get(health).status_code == 200


def test_scrapes_that_wait_for_the_loop_are_bounded_and_each_is_answered() -> None:
    gate = threading.Event()

    def waiting() -> Reading:
        gate.wait(30)
        return []

    with served(read=waiting) as url, ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(httpx.get, url, timeout=30) for _ in range(20)]
        refused, _ = wait(answers, 30, FIRST_COMPLETED)
        assert {each.result().status_code for each in refused} == {503}
        gate.set()
        assert {each.result().status_code for each in answers} == {200, 503}
