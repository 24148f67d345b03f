"""Adapters whose files change in every way that a user has, between readings and restarts: no digest is ever wrong.

Sizes never differ, and modification times are set back. After each step vLLM starts again, and what its first request
would be looked up by is nothing, or the digest of what the files hold at that moment.
"""

import mmap
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_connector.engine.lora import adapter_files
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.engine.lora.adapter_files import adapter_digest, stat_adapter
from tests.fakes.waiting import wait_for
from tests.unit.connector.engine.lora.test_adapter_digests import Engine

NUM_RUNS = int(os.environ.get("KVTIER_ADAPTERS", "0")) or 4
NUM_STEPS = 60
CONTENTS = (b"1" * 5000, b"2" * 5000, b"3" * 5000)
MIN_AGE_NS = 100 * 10**6


class Run:
    """One adapter, and someone who changes its files.

    Attributes:
        seen: How often what the test is about came about.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder / "adapter"
        self.folder.mkdir()
        self.weights, self.cache = self.folder / "adapter_model.safetensors", folder / "cache" / "digests.json"
        self.weights.write_bytes(CONTENTS[0])
        self.mapped = self._map()
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        files = self.chance.choice((self.write, self.replace, self.create_again, self.exchange_links))
        for change, share in ((files, 0.3), (self.write_through_the_mapping, 0.5)):
            if self.chance.random() < share:
                self._with_old_times(change)
        if self.chance.random() < 0.4:
            self.pass_time()
        self.restart()

    def restart(self) -> None:
        adapter = Adapter("sql", str(self.folder), 1)
        engine = Engine(self.cache)
        digest, expected = engine.first_request(adapter), adapter_digest(self.folder)
        assert digest in (None, expected)
        self.seen["hit" if digest else "miss"] += 1
        if self.chance.random() < 0.3:
            self._with_old_times(self.write_through_the_mapping)
        engine.read()
        assert engine.digests.digest(adapter) in (None, adapter_digest(self.folder))

    def pass_time(self) -> None:
        changed_ns, probe = self.weights.stat().st_ctime_ns, self.cache.parent.parent / "probe"

        def is_old_enough() -> bool:
            probe.unlink(missing_ok=True)
            probe.touch()
            return probe.stat().st_ctime_ns > changed_ns + MIN_AGE_NS

        wait_for(is_old_enough)

    def write(self) -> None:
        self.weights.write_bytes(self.chance.choice(CONTENTS))

    def write_through_the_mapping(self) -> None:
        """Pages that are dirty already are changed without a fault."""
        self.mapped[:] = self.chance.choice(CONTENTS)

    def replace(self) -> None:
        other = self.folder / "other"
        other.write_bytes(self.chance.choice(CONTENTS))
        other.rename(self.weights)
        self.mapped = self._map()

    def create_again(self) -> None:
        """With the same inode number, on most file systems."""
        self.mapped.close()
        self.weights.unlink()
        self.weights.write_bytes(self.chance.choice(CONTENTS))
        self.mapped = self._map()

    def exchange_links(self) -> None:
        aside = self.folder / "aside"
        aside.unlink(missing_ok=True)
        self.weights.rename(aside)
        target = self.folder.parent / f"blob-{self.chance.randrange(3)}"
        target.write_bytes(self.chance.choice(CONTENTS))
        self.weights.symlink_to(target)
        self.mapped = self._map()

    def _with_old_times(self, change: Callable[[], None]) -> None:
        before = self.weights.stat()
        change()
        if change != self.write_through_the_mapping or self.chance.random() < 0.5:
            os.utime(self.weights, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _map(self) -> mmap.mmap:
        with self.weights.open("r+b") as file:
            return mmap.mmap(file.fileno(), len(CONTENTS[0]))


def test_no_digest_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "MIN_AGE_NS", MIN_AGE_NS)
    seen: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = Run(folder, seed)
        if not stat_adapter(run.folder).is_reliable:
            pytest.skip("the tests' folder is on an overlay or in memory")
        for _ in range(NUM_STEPS):
            run.step()
        seen += run.seen
    assert seen["hit"] >= NUM_RUNS, seen
    assert seen["miss"] >= NUM_RUNS, seen
