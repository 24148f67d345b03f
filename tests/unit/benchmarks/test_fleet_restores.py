"""The benchmark of a fleet's store: every side is measured, and what is compared was restored whole."""

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks.fleet.__main__ import LIMITS, Prompt, run
from benchmarks.measuring.daemon_fixtures import one_group


@pytest.mark.parametrize("memory", [True, False])
def test_every_side_is_measured_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: bool) -> None:
    options = argparse.Namespace(mib=2, chunk_kib=128, runs=1, parallel=2, memory=memory)
    (tmp_path / "arenas").mkdir()
    asyncio.run(run(Prompt(one_group(128 * 1024), 16), tmp_path, tmp_path / "arenas", options))
    _, what, *lines = capsys.readouterr().out.strip().splitlines()
    assert ("a dict" if memory else "a folder") in what
    sides = [line[:22].strip() for line in lines]
    assert {"upload", "restore", "held back", "read", "pages", *LIMITS, "disk", "memcpy"} <= set(sides)
    assert sum(line.startswith("held back / ") for line in lines) == len(LIMITS)
