"""What a request may ask of kvtier: read as written, or refused by the name of the field, whatever it is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.requests.request_instructions import Breakpoint, RequestInstructions, read_instructions
from kvtier.errors import InvalidArgumentError

WHERE = "kv_transfer_params.kvtier"
OWNER = "0123456789abcdef"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"pin": True}, RequestInstructions(pins=True)),
        ({"pin": "support/v2"}, RequestInstructions(pins=True, name="support/v2")),
        ({"pin": True, "ttl": 300}, RequestInstructions(pins=True, ttl_s=300)),
        ({"pin": True, "ttl": "5m"}, RequestInstructions(pins=True, ttl_s=300)),
        ({"pin": True, "ttl": "24h", "priority": -100}, RequestInstructions(pins=True, ttl_s=86400, priority=-100)),
        ({"pin": True, "ttl": "never"}, RequestInstructions(pins=True, ttl_s=0)),
        ({"no_store": True}, RequestInstructions(no_store=True)),
        ({"no_store": False, "pin": True}, RequestInstructions(pins=True)),
        ({"owner": OWNER}, RequestInstructions(owner=OWNER)),
        ({"owner": ""}, RequestInstructions()),
        ({"no_store": False}, RequestInstructions()),
        ({"report": True}, RequestInstructions(report=True)),
        ({"report": True, "no_store": True}, RequestInstructions(report=True, no_store=True)),
        ({"pin": True, "ttl": 1}, RequestInstructions(pins=True, ttl_s=1)),
        ({"pin": True, "ttl": 3_153_600_000}, RequestInstructions(pins=True, ttl_s=3_153_600_000)),
        ({"pin": True, "priority": 0}, RequestInstructions(pins=True, priority=0)),
        ({"pin": "a" * 128}, RequestInstructions(pins=True, name="a" * 128)),
        (
            {"breakpoints": [{"num_tokens": 1}, {"num_tokens": 2**20, "ttl_s": 3_153_600_000}], "priority": -1},
            RequestInstructions(
                pins=True,
                priority=-1,
                breakpoints=(
                    Breakpoint(num_tokens=1, ttl_s=3600),
                    Breakpoint(num_tokens=2**20, ttl_s=3_153_600_000),
                ),
            ),
        ),
    ],
)
def test_what_may_be_asked(value: Any, expected: RequestInstructions) -> None:
    assert read_instructions(value) == expected


def test_breakpoints_come_in_order_each_length_once_with_the_longer_ttl() -> None:
    breakpoints = [
        {"num_tokens": 90, "ttl_s": 300},
        {"num_tokens": 20, "ttl_s": 3600},
        {"num_tokens": 90, "ttl_s": 0},
        {"num_tokens": 50},
    ]
    read = read_instructions({"breakpoints": breakpoints, "owner": OWNER, "ttl": 60})
    assert read.pins
    assert read.breakpoints == (
        Breakpoint(num_tokens=20, ttl_s=3600),
        Breakpoint(num_tokens=50, ttl_s=60),
        Breakpoint(num_tokens=90, ttl_s=0),
    )


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, WHERE),
        ({}, WHERE),
        ([], WHERE),
        ("pin", WHERE),
        ({"pinn": True}, WHERE),
        ({"pin": True, 7: 1}, WHERE),
        ({str(number): number for number in range(1_000_000)}, WHERE),
        ({"pin": False}, f"{WHERE}.pin"),
        ({"pin": 1}, f"{WHERE}.pin"),
        ({"pin": "-rm"}, f"{WHERE}.pin"),
        ({"pin": "a" * 200}, f"{WHERE}.pin"),
        ({"pin": ["a"] * 1_000_000}, f"{WHERE}.pin"),
        ({"pin": True, "ttl": 0}, f"{WHERE}.ttl"),
        ({"pin": True, "ttl": True}, f"{WHERE}.ttl"),
        ({"pin": True, "ttl": 1.5}, f"{WHERE}.ttl"),
        ({"pin": True, "ttl": "soon"}, f"{WHERE}.ttl"),
        ({"pin": True, "ttl": 10**400}, f"{WHERE}.ttl"),
        ({"ttl": 300}, f"{WHERE}.ttl"),
        ({"pin": True, "ttl": 3_153_600_001}, f"{WHERE}.ttl"),
        ({"ttl": 300, "no_store": True}, f"{WHERE}.ttl"),
        ({"priority": 0}, f"{WHERE}.priority"),
        ({"pin": "auto-1"}, f"{WHERE}.pin"),
        ({"pin": "a" * 129}, f"{WHERE}.pin"),
        ({"pin": ""}, f"{WHERE}.pin"),
        ({"breakpoints": [{"num_tokens": 5}], "no_store": True}, f"{WHERE}.no_store"),
        ({"breakpoints": [{"num_tokens": 2**20 + 1}]}, f"{WHERE}.breakpoints[0].num_tokens"),
        ({"breakpoints": [{"num_tokens": 5}, {"num_tokens": True}]}, f"{WHERE}.breakpoints[1].num_tokens"),
        ({"breakpoints": [{"num_tokens": 5, "ttl_s": 3_153_600_001}]}, f"{WHERE}.breakpoints[0].ttl_s"),
        ({"breakpoints": [{"num_tokens": 5}, {}]}, f"{WHERE}.breakpoints[1]"),
        ({"priority": 1, "no_store": True}, f"{WHERE}.priority"),
        ({"pin": True, "priority": 1}, f"{WHERE}.priority"),
        ({"pin": True, "priority": -101}, f"{WHERE}.priority"),
        ({"pin": True, "priority": "high"}, f"{WHERE}.priority"),
        ({"pin": True, "no_store": True}, f"{WHERE}.no_store"),
        ({"no_store": 1}, f"{WHERE}.no_store"),
        ({"report": "yes"}, f"{WHERE}.report"),
        ({"pin": True, "owner": "ABCDEF0123456789"}, f"{WHERE}.owner"),
        ({"pin": True, "owner": 5}, f"{WHERE}.owner"),
        ({"breakpoints": []}, f"{WHERE}.breakpoints"),
        ({"breakpoints": {}}, f"{WHERE}.breakpoints"),
        ({"breakpoints": [{"num_tokens": 5}] * 5}, f"{WHERE}.breakpoints"),
        ({"breakpoints": [5]}, f"{WHERE}.breakpoints[0]"),
        ({"breakpoints": [{"num_tokens": 5}, {"ttl_s": 5}]}, f"{WHERE}.breakpoints[1].num_tokens"),
        ({"breakpoints": [{"num_tokens": 0}]}, f"{WHERE}.breakpoints[0].num_tokens"),
        ({"breakpoints": [{"num_tokens": 5, "ttl_s": -1}]}, f"{WHERE}.breakpoints[0].ttl_s"),
        ({"breakpoints": [{"num_tokens": 5, "ttl": 5}]}, f"{WHERE}.breakpoints[0]"),
    ],
)
def test_what_may_not_is_refused_by_field(value: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_instructions(value)
    assert refused.value.field == field
    assert len(str(refused.value)) < 1000


def test_four_breakpoints_are_the_most() -> None:
    four = [{"num_tokens": number} for number in (4, 3, 2, 1)]
    assert [each.num_tokens for each in read_instructions({"breakpoints": four}).breakpoints] == [1, 2, 3, 4]
    with pytest.raises(InvalidArgumentError, match=r"5 of them.*at most 4"):
        read_instructions({"breakpoints": [*four, {"num_tokens": 5}]})


def test_an_unknown_key_is_named_with_those_that_are_known() -> None:
    known = "pin, ttl, priority, no_store, report, breakpoints, owner"
    with pytest.raises(InvalidArgumentError, match=f"nostore.*use {known}"):
        read_instructions({"pin": True, "nostore": True})


KEYS = ["pin", "ttl", "priority", "no_store", "report", "breakpoints", "owner", "num_tokens", "ttl_s"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["5m", "\ud800", OWNER])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner),
    max_leaves=20,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS[:7]), anything, max_size=6) | anything)
def test_whatever_a_client_sends_is_read_or_refused(value: object) -> None:
    refused: InvalidArgumentError | None = None
    try:
        read = read_instructions(value)
    except InvalidArgumentError as error:
        refused = error
    if refused is not None:
        assert refused.field.startswith(WHERE)
        assert len(str(refused).encode()) <= 2000
    else:
        assert read.ttl_s >= 0
        assert len(read.breakpoints) <= 4
        assert not (read.no_store and read.pins)
