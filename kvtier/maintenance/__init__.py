"""Reconciling what the ledger, the packs and memory say: `kvtier fsck`, with a daemon and without one."""

from kvtier.maintenance.findings import Code, Finding, Report

__all__ = ["Code", "Finding", "Report"]
