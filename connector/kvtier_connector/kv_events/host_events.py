"""What routers know of host memory: which pinned prompts are there, from their first block on."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, RouterHash

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

REPEAT_S = 300.0
"""All is announced again: a router that was started later, or lost a message, learns of it by then. The pause doubles
while the engine computes nothing: vLLM keeps its last 10,000 messages for replay, and an idle one sends no others."""
MAX_REPEAT_S = 86400.0
_BLOCKS_PER_STEP = 1024
"""A few milliseconds of a step, and 75 kB of a message where a block has 16 tokens."""
_LEAST_BLOCKS = 128
"""Of a prompt, whatever else the step had to do."""
_LOOKS_PER_BLOCK = 16
"""To look at this many blocks that were announced before takes as long as to announce one."""


class HostEvents:
    """Turns what the daemon reports of pins into events. Scheduler thread only.

    Each block is announced once, whatever number of prompts has it, and removed when the last of them has lost it: so
    a router may count announcements, or keep a set. A block is announced with or after those before it.

    Args:
        maker: Makes events.
        prefix_cache: Returns vLLM's index of its prefix cache, which is another object after each reset: then routers
            have forgotten all blocks of this engine, and all are announced again.
        count: Takes the number of blocks of which routers know, when it has changed.
    """

    def __init__(
        self,
        maker: EventMaker,
        prefix_cache: Callable[[], object],
        count: Callable[[int], None] = lambda num_blocks: None,
    ) -> None:
        self._maker, self._prefix_cache, self._count = maker, prefix_cache, count
        self._num_counted = 0
        self._is_count_new = False  # vLLM reads gauges before it takes events, so another step has to show it
        self._prompts: dict[str, AnnouncedPrompt] = {}
        self._resident: dict[str, int] = {}  # blocks of a pin, by its id
        self._num_pins = Counter[RouterHash]()  # that have a block there
        self._due = deque[str]()  # pins to announce, if they are still there
        self._announced: set[RouterHash] = set()
        self._repeated: set[RouterHash] = set()  # announced before the last repeat began, and not since
        self._lost = deque[RouterHash]()  # blocks to remove, if they have not come back
        self._repeat_at_s, self._pause_s = 0.0, REPEAT_S
        self._seen_cache: object = None

    # What happens

    def session_ended(self) -> None:
        """Nothing can be restored until the next one begins."""
        for each in (self._prompts, self._resident, self._num_pins, self._due):
            each.clear()
        self._lost = deque((*self._announced, *self._repeated))

    def step_scheduled(self, num_tokens: int, now_s: float) -> None:
        """A step begins, over this many tokens."""
        self._is_count_new = False
        if num_tokens:
            self._pause_s = REPEAT_S
            self._repeat_at_s = min(self._repeat_at_s, now_s + REPEAT_S)

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
                if self._is_known(block):
                    self._lost.append(block)

    def _is_known(self, block: RouterHash) -> bool:
        return block in self._announced or block in self._repeated

    # What is announced

    def is_pending(self, now_s: float) -> bool:
        """Return whether a step would have events: an idle engine steps until they have left."""
        self._notice_reset()
        is_due = bool(self._resident) and now_s >= self._repeat_at_s
        return bool(self._due or self._lost or is_due or self._is_count_new)

    def take(self, now_s: float) -> Iterator["KVCacheEvent"]:
        """Yield the events of a step, of a bounded number of blocks."""
        self._notice_reset()
        if now_s >= self._repeat_at_s:
            self._begin_repeat(now_s)
        if lost := self._take_lost():
            yield self._maker.removed(lost)
        num_left = _BLOCKS_PER_STEP - len(lost)
        while self._due and num_left > 0:
            pin_id = self._due.popleft()
            if (end := self._resident.get(pin_id, 0)) == 0:
                continue
            prompt = self._prompts[pin_id]
            begin = next((idx for idx in range(end) if prompt.blocks[idx] not in self._announced), end)
            num_left -= 1 + begin // _LOOKS_PER_BLOCK
            if begin == end:
                continue
            if end - begin > (most := max(num_left, _LEAST_BLOCKS)):
                end = begin + most
                self._due.appendleft(pin_id)
            num_left -= end - begin
            blocks = prompt.blocks[begin:end]
            if again := [block for block in blocks if self._is_known(block)]:
                yield self._maker.removed(again)
                self._repeated.difference_update(again)
            self._announced.update(blocks)
            yield self._maker.stored(prompt, begin, end)
        num_blocks = len(self._announced) + len(self._repeated)
        if num_blocks != self._num_counted:
            self._num_counted, self._is_count_new = num_blocks, True
            self._count(num_blocks)

    def _take_lost(self) -> list[RouterHash]:
        lost = list[RouterHash]()
        while self._lost and len(lost) < _BLOCKS_PER_STEP:
            block = self._lost.popleft()
            if self._is_known(block) and block not in self._num_pins:
                self._announced.discard(block)
                self._repeated.discard(block)
                lost.append(block)
        return lost

    def _notice_reset(self) -> None:
        """Forget what was announced if vLLM has cleared its cache: its own event has routers forget all of it."""
        cache = self._prefix_cache()
        if cache is not self._seen_cache:
            self._seen_cache, self._is_count_new = cache, False
            self._announced, self._repeated, self._lost = set(), set(), deque()
            self._due = deque(self._resident)

    def _begin_repeat(self, now_s: float) -> None:
        self._repeat_at_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, MAX_REPEAT_S)
        if not self._repeated:
            self._repeated, self._announced = self._announced, set()
        self._due = deque(self._resident)
