"""The metrics' HTTP server, over real sockets."""

import gzip
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.obs.declare import counter, series, timed
from kvtier.obs.exposition import MetricsServer, Reading
from kvtier.obs.histogram import Histogram

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
    server = MetricsServer((host, 0), read)  # type: ignore[arg-type]
    try:
        yield server.url
    finally:
        server.close()


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
        answer = httpx.get(url.removesuffix("/metrics"))
        assert (answer.status_code, answer.text) == (404, "nothing here; the metrics are at /metrics\n")
        assert httpx.post(url).status_code == 501


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
        with pytest.raises(OSError, match="in use"):
            MetricsServer(("127.0.0.1", port), reading)
    MetricsServer(("127.0.0.1", port), reading).close()
