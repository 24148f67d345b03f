"""LMCache's real server and coordinator on a real daemon: what is stored returns, and pins by token ids are kept."""

from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier.client.admin import AdminClient
from tests.fakes.caching_daemon import caching_daemon
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for
from tests.lmcache.adapter_process import kvtier_spec
from tests.lmcache.lmcache_server import bench_tokens, coordinator, server

NUM_TOKENS = 512
"""Two chunks of LMCache's."""


@pytest.mark.timeout(400)
def test_pins_by_token_ids_are_kept_when_all_else_is_evicted(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=16 << 20)
    with caching_daemon(config), coordinator(tmp_path) as pins, AdminClient(config.server.socket) as daemon:
        spec = kvtier_spec(config.server.socket, coordinator_url=pins.url, pin_poll_s=1)

        def pinned_states() -> list[int]:
            return [each.state for each in daemon.list() if each.pinned]

        with server(tmp_path, spec, pins.url) as lmcache:
            printed = lmcache.bench(1, 4, NUM_TOKENS)
            assert "LOOKUP: 2/2 chunks hit" in printed  # of its own memory
            wait_for(lambda: _held_bytes(lmcache.status()) == 6 * 131_072)
            assert pins.pin(bench_tokens(2, NUM_TOKENS)) == 2
            wait_for(lambda: pinned_states() == [cache_pb2.PromptStatus.DURABLE], 30)
        daemon.evict_all()  # of what no pin has, everywhere
        daemon.evict_all(force=True, tier=cache_pb2.TIER_HOST)  # so that the rest comes from disk
        with server(tmp_path, spec, pins.url) as lmcache:
            printed = lmcache.bench(1, 4, NUM_TOKENS)
            first_lookups = {
                number: next(line for line in printed.splitlines() if f"[seq {number}/" in line and "LOOKUP" in line)
                for number in (1, 2, 3)
            }
            assert [number for number, line in first_lookups.items() if "2/2 chunks hit" in line] == [2], printed
            assert "Checksum FAIL:                                                 0" in printed
            pins.unpin(bench_tokens(2, NUM_TOKENS))
            wait_for(lambda: pinned_states() == [], 30)


def _held_bytes(status: dict[str, object]) -> int:
    """Find what the adapter reports, wherever LMCache has it in its status."""
    found = 0
    waiting: list[object] = [status]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found += int(each.get("held_bytes", 0))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found
