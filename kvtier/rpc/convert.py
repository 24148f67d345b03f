"""The service's views as messages of proto/kvtier/v1/cache.proto."""

import os

from kvtier._pb import cache_pb2 as pb
from kvtier.maintenance import Report
from kvtier.prompts.status import BindingView, PromptState, PromptView
from kvtier.rpc.metrics import MetricsState
from kvtier.service import Cache
from kvtier.service.metrics_reading import read_gauges
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.version import __version__

_STATES = {
    PromptState.UNRENDERED: pb.PromptStatus.UNRENDERED,
    PromptState.WAITING: pb.PromptStatus.WAITING,
    PromptState.CAPTURING: pb.PromptStatus.CAPTURING,
    PromptState.DURABLE: pb.PromptStatus.DURABLE,
    PromptState.OVER_QUOTA: pb.PromptStatus.OVER_QUOTA,
}


def prompt_status(view: PromptView, *, with_recipe: bool = True) -> pb.PromptStatus:
    """Return a prompt as a message; recipes may be long, and lists go without."""
    prompt = view.prompt
    return pb.PromptStatus(
        name=prompt.name,
        pin_id=prompt.pin_id,
        pinned=prompt.pinned,
        state=_STATES[view.state],
        model=prompt.model,
        lora_name=prompt.lora_name,
        cache_salt=prompt.cache_salt,
        num_tokens=len(prompt.tokens),
        created_unix_s=prompt.created_unix_s,
        expires_unix_s=prompt.expires_unix_s,
        bindings=[_binding(binding) for binding in view.bindings],
        recipe_json=prompt.recipe_json if with_recipe else "",
        num_engines=view.num_engines,
        num_confirmed=view.num_confirmed,
        tokens_digest=prompt.token_ids.digest,
        error=view.error,
        priority=prompt.priority,
    )


def _binding(view: BindingView) -> pb.PromptBinding:
    return pb.PromptBinding(
        namespace_id=view.namespace_id,
        model=view.model,
        covered_tokens=view.covered_tokens,
        num_chunks=view.num_chunks,
        num_host_chunks=view.num_host_chunks,
        num_durable_chunks=view.num_durable_chunks,
        raw_bytes=view.raw_bytes,
        disk_bytes=view.disk_bytes,
        live=view.live,
        durable_raw_bytes=view.durable_raw_bytes,
        num_shared_chunks=view.num_shared_chunks,
        disk_share_bytes=view.disk_share_bytes,
    )


def daemon_status(cache: Cache, metrics: MetricsState) -> pb.DaemonStatus:
    """Return the whole daemon as a message."""
    gauges = read_gauges(cache)
    return pb.DaemonStatus(
        version=__version__,
        pid=os.getpid(),
        started_unix_s=cache.started_unix_s,
        socket=str(cache.config.server.socket),
        host=pb.TierStatus(
            location=str(cache.config.host.arena_dir),
            used_bytes=gauges.host_pinned_bytes + gauges.host_unpinned_bytes,
            limit_bytes=gauges.host_limit_bytes,
            num_chunks=gauges.host_pinned_chunks + gauges.host_unpinned_chunks,
            pinned_bytes=gauges.host_pinned_bytes,
        ),
        disk=pb.TierStatus(
            location=str(cache.config.disk.disk_dir),
            used_bytes=gauges.disk_used_bytes,
            limit_bytes=gauges.disk_limit_bytes,
            num_chunks=gauges.disk_pinned_chunks + gauges.disk_unpinned_chunks,
            pinned_bytes=gauges.disk_pinned_bytes,
            latched=cache.resources.disk_health.latched,
        ),
        sessions=[_session(session) for session in cache.sessions],
        namespaces=[namespace_status(namespace) for namespace in cache.namespaces.values()],
        num_prompts=gauges.prompts,
        num_pinned=cache.prompts.num_pinned,
        counters=cache.resources.counters.as_dict(),
        store=cache.config.cache.store,
        metrics_url=metrics.url,
        metrics_problem=metrics.problem,
        prompt_bytes=cache.prompts.num_bytes,
    )


def _session(session: Session) -> pb.SessionStatus:
    return pb.SessionStatus(
        session_id=session.session_id,
        engine_id=session.hello.engine_id,
        pid=session.hello.pid,
        namespace_id=session.namespace_id,
        model_names=session.hello.model_names,
        attached_unix_s=session.attached_unix_s,
        num_leases=session.loads.num_leases,
        num_acquires=session.loads.num_acquires,
        num_store_grants=session.stores.num_grants,
        quarantined=session.ended,
    )


def namespace_status(namespace: Namespace, *, with_fingerprint: bool = False) -> pb.NamespaceStatus:
    """Return a namespace as a message; a fingerprint is some kilobytes."""
    return pb.NamespaceStatus(
        namespace_id=namespace.namespace_id,
        model=namespace.row.model,
        num_host_chunks=namespace.table.host.num_chunks,
        num_disk_chunks=namespace.table.disk.num_chunks,
        disk_bytes=namespace.table.disk.num_bytes,
        row_bytes=namespace.layout.row_bytes,
        fingerprint=namespace.fingerprint if with_fingerprint else {},
        live=namespace.live,
    )


def fsck_report(report: Report) -> pb.FsckReport:
    """Return a check's report as a message."""
    findings = [
        pb.FsckFinding(
            code=finding.code,
            subject=finding.subject,
            detail=finding.detail,
            num_chunks=finding.num_chunks,
            repaired=finding.repaired,
        )
        for finding in report.findings
    ]
    return pb.FsckReport(
        findings=findings,
        num_packs=report.num_packs,
        num_chunks=report.num_chunks,
        verified_bytes=report.verified_bytes,
        num_arena_slots=report.num_arena_slots,
    )
