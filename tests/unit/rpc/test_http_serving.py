"""Between the event loop and the thread that a scrape runs in."""

import asyncio
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier.rpc.http_serving
from kvtier.config import HttpConfig
from kvtier.errors import ConfigError
from kvtier.obs.counters import Counters
from kvtier.obs.exposition import Read
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier.rpc.http_serving import _on_loop, _start
from kvtier.service.metrics_reading import read_metrics
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import DEADLINE_S, config_in
from tests.unit.web.http_rig import gatekeeper_in


@pytest.mark.parametrize("listen", ["no.such..name:1", "192.0.2.1:1"])
def test_an_address_that_cannot_be_had_names_field_value_and_remedy(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"http.listen = '{listen}': cannot listen there: .*; name another address"):
        _start(replace(config_in(tmp_path), http=HttpConfig(listen=listen)), gatekeeper_in(tmp_path), list, str)


def test_a_reading_is_taken_on_the_loop_and_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            read = _on_loop(lambda: read_metrics(r.cache))
            assert [type(record) for record in await asyncio.to_thread(read)] == [Counters, Timings, Gauges]
            monkeypatch.setattr(kvtier.rpc.http_serving, "_LOOP_TIMEOUT_S", 0.05)
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(read)
                wait([reading], DEADLINE_S)  # the loop is stuck meanwhile
                with pytest.raises(TimeoutError):
                    reading.result(0)
        readers.append(read)

    readers: list[Read] = []
    asyncio.run(scenario())
    with pytest.raises(TimeoutError):  # the daemon has ended
        readers[0]()
