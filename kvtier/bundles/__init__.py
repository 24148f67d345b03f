"""Bundles: a pinned prompt as one portable, checksummed file. docs/format.md has the bytes."""

from kvtier.bundles.exporting import export_bundle
from kvtier.bundles.importing import import_bundle
from kvtier.bundles.receiving import RequestedImport

__all__ = ["RequestedImport", "export_bundle", "import_bundle"]
