"""`kv_connector_extra_config`: what we take, what we refuse, and what in vLLM's own settings rules kvtier out."""

import enum
import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvtier.client.address import (
    MAX_UID,
    SOCKET_VARIABLE,
    default_daemon_uid,
    default_socket_path,
    usable_socket_path,
)
from kvtier.core.limits import PREFILL_TOKENS_PER_S
from kvtier.errors import ConfigError
from kvtier.printable import shown_url
from kvtier.vllm_versions import CRYPTO_HASHES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPEC_NAME, SPEC_MODULE = "KVTierOffloadingSpec", "kvtier_connector.spec"
_SOURCE = "kv_connector_extra_config"
_OUR_KEYS = (
    "admission",
    "chat_template",
    "daemon_uid",
    "gpu_pin",
    "lookup_timeout_ms",
    "otlp_endpoint",
    "prefill_tokens_per_s",
    "refresh",
    "safe_rpcs",
    "socket",
    "warm_url",
    "weights_fingerprint",
)
# vLLM's own keys that mean the same here; its others (cpu_bytes_to_use, block_size, canonical_layout, ...) would be
# silently without effect. With self_describing_kv_events vLLM would also keep the tokens of every chunk for events that
# do not come.
_VLLM_KEYS = ("blocks_per_chunk", "offload_prompt_only")
_TRACE_VARIABLE = "KVTIER_TRACE_FOLDER"  # the daemon's, so that one word traces both
_SPEC_KEYS = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE}

AUTO = "auto"

_Choice = TypeVar("_Choice", bound=enum.Enum)

logger = logging.getLogger(__name__)


class WeightsFingerprint(enum.Enum):
    """How much of the weight files is read to tell two models apart."""

    SAMPLED = "sampled"
    FULL = "full"


class GpuPin(enum.Enum):
    """How pinned prompts are kept in vLLM's prefix cache (ADR 16)."""

    SOFT = "soft"
    HARD = "hard"
    OFF = "off"


class AdmissionOrder(enum.Enum):
    """Which waiting request is admitted when vLLM's pool is short of blocks (ADR 26)."""

    PREFIX_FIRST = "prefix_first"
    FCFS = "fcfs"


class Role(enum.Enum):
    """vLLM's `kv_role`: which half of a pair of engines this one is (ADR 35). vLLM refuses other values."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"

    @property
    def stores(self) -> bool:
        """Whether the engine stores what it computed. A decode engine does not; each of them loads."""
        return self is not Role.CONSUMER


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """The validated settings of one connector."""

    socket: Path
    """The daemon's unix socket."""
    daemon_uid: int | None = None
    """As whom the daemon may run besides our own uid and root; None: as no one else."""
    admission: AdmissionOrder = AdmissionOrder.PREFIX_FIRST
    """prefix_first: a request that waits for the blocks of a whole prompt lets some pass that need few; fcfs: none."""
    blocks_per_chunk: int = 1
    """vLLM blocks that make one chunk, our stored unit."""
    gpu_pin: GpuPin = GpuPin.SOFT
    """soft: vLLM evicts pinned blocks last; hard: they are held until requests need the memory; off: as vLLM likes."""
    lookup_timeout_s: float = 0.25
    """How long a request waits for the daemon's first answer before it counts as a miss."""
    prefill_tokens_per_s: int | None = None
    """What computing is taken to cost when a promotion or a load is weighed against it; None: measured."""
    weights_fingerprint: WeightsFingerprint = WeightsFingerprint.SAMPLED
    """Whether every byte of the weights is hashed, or a sample of each tensor."""
    trace_folder: Path | None = None
    """From the environment. Where spans for a trace viewer go, one file for each process; None: nowhere."""
    chat_template: Path | None = None
    """The file that vLLM got by `--chat-template`, which the engine is not given; None: the model's own is used."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry spans of traced requests go; None: nowhere."""
    warm_url: str | None = None
    """vLLM's own API server, which is asked for pinned prompts after a start; `AUTO`: found; None: it is not asked."""
    refresh: bool = True
    """With `warm_url`: sources of pins are rendered, and what is not durable is computed, while no user waits."""
    safe_rpcs: frozenset[str] = frozenset()
    """Methods of vLLM's `collective_rpc`, of a worker extension for example, that change no weights."""


def parse_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Validate `kv_connector_extra_config`.

    Raises:
        ConfigError: A key is unknown or its value unusable; names key, value and what is allowed.
    """
    for key, value in extra.items():
        _refuse_unknown(key, value)
    _bool(extra, "offload_prompt_only", True)  # vLLM reads it, and takes any text for true
    return ConnectorSettings(
        socket=_socket(extra.get("socket")),
        daemon_uid=_uid(extra.get("daemon_uid")),
        admission=_choice(AdmissionOrder, extra, "admission", AdmissionOrder.PREFIX_FIRST),
        blocks_per_chunk=_positive_int(extra, "blocks_per_chunk", 1),
        gpu_pin=_choice(GpuPin, extra, "gpu_pin", GpuPin.SOFT),
        lookup_timeout_s=_positive_int(extra, "lookup_timeout_ms", 250) / 1000,
        prefill_tokens_per_s=_positive_int(extra, "prefill_tokens_per_s", 1, int(PREFILL_TOKENS_PER_S[1]))
        if "prefill_tokens_per_s" in extra
        else None,
        weights_fingerprint=_choice(WeightsFingerprint, extra, "weights_fingerprint", WeightsFingerprint.SAMPLED),
        trace_folder=_trace_folder(os.environ.get(_TRACE_VARIABLE, "off")),
        chat_template=_chat_template(extra.get("chat_template")),
        otlp_endpoint=_otlp_endpoint(extra.get("otlp_endpoint")),
        warm_url=_warm_url(extra.get("warm_url")),
        refresh=_bool(extra, "refresh", True),
        safe_rpcs=_names(extra.get("safe_rpcs", [])),
    )


def name_our_spec(extra: MutableMapping[str, Any]) -> None:
    """Point vLLM's spec factory at our spec. Idempotent; needed in every process that builds a spec or its metrics."""
    extra.update(_SPEC_KEYS)


def check_vllm_config(config: "VllmConfig") -> None:
    """Refuse vLLM settings under which nothing could ever be restored, and warn of a harmful one.

    Raises:
        ConfigError: Names the setting and the remedy.
    """
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching",
            False,
            "vLLM",
            "kvtier restores prefixes; start vLLM with --enable-prefix-caching. Where vLLM itself switches that off "
            "(MLA on a CPU without AMX, encoder-decoder models), run without kvtier",
        )
    if getattr(config.parallel_config, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            "nnodes",
            config.parallel_config.nnodes,
            "vLLM",
            "ranks of one engine copy through the memory of one host, and those on another could store and load "
            "nothing; run each engine on one host, or without kvtier",
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales",
            True,
            "vLLM",
            "the scales of KV differ at every start; take them from the checkpoint, or run without kvtier",
        )
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in CRYPTO_HASHES and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "vLLM",
            "its hashes differ at every start, so nothing would be found again; use --prefix-caching-hash-algo sha256, "
            "or set PYTHONHASHSEED to a fixed value",
        )
    if config.kv_transfer_config.kv_load_failure_policy == "fail":
        logger.warning(
            'kvtier: kv_load_failure_policy is "fail": a chunk lost while it is loaded fails its request; set '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )


def _refuse_unknown(key: str, value: object) -> None:
    if key in _OUR_KEYS or key in _VLLM_KEYS:
        return
    if key not in _SPEC_KEYS:
        allowed = ", ".join(sorted(_OUR_KEYS + _VLLM_KEYS))
        raise ConfigError(key, value, _SOURCE, f"unknown key; allowed are {allowed}")
    if value != _SPEC_KEYS[key]:
        raise ConfigError(key, value, _SOURCE, "set by kvtier itself; remove it")


def _socket(value: object) -> Path:
    key, source = ("socket", _SOURCE) if value is not None else (SOCKET_VARIABLE, "environment")
    path = default_socket_path() if value is None else value
    if not isinstance(path, str | Path) or not path:
        raise ConfigError(key, value, source, "must be the path of the daemon's unix socket")
    try:
        return usable_socket_path(path)
    except ValueError as exc:
        raise ConfigError(key, str(path), source, str(exc)) from exc


def _uid(value: object) -> int | None:
    if value is None:
        return default_daemon_uid()
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_UID:
        raise ConfigError("daemon_uid", value, _SOURCE, "must be a uid, a whole number; `id -u NAME` prints it")
    return value


def _trace_folder(text: str) -> Path | None:
    if text.lower() in ("off", ""):
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as exc:
        raise ConfigError(_TRACE_VARIABLE, text, "environment", "~ names no user here; write it out") from exc


def _chat_template(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not value:
        remedy = "must be the path of the file that vLLM got by --chat-template"
        raise ConfigError("chat_template", value, _SOURCE, remedy)
    try:
        path = Path(value).expanduser().absolute()
        path.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as exc:
        remedy = f"cannot be read as text ({exc}); name the file that vLLM got by --chat-template"
        raise ConfigError("chat_template", value, _SOURCE, remedy) from exc
    return path


def _positive_int(extra: Mapping[str, Any], key: str, default: int, most: int | None = None) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or (most is not None and value > most):
        bound = "" if most is None else f", at most {most}"
        raise ConfigError(key, value, _SOURCE, f"must be a positive whole number{bound}")
    return value


def _bool(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    value = extra.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(key, value, _SOURCE, "must be true or false")
    return value


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError("safe_rpcs", value, _SOURCE, 'must be a list of names of methods, like ["my_statistics"]')
    return frozenset(value)


def _warm_url(value: object) -> str | None:
    if value is None:
        return None
    remedy = 'must be the URL of vLLM\'s own API server, like http://127.0.0.1:8000, or "auto"'
    if not isinstance(value, str):
        raise ConfigError("warm_url", value, _SOURCE, remedy)
    if value == AUTO:
        return value
    url = value.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError("warm_url", shown_url(value), _SOURCE, remedy)
    return url


def _otlp_endpoint(value: object) -> str | None:
    if value is None:
        return None
    remedy = "must be the URL of an OTLP collector, like http://127.0.0.1:4317, as for vLLM's --otlp-traces-endpoint"
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        is_usable = (
            parts is not None
            and parts.scheme in ("http", "https", "grpc")
            and bool(parts.hostname)
            and parts.port != 0  # raises for one that is none
        )
    except ValueError:
        is_usable = False
    if not is_usable or not isinstance(value, str):
        raise ConfigError("otlp_endpoint", shown_url(str(value)), _SOURCE, remedy)
    return value


def _choice(kind: type[_Choice], extra: Mapping[str, Any], key: str, default: _Choice) -> _Choice:
    value = extra.get(key, default.value)
    try:
        return kind(value)
    except ValueError as exc:
        names = [repr(mode.value) for mode in kind]
        allowed = f"{', '.join(names[:-1])} or {names[-1]}"
        raise ConfigError(key, value, _SOURCE, f"must be {allowed}") from exc
