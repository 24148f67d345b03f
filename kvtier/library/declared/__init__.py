"""Prompts that are declared in YAML files: read, compared with what the daemon has, and applied."""

from kvtier.library.declared.applied import AppliedSet, RefusedPrompt
from kvtier.library.declared.applied_json import applied_to_jsonable, failure_to_jsonable, mistakes_to_jsonable
from kvtier.library.declared.apply_flow import ApplyFlow
from kvtier.library.declared.difference import Change, ChangeKind, source_diff
from kvtier.library.declared.documents import DeclaredError, DeclaredErrors
from kvtier.library.declared.entries import DeclaredPrompt
from kvtier.library.declared.export import declared_yaml
from kvtier.library.declared.file_schema import json_schema
from kvtier.library.declared.files import DeclaredSet, read_declared, read_declared_text

__all__ = [
    "AppliedSet",
    "ApplyFlow",
    "Change",
    "ChangeKind",
    "DeclaredError",
    "DeclaredErrors",
    "DeclaredPrompt",
    "DeclaredSet",
    "RefusedPrompt",
    "applied_to_jsonable",
    "declared_yaml",
    "failure_to_jsonable",
    "json_schema",
    "mistakes_to_jsonable",
    "read_declared",
    "read_declared_text",
    "source_diff",
]
