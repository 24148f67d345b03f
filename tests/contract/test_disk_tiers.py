"""Every disk tier, and every fake of one, keeps the contract."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvtier.disk.base import DiskTier
from kvtier.disk.codecs.words import NUMPY, compile_kernels, use_kernels
from kvtier.disk.packs.pack_tier import PackTier
from tests.contract.disk_tier import DiskTierContract
from tests.fakes.keys import seals_of
from tests.fakes.memory_tier import MemoryTier

compiled_once = cache(compile_kernels)


class TestPackTier(DiskTierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> DiskTier:
        return PackTier(tmp_path / "packs")


class TestSealedPackTier(DiskTierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> DiskTier:
        return PackTier(tmp_path / "packs", seals=seals_of("new", "old"))


class TestPackTierWithCompiledCodecs(DiskTierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[DiskTier]:
        pytest.importorskip("numba")
        use_kernels(compiled_once())
        yield PackTier(tmp_path / "packs")
        use_kernels(NUMPY)


class TestMemoryTier(DiskTierContract):
    @pytest.fixture
    def tier(self) -> DiskTier:
        return MemoryTier()
