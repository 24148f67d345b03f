"""Which metrics and labels a PromQL expression names: as much of the language as configs/ uses; nothing is guessed."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
TARGET_LABELS = frozenset({"instance", "job"})
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)"""
    r"""|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},]))"""
)
_GROUPING = frozenset({"by", "without", "on", "ignoring"})
_KEYWORDS = frozenset({"and", "or", "unless", "bool"})


@dataclass
class Used:
    """What an expression names.

    Attributes:
        selectors: Each metric with the (label, operator, value) that it is selected by.
        grouped_by: Labels in `by` and the like.
        functions: Functions and aggregations.
    """

    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    grouped_by: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)


def used_in(expression: str) -> Used:
    """Read an expression.

    Raises:
        ValueError: It is not PromQL, or PromQL that this does not know.
    """
    tokens, used = _tokens(expression), Used()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name" or text in _KEYWORDS:
            continue
        if text in _GROUPING:
            end = tokens.index(("sign", ")"), at)
            used.grouped_by.update(text for kind, text in tokens[at:end] if kind == "name")
            at = end + 1
        elif after == "(" or after in _GROUPING:
            used.functions.add(text)
        elif after == "{":
            end = tokens.index(("sign", "}"), at)
            used.selectors.append((text, _matchers(tokens[at + 1 : end])))
            at = end + 1
        else:
            used.selectors.append((text, []))
    return used


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    if expression.count("(") != expression.count(")"):
        raise ValueError(f"brackets do not match in {expression}")
    while at < len(expression.rstrip()):
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"not PromQL from {expression[at : at + 20]!r} on: {expression}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens


def _matchers(tokens: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    found = []
    for at in range(0, len(tokens), 4):
        (kind, label), (_, operator), (value_kind, value) = tokens[at : at + 3]
        if (kind, value_kind) != ("name", "string") or operator not in ("=", "!=", "=~", "!~"):
            raise ValueError(f"no label matcher: {label} {operator} {value}")
        found.append((label, operator, value.strip('"')))
    return found


def alert_rules() -> list[dict[str, Any]]:
    """Return the rules of configs/prometheus/alerts.yml."""
    document = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return configs/grafana/kvtier.json."""
    found: dict[str, Any] = json.loads((CONFIGS / "grafana" / "kvtier.json").read_text())
    return found


def dashboard_targets() -> Iterator[tuple[str, str]]:
    """Yield expression and legend of every query of the dashboard, its variables filled in as Grafana does."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in (("$__rate_interval", "1m"), ("$__range", "6h"), ("$instance", ".*")):
                expression = expression.replace(variable, value)
            yield expression, target["legendFormat"]


def expressions() -> list[str]:
    """Return every expression of dashboard and alerts."""
    return [rule["expr"] for rule in alert_rules()] + [expression for expression, _ in dashboard_targets()]
