"""fsck for tests of everything else: whatever was done to a daemon, its directory must be clean afterwards."""

from pathlib import Path

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.maintenance import Finding, Report
from kvtier.maintenance.offline import check_offline


def check(state_dir: Path, *, repair: bool = False, deep: bool = True) -> Report:
    """Check a directory that no daemon uses."""
    return check_offline(state_dir, repair=repair, deep=deep)


def assert_clean(state_dir: Path, *, deep: bool = True) -> Report:
    """Fail unless ledger and packs agree and, with `deep`, every chunk reads right. No daemon may run on it."""
    report = check(state_dir, deep=deep)
    assert not report.remaining, "\n".join(as_line(finding) for finding in report.remaining)
    return report


async def assert_clean_online(stub: cache_pb2_grpc.CacheServiceStub, *, deep: bool = True) -> cache_pb2.FsckReport:
    """Fail unless a running daemon finds itself in order."""
    report: cache_pb2.FsckReport = await stub.Fsck(cache_pb2.FsckRequest(deep=deep))
    wrong = [finding for finding in report.findings if not finding.code.startswith("note-")]
    assert not wrong, str(wrong)
    return report


def as_line(finding: Finding) -> str:
    """Return a finding as one line."""
    return f"{finding.code} {finding.subject}: {finding.detail}"
