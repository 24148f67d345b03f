"""What the ledger forgets when there is time."""

import asyncio
import errno
from contextlib import closing
from pathlib import Path

from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger, NamespaceRow
from kvtier.tiering.resources import Resources
from kvtier.upkeep.ledger_upkeep import _forget_removed
from tests.fakes.chunks import key_of, payload_of, soft
from tests.fakes.scripted_engine import ONE_GROUP, config_in

NAMESPACE = NamespaceRow(
    namespace_id="ns", model="m", fingerprint={}, layout=ONE_GROUP, created_unix_s=0.0, seen_unix_s=0.0
)


class Ops(FileOps):
    """Refuses to make names durable as long as `is_refusing`."""

    is_refusing = False

    def fsync_dir(self, path: Path) -> None:
        """See FileOps."""
        if self.is_refusing:
            raise OSError(errno.EIO, "refused")


def test_a_removed_pack_is_forgotten_when_no_loss_of_power_brings_it_back(tmp_path: Path) -> None:
    """Its file came back after such a loss, no one called it removed any longer, and the start adopted it."""

    async def scenario() -> None:
        ops = Ops()
        tier, ledger = PackTier(tmp_path / "packs", ops=ops), Ledger.open(tmp_path / "ledger.sqlite")
        with closing(ledger):
            resources = Resources(config_in(tmp_path), tier, ledger)
            ledger.put_namespace(NAMESPACE)
            there, gone = (tier.write_pack("ns", [payload_of(number, soft(100))]) for number in range(2))
            for number, record in enumerate((there, gone)):
                ledger.packs.commit_pack(record)
                ledger.packs.drop_chunks("ns", [key_of(number)])
            tier.delete_pack(gone.pack_id)
            ops.is_refusing = True
            await _forget_removed(resources)
            assert ledger.packs.removed_packs() == {there.pack_id, gone.pack_id}
            ops.is_refusing = False
            await _forget_removed(resources)
            assert ledger.packs.removed_packs() == {there.pack_id}

    asyncio.run(scenario())
