"""Every host tier, and every fake of one, keeps the contract."""

from collections.abc import Iterator

import pytest

from tests.contract.host_tier import NUM_AFFORDABLE, NUM_SLOTS, HostRig, HostTierContract
from tests.fakes.host_rigs import ArenaHostRig, MemoryHostRig


class TestArenaTier(HostTierContract):
    @pytest.fixture
    def rig(self) -> Iterator[HostRig]:
        rig = ArenaHostRig(NUM_SLOTS, NUM_AFFORDABLE)
        yield rig
        rig.close()


class TestMemoryHostTier(HostTierContract):
    @pytest.fixture
    def rig(self) -> HostRig:
        return MemoryHostRig(NUM_SLOTS, NUM_AFFORDABLE)
