"""The ledger: SQLite, the truth for namespaces, prompts, bindings and packs."""

from kvtier.ledger.ledger import Ledger
from kvtier.ledger.promises import Restored
from kvtier.ledger.rows import BindingRow, Labels, LedgerSnapshot, NamespaceRow, Origin, PromptRow
from kvtier.ledger.shared_pins import SENT, SharedPinRow

__all__ = [
    "SENT",
    "BindingRow",
    "Labels",
    "Ledger",
    "LedgerSnapshot",
    "NamespaceRow",
    "Origin",
    "PromptRow",
    "Restored",
    "SharedPinRow",
]
