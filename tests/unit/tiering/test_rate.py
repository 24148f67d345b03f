from kvtier.tiering.promotion.rate import Rate

MIB = 1024**2


def test_transfers_that_overlap_share_the_time() -> None:
    """Each of two readers at 50 MiB/s was taken for the whole: 200 MiB/s, and requests waited for what never came."""
    rate = Rate()
    rate.began(0.0)
    rate.began(0.0)
    rate.moved(8 * MIB, 0.08)
    rate.moved(8 * MIB, 0.16)
    rate.ended(0.16)
    rate.ended(0.16)
    assert round(rate.per_s / MIB) == 100


def test_idle_time_does_not_count() -> None:
    rate = Rate()
    for start_s in (0.0, 1000.0):
        rate.began(start_s)
        rate.moved(8 * MIB, start_s + 0.08)
        rate.ended(start_s + 0.08)
    assert round(rate.per_s / MIB) == 100


def test_tiny_transfers_gather_before_they_count() -> None:
    """A promotion of one chunk of 6 kB measured the cost of a thread switch."""
    rate = Rate()
    rate.began(0.0)
    rate.moved(6000, 0.01)
    rate.ended(0.01)
    assert rate.per_s == 0
    rate.began(1.0)
    rate.moved(8 * MIB, 1.07)
    rate.ended(1.07)
    assert 95 < rate.per_s / MIB < 105


def test_before_the_first_window_what_was_seen_counts() -> None:
    rate = Rate()
    rate.began(0.0)
    rate.moved(2 * MIB, 0.02)
    assert round(rate.per_s / MIB) == 100
