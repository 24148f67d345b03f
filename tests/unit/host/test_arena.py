"""The arena, owner side."""

import mmap
import os
import platform
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import HEADER_BYTES, key_tag_of, num_slots_within, overhead_bytes, unpack_header
from kvtier.core.layout import KVLayout
from kvtier.errors import ArenaError, InvalidArgumentError
from kvtier.host.arena import Arena, sweep_arena_directory
from kvtier.host.session_locks import SessionLock
from tests.fakes.chunks import key_of, layout_of


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path / "arena", layout_of(num_ranks=2), 8)
    yield arena
    arena.close(unlink=True)


def stamp(arena: Arena, slot: int, rank: int, *words: int) -> None:
    """Write a stamp through the file, as another process does."""
    offset = HEADER_BYTES + 8 * arena.geometry.stamp_word(slot, rank)
    with arena.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"".join(word.to_bytes(8, "little") for word in words))


def test_the_file_says_what_it_is(arena: Arena) -> None:
    header = arena.path.read_bytes()[:HEADER_BYTES]
    assert unpack_header(header) == arena.geometry
    assert arena.path.name == f"arena-{arena.geometry.arena_id.hex()}"
    assert arena.path.stat().st_size == arena.geometry.file_bytes


@pytest.mark.parametrize("row_bytes", [4096, 65536])
@pytest.mark.parametrize("num_ranks", [1, 2, 40])
def test_an_arena_has_all_rows_that_fit(row_bytes: int, num_ranks: int) -> None:
    for limit_bytes in [*range(0, 64 * 4096, 1024), *range(1 << 20, (1 << 20) + 16 * 4096, 512)]:
        num_slots = num_slots_within(limit_bytes, row_bytes, num_ranks)
        assert not num_slots or overhead_bytes(num_slots, num_ranks) + num_slots * row_bytes <= limit_bytes
        assert overhead_bytes(num_slots + 1, num_ranks) + (num_slots + 1) * row_bytes > limit_bytes


def test_a_row_that_does_not_get_its_chunk_says_so_at_its_generation(arena: Arena) -> None:
    tag = key_tag_of(key_of(1))
    with ArenaMap(arena.path, arena.geometry.arena_id) as seen:
        arena.set_generation(3, 5)
        assert not seen.is_readable(3, tag, 5)
        assert not seen.is_readable(3, tag, 6), "its load has yet to begin"
        arena.refuse(3, 6)
        with pytest.raises(ArenaError, match="slot 3 does not get the chunk"):
            seen.is_readable(3, tag, 6)
        assert not seen.is_readable(3, tag, 7), "what comes next is not refused with it"
        with pytest.raises(ArenaError, match="slot 3"):
            seen.is_readable(3, tag, 4)
        arena.set_generation(3, 7)
        arena.commit(3, key_of(1), 7, 99)
        assert seen.is_readable(3, tag, 7)
        assert not seen.is_readable(3, tag + 1, 7)
    assert arena.entries()[3].committed


def test_only_the_owner_reaches_the_file_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        arena = Arena.create(tmp_path / "arena", layout_of(), 1)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(arena.path.parent.stat().st_mode) == 0o700
    arena.close(unlink=True)


def test_a_shortened_file_is_noticed_never_lengthened_and_can_be_abandoned(arena: Arena) -> None:
    """Pages of a later row brought the file's length back, and zeros where the table said that chunks were."""
    arena.back([0, 1])
    assert arena.is_whole
    os.truncate(arena.path, arena.geometry.row_offset(1))
    assert not arena.is_whole
    arena.back([5])
    assert arena.path.stat().st_size == arena.geometry.row_offset(1)
    arena.abandon()
    assert not arena.path.exists()
    assert bytes(arena.payload(1, 0)[0]) == bytes(arena.layout.group(0).useful_bytes), "to touch it is harmless"
    arena.set_generation(7, 3)
    assert (arena.generation(7), arena.entries()[0].generation) == (3, 0)


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 14), reason="the kernel has no such call"
)
def test_writing_populated_rows_faults_no_more(tmp_path: Path) -> None:
    """The faults of a new arena's pages took longer than decoding into them, and the decoder's time."""
    arena = Arena.create(tmp_path, layout_of(useful_bytes=2**20), 4)
    arena.back([2, 1])
    arena.payload(1, 0)[0][:5] = b"hello"
    arena.populate([1, 2])
    assert bytes(arena.payload(1, 0)[0][:5]) == b"hello"
    written = b"\1" * 2**20
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for slot in (1, 2):
        arena.payload(slot, 0)[0][:] = written
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 2**20 // mmap.PAGESIZE
    arena.close(unlink=True)


def test_only_the_slot_table_has_pages_at_first(arena: Arena) -> None:
    assert arena.path.stat().st_blocks * 512 == arena.geometry.rows_offset


def test_backing_allocates_rows_and_unbacking_releases_them(arena: Arena) -> None:
    empty = arena.path.stat().st_blocks
    assert arena.back([0, 3, 5]) == 3
    assert (arena.path.stat().st_blocks - empty) * 512 == 3 * arena.geometry.row_bytes
    arena.payload(3, 0)[0][:5] = b"hello"
    assert arena.back([3]) == 1
    assert bytes(arena.payload(3, 0)[0][:5]) == b"hello"
    arena.unback([0, 3, 5])
    assert arena.path.stat().st_blocks == empty
    assert bytes(arena.payload(3, 0)[0][:5]) == b"\0" * 5


def test_a_slot_starts_at_generation_0(arena: Arena) -> None:
    assert [arena.generation(slot) for slot in range(8)] == [0] * 8
    arena.set_generation(2, 2**64 - 1)
    assert [arena.generation(slot) for slot in (1, 2, 3)] == [0, 2**64 - 1, 0]


def test_stamps_agree_when_every_rank_wrote_what_was_granted(arena: Arena) -> None:
    key = key_of(1)
    arena.set_generation(4, 7)
    assert not arena.stamps_agree(4, key, 7)
    stamp(arena, 4, 0, key_tag_of(key), 7, 1000)
    assert not arena.stamps_agree(4, key, 7)
    stamp(arena, 4, 1, key_tag_of(key), 7, 1000)
    assert arena.stamps_agree(4, key, 7)
    assert not arena.stamps_agree(4, key, 8)
    assert not arena.stamps_agree(4, key_of(2), 7)
    assert not arena.stamps_agree(3, key, 7)


@pytest.mark.parametrize("wrong", [(1, 7, 1000), (0, 6, 1000), (0, 7, 999), (0, 7, 500), (0, 0, 0)])
def test_one_wrong_word_of_one_rank_is_seen(arena: Arena, wrong: tuple[int, int, int]) -> None:
    key = key_of(1)
    tag_error, generation, length = wrong
    stamp(arena, 0, 0, key_tag_of(key), 7, 1000)
    stamp(arena, 0, 1, key_tag_of(key) ^ tag_error, generation, length)
    assert not arena.stamps_agree(0, key, 7)


def test_a_group_has_its_own_length(arena: Arena) -> None:
    key = key_of(1, group_idx=1)
    for rank in range(2):
        stamp(arena, 0, rank, key_tag_of(key), 1, 500)
    assert arena.stamps_agree(0, key, 1)


def test_a_new_generation_clears_all_stamps_of_its_slot_only(arena: Arena) -> None:
    key = key_of(1)
    for slot in (2, 3, 4):
        for rank in range(2):
            stamp(arena, slot, rank, key_tag_of(key), 1, 1000)
    arena.set_generation(3, 2)
    assert [arena.stamps_agree(slot, key, 1) for slot in (2, 3, 4)] == [True, False, True]


def test_ranks_that_do_not_write_do_not_stamp(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, layout_of(num_ranks=4, num_writers=1), 1)
    key = key_of(1)
    stamp(arena, 0, 0, key_tag_of(key), 1, 1000)
    assert arena.stamps_agree(0, key, 1)
    assert [view.nbytes for view in arena.payload(0, 0)] == [1000]
    arena.close(unlink=True)


def test_a_payload_is_the_useful_part_of_each_rank(arena: Arena) -> None:
    arena.back([1])
    for group_idx, size in ((0, 1000), (1, 500)):
        for rank, view in enumerate(arena.payload(1, group_idx)):
            assert view.nbytes == size
            view[:] = bytes([10 * group_idx + rank + 1]) * size
    row = arena.path.read_bytes()[arena.geometry.row_offset(1) :][: arena.geometry.row_bytes]
    assert row[:1000] == b"\x0b" * 500 + b"\x01" * 500
    assert row[1100:2100] == b"\x0c" * 500 + b"\x02" * 500
    assert not any(row[1000:1100] + row[2100:])


@pytest.mark.parametrize("slot", [-1, 8, 2**40])
def test_a_slot_outside_the_arena_is_refused(arena: Arena, slot: int) -> None:
    for call in (
        lambda: arena.generation(slot),
        lambda: arena.set_generation(slot, 1),
        lambda: arena.stamps_agree(slot, key_of(1), 1),
        lambda: arena.payload(slot, 0),
        lambda: arena.back([slot]),
        lambda: arena.unback([slot]),
    ):
        with pytest.raises(InvalidArgumentError):
            call()


def test_close_is_safe_while_views_are_used(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, layout_of(), 1)
    arena.back([0])
    view = arena.payload(0, 0)[0]
    arena.close(unlink=True)
    arena.close(unlink=True)
    view[:] = b"\x05" * 1000
    assert bytes(view) == b"\x05" * 1000
    assert not arena.path.exists()


def test_close_without_views_unmaps(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, layout_of(), 1)
    arena.close(unlink=False)
    assert arena.path.name not in Path("/proc/self/maps").read_text()
    assert arena.path.exists()


def test_close_ends_the_file_descriptor(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, layout_of(), 1)
    assert str(arena.path) in open_files()
    arena.close(unlink=False)
    assert str(arena.path) not in open_files()


def test_a_file_with_descriptor_0_ends_like_any_other(tmp_path: Path) -> None:
    """A daemon that was started without stdin opens its first file as that."""
    stdin = os.dup(0)
    os.close(0)
    try:
        arena = Arena.create(tmp_path, layout_of(), 1)
        assert os.readlink("/proc/self/fd/0") == str(arena.path)  # noqa: PTH115 (a text, as in open_files)
        arena.close(unlink=False)
        assert str(arena.path) not in open_files()
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def open_files() -> list[str]:
    paths = Path("/proc/self/fd").iterdir()
    return [str(path.readlink()) for path in paths if path.is_symlink()]


def test_another_process_keeps_its_mapping_after_unlink(arena: Arena) -> None:
    arena.back([0])
    with arena.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as other:
        arena.payload(0, 0)[0][:2] = b"hi"
        arena.close(unlink=True)
        assert other[arena.geometry.row_offset(0) :][:2] == b"hi"


def test_an_arena_that_cannot_be_mapped_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArenaError):
        Arena.create(tmp_path, KVLayout(num_ranks=1, rank_bytes=2**40, num_writers=1, groups=layout_of().groups), 2**24)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArenaError, match=r"check host\.arena_dir"):
        Arena.create(tmp_path / "file", layout_of(), 1)


def test_sweep_removes_what_a_previous_daemon_left_but_not_the_daemon_lock(tmp_path: Path) -> None:
    sweep_arena_directory(tmp_path / "none")
    Arena.create(tmp_path, layout_of(), 1).close(unlink=False)
    SessionLock.create(tmp_path, "s1")
    (tmp_path / "daemon.lock").touch()
    sweep_arena_directory(tmp_path)
    assert os.listdir(tmp_path) == ["daemon.lock"]  # noqa: PTH208
