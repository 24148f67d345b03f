"""What routers know of host memory: which pinned prompts are there, from their first block on."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, RouterHash

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

REPEAT_S = 300.0
"""All is announced again: a router that was started later, or lost a message, learns of it by then."""
_BLOCKS_PER_STEP = 1024
"""A few milliseconds of a step."""


class HostEvents:
    """Turns what the daemon reports of pins into events. Scheduler thread only.

    Each block is announced once, whatever number of prompts has it, and removed when the last of them has lost it: so
    a router may count announcements, or keep a set. A block is announced with or after those before it.

    Args:
        maker: Makes events.
        prefix_cache: Returns vLLM's index of its prefix cache, which is another object after each reset: then routers
            have forgotten all blocks of this engine, and all are announced again.
    """

    def __init__(self, maker: EventMaker, prefix_cache: Callable[[], object]) -> None:
        self._maker, self._prefix_cache = maker, prefix_cache
        self._prompts: dict[str, AnnouncedPrompt] = {}
        self._resident: dict[str, int] = {}  # blocks of a pin, by its id
        self._num_pins = Counter[RouterHash]()  # that have a block there
        self._due = deque[str]()  # pins to announce, if they are still there
        self._announced: set[RouterHash] = set()
        self._repeated: set[RouterHash] = set()  # announced before the last repeat began, and not since
        self._lost = deque[RouterHash]()  # blocks to remove, if they have not come back
        self._repeat_at_s = 0.0
        self._seen_cache: object = None

    @property
    def num_announced(self) -> int:
        """Blocks of which routers know."""
        return len(self._announced) + len(self._repeated)

    # What happens

    def session_ended(self) -> None:
        """Nothing can be restored until the next one begins."""
        for pin_id in list(self._prompts):
            self.gone(pin_id)

    def bound(self, pin_id: str, prompt: AnnouncedPrompt | None) -> None:
        """A pin's blocks are known; None: it cannot be announced."""
        if self._prompts.get(pin_id) == prompt:
            return
        self.resident(pin_id, 0)
        self._prompts.pop(pin_id, None)
        if prompt is not None:
            self._prompts[pin_id] = prompt

    def gone(self, pin_id: str) -> None:
        """A pin was removed."""
        self.bound(pin_id, None)

    def resident(self, pin_id: str, num_chunks: int) -> None:
        """The daemon reports how many chunks of a pin, from the first on, are in host memory."""
        if (prompt := self._prompts.get(pin_id)) is None:
            return
        before = self._resident.pop(pin_id, 0)
        now = min(num_chunks * prompt.blocks_per_chunk, len(prompt.blocks))
        if now:
            self._resident[pin_id] = now
        if now > before:
            self._num_pins.update(prompt.blocks[before:now])
            self._due.append(pin_id)
        elif now < before:
            self._lose(prompt.blocks[now:before])

    def _lose(self, blocks: Iterable[RouterHash]) -> None:
        for block in blocks:
            self._num_pins[block] -= 1
            if not self._num_pins[block]:
                del self._num_pins[block]
                self._lost.append(block)

    # What is announced

    def is_pending(self, now_s: float) -> bool:
        """Return whether a step would have events: an idle engine steps until they have left."""
        return bool(self._due or self._lost or (self._resident and self._must_repeat(now_s)))

    def take(self, now_s: float) -> Iterator["KVCacheEvent"]:
        """Yield the events of a step, of a bounded number of blocks."""
        if self._must_repeat(now_s):
            self._repeat(now_s)
        if lost := self._take_lost():
            yield self._maker.removed(lost)
        num_blocks = 0
        while self._due and num_blocks < _BLOCKS_PER_STEP:
            pin_id = self._due.popleft()
            if (end := self._resident.get(pin_id, 0)) == 0:
                continue
            prompt = self._prompts[pin_id]
            blocks = prompt.blocks[:end]
            begin = next((idx for idx, block in enumerate(blocks) if block not in self._announced), end)
            if begin == end:
                continue
            num_blocks += end - begin
            if again := [block for block in blocks[begin:] if block in self._repeated]:
                yield self._maker.removed(again)
                self._repeated.difference_update(again)
            self._announced.update(blocks[begin:])
            yield self._maker.stored(prompt, begin, end)

    def _take_lost(self) -> list[RouterHash]:
        lost = list[RouterHash]()
        while self._lost and len(lost) < _BLOCKS_PER_STEP:
            block = self._lost.popleft()
            was_announced = block in self._announced or block in self._repeated
            if was_announced and block not in self._num_pins:
                lost.append(block)
        self._announced.difference_update(lost)
        self._repeated.difference_update(lost)
        return lost

    def _must_repeat(self, now_s: float) -> bool:
        return now_s >= self._repeat_at_s or self._prefix_cache() is not self._seen_cache

    def _repeat(self, now_s: float) -> None:
        cache = self._prefix_cache()
        was_cleared, self._seen_cache = cache is not self._seen_cache, cache
        self._repeat_at_s = now_s + REPEAT_S
        if was_cleared:
            self._repeated, self._announced = set(), set()
        elif not self._repeated:
            self._repeated, self._announced = self._announced, set()
        self._due = deque(self._resident)
