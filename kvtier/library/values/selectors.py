"""Label selectors, as in Kubernetes: `team=support,tier!=1,canary,!draft`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.core.limits import LABEL_KEY, LABEL_VALUE
from kvtier.errors import InvalidArgumentError

_TERM = re.compile(rf"\s*(?:(!)\s*)?({LABEL_KEY.pattern})\s*(?:(==|=|!=)\s*({LABEL_VALUE.pattern}))?\s*")


@dataclass(frozen=True)
class Selector:
    """All terms have to hold. A term is (key, value or None for any, whether it shall be so).

    `key!=value` holds for labels without the key, too.
    """

    terms: tuple[tuple[str, str | None, bool], ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels are selected."""
        return all(self._holds(labels, *term) for term in self.terms)

    @staticmethod
    def _holds(labels: Mapping[str, str], key: str, value: str | None, is_wanted: bool) -> bool:
        has_it = key in labels if value is None else labels.get(key) == value
        return has_it is is_wanted


def parse_selector(field: str, *texts: str) -> Selector:
    """Read selectors, all of which have to hold.

    Raises:
        InvalidArgumentError: One is none.
    """
    terms = []
    for text in texts:
        for part in text.split(","):
            match = _TERM.fullmatch(part)
            if match is None or (match[1] and match[3]):
                raise InvalidArgumentError(field, text, "write label selectors like team=support,tier!=1,canary,!draft")
            terms.append((match[2], match[4], not match[1] and match[3] != "!="))
    return Selector(tuple(terms))
