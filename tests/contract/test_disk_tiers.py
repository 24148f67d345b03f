"""Every disk tier, and every fake of one, keeps the contract."""

from pathlib import Path

import pytest

from kvtier.tiers.base import DiskTier
from kvtier.tiers.packs import PackTier
from tests.contract.disk_tier import DiskTierContract
from tests.fakes.memory_tier import MemoryTier


class TestPackTier(DiskTierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> DiskTier:
        return PackTier(tmp_path / "packs")


class TestMemoryTier(DiskTierContract):
    @pytest.fixture
    def tier(self) -> DiskTier:
        return MemoryTier()
