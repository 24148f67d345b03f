"""Prompts that are declared in YAML files: read, compared with what the daemon has, and applied."""

from kvtier.library.declared.apply import ApplyFlow, apply_changes
from kvtier.library.declared.difference import Change, ChangeKind
from kvtier.library.declared.documents import DeclaredError, DeclaredErrors
from kvtier.library.declared.export import declared_yaml
from kvtier.library.declared.files import DeclaredPrompt, DeclaredSet, read_declared
from kvtier.library.declared.schema import json_schema

__all__ = [
    "ApplyFlow",
    "Change",
    "ChangeKind",
    "DeclaredError",
    "DeclaredErrors",
    "DeclaredPrompt",
    "DeclaredSet",
    "apply_changes",
    "declared_yaml",
    "json_schema",
    "read_declared",
]
