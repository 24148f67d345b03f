"""The chunk index keeps its contract over every disk tier."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.disk.packs.pack_tier import PackTier
from tests.contract.chunk_index import ChunkIndexContract
from tests.fakes.index_rig import IndexRig
from tests.fakes.keys import seals_of
from tests.fakes.memory_tier import MemoryTier


class TestOverPackTier(ChunkIndexContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[IndexRig]:
        rig = IndexRig(tmp_path, PackTier(tmp_path / "packs"))
        yield rig
        rig.check()
        rig.close()


class TestOverSealedPackTier(ChunkIndexContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[IndexRig]:
        rig = IndexRig(tmp_path, PackTier(tmp_path / "packs", seals=seals_of("new", "old")))
        yield rig
        rig.check()
        rig.close()


class TestOverMemoryTier(ChunkIndexContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[IndexRig]:
        rig = IndexRig(tmp_path, MemoryTier())
        yield rig
        rig.check()
        rig.close()
