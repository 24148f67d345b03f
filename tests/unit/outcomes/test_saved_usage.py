"""What pins saved, in a file that anything may have happened to: what cannot be read costs the counts."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.outcomes.pin_usage import PinUsage
from kvtier.outcomes.recent_requests import EndedRequest
from kvtier.outcomes.saved_usage import FILE_NAME, MAX_BYTES, SavedUsage, encoded

USAGE = PinUsage(
    num_hits=3,
    last_hit_unix_s=1e9,
    last_used_unix_s=1.1e9,
    device_tokens=1,
    host_tokens=2,
    disk_tokens=3,
    saved_prefill_s=0.25,
    others=Counter({RequestOutcome.DIVERGED: 2}),
)


def ended(outcome: RequestOutcome = RequestOutcome.HIT, **fields: int | float) -> EndedRequest:
    usual: dict[str, int] = {"prompt_tokens": 100, "shared_tokens": 48, "device_tokens": 0, "host_tokens": 0}
    return EndedRequest(
        request_id="r", outcome=outcome, pin_id="p", namespace_id="n",
        **{"disk_tokens": 0, "ended_unix_s": 5.0, **usual, **fields},  # type: ignore[arg-type]
    )  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    saved = SavedUsage(tmp_path)
    assert saved.load() == {}
    saved.write({"p": encoded(USAGE)})
    assert saved.load() == {"p": USAGE}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"pins": {"p": {"num_hits": -1}}}'),
        lambda path: path.write_text(path.read_text().replace("diverged", "odd")),
        lambda path: path.write_text(path.read_text().replace("0.25", "NaN")),
        lambda path: os.truncate(path, MAX_BYTES + 1),
    ],
)
def test_a_damaged_file_is_removed(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    saved = SavedUsage(tmp_path)
    saved.write({"p": encoded(USAGE)})
    damage(tmp_path / FILE_NAME)
    assert saved.load() == {}
    assert not (tmp_path / FILE_NAME).exists()


def test_tokens_behind_the_pin_are_not_the_pins(tmp_path: Path) -> None:
    usage = PinUsage()
    usage.add(ended(device_tokens=16, host_tokens=40, disk_tokens=8), 10.0)
    assert (usage.device_tokens, usage.host_tokens, usage.disk_tokens, usage.saved_prefill_s) == (16, 32, 0, 3.2)


def test_a_request_that_diverges_does_not_use_the_pin() -> None:
    usage = PinUsage()
    usage.add(ended(RequestOutcome.DIVERGED, host_tokens=16), 10.0)
    assert (usage.num_hits, usage.last_used_unix_s, usage.host_tokens) == (0, 0.0, 16)
    usage.add(ended(RequestOutcome.LATE), 10.0)
    assert (usage.num_hits, usage.last_hit_unix_s, usage.last_used_unix_s) == (0, 0.0, 5.0)
    assert usage.others == {RequestOutcome.DIVERGED: 1, RequestOutcome.LATE: 1}
