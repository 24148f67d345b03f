"""Places: a caller's share, all together, and what is free again."""

import pytest

from kvtier.access.caller_shares import CallerShares
from kvtier.errors import TooManyCallsError, TooManyWatchersError


def test_a_caller_has_its_share_and_all_together_the_whole() -> None:
    places = CallerShares("calls run", 3, 2)
    places.take("a")
    places.take("a")
    with pytest.raises(TooManyCallsError, match="2 calls run for this caller, and no more may; try again"):
        places.take("a")
    places.take("b")
    with pytest.raises(TooManyCallsError, match="3 calls run, and no more may; try again"):
        places.take("c")
    places.free("a")
    places.take("c")
    assert len(places) == 3


def test_callers_that_nothing_tells_apart_have_no_share() -> None:
    places = CallerShares("calls run", 3, 1)
    for _ in range(3):
        places.take("")
    with pytest.raises(TooManyCallsError):
        places.take("")


def test_a_place_is_free_after_the_block_however_it_ends_and_none_is_kept_in_mind() -> None:
    places = CallerShares("clients watch", 1, 1, TooManyWatchersError)
    with places.holding("a"), pytest.raises(TooManyWatchersError), places.holding("b"):
        pass
    with pytest.raises(ZeroDivisionError), places.holding("a"):
        raise ZeroDivisionError
    assert not places
    assert not places._held


def test_places_that_are_taken_one_after_the_other_are_free_after_the_block() -> None:
    places = CallerShares("bytes are held", 12, 8)
    with places.taking("a") as take:
        take(5)
        take(3)
        with pytest.raises(TooManyCallsError, match="8 bytes are held for this caller, and no more may"):
            take(1)
        with places.taking("b") as take_too, pytest.raises(TooManyCallsError, match="12 bytes are held, and no more"):
            take_too(5)
        assert len(places) == 8
    assert not places
    assert not places._held
