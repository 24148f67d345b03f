"""An attached engine: how it introduces itself, what it is sent, and what the parts of its session share."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier.ledger import PromptRow
from kvtier.tiering.namespace import Namespace

MAX_PIN_BATCH_BYTES = 256 * 1024
"""Of pins in one message; making and sending more at once would hold up every other engine."""


@dataclass(frozen=True, kw_only=True)
class EngineHello:
    """Hello of proto/kvtier/v1/engine.proto, checked and typed."""

    engine_id: str
    pid: int
    vllm_version: str
    model_names: tuple[str, ...]
    fingerprint: Mapping[str, str]
    layout: KVLayout
    store_credits: int
    ephemeral: bool
    report_residency: bool = False
    takes_joined_keys: bool = False


@dataclass(frozen=True, kw_only=True)
class PromotionForecast:
    """How far an acquire's promotions are.

    Attributes:
        pending_bytes: Raw bytes still to be read for it.
        bytes_per_s: Measured promotion rate; 0 while unknown.
        ready_in_s: Seconds until the last of them is readable, what is read before them included; 0 while unknown.
    """

    pending_bytes: int = 0
    bytes_per_s: float = 0.0
    ready_in_s: float = 0.0


class KnownPin(NamedTuple):
    """A prompt, and the keys by which the session's namespace recognizes it; none if no engine has said so.

    `are_joined`: the keys are sent as one field, and without the tokens.
    """

    prompt: PromptRow
    keys: Sequence[ChunkKey] = ()
    are_joined: bool = False

    @property
    def about_bytes(self) -> int:
        """About how long it is in a message."""
        return 64 + 40 * len(self.keys) + (0 if self.are_joined else 3 * len(self.prompt.tokens))


class PinOutcome(Enum):
    """RequestPinResult.State of proto/kvtier/v1/engine.proto; the meanings stand there."""

    UNKNOWN = auto()
    PINNED = auto()
    REFUSED = auto()


class PinResult(NamedTuple):
    """What became of a pin that a request asked for, and when the pin ends, in seconds from now; 0: never."""

    outcome: PinOutcome
    ends_in_s: float = 0.0


class EnginePeer(Protocol):
    """The outgoing half of a session's stream. Never blocks: it queues. gRPC implements it; in tests it is a list."""

    def acquire_answered(
        self,
        acquire_id: int,
        leased: Mapping[int, Chunk],
        forecast: PromotionForecast,
        *,
        more: bool = False,
        missed: RequestOutcome | None = None,
    ) -> None:
        """First answer to an acquire: what is leased, by index. Read it at once: chunks and mapping change later.

        With `more` it is a part of it; the last part has the forecast, and until then nothing else is said of it.
        `missed`: why some of what was asked for is not leased; None when all of it is.
        """

    def promotion_advanced(
        self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int], forecast: PromotionForecast
    ) -> None:
        """Chunks of an acquire (by index) became readable, or will not."""

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """Arena slots for stores to come."""

    def pin_added(self, prompt: PromptRow) -> None:
        """A prompt to recognize, or one that changed from pinned to unpinned."""

    def pins_added(self, pins: Sequence[KnownPin]) -> None:
        """Prompts to recognize, of at most MAX_PIN_BATCH_BYTES, or one."""

    def pin_removed(self, pin_id: str) -> None:
        """A prompt to forget."""

    def chunks_held(self, keys: Sequence[ChunkKey], held: bool, *, complete: bool = False) -> None:
        """What is held of bound keys (storing all: of any) changed; `complete`: all that is held has been named."""

    def pins_held(self, pin_ids: Sequence[str]) -> None:
        """Every chunk of these bound pins is held: as `chunks_held` of all their keys."""

    def prefixes_wanted(self, digests: Sequence[bytes]) -> None:
        """Prefixes whose tokens the engine shall send when a request begins with them."""

    def request_pins_answered(self, ask_id: int, results: Sequence[PinResult], problem: str) -> None:
        """What became of each prefix that a request asked to pin."""

    def device_blocks_wanted(self, ask_id: int, pin_ids: Sequence[str]) -> None:
        """How much of these pins is in vLLM's prefix cache?"""

    def pins_resident(self, nums_host_chunks: Mapping[str, int]) -> None:
        """How many chunks of these bound pins are in host memory, from the first one on."""

    def ponged(self, ping_id: int) -> None:
        """Answer to a ping."""


class SessionBase:
    """A session, as its loads and stores see it.

    Attributes:
        hello: How the engine introduced itself.
        peer: Its stream.
        ended: Its stream is gone; processes of the engine may still touch rows until they release the session's lock.
    """

    def __init__(self, session_id: str, hello: EngineHello, peer: EnginePeer, namespace: Namespace) -> None:
        self.session_id, self.hello, self.peer, self.namespace = session_id, hello, peer, namespace
        self.namespace_id, self.tiers, self.resources = namespace.namespace_id, namespace.tiers, namespace.resources
        self.ended = False

    def start_task(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, as long as the namespace is there."""
        self.namespace.tasks.start(f"{name}-{self.session_id[:8]}", coroutine)
