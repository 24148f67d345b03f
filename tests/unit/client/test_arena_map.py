import ctypes
import fcntl
from pathlib import Path

import pytest

from kvtier.client.arena_map import ArenaMap, SessionLockHolder, Stamp
from kvtier.core.arena_format import ArenaGeometry
from kvtier.errors import ArenaError
from tests.fakes.arena_file import set_generation, write_arena


def test_rows_stamps_and_generations_are_where_the_format_says(tmp_path: Path, geometry: ArenaGeometry) -> None:
    path = tmp_path / "arena"
    write_arena(path, geometry)
    set_generation(path, geometry, 3, 7)
    with ArenaMap(path, geometry.arena_id) as arena:
        assert arena.generation(3) == 7
        ctypes.memmove(arena.row_address(3) + 10, b"hello", 5)
        arena.stamp(3, rank=1, key_tag=11, generation=7, length=13)
        assert arena.stamp_of(3, 1) == Stamp(11, 7, 13)
        assert arena.stamp_of(3, 0) == Stamp(0, 0, 0)
    assert path.read_bytes()[geometry.row_offset(3) + 10 :][:5] == b"hello"


def test_another_arena_under_the_same_path_is_refused(tmp_path: Path, geometry: ArenaGeometry) -> None:
    path = tmp_path / "arena"
    write_arena(path, geometry)
    with pytest.raises(ArenaError, match=r"is arena 4141.*, not 4242"):
        ArenaMap(path, b"B" * 16)


def test_a_truncated_arena_is_refused(tmp_path: Path, geometry: ArenaGeometry) -> None:
    path = tmp_path / "arena"
    write_arena(path, geometry)
    with path.open("r+b") as file:
        file.truncate(geometry.file_bytes - 1)
    with pytest.raises(ArenaError, match="asks for"):
        ArenaMap(path, geometry.arena_id)


def test_an_arena_that_is_truncated_later_is_noticed_before_it_is_touched(
    tmp_path: Path, geometry: ArenaGeometry
) -> None:
    """To touch what is gone would be SIGBUS, in vLLM's process."""
    path = tmp_path / "arena"
    write_arena(path, geometry)
    with ArenaMap(path, geometry.arena_id) as arena:
        arena.check_length()
        with path.open("r+b") as file:
            file.truncate(0)
        path.unlink()
        with pytest.raises(ArenaError, match=rf"has 0 of {geometry.file_bytes} bytes: it was shortened"):
            arena.check_length()
        with pytest.raises(ArenaError, match="shortened"):
            arena.backings()


def test_a_missing_arena_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"cannot open arena .* as uid \d+; run vLLM and kvtier-daemon as one user"):
        ArenaMap(tmp_path / "none", b"A" * 16)


def test_slots_out_of_range_are_refused(tmp_path: Path, geometry: ArenaGeometry) -> None:
    path = tmp_path / "arena"
    write_arena(path, geometry)
    with ArenaMap(path, geometry.arena_id) as arena, pytest.raises(ArenaError, match="has 64 slots"):
        arena.row_address(64)


def test_session_lock_keeps_the_daemon_out_while_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as daemon_side:
        with SessionLockHolder(path), pytest.raises(BlockingIOError):
            fcntl.flock(daemon_side, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(daemon_side, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_session_lock_of_an_ended_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="the session has ended"):
        SessionLockHolder(tmp_path / "gone").acquire()
    path = tmp_path / "lock"
    path.touch()
    with path.open() as daemon_side:
        fcntl.flock(daemon_side, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ArenaError, match="the session has ended"):
            SessionLockHolder(path).acquire()
