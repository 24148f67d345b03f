"""The collector is off while an index is built, and only then."""

import gc
import weakref

import pytest

import kvtier.collector
from kvtier.collector import freeze_index, gc_paused, thaw_index


def _fail_while_it_is_off() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise ValueError("raised")


def test_it_is_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="raised"):
        _fail_while_it_is_off()
    assert gc.isenabled()


def test_blocks_may_nest() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block has not ended"
    assert gc.isenabled()


def test_who_switched_it_off_before_finds_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Node:
    """Part of a cycle."""

    other: "Node"


def test_what_survives_a_long_round_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    try:
        freeze_index()
        before = gc.get_freeze_count()
        lasting = [[number] for number in range(1000)]
        gc.collect()
        assert gc.get_freeze_count() == before, "a short round leaves all as it is"
        monkeypatch.setattr(kvtier.collector, "_LONG_S", -1.0)
        gc.collect(1)
        assert gc.get_freeze_count() == before, "only full rounds look at everything"
        gc.collect()
        assert gc.get_freeze_count() >= before + len(lasting)
        monkeypatch.setattr(kvtier.collector, "_LONG_S", 1e9)
        one, two = Node(), Node()
        one.other, two.other = two, one
        gone = weakref.ref(one)
        del one, two
        gc.collect()
        assert gone() is None, "garbage that comes later is found"
    finally:
        thaw_index()
    assert gc.get_freeze_count() == 0
    assert kvtier.collector._freeze_survivors not in gc.callbacks
