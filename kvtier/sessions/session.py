"""One engine's session, from its Hello until its processes are gone. The contract is proto/kvtier/v1/engine.proto."""

import asyncio
import logging
import operator
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import compress

from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import SLICE_KEYS, Breather, slices
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.errors import InvalidArgumentError, TierIOError
from kvtier.host.session_locks import SessionLock
from kvtier.ledger import BindingRow, PromptRow
from kvtier.obs.log import LastProblem, log_event
from kvtier.sessions.device_blocks import DeviceBlocks
from kvtier.sessions.engine_peer import MAX_PIN_BATCH_BYTES, EngineHello, EnginePeer, KnownPin, SessionBase
from kvtier.sessions.loads import Loads
from kvtier.sessions.stores import Stores
from kvtier.tiering.namespace import Namespace

logger = logging.getLogger(__name__)


class SessionEnd(Enum):
    """How a session's stream ended."""

    CLOSED = auto()
    """The engine said goodbye."""
    GONE = auto()
    """It broke while nothing was under way: vLLM was stopped and killed its engine process, or it attaches again."""
    CUT = auto()
    """It broke in the middle of a load or a store, or the daemon ended it because the engine did not read."""
    REFUSED = auto()
    """The engine made a mistake."""
    DRAINED = auto()
    """The daemon stops."""


class Session(SessionBase):
    """What one engine may read (`loads`) and write (`stores`), and which pins it has bound. Loop thread only.

    Its life: attached, until `lost` (the stream is gone); then its slots are quarantined until no process of the engine
    holds the session's lock (`wait_until_released`), because a stopped worker may still copy.

    Attributes:
        lock: Held by the engine's processes as long as they may touch rows.
        bound: Ids of the pins for which the engine has sent or confirmed keys; `bind_errors` says why it could not.
        unreported: Of those, the ones of which it has yet to be notified how much is in host memory.
        unrecorded: Bindings that the ledger refused, by the pins' ids: these are not bound yet.
    """

    def __init__(
        self, session_id: str, hello: EngineHello, peer: EnginePeer, namespace: Namespace, lock: SessionLock
    ) -> None:
        super().__init__(session_id, hello, peer, namespace)
        self.lock = lock
        self.loads = Loads(self)
        self.stores = Stores(self, self.loads)
        self.device_blocks = DeviceBlocks(peer)
        self.attached_unix_s = time.time()
        self.bound: set[str] = set()
        self.unreported: set[str] = set()
        self.bind_errors: dict[str, str] = {}
        self.unrecorded: dict[str, BindingRow] = {}
        self._lock_problem = LastProblem()
        self.tiers.inventory.add(self.peer.chunks_held)

    @property
    def model(self) -> str:
        """The name by which the engine serves its model; the first, if there are several."""
        return self.hello.model_names[0]

    @property
    def is_busy(self) -> bool:
        """A load or a store is under way; idle credits are neither."""
        return bool(self.loads.num_acquires) or self.stores.is_writing

    def serves(self, prompt: PromptRow) -> bool:
        """Say whether the engine recognizes the prompt."""
        return bool(prompt.tokens) and (not prompt.model or prompt.model in self.hello.model_names)

    def recognizes(self, pin_id: str) -> None:
        """The engine has sent or confirmed the pin's keys."""
        self.bind_errors.pop(pin_id, None)
        self.bound.add(pin_id)
        if self.hello.report_residency:
            self.unreported.add(pin_id)

    def measured(self, prefill_tokens_per_s: float) -> None:
        """Take in how fast the engine computes.

        Raises:
            InvalidArgumentError: No engine has that speed.
        """
        least, most = limits.PREFILL_TOKENS_PER_S
        if not least <= prefill_tokens_per_s <= most:
            remedy = f"use {least:g} to {most:g}"
            raise InvalidArgumentError("engine_rates.prefill_tokens_per_s", prefill_tokens_per_s, remedy)
        self.namespace.cost.prefill_tokens_per_s = prefill_tokens_per_s

    # What the engine is notified of

    async def send_pins(self, find_pin: Callable[[str], KnownPin | None], pin_ids: Sequence[str]) -> None:
        """Send these pins, each as it is when its turn comes, many in a message and a few per turn of the loop."""
        breather, batch, num_bytes = Breather(), list[KnownPin](), 0
        for pin_id in pin_ids:
            await breather.pause()
            if self.ended:
                return
            pin = find_pin(pin_id)
            if pin is None or not self.serves(pin.prompt):
                continue
            if num_bytes + pin.about_bytes > MAX_PIN_BATCH_BYTES:
                if batch:
                    self.peer.pins_added(batch)
                batch, num_bytes = [], 0
            batch.append(pin)
            num_bytes += pin.about_bytes
        if batch:
            self.peer.pins_added(batch)

    async def send_held(self, keys: Sequence[ChunkKey]) -> None:
        """Send what is held of these keys and what is not, a slice per turn of the loop."""
        for part in slices(keys):
            if self.ended:
                return
            are_held = [chunk is not None and chunk.held for chunk in self.tiers.table.get_all(part)]
            self.peer.chunks_held(list(compress(part, are_held)), True)
            self.peer.chunks_held(list(compress(part, map(operator.not_, are_held))), False)
            await asyncio.sleep(0)

    async def send_pins_held(self, bindings: Sequence[BindingRow]) -> None:
        """Send which of these pins are held whole, by their ids, and of the others what is held and what is not.

        One turn of the loop looks at all but long ones: they have about SLICE_KEYS keys together.
        """
        if self.ended:
            return
        are_whole = [len(row.keys) <= SLICE_KEYS and self.tiers.table.holds_all(row.keys) for row in bindings]
        if whole := [row.pin_id for row in compress(bindings, are_whole)]:
            self.peer.pins_held(whole)
        await asyncio.sleep(0)
        for row in compress(bindings, map(operator.not_, are_whole)):
            await self.send_held(row.keys)

    async def send_inventory(self) -> None:
        """Send every key that the namespace holds, a batch per turn of the loop, and say when that is complete.

        Notifications of changes come between the batches; their order makes the sum right.
        """
        for part in slices(self.tiers.table.keys()):
            if self.ended:
                return
            self.peer.chunks_held([key for key in part if self.tiers.table.holds(key)], True)
            await asyncio.sleep(0)
        if not self.ended:
            self.peer.chunks_held((), True, complete=True)

    # The end

    def lost(self) -> None:
        """The stream is gone: quarantine the slots that the engine's processes may still write."""
        if self.ended:
            return
        self.ended = True
        self.tiers.inventory.remove(self.peer.chunks_held)
        self.device_blocks.end()
        num_quarantined = self.stores.quarantine()
        self.tiers.counters.slots_quarantined += num_quarantined
        log_event(
            logger, "session_ended", session=self.session_id, leases=self.loads.num_leases, quarantined=num_quarantined
        )

    async def wait_until_released(self) -> None:
        """Wait until no process of the engine touches slots of this session any longer, and free them."""
        # A kernel lock has no event to wait for.
        while not self._is_released():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self.stores.release_all()
        await self.loads.release_all()
        log_event(logger, "session_released", session=self.session_id)

    def _is_released(self) -> bool:
        is_released, problem = False, ""
        try:
            is_released = self.lock.released()
        except TierIOError as error:  # for example out of descriptors: what is not known is waited for
            problem = str(error)
        if self._lock_problem.becomes(problem):
            log_event(logger, "lock_unknown", level=logging.WARNING, session=self.session_id, problem=problem)
        return is_released
