from kvtier._pb import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_ANY: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
TIER_ANY: Tier
TIER_HOST: Tier
TIER_DISK: Tier

class PinRequest(_message.Message):
    __slots__ = ("name", "tokens", "model", "lora_name", "lora_path", "cache_salt", "recipe_json", "ttl_s", "replace", "priority", "public", "adopt", "version", "labels", "owner", "sliding", "if_pin_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RECIPE_JSON_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    IF_PIN_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    model: str
    lora_name: str
    lora_path: str
    cache_salt: str
    recipe_json: str
    ttl_s: int
    replace: bool
    priority: int
    public: bool
    adopt: str
    version: int
    labels: Labels
    owner: str
    sliding: bool
    if_pin_id: str
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., cache_salt: _Optional[str] = ..., recipe_json: _Optional[str] = ..., ttl_s: _Optional[int] = ..., replace: bool = ..., priority: _Optional[int] = ..., public: bool = ..., adopt: _Optional[str] = ..., version: _Optional[int] = ..., labels: _Optional[_Union[Labels, _Mapping]] = ..., owner: _Optional[str] = ..., sliding: bool = ..., if_pin_id: _Optional[str] = ...) -> None: ...

class Labels(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ApplyMessage(_message.Message):
    __slots__ = ("start", "pin", "unpin", "expected")
    START_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    start: ApplyStart
    pin: PinRequest
    unpin: str
    expected: ExpectedPin
    def __init__(self, start: _Optional[_Union[ApplyStart, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[str] = ..., expected: _Optional[_Union[ExpectedPin, _Mapping]] = ...) -> None: ...

class ExpectedPin(_message.Message):
    __slots__ = ("absent", "pin_id", "set")
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    absent: bool
    pin_id: str
    set: str
    def __init__(self, absent: bool = ..., pin_id: _Optional[str] = ..., set: _Optional[str] = ...) -> None: ...

class ApplyStart(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: bool = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[AppliedPrompt]
    def __init__(self, pins: _Optional[_Iterable[_Union[AppliedPrompt, _Mapping]]] = ...) -> None: ...

class AppliedPrompt(_message.Message):
    __slots__ = ("name", "made", "pin_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    made: str
    pin_id: str
    def __init__(self, name: _Optional[str] = ..., made: _Optional[str] = ..., pin_id: _Optional[str] = ...) -> None: ...

class RenamePromptRequest(_message.Message):
    __slots__ = ("name", "new_name")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEW_NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    new_name: str
    def __init__(self, name: _Optional[str] = ..., new_name: _Optional[str] = ...) -> None: ...

class UpdatePromptRequest(_message.Message):
    __slots__ = ("name", "ttl_s", "priority", "public", "set_labels", "removed_labels", "owner", "sliding")
    class SetLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    SET_LABELS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_LABELS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl_s: int
    priority: int
    public: bool
    set_labels: _containers.ScalarMap[str, str]
    removed_labels: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    sliding: bool
    def __init__(self, name: _Optional[str] = ..., ttl_s: _Optional[int] = ..., priority: _Optional[int] = ..., public: bool = ..., set_labels: _Optional[_Mapping[str, str]] = ..., removed_labels: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., sliding: bool = ...) -> None: ...

class GetAdviceRequest(_message.Message):
    __slots__ = ("max_bytes",)
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    def __init__(self, max_bytes: _Optional[int] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("mode", "max_bytes", "namespaces")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    max_bytes: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceAdvice]
    def __init__(self, mode: _Optional[str] = ..., max_bytes: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceAdvice, _Mapping]]] = ...) -> None: ...

class NamespaceAdvice(_message.Message):
    __slots__ = ("namespace_id", "model", "requests_per_hour", "prompt_tokens_per_hour", "chosen_bytes", "saved_s_per_hour", "saved_share", "prefixes", "places")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    SAVED_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    model: str
    requests_per_hour: float
    prompt_tokens_per_hour: float
    chosen_bytes: int
    saved_s_per_hour: float
    saved_share: float
    prefixes: _containers.RepeatedCompositeFieldContainer[AdvisedPrefix]
    places: _containers.RepeatedCompositeFieldContainer[ChangingPlace]
    def __init__(self, namespace_id: _Optional[str] = ..., model: _Optional[str] = ..., requests_per_hour: _Optional[float] = ..., prompt_tokens_per_hour: _Optional[float] = ..., chosen_bytes: _Optional[int] = ..., saved_s_per_hour: _Optional[float] = ..., saved_share: _Optional[float] = ..., prefixes: _Optional[_Iterable[_Union[AdvisedPrefix, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[ChangingPlace, _Mapping]]] = ...) -> None: ...

class AdvisedPrefix(_message.Message):
    __slots__ = ("digest", "num_tokens", "is_system_prompt", "verdict", "pin_name", "requests_per_hour", "num_prompts", "last_seen_unix_s", "added_tokens", "added_bytes", "saved_s_per_hour", "saved_share")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[AdvisedPrefix.Verdict]
        CHOSEN: _ClassVar[AdvisedPrefix.Verdict]
        CONTAINED: _ClassVar[AdvisedPrefix.Verdict]
        TOO_SHORT: _ClassVar[AdvisedPrefix.Verdict]
        TOO_FEW_REQUESTS: _ClassVar[AdvisedPrefix.Verdict]
        ONE_PROMPT: _ClassVar[AdvisedPrefix.Verdict]
        OVER_BUDGET: _ClassVar[AdvisedPrefix.Verdict]
        NAMED: _ClassVar[AdvisedPrefix.Verdict]
    VERDICT_UNSPECIFIED: AdvisedPrefix.Verdict
    CHOSEN: AdvisedPrefix.Verdict
    CONTAINED: AdvisedPrefix.Verdict
    TOO_SHORT: AdvisedPrefix.Verdict
    TOO_FEW_REQUESTS: AdvisedPrefix.Verdict
    ONE_PROMPT: AdvisedPrefix.Verdict
    OVER_BUDGET: AdvisedPrefix.Verdict
    NAMED: AdvisedPrefix.Verdict
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PIN_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    SAVED_SHARE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    verdict: AdvisedPrefix.Verdict
    pin_name: str
    requests_per_hour: float
    num_prompts: int
    last_seen_unix_s: float
    added_tokens: int
    added_bytes: int
    saved_s_per_hour: float
    saved_share: float
    def __init__(self, digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., is_system_prompt: bool = ..., verdict: _Optional[_Union[AdvisedPrefix.Verdict, str]] = ..., pin_name: _Optional[str] = ..., requests_per_hour: _Optional[float] = ..., num_prompts: _Optional[int] = ..., last_seen_unix_s: _Optional[float] = ..., added_tokens: _Optional[int] = ..., added_bytes: _Optional[int] = ..., saved_s_per_hour: _Optional[float] = ..., saved_share: _Optional[float] = ...) -> None: ...

class ChangingPlace(_message.Message):
    __slots__ = ("num_stable_tokens", "num_tokens", "num_prompts", "before", "examples", "seen_unix_s")
    NUM_STABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    num_stable_tokens: int
    num_tokens: int
    num_prompts: int
    before: str
    examples: _containers.RepeatedScalarFieldContainer[str]
    seen_unix_s: float
    def __init__(self, num_stable_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_prompts: _Optional[int] = ..., before: _Optional[str] = ..., examples: _Optional[_Iterable[str]] = ..., seen_unix_s: _Optional[float] = ...) -> None: ...

class GetPromptRequest(_message.Message):
    __slots__ = ("name", "pin_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    pin_id: str
    def __init__(self, name: _Optional[str] = ..., pin_id: _Optional[str] = ...) -> None: ...

class GetTokensRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PromptTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class GetChunkMapRequest(_message.Message):
    __slots__ = ("name", "namespace_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: str
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[str] = ...) -> None: ...

class ChunkMap(_message.Message):
    __slots__ = ("name", "namespace_id", "chunks", "covered_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: str
    chunks: bytes
    covered_tokens: int
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[str] = ..., chunks: _Optional[bytes] = ..., covered_tokens: _Optional[int] = ...) -> None: ...

class ListPromptsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "unfinished")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    unfinished: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., unfinished: bool = ...) -> None: ...

class ListPromptsResponse(_message.Message):
    __slots__ = ("prompts", "next_page_token")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptStatus]
    next_page_token: str
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next_page_token")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    next_page_token: str
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name", "forget")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    name: str
    forget: bool
    def __init__(self, name: _Optional[str] = ..., forget: bool = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("name", "force", "tier", "all", "namespace_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    force: bool
    tier: Tier
    all: bool
    namespace_id: str
    def __init__(self, name: _Optional[str] = ..., force: bool = ..., tier: _Optional[_Union[Tier, str]] = ..., all: bool = ..., namespace_id: _Optional[str] = ...) -> None: ...

class FsckRequest(_message.Message):
    __slots__ = ("repair", "deep")
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    DEEP_FIELD_NUMBER: _ClassVar[int]
    repair: bool
    deep: bool
    def __init__(self, repair: bool = ..., deep: bool = ...) -> None: ...

class FsckReport(_message.Message):
    __slots__ = ("findings", "num_packs", "num_chunks", "verified_bytes", "num_arena_slots")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_PACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ARENA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[FsckFinding]
    num_packs: int
    num_chunks: int
    verified_bytes: int
    num_arena_slots: int
    def __init__(self, findings: _Optional[_Iterable[_Union[FsckFinding, _Mapping]]] = ..., num_packs: _Optional[int] = ..., num_chunks: _Optional[int] = ..., verified_bytes: _Optional[int] = ..., num_arena_slots: _Optional[int] = ...) -> None: ...

class FsckFinding(_message.Message):
    __slots__ = ("code", "subject", "detail", "num_chunks", "repaired")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    code: str
    subject: str
    detail: str
    num_chunks: int
    repaired: bool
    def __init__(self, code: _Optional[str] = ..., subject: _Optional[str] = ..., detail: _Optional[str] = ..., num_chunks: _Optional[int] = ..., repaired: bool = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("name", "namespace_id", "decoded")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: str
    decoded: bool
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[str] = ..., decoded: bool = ...) -> None: ...

class BundlePiece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImportMessage(_message.Message):
    __slots__ = ("start", "piece")
    START_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    start: ImportStart
    piece: BundlePiece
    def __init__(self, start: _Optional[_Union[ImportStart, _Mapping]] = ..., piece: _Optional[_Union[BundlePiece, _Mapping]] = ...) -> None: ...

class ImportStart(_message.Message):
    __slots__ = ("name", "replace", "ttl_s", "public")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    replace: bool
    ttl_s: int
    public: bool
    def __init__(self, name: _Optional[str] = ..., replace: bool = ..., ttl_s: _Optional[int] = ..., public: bool = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_chunks", "host_bytes", "disk_bytes", "num_shared_chunks")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    host_bytes: int
    disk_bytes: int
    num_shared_chunks: int
    def __init__(self, num_chunks: _Optional[int] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., num_shared_chunks: _Optional[int] = ...) -> None: ...

class PromptStatus(_message.Message):
    __slots__ = ("name", "pin_id", "pinned", "state", "model", "lora_name", "cache_salt", "num_tokens", "created_unix_s", "expires_unix_s", "bindings", "recipe_json", "num_engines", "num_confirmed", "tokens_digest", "error", "priority", "public", "origin", "owner", "use", "replacement", "labels", "ttl_s", "sliding", "source_digest", "usage", "computed_elsewhere")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[PromptStatus.State]
        UNRENDERED: _ClassVar[PromptStatus.State]
        WAITING: _ClassVar[PromptStatus.State]
        CAPTURING: _ClassVar[PromptStatus.State]
        DURABLE: _ClassVar[PromptStatus.State]
        OVER_QUOTA: _ClassVar[PromptStatus.State]
        STALE: _ClassVar[PromptStatus.State]
        REFRESHING: _ClassVar[PromptStatus.State]
        REFUSED: _ClassVar[PromptStatus.State]
    STATE_UNSPECIFIED: PromptStatus.State
    UNRENDERED: PromptStatus.State
    WAITING: PromptStatus.State
    CAPTURING: PromptStatus.State
    DURABLE: PromptStatus.State
    OVER_QUOTA: PromptStatus.State
    STALE: PromptStatus.State
    REFRESHING: PromptStatus.State
    REFUSED: PromptStatus.State
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    RECIPE_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    name: str
    pin_id: str
    pinned: bool
    state: PromptStatus.State
    model: str
    lora_name: str
    cache_salt: str
    num_tokens: int
    created_unix_s: float
    expires_unix_s: float
    bindings: _containers.RepeatedCompositeFieldContainer[PromptBinding]
    recipe_json: str
    num_engines: int
    num_confirmed: int
    tokens_digest: str
    error: str
    priority: int
    public: bool
    origin: str
    owner: str
    use: PinUse
    replacement: str
    labels: _containers.ScalarMap[str, str]
    ttl_s: int
    sliding: bool
    source_digest: str
    usage: PinUsage
    computed_elsewhere: bool
    def __init__(self, name: _Optional[str] = ..., pin_id: _Optional[str] = ..., pinned: bool = ..., state: _Optional[_Union[PromptStatus.State, str]] = ..., model: _Optional[str] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., num_tokens: _Optional[int] = ..., created_unix_s: _Optional[float] = ..., expires_unix_s: _Optional[float] = ..., bindings: _Optional[_Iterable[_Union[PromptBinding, _Mapping]]] = ..., recipe_json: _Optional[str] = ..., num_engines: _Optional[int] = ..., num_confirmed: _Optional[int] = ..., tokens_digest: _Optional[str] = ..., error: _Optional[str] = ..., priority: _Optional[int] = ..., public: bool = ..., origin: _Optional[str] = ..., owner: _Optional[str] = ..., use: _Optional[_Union[PinUse, _Mapping]] = ..., replacement: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., ttl_s: _Optional[int] = ..., sliding: bool = ..., source_digest: _Optional[str] = ..., usage: _Optional[_Union[PinUsage, _Mapping]] = ..., computed_elsewhere: bool = ...) -> None: ...

class PinUsage(_message.Message):
    __slots__ = ("num_hits", "last_hit_unix_s", "last_used_unix_s", "device_tokens", "host_tokens", "disk_tokens", "saved_prefill_s", "others")
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    LAST_HIT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    num_hits: int
    last_hit_unix_s: float
    last_used_unix_s: float
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    saved_prefill_s: float
    others: _containers.RepeatedCompositeFieldContainer[OutcomeCount]
    def __init__(self, num_hits: _Optional[int] = ..., last_hit_unix_s: _Optional[float] = ..., last_used_unix_s: _Optional[float] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., saved_prefill_s: _Optional[float] = ..., others: _Optional[_Iterable[_Union[OutcomeCount, _Mapping]]] = ...) -> None: ...

class OutcomeCount(_message.Message):
    __slots__ = ("outcome", "num_requests")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    outcome: _engine_pb2.RequestOutcome
    num_requests: int
    def __init__(self, outcome: _Optional[_Union[_engine_pb2.RequestOutcome, str]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("tokens", "model", "lora_name", "cache_salt", "request_id")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    model: str
    lora_name: str
    cache_salt: str
    request_id: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("outcome", "reason", "prompts", "request", "last_request")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    outcome: _engine_pb2.RequestOutcome
    reason: str
    prompts: _containers.RepeatedCompositeFieldContainer[NearPrompt]
    request: RecentRequest
    last_request: RecentRequest
    def __init__(self, outcome: _Optional[_Union[_engine_pb2.RequestOutcome, str]] = ..., reason: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[NearPrompt, _Mapping]]] = ..., request: _Optional[_Union[RecentRequest, _Mapping]] = ..., last_request: _Optional[_Union[RecentRequest, _Mapping]] = ...) -> None: ...

class NearPrompt(_message.Message):
    __slots__ = ("name", "pin_id", "pinned", "num_tokens", "shared_tokens", "differs_at", "differs_in", "bindings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_AT_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_IN_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pin_id: str
    pinned: bool
    num_tokens: int
    shared_tokens: int
    differs_at: int
    differs_in: _containers.RepeatedScalarFieldContainer[str]
    bindings: _containers.RepeatedCompositeFieldContainer[NearBinding]
    def __init__(self, name: _Optional[str] = ..., pin_id: _Optional[str] = ..., pinned: bool = ..., num_tokens: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., differs_at: _Optional[int] = ..., differs_in: _Optional[_Iterable[str]] = ..., bindings: _Optional[_Iterable[_Union[NearBinding, _Mapping]]] = ...) -> None: ...

class NearBinding(_message.Message):
    __slots__ = ("namespace_id", "model", "live", "bound", "shared_tokens", "lost_tokens", "num_host_chunks", "num_disk_chunks", "num_missing_chunks", "differing_fields", "missing")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    model: str
    live: bool
    bound: bool
    shared_tokens: int
    lost_tokens: int
    num_host_chunks: int
    num_disk_chunks: int
    num_missing_chunks: int
    differing_fields: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedCompositeFieldContainer[MissingChunks]
    def __init__(self, namespace_id: _Optional[str] = ..., model: _Optional[str] = ..., live: bool = ..., bound: bool = ..., shared_tokens: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., num_host_chunks: _Optional[int] = ..., num_disk_chunks: _Optional[int] = ..., num_missing_chunks: _Optional[int] = ..., differing_fields: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[_Union[MissingChunks, _Mapping]]] = ...) -> None: ...

class MissingChunks(_message.Message):
    __slots__ = ("cause", "num_chunks", "last_unix_s")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[MissingChunks.Cause]
        NOT_RECORDED: _ClassVar[MissingChunks.Cause]
        EVICTED_BY_COMMAND: _ClassVar[MissingChunks.Cause]
        EVICTED_FOR_HOST_MEMORY: _ClassVar[MissingChunks.Cause]
        EVICTED_FOR_DISK_SPACE: _ClassVar[MissingChunks.Cause]
        DROPPED_AS_DAMAGED: _ClassVar[MissingChunks.Cause]
    CAUSE_UNSPECIFIED: MissingChunks.Cause
    NOT_RECORDED: MissingChunks.Cause
    EVICTED_BY_COMMAND: MissingChunks.Cause
    EVICTED_FOR_HOST_MEMORY: MissingChunks.Cause
    EVICTED_FOR_DISK_SPACE: MissingChunks.Cause
    DROPPED_AS_DAMAGED: MissingChunks.Cause
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAST_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    cause: MissingChunks.Cause
    num_chunks: int
    last_unix_s: float
    def __init__(self, cause: _Optional[_Union[MissingChunks.Cause, str]] = ..., num_chunks: _Optional[int] = ..., last_unix_s: _Optional[float] = ...) -> None: ...

class ListRecentRequestsRequest(_message.Message):
    __slots__ = ("max_requests", "outcomes", "misses_only")
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MISSES_ONLY_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    outcomes: _containers.RepeatedScalarFieldContainer[_engine_pb2.RequestOutcome]
    misses_only: bool
    def __init__(self, max_requests: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[_engine_pb2.RequestOutcome, str]]] = ..., misses_only: bool = ...) -> None: ...

class ListRecentRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("request_id", "outcome", "pin_id", "pin_name", "prompt_tokens", "shared_tokens", "device_tokens", "host_tokens", "disk_tokens", "ended_unix_s", "namespace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: _engine_pb2.RequestOutcome
    pin_id: str
    pin_name: str
    prompt_tokens: int
    shared_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    ended_unix_s: float
    namespace_id: str
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[_engine_pb2.RequestOutcome, str]] = ..., pin_id: _Optional[str] = ..., pin_name: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., ended_unix_s: _Optional[float] = ..., namespace_id: _Optional[str] = ...) -> None: ...

class PinUse(_message.Message):
    __slots__ = ("num_requests", "saved_tokens", "saved_s", "last_used_unix_s")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    saved_tokens: int
    saved_s: float
    last_used_unix_s: float
    def __init__(self, num_requests: _Optional[int] = ..., saved_tokens: _Optional[int] = ..., saved_s: _Optional[float] = ..., last_used_unix_s: _Optional[float] = ...) -> None: ...

class PromptBinding(_message.Message):
    __slots__ = ("namespace_id", "model", "covered_tokens", "num_chunks", "num_host_chunks", "num_durable_chunks", "raw_bytes", "disk_bytes", "live", "durable_raw_bytes", "num_shared_chunks", "disk_share_bytes", "ephemeral")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DURABLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DISK_SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    model: str
    covered_tokens: int
    num_chunks: int
    num_host_chunks: int
    num_durable_chunks: int
    raw_bytes: int
    disk_bytes: int
    live: bool
    durable_raw_bytes: int
    num_shared_chunks: int
    disk_share_bytes: int
    ephemeral: bool
    def __init__(self, namespace_id: _Optional[str] = ..., model: _Optional[str] = ..., covered_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., num_host_chunks: _Optional[int] = ..., num_durable_chunks: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., live: bool = ..., durable_raw_bytes: _Optional[int] = ..., num_shared_chunks: _Optional[int] = ..., disk_share_bytes: _Optional[int] = ..., ephemeral: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DaemonStatus(_message.Message):
    __slots__ = ("version", "pid", "started_unix_s", "socket", "host", "disk", "sessions", "namespaces", "num_prompts", "num_pinned", "counters", "store", "http_url", "http_problem", "prompt_bytes", "disk_keys")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    HTTP_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_KEYS_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    started_unix_s: float
    socket: str
    host: TierStatus
    disk: TierStatus
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    num_prompts: int
    num_pinned: int
    counters: _containers.ScalarMap[str, int]
    store: str
    http_url: str
    http_problem: str
    prompt_bytes: int
    disk_keys: _containers.RepeatedCompositeFieldContainer[KeyUsage]
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., started_unix_s: _Optional[float] = ..., socket: _Optional[str] = ..., host: _Optional[_Union[TierStatus, _Mapping]] = ..., disk: _Optional[_Union[TierStatus, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., num_prompts: _Optional[int] = ..., num_pinned: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., store: _Optional[str] = ..., http_url: _Optional[str] = ..., http_problem: _Optional[str] = ..., prompt_bytes: _Optional[int] = ..., disk_keys: _Optional[_Iterable[_Union[KeyUsage, _Mapping]]] = ...) -> None: ...

class KeyUsage(_message.Message):
    __slots__ = ("name", "writes", "is_missing", "num_packs", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    NUM_PACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    writes: bool
    is_missing: bool
    num_packs: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., writes: bool = ..., is_missing: bool = ..., num_packs: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("location", "used_bytes", "limit_bytes", "num_chunks", "pinned_bytes", "breaker_open_reason")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_REASON_FIELD_NUMBER: _ClassVar[int]
    location: str
    used_bytes: int
    limit_bytes: int
    num_chunks: int
    pinned_bytes: int
    breaker_open_reason: str
    def __init__(self, location: _Optional[str] = ..., used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., breaker_open_reason: _Optional[str] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "engine_id", "pid", "namespace_id", "model_names", "attached_unix_s", "num_leases", "num_store_grants", "quarantined", "num_acquires")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_STORE_GRANTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACQUIRES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    engine_id: str
    pid: int
    namespace_id: str
    model_names: _containers.RepeatedScalarFieldContainer[str]
    attached_unix_s: float
    num_leases: int
    num_store_grants: int
    quarantined: bool
    num_acquires: int
    def __init__(self, session_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., pid: _Optional[int] = ..., namespace_id: _Optional[str] = ..., model_names: _Optional[_Iterable[str]] = ..., attached_unix_s: _Optional[float] = ..., num_leases: _Optional[int] = ..., num_store_grants: _Optional[int] = ..., quarantined: bool = ..., num_acquires: _Optional[int] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("namespace_id", "model", "num_host_chunks", "num_disk_chunks", "disk_bytes", "row_bytes", "fingerprint", "live", "seen_unix_s", "quarantine_reason", "quarantined_unix_s")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_REASON_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    model: str
    num_host_chunks: int
    num_disk_chunks: int
    disk_bytes: int
    row_bytes: int
    fingerprint: _containers.ScalarMap[str, str]
    live: bool
    seen_unix_s: float
    quarantine_reason: str
    quarantined_unix_s: float
    def __init__(self, namespace_id: _Optional[str] = ..., model: _Optional[str] = ..., num_host_chunks: _Optional[int] = ..., num_disk_chunks: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., row_bytes: _Optional[int] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., live: bool = ..., seen_unix_s: _Optional[float] = ..., quarantine_reason: _Optional[str] = ..., quarantined_unix_s: _Optional[float] = ...) -> None: ...

class VerifyPromptRequest(_message.Message):
    __slots__ = ("name", "namespace_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: str
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[str] = ...) -> None: ...

class VerifyReport(_message.Message):
    __slots__ = ("name", "namespaces", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespaces: _containers.RepeatedCompositeFieldContainer[VerifiedNamespace]
    seconds: float
    def __init__(self, name: _Optional[str] = ..., namespaces: _Optional[_Iterable[_Union[VerifiedNamespace, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class VerifiedNamespace(_message.Message):
    __slots__ = ("namespace_id", "model", "num_chunks", "host", "disk", "num_lost_chunks", "num_differing_chunks")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DIFFERING_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    model: str
    num_chunks: int
    host: VerifiedTier
    disk: VerifiedTier
    num_lost_chunks: int
    num_differing_chunks: int
    def __init__(self, namespace_id: _Optional[str] = ..., model: _Optional[str] = ..., num_chunks: _Optional[int] = ..., host: _Optional[_Union[VerifiedTier, _Mapping]] = ..., disk: _Optional[_Union[VerifiedTier, _Mapping]] = ..., num_lost_chunks: _Optional[int] = ..., num_differing_chunks: _Optional[int] = ...) -> None: ...

class VerifiedTier(_message.Message):
    __slots__ = ("num_verified_chunks", "num_damaged_chunks", "num_missing_chunks", "num_refused_chunks", "verified_bytes")
    NUM_VERIFIED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_verified_chunks: int
    num_damaged_chunks: int
    num_missing_chunks: int
    num_refused_chunks: int
    verified_bytes: int
    def __init__(self, num_verified_chunks: _Optional[int] = ..., num_damaged_chunks: _Optional[int] = ..., num_missing_chunks: _Optional[int] = ..., num_refused_chunks: _Optional[int] = ..., verified_bytes: _Optional[int] = ...) -> None: ...

class QuarantineNamespaceRequest(_message.Message):
    __slots__ = ("namespace_id", "reason")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    reason: str
    def __init__(self, namespace_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseNamespaceRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    def __init__(self, namespace_id: _Optional[str] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("names", "where")
    class Where(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DISK: _ClassVar[ReadyRequest.Where]
        HOST: _ClassVar[ReadyRequest.Where]
        DEVICE: _ClassVar[ReadyRequest.Where]
    DISK: ReadyRequest.Where
    HOST: ReadyRequest.Where
    DEVICE: ReadyRequest.Where
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    where: ReadyRequest.Where
    def __init__(self, names: _Optional[_Iterable[str]] = ..., where: _Optional[_Union[ReadyRequest.Where, str]] = ...) -> None: ...

class Readiness(_message.Message):
    __slots__ = ("ready", "num_prompts", "num_ready", "waiting")
    READY_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    num_prompts: int
    num_ready: int
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingPrompt]
    def __init__(self, ready: bool = ..., num_prompts: _Optional[int] = ..., num_ready: _Optional[int] = ..., waiting: _Optional[_Iterable[_Union[WaitingPrompt, _Mapping]]] = ...) -> None: ...

class WaitingPrompt(_message.Message):
    __slots__ = ("name", "state", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: PromptStatus.State
    why: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[PromptStatus.State, str]] = ..., why: _Optional[str] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("name", "unix_s", "level", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    unix_s: float
    level: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., unix_s: _Optional[float] = ..., level: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetRemoteRequest(_message.Message):
    __slots__ = ("with_hosts",)
    WITH_HOSTS_FIELD_NUMBER: _ClassVar[int]
    with_hosts: bool
    def __init__(self, with_hosts: bool = ...) -> None: ...

class RemoteStatus(_message.Message):
    __slots__ = ("url", "host", "problem", "looked_unix_s", "clock_offset_s", "num_pins", "num_kv_objects", "kv_bytes", "num_waiting_pins", "num_uploaded", "num_restored", "num_conflicts", "refused", "spending", "hosts")
    URL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_PINS_FIELD_NUMBER: _ClassVar[int]
    NUM_UPLOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_FIELD_NUMBER: _ClassVar[int]
    NUM_CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SPENDING_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    url: str
    host: str
    problem: str
    looked_unix_s: float
    clock_offset_s: float
    num_pins: int
    num_kv_objects: int
    kv_bytes: int
    num_waiting_pins: int
    num_uploaded: int
    num_restored: int
    num_conflicts: int
    refused: _containers.RepeatedCompositeFieldContainer[RefusedSharedPin]
    spending: RemoteSpending
    hosts: _containers.RepeatedCompositeFieldContainer[RemoteHost]
    def __init__(self, url: _Optional[str] = ..., host: _Optional[str] = ..., problem: _Optional[str] = ..., looked_unix_s: _Optional[float] = ..., clock_offset_s: _Optional[float] = ..., num_pins: _Optional[int] = ..., num_kv_objects: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., num_waiting_pins: _Optional[int] = ..., num_uploaded: _Optional[int] = ..., num_restored: _Optional[int] = ..., num_conflicts: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[RefusedSharedPin, _Mapping]]] = ..., spending: _Optional[_Union[RemoteSpending, _Mapping]] = ..., hosts: _Optional[_Iterable[_Union[RemoteHost, _Mapping]]] = ...) -> None: ...

class RefusedSharedPin(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class RemoteSpending(_message.Message):
    __slots__ = ("num_reads", "num_writes", "num_lists", "num_deletes", "num_failed", "bytes_up", "bytes_down", "dollars")
    NUM_READS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_LISTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_FIELD_NUMBER: _ClassVar[int]
    num_reads: int
    num_writes: int
    num_lists: int
    num_deletes: int
    num_failed: int
    bytes_up: int
    bytes_down: int
    dollars: float
    def __init__(self, num_reads: _Optional[int] = ..., num_writes: _Optional[int] = ..., num_lists: _Optional[int] = ..., num_deletes: _Optional[int] = ..., num_failed: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., dollars: _Optional[float] = ...) -> None: ...

class RemoteHost(_message.Message):
    __slots__ = ("host", "version", "seen_unix_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    version: str
    seen_unix_s: float
    def __init__(self, host: _Optional[str] = ..., version: _Optional[str] = ..., seen_unix_s: _Optional[float] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("name", "role", "owner", "certificate", "created_unix_s", "expires_unix_s", "grant_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    owner: str
    certificate: str
    created_unix_s: float
    expires_unix_s: float
    grant_id: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., owner: _Optional[str] = ..., certificate: _Optional[str] = ..., created_unix_s: _Optional[float] = ..., expires_unix_s: _Optional[float] = ..., grant_id: _Optional[str] = ...) -> None: ...

class CreateGrantRequest(_message.Message):
    __slots__ = ("name", "role", "owner", "ttl_s", "certificate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    owner: str
    ttl_s: int
    certificate: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[int] = ..., certificate: _Optional[str] = ...) -> None: ...

class CreatedGrant(_message.Message):
    __slots__ = ("grant", "token")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    token: str
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class ListGrantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGrantsResponse(_message.Message):
    __slots__ = ("grants",)
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class RevokeGrantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...
