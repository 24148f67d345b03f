"""From messages to typed, bounded values. Lists are refused for their length before they are copied."""

from collections.abc import Iterator, Sequence

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.bundles import RequestedImport
from kvtier.concurrency.turns import slices
from kvtier.core import limits
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.slots import SlotRef
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError
from kvtier.prompts.book import RequestedPin
from kvtier.sessions.engine_peer import EngineHello

PROTOCOL = 1


def parse_pin(request: cache_pb2.PinRequest, tokens: TokenIds) -> RequestedPin:
    """Return what is to be pinned; `tokens` are the request's, which the caller has copied in turns of the loop.

    Raises:
        InvalidArgumentError: A field cannot be used.
    """
    return RequestedPin(
        name=request.name,
        tokens=tokens,
        model=request.model,
        lora_name=request.lora_name,
        lora_path=request.lora_path,
        cache_salt=request.cache_salt,
        recipe_json=request.recipe_json,
        ttl_s=request.ttl_s,
        replace=request.replace,
        priority=request.priority,
    )


def parse_import_start(message: cache_pb2.ImportMessage | None) -> RequestedImport:
    """Return how a bundle is to be taken in.

    Raises:
        InvalidArgumentError: The first message of an import is another one, or a field cannot be used.
    """
    kind = message.WhichOneof("kind") if message is not None else "nothing"
    if message is None or kind != "start":
        raise InvalidArgumentError("message", kind, "the first message of an import is ImportStart")
    start = message.start
    if start.name:
        limits.check_name(start.name)
    return RequestedImport(name=start.name, replace=start.replace, ttl_s=limits.TTL_S.check("ttl_s", start.ttl_s))


def parse_hello(message: engine_pb2.EngineMessage | None) -> EngineHello:
    """Check the first message of a stream.

    Raises:
        InvalidArgumentError: It is not a usable Hello.
    """
    kind = message.WhichOneof("kind") if message is not None else "nothing"
    if message is None or kind != "hello":
        raise InvalidArgumentError("message", kind, "the first message of a session is Hello")
    hello = message.hello
    if hello.protocol != PROTOCOL:
        raise InvalidArgumentError(
            "hello.protocol", hello.protocol, f"this daemon speaks {PROTOCOL}; run daemon and connector of one version"
        )
    limits.ENGINE_TEXT.check("hello.kvtier_version", hello.kvtier_version)
    limits.NUM_MODEL_NAMES.check("number of hello.model_names", len(hello.model_names))
    return EngineHello(
        engine_id=limits.ENGINE_ID.check("hello.engine_id", hello.engine_id),
        pid=hello.pid,
        vllm_version=limits.ENGINE_TEXT.check("hello.vllm_version", hello.vllm_version),
        model_names=tuple(limits.MODEL_NAME.check("hello.model_names", name) for name in hello.model_names),
        fingerprint=limits.check_fingerprint("hello.fingerprint", hello.fingerprint),
        layout=_layout(hello.layout),
        store_credits=limits.STORE_CREDITS.check("hello.store_credits", hello.store_credits),
        ephemeral=hello.ephemeral,
    )


def _layout(message: engine_pb2.KVLayout) -> KVLayout:
    limits.NUM_GROUPS.check("number of hello.layout.groups", len(message.groups))
    fields = {"num_ranks": message.num_ranks, "rank_bytes": message.rank_bytes, "num_writers": message.num_writers}
    groups = [
        {
            "group_idx": group.group_idx,
            "chunk_tokens": group.chunk_tokens,
            "useful_bytes": group.useful_bytes,
            "window_chunks": group.window_chunks,
        }
        for group in message.groups
    ]
    return limits.read_layout("hello.layout", fields, groups)


def parse_stores(field: str, stores: Sequence[engine_pb2.StoreSlot]) -> Iterator[list[tuple[ChunkKey, SlotRef]]]:
    """Yield chunks and the slots that they are written to, in slices: one at least, which may be empty.

    Raises:
        InvalidArgumentError: There are more than a message may have.
    """
    limits.check_count(field, len(stores), limits.MAX_KEYS)
    for part in list(slices(stores)) or [stores]:
        yield [(store.key, SlotRef(store.slot.slot, store.slot.generation)) for store in part]
