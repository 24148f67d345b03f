from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_PINNED: _ClassVar[StoreMode]
    STORE_ALL: _ClassVar[StoreMode]

class RequestOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[RequestOutcome]
    HIT: _ClassVar[RequestOutcome]
    PART: _ClassVar[RequestOutcome]
    DIVERGED: _ClassVar[RequestOutcome]
    UNKNOWN: _ClassVar[RequestOutcome]
    TOO_SHORT: _ClassVar[RequestOutcome]
    NOT_CACHEABLE: _ClassVar[RequestOutcome]
    CACHE_SKIPPED: _ClassVar[RequestOutcome]
    NO_SESSION: _ClassVar[RequestOutcome]
    BREAKER_OPEN: _ClassVar[RequestOutcome]
    LATE: _ClassVar[RequestOutcome]
    SLOWER: _ClassVar[RequestOutcome]
    NOT_STORED: _ClassVar[RequestOutcome]
    NO_SLOT: _ClassVar[RequestOutcome]
    DISK_OFF: _ClassVar[RequestOutcome]
    OVER_LIMIT: _ClassVar[RequestOutcome]
    LOAD_FAILED: _ClassVar[RequestOutcome]
    ADAPTER_NOT_READY: _ClassVar[RequestOutcome]
    NOT_PROMOTED: _ClassVar[RequestOutcome]
    QUARANTINED: _ClassVar[RequestOutcome]
STORE_PINNED: StoreMode
STORE_ALL: StoreMode
OUTCOME_UNSPECIFIED: RequestOutcome
HIT: RequestOutcome
PART: RequestOutcome
DIVERGED: RequestOutcome
UNKNOWN: RequestOutcome
TOO_SHORT: RequestOutcome
NOT_CACHEABLE: RequestOutcome
CACHE_SKIPPED: RequestOutcome
NO_SESSION: RequestOutcome
BREAKER_OPEN: RequestOutcome
LATE: RequestOutcome
SLOWER: RequestOutcome
NOT_STORED: RequestOutcome
NO_SLOT: RequestOutcome
DISK_OFF: RequestOutcome
OVER_LIMIT: RequestOutcome
LOAD_FAILED: RequestOutcome
ADAPTER_NOT_READY: RequestOutcome
NOT_PROMOTED: RequestOutcome
QUARANTINED: RequestOutcome

class EngineMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[EngineMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[EngineMessage, _Mapping]]] = ...) -> None: ...

class DaemonMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[DaemonMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[DaemonMessage, _Mapping]]] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("hello", "acquire", "release", "touch", "store_begin", "store_done", "store_abort", "bind_pin", "ping", "engine_rates", "goodbye", "requests_seen", "prefix_tokens", "changing_middle", "request_pins", "prefetch", "demote", "confirm_pins", "requests_ended", "device_blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    STORE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    STORE_DONE_FIELD_NUMBER: _ClassVar[int]
    STORE_ABORT_FIELD_NUMBER: _ClassVar[int]
    BIND_PIN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RATES_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_SEEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHANGING_MIDDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PINS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_PINS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ENDED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    acquire: Acquire
    release: Release
    touch: Touch
    store_begin: StoreBegin
    store_done: StoreDone
    store_abort: StoreAbort
    bind_pin: BindPin
    ping: Ping
    engine_rates: EngineRates
    goodbye: Goodbye
    requests_seen: RequestsSeen
    prefix_tokens: PrefixTokens
    changing_middle: ChangingMiddle
    request_pins: RequestPins
    prefetch: Prefetch
    demote: Demote
    confirm_pins: ConfirmPins
    requests_ended: RequestsEnded
    device_blocks: DeviceBlocks
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., acquire: _Optional[_Union[Acquire, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., touch: _Optional[_Union[Touch, _Mapping]] = ..., store_begin: _Optional[_Union[StoreBegin, _Mapping]] = ..., store_done: _Optional[_Union[StoreDone, _Mapping]] = ..., store_abort: _Optional[_Union[StoreAbort, _Mapping]] = ..., bind_pin: _Optional[_Union[BindPin, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., engine_rates: _Optional[_Union[EngineRates, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., requests_seen: _Optional[_Union[RequestsSeen, _Mapping]] = ..., prefix_tokens: _Optional[_Union[PrefixTokens, _Mapping]] = ..., changing_middle: _Optional[_Union[ChangingMiddle, _Mapping]] = ..., request_pins: _Optional[_Union[RequestPins, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., demote: _Optional[_Union[Demote, _Mapping]] = ..., confirm_pins: _Optional[_Union[ConfirmPins, _Mapping]] = ..., requests_ended: _Optional[_Union[RequestsEnded, _Mapping]] = ..., device_blocks: _Optional[_Union[DeviceBlocks, _Mapping]] = ...) -> None: ...

class DaemonMessage(_message.Message):
    __slots__ = ("welcome", "acquire_update", "store_credits", "pin_added", "pin_removed", "chunks_held", "pong", "prefixes_wanted", "request_pins_answer", "pins_added", "device_blocks_wanted", "pin_residency")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STORE_CREDITS_FIELD_NUMBER: _ClassVar[int]
    PIN_ADDED_FIELD_NUMBER: _ClassVar[int]
    PIN_REMOVED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_HELD_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_WANTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PINS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PINS_ADDED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_WANTED_FIELD_NUMBER: _ClassVar[int]
    PIN_RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    acquire_update: AcquireUpdate
    store_credits: StoreCredits
    pin_added: PinAdded
    pin_removed: PinRemoved
    chunks_held: ChunksHeld
    pong: Pong
    prefixes_wanted: PrefixesWanted
    request_pins_answer: RequestPinsAnswer
    pins_added: PinsAdded
    device_blocks_wanted: DeviceBlocksWanted
    pin_residency: PinResidency
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., acquire_update: _Optional[_Union[AcquireUpdate, _Mapping]] = ..., store_credits: _Optional[_Union[StoreCredits, _Mapping]] = ..., pin_added: _Optional[_Union[PinAdded, _Mapping]] = ..., pin_removed: _Optional[_Union[PinRemoved, _Mapping]] = ..., chunks_held: _Optional[_Union[ChunksHeld, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., prefixes_wanted: _Optional[_Union[PrefixesWanted, _Mapping]] = ..., request_pins_answer: _Optional[_Union[RequestPinsAnswer, _Mapping]] = ..., pins_added: _Optional[_Union[PinsAdded, _Mapping]] = ..., device_blocks_wanted: _Optional[_Union[DeviceBlocksWanted, _Mapping]] = ..., pin_residency: _Optional[_Union[PinResidency, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "engine_id", "pid", "vllm_version", "kvtier_version", "model_names", "fingerprint", "layout", "store_credits", "ephemeral", "report_residency", "takes_joined_keys")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    KVTIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STORE_CREDITS_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    REPORT_RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    TAKES_JOINED_KEYS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine_id: str
    pid: int
    vllm_version: str
    kvtier_version: str
    model_names: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: _containers.ScalarMap[str, str]
    layout: KVLayout
    store_credits: int
    ephemeral: bool
    report_residency: bool
    takes_joined_keys: bool
    def __init__(self, protocol: _Optional[int] = ..., engine_id: _Optional[str] = ..., pid: _Optional[int] = ..., vllm_version: _Optional[str] = ..., kvtier_version: _Optional[str] = ..., model_names: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., store_credits: _Optional[int] = ..., ephemeral: bool = ..., report_residency: bool = ..., takes_joined_keys: bool = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("num_ranks", "rank_bytes", "num_writers", "groups")
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    RANK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    num_ranks: int
    rank_bytes: int
    num_writers: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    def __init__(self, num_ranks: _Optional[int] = ..., rank_bytes: _Optional[int] = ..., num_writers: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("group_idx", "chunk_tokens", "useful_bytes", "window_chunks")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USEFUL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    chunk_tokens: int
    useful_bytes: int
    window_chunks: int
    def __init__(self, group_idx: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., useful_bytes: _Optional[int] = ..., window_chunks: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "namespace_id", "arena", "lock_path", "pins", "other_namespaces", "store_mode", "pin_ids", "report_requests")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    LOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    STORE_MODE_FIELD_NUMBER: _ClassVar[int]
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: str
    arena: ArenaInfo
    lock_path: str
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    other_namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceDifference]
    store_mode: StoreMode
    pin_ids: _containers.RepeatedScalarFieldContainer[str]
    report_requests: bool
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[str] = ..., arena: _Optional[_Union[ArenaInfo, _Mapping]] = ..., lock_path: _Optional[str] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., other_namespaces: _Optional[_Iterable[_Union[NamespaceDifference, _Mapping]]] = ..., store_mode: _Optional[_Union[StoreMode, str]] = ..., pin_ids: _Optional[_Iterable[str]] = ..., report_requests: bool = ...) -> None: ...

class ArenaInfo(_message.Message):
    __slots__ = ("arena_id", "path", "num_slots", "row_bytes")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_id: bytes
    path: str
    num_slots: int
    row_bytes: int
    def __init__(self, arena_id: _Optional[bytes] = ..., path: _Optional[str] = ..., num_slots: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class NamespaceDifference(_message.Message):
    __slots__ = ("namespace_id", "fields", "num_prompts")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    num_prompts: int
    def __init__(self, namespace_id: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., num_prompts: _Optional[int] = ...) -> None: ...

class Acquire(_message.Message):
    __slots__ = ("acquire_id", "keys")
    ACQUIRE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    acquire_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, acquire_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AcquireUpdate(_message.Message):
    __slots__ = ("acquire_id", "resident", "chunks", "pending_bytes", "promote_bytes_per_s", "ready_in_s", "miss_reason")
    ACQUIRE_ID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READY_IN_S_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    acquire_id: int
    resident: ResidentChunks
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkResidency]
    pending_bytes: int
    promote_bytes_per_s: float
    ready_in_s: float
    miss_reason: RequestOutcome
    def __init__(self, acquire_id: _Optional[int] = ..., resident: _Optional[_Union[ResidentChunks, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkResidency, _Mapping]]] = ..., pending_bytes: _Optional[int] = ..., promote_bytes_per_s: _Optional[float] = ..., ready_in_s: _Optional[float] = ..., miss_reason: _Optional[_Union[RequestOutcome, str]] = ...) -> None: ...

class ResidentChunks(_message.Message):
    __slots__ = ("indexes", "slots", "generations")
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indexes: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkResidency(_message.Message):
    __slots__ = ("index", "state", "slot", "from_disk")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MISS: _ClassVar[ChunkResidency.State]
        HOST: _ClassVar[ChunkResidency.State]
        PROMOTING: _ClassVar[ChunkResidency.State]
    MISS: ChunkResidency.State
    HOST: ChunkResidency.State
    PROMOTING: ChunkResidency.State
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FROM_DISK_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: ChunkResidency.State
    slot: SlotRef
    from_disk: bool
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[ChunkResidency.State, str]] = ..., slot: _Optional[_Union[SlotRef, _Mapping]] = ..., from_disk: bool = ...) -> None: ...

class SlotRef(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("acquire_id", "all", "indexes")
    ACQUIRE_ID_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    acquire_id: int
    all: bool
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, acquire_id: _Optional[int] = ..., all: bool = ..., indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class Touch(_message.Message):
    __slots__ = ("keys", "stored")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    stored: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., stored: bool = ...) -> None: ...

class StoreCredits(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotRef]
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotRef, _Mapping]]] = ...) -> None: ...

class StoreSlot(_message.Message):
    __slots__ = ("key", "slot", "requested")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    slot: SlotRef
    requested: bool
    def __init__(self, key: _Optional[bytes] = ..., slot: _Optional[_Union[SlotRef, _Mapping]] = ..., requested: bool = ...) -> None: ...

class StoreBegin(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreSlot]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreSlot, _Mapping]]] = ...) -> None: ...

class StoreDone(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreSlot]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreSlot, _Mapping]]] = ...) -> None: ...

class StoreAbort(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreSlot]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreSlot, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("pin_id", "name", "tokens", "model", "lora_name", "lora_path", "cache_salt", "pinned", "priority", "public", "keys", "joined_keys", "num_tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    JOINED_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    name: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    model: str
    lora_name: str
    lora_path: str
    cache_salt: str
    pinned: bool
    priority: int
    public: bool
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    joined_keys: bytes
    num_tokens: int
    def __init__(self, pin_id: _Optional[str] = ..., name: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., cache_salt: _Optional[str] = ..., pinned: bool = ..., priority: _Optional[int] = ..., public: bool = ..., keys: _Optional[_Iterable[bytes]] = ..., joined_keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PinAdded(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: Pin
    def __init__(self, pin: _Optional[_Union[Pin, _Mapping]] = ...) -> None: ...

class PinsAdded(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class PinRemoved(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    def __init__(self, pin_id: _Optional[str] = ...) -> None: ...

class BindPin(_message.Message):
    __slots__ = ("pin_id", "keys", "error", "covered_tokens")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    error: str
    covered_tokens: int
    def __init__(self, pin_id: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., error: _Optional[str] = ..., covered_tokens: _Optional[int] = ...) -> None: ...

class ConfirmPins(_message.Message):
    __slots__ = ("pin_ids", "unknown_pin_ids")
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    pin_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_pin_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pin_ids: _Optional[_Iterable[str]] = ..., unknown_pin_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunksHeld(_message.Message):
    __slots__ = ("keys", "held", "complete", "pin_ids")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    held: bool
    complete: bool
    pin_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., held: bool = ..., complete: bool = ..., pin_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PinResidency(_message.Message):
    __slots__ = ("pin_ids", "num_host_chunks")
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    pin_ids: _containers.RepeatedScalarFieldContainer[str]
    num_host_chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pin_ids: _Optional[_Iterable[str]] = ..., num_host_chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestsSeen(_message.Message):
    __slots__ = ("requests", "num_skipped")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SeenRequest]
    num_skipped: int
    def __init__(self, requests: _Optional[_Iterable[_Union[SeenRequest, _Mapping]]] = ..., num_skipped: _Optional[int] = ...) -> None: ...

class SeenRequest(_message.Message):
    __slots__ = ("prefixes", "prompt_digest", "num_tokens")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[SeenPrefix]
    prompt_digest: int
    num_tokens: int
    def __init__(self, prefixes: _Optional[_Iterable[_Union[SeenPrefix, _Mapping]]] = ..., prompt_digest: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class SeenPrefix(_message.Message):
    __slots__ = ("digest", "num_tokens", "is_system_prompt")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    def __init__(self, digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., is_system_prompt: bool = ...) -> None: ...

class PrefixesWanted(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixTokens(_message.Message):
    __slots__ = ("digest", "tokens", "lora_name", "lora_path", "cache_salt")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    lora_name: str
    lora_path: str
    cache_salt: str
    def __init__(self, digest: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ChangingMiddle(_message.Message):
    __slots__ = ("digest", "num_stable_tokens", "num_tokens", "num_prompts", "before", "examples")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_STABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    num_stable_tokens: int
    num_tokens: int
    num_prompts: int
    before: str
    examples: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[bytes] = ..., num_stable_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_prompts: _Optional[int] = ..., before: _Optional[str] = ..., examples: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestPins(_message.Message):
    __slots__ = ("id", "prefixes", "tokens", "priority", "name", "owner", "lora_name", "lora_path", "cache_salt")
    ID_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    id: int
    prefixes: _containers.RepeatedCompositeFieldContainer[RequestedPrefix]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    name: str
    owner: str
    lora_name: str
    lora_path: str
    cache_salt: str
    def __init__(self, id: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[RequestedPrefix, _Mapping]]] = ..., tokens: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class RequestedPrefix(_message.Message):
    __slots__ = ("digest", "num_tokens", "ttl_s")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    num_tokens: int
    ttl_s: int
    def __init__(self, digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., ttl_s: _Optional[int] = ...) -> None: ...

class RequestPinsAnswer(_message.Message):
    __slots__ = ("id", "results", "problem")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    id: int
    results: _containers.RepeatedCompositeFieldContainer[RequestPinResult]
    problem: str
    def __init__(self, id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[RequestPinResult, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class RequestPinResult(_message.Message):
    __slots__ = ("state", "ends_in_s")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[RequestPinResult.State]
        PINNED: _ClassVar[RequestPinResult.State]
        REFUSED: _ClassVar[RequestPinResult.State]
    UNKNOWN: RequestPinResult.State
    PINNED: RequestPinResult.State
    REFUSED: RequestPinResult.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDS_IN_S_FIELD_NUMBER: _ClassVar[int]
    state: RequestPinResult.State
    ends_in_s: float
    def __init__(self, state: _Optional[_Union[RequestPinResult.State, str]] = ..., ends_in_s: _Optional[float] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Demote(_message.Message):
    __slots__ = ("keys", "digest", "owner")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    digest: bytes
    owner: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., digest: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class RequestsEnded(_message.Message):
    __slots__ = ("requests", "num_dropped")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestEnded]
    num_dropped: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestEnded, _Mapping]]] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class RequestEnded(_message.Message):
    __slots__ = ("request_id", "outcome", "pin_id", "prompt_tokens", "shared_tokens", "device_tokens", "host_tokens", "disk_tokens", "ended_unix_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: RequestOutcome
    pin_id: str
    prompt_tokens: int
    shared_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    ended_unix_s: float
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[RequestOutcome, str]] = ..., pin_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., ended_unix_s: _Optional[float] = ...) -> None: ...

class EngineRates(_message.Message):
    __slots__ = ("prefill_tokens_per_s",)
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens_per_s: float
    def __init__(self, prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class DeviceBlocksWanted(_message.Message):
    __slots__ = ("id", "pin_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    pin_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[int] = ..., pin_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DeviceBlocks(_message.Message):
    __slots__ = ("id", "num_blocks", "num_cached_blocks", "problem")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    id: int
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_cached_blocks: _containers.RepeatedScalarFieldContainer[int]
    problem: str
    def __init__(self, id: _Optional[int] = ..., num_blocks: _Optional[_Iterable[int]] = ..., num_cached_blocks: _Optional[_Iterable[int]] = ..., problem: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...
