"""What is kept for files on their way, and what the file system has left: always the same together."""

from kvtier.disk.disk_usage import DiskUsage

FREE_BYTES = 1000


def test_writing_a_scratch_file_takes_nothing_more_from_others() -> None:
    """Its space is kept before it is written. What is written counted twice: packs were refused beside an import."""
    usage = DiskUsage(limit_bytes=10 * FREE_BYTES)
    usage.measured(FREE_BYTES)
    with usage.scratch_space() as scratch:
        scratch.keep(600, pack_bytes=150)
        assert usage.shortage(250) == 0
        for written_bytes in (1, 400, 600):
            scratch.grew(written_bytes)
            assert usage.shortage(250) == 0
            assert usage.kept_bytes == 150 + 600 - written_bytes
            usage.measured(FREE_BYTES - written_bytes)
            assert usage.shortage(250) == 0, "the file system says the same"
        assert scratch.shortage(850, pack_bytes=150) == 0, "the file may still become longer"
    assert (usage.kept_bytes, usage.free_bytes) == (0, FREE_BYTES)


def test_space_that_ended_takes_nothing_and_may_be_used_again() -> None:
    usage = DiskUsage(limit_bytes=10 * FREE_BYTES)
    usage.measured(FREE_BYTES)
    scratch = usage.scratch_space()
    for _ in range(2):
        with scratch:
            scratch.keep(600, pack_bytes=150)
            assert usage.shortage(251) == 1
            scratch.grew(400)
        assert (usage.kept_bytes, usage.free_bytes) == (0, FREE_BYTES)
        assert scratch.file_shortage(FREE_BYTES + 1) == 1


def test_packs_that_are_written_one_after_the_other_take_nothing_more_from_others() -> None:
    usage = DiskUsage(limit_bytes=FREE_BYTES)
    usage.measured(FREE_BYTES)
    with usage.promised(300) as space:
        for number in (1, 2):
            space.written(f"p{number}", 140)
            assert usage.shortage(700) == 0
            usage.measured(FREE_BYTES - 140 * number)
            assert usage.shortage(700) == 0, "the file system says the same"
        space.written("p3", 120)  # longer than all that was left
        assert (usage.kept_bytes, usage.used_bytes) == (0, 400)
    assert (usage.kept_bytes, usage.free_bytes, usage.writes) == (0, FREE_BYTES - 400, set())
