"""kvtier: explicit prompt caching for self-hosted vLLM.

from kvtier import Client

with Client() as client:
    for prompt in client.list():
        print(prompt.name, prompt.state)

docs/python.md shows more. What is exported here is loaded when it is first used: daemon and connector import `kvtier`
too, and need none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.version import __version__

if TYPE_CHECKING:
    from kvtier.client.remote_errors import RemoteError
    from kvtier.errors import KvtierError
    from kvtier.library.async_client import AsyncClient
    from kvtier.library.client import Client
    from kvtier.library.declared import AppliedSet, Change, ChangeKind, DeclaredError, DeclaredErrors, RefusedPrompt
    from kvtier.library.progress_events import CaptureOutcome, Progress, Warmed, WarmResult
    from kvtier.library.values.grant_values import CreatedGrant, Grant
    from kvtier.library.values.outcome_values import (
        ChangeLooksLike,
        Difference,
        Explained,
        Explanation,
        NearBinding,
        NearPrompt,
        OutcomeCount,
        PinUsage,
        RecentRequest,
        RequestOutcome,
    )
    from kvtier.library.values.proof_values import (
        Event,
        Readiness,
        VerifiedNamespace,
        VerifiedTier,
        VerifyReport,
        VerifyResult,
        WaitingPrompt,
    )
    from kvtier.library.values.public_values import (
        Advice,
        AdvisedPrefix,
        Binding,
        ChangingPlace,
        DaemonStatus,
        EngineStatus,
        Evicted,
        FsckFinding,
        FsckReport,
        KeyUsage,
        Namespace,
        NamespaceAdvice,
        PinUse,
        Prompt,
        PromptState,
        Tier,
        Verdict,
    )
    from kvtier.library.values.remote_values import RefusedSharedPin, RemoteHost, RemoteSpending, RemoteStatus
    from kvtier.verification import Comparison, ComparisonVerdict

_PLACES = {
    "kvtier.client.remote_errors": ("RemoteError",),
    "kvtier.errors": ("KvtierError",),
    "kvtier.library.async_client": ("AsyncClient",),
    "kvtier.library.client": ("Client",),
    "kvtier.library.declared": (
        "AppliedSet",
        "Change",
        "ChangeKind",
        "DeclaredError",
        "DeclaredErrors",
        "RefusedPrompt",
    ),
    "kvtier.library.progress_events": ("CaptureOutcome", "Progress", "WarmResult", "Warmed"),
    "kvtier.library.values.grant_values": ("CreatedGrant", "Grant"),
    "kvtier.library.values.outcome_values": (
        "ChangeLooksLike",
        "Difference",
        "Explained",
        "Explanation",
        "NearBinding",
        "NearPrompt",
        "OutcomeCount",
        "PinUsage",
        "RecentRequest",
        "RequestOutcome",
    ),
    "kvtier.library.values.proof_values": (
        "Event",
        "Readiness",
        "VerifiedNamespace",
        "VerifiedTier",
        "VerifyReport",
        "VerifyResult",
        "WaitingPrompt",
    ),
    "kvtier.library.values.public_values": (
        "Advice",
        "AdvisedPrefix",
        "Binding",
        "ChangingPlace",
        "DaemonStatus",
        "EngineStatus",
        "Evicted",
        "FsckFinding",
        "FsckReport",
        "KeyUsage",
        "Namespace",
        "NamespaceAdvice",
        "PinUse",
        "Prompt",
        "PromptState",
        "Tier",
        "Verdict",
    ),
    "kvtier.library.values.remote_values": ("RefusedSharedPin", "RemoteHost", "RemoteSpending", "RemoteStatus"),
    "kvtier.verification": ("Comparison", "ComparisonVerdict"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Advice",
    "AdvisedPrefix",
    "AppliedSet",
    "AsyncClient",
    "Binding",
    "CaptureOutcome",
    "Change",
    "ChangeKind",
    "ChangeLooksLike",
    "ChangingPlace",
    "Client",
    "Comparison",
    "ComparisonVerdict",
    "CreatedGrant",
    "DaemonStatus",
    "DeclaredError",
    "DeclaredErrors",
    "Difference",
    "EngineStatus",
    "Event",
    "Evicted",
    "Explained",
    "Explanation",
    "FsckFinding",
    "FsckReport",
    "Grant",
    "KeyUsage",
    "KvtierError",
    "Namespace",
    "NamespaceAdvice",
    "NearBinding",
    "NearPrompt",
    "OutcomeCount",
    "PinUsage",
    "PinUse",
    "Progress",
    "Prompt",
    "PromptState",
    "Readiness",
    "RecentRequest",
    "RefusedPrompt",
    "RefusedSharedPin",
    "RemoteError",
    "RemoteHost",
    "RemoteSpending",
    "RemoteStatus",
    "RequestOutcome",
    "Tier",
    "Verdict",
    "VerifiedNamespace",
    "VerifiedTier",
    "VerifyReport",
    "VerifyResult",
    "WaitingPrompt",
    "WarmResult",
    "Warmed",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
