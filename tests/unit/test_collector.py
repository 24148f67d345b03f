"""The collector is off while an index is built, and only then."""

import gc

import pytest

from kvtier.collector import collector_off


def _fail_while_it_is_off() -> None:
    with collector_off():
        assert not gc.isenabled()
        raise ValueError("told")


def test_it_is_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="told"):
        _fail_while_it_is_off()
    assert gc.isenabled()


def test_blocks_may_nest() -> None:
    with collector_off():
        with collector_off():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block has not ended"
    assert gc.isenabled()


def test_who_switched_it_off_before_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
