from kvtier.disk.tier_health import FAILURES_IN_A_ROW, FIRST_PROBE_S, LAST_PROBE_S, Latch, TierHealth


def broken(kind: str = "write", *, full: bool = False) -> TierHealth:
    health = TierHealth()
    assert [health.failed(kind, "EIO", 100.0, full=full) for _ in range(FAILURES_IN_A_ROW)] == [False, False, True]
    return health


def test_failures_in_a_row_latch_once() -> None:
    health = broken()
    assert (health.latch, health.readable, health.writable) == (Latch.OFF, False, False)
    assert not health.failed("write", "EIO", 101.0), "said once"


def test_a_success_between_keeps_it_open() -> None:
    health = TierHealth()
    for _ in range(10):
        assert not health.failed("write", "EIO", 0.0)
        assert not health.failed("write", "EIO", 0.0)
        health.succeeded("write")
    assert health.latch is Latch.OPEN


def test_reads_that_work_do_not_hide_writes_that_fail() -> None:
    health = TierHealth()
    for _ in range(FAILURES_IN_A_ROW):
        health.failed("write", "EIO", 0.0)
        health.succeeded("read")
    assert health.latch is Latch.OFF


def test_a_full_disk_is_read() -> None:
    health = broken(full=True)
    assert (health.readable, health.writable) == (True, False)
    for _ in range(FAILURES_IN_A_ROW):
        health.failed("read", "EIO", 0.0)
    assert health.latch is Latch.OFF, "until reading fails too"


def test_probes_come_less_and_less_often() -> None:
    health, now_s, waits = broken(), 100.0, []
    for _ in range(8):
        waits.append(health.probe_in_s(now_s))
        now_s += waits[-1]
        health.probe_failed("EIO", now_s)
    assert waits[:3] == [FIRST_PROBE_S, 2 * FIRST_PROBE_S, 4 * FIRST_PROBE_S]
    assert waits[-1] == LAST_PROBE_S


def test_a_disk_that_takes_the_probe_and_no_pack_does_not_flap() -> None:
    """Latch, probe, three failures, latch, every few seconds for ever."""
    health = broken(full=True)
    waits = []
    for _ in range(6):
        health.probe_succeeded()
        assert health.writable
        assert health.failed("write", "ENOSPC", 200.0, full=True), "on probation one failure is enough"
        waits.append(health.probe_in_s(200.0))
    assert waits == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    health.probe_succeeded()
    health.succeeded("write")
    assert not health.failed("write", "ENOSPC", 300.0, full=True), "a pack was written: trusted again"
