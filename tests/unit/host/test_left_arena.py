"""An arena that outlives its daemon: what it states of its rows, and which files are taken over at all."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import FORMAT_VERSION, HEADER_BYTES, pack_header
from kvtier.core.layout import KVLayout
from kvtier.errors import ArenaError
from kvtier.host.arena import Arena, left_arenas, left_header
from kvtier.pages import PageOps
from tests.fakes.chunks import key_of, layout_of

LAYOUT = layout_of(num_ranks=2)
NAMESPACE = "0123456789abcdef" * 2
KEY = key_of(1)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """An arena of 4 slots; slot 1 is committed at generation 6."""
    arena = Arena.create(tmp_path, LAYOUT, 4, namespace_id=NAMESPACE)
    arena.back([1, 2])
    arena.set_generation(1, 6)
    arena.commit(1, KEY, 6, 77)
    arena.close(unlink=False)
    return arena.path


def test_what_was_committed_is_there_again(left: Path) -> None:
    assert left_arenas(left.parent) == [left]
    assert left_header(left).namespace_id == NAMESPACE
    arena = Arena.reopen(left, LAYOUT)
    assert [(e.generation, e.backed, e.checksum, e.committed) for e in arena.entries()] == [
        (0, False, 0, False),
        (6, True, 77, True),
        (0, True, 0, False),
        (0, False, 0, False),
    ]
    assert arena.stamps_agree(1, KEY, 6), "a promoted chunk, which no engine stamped, has stamps too"
    arena.close(unlink=True)


def test_a_mark_goes_before_anything_else_of_the_slot(left: Path) -> None:
    arena = Arena.reopen(left, LAYOUT)
    arena.uncommit(1)
    assert not arena.entries()[1].mark
    arena.commit(1, KEY, 6, 77)
    arena.set_generation(1, 7)
    assert not arena.entries()[1].mark
    arena.close(unlink=True)


def test_pages_go_after_mark_and_generation(left: Path) -> None:
    """A reader of a previous daemon's session has no lease: only the generation tells it that the row is empty now."""
    arena = Arena.reopen(left, LAYOUT)
    arena.unback([1])
    entry = arena.entries()[1]
    assert (entry.generation, entry.backed, entry.mark) == (7, False, 0)
    arena.close(unlink=True)


def test_a_row_has_another_number_whenever_its_pages_may_be_others(tmp_path: Path) -> None:
    """A device goes on to write into pages that it has locked: a worker must be able to tell that they went."""
    arena = Arena.create(tmp_path, LAYOUT, 4, namespace_id=NAMESPACE)
    with ArenaMap(arena.path, arena.geometry.arena_id) as seen:
        assert seen.backings().tolist() == [0, 0, 0, 0]
        arena.back([1, 2])
        arena.back([1])
        assert seen.backings().tolist() == [0, 1, 1, 0]
        arena.unback([1])
        arena.unback([1])
        assert [seen.backing(slot) for slot in range(4)] == [0, 2, 1, 0]
        arena.back([1])
        assert seen.backings().tolist() == [0, 3, 1, 0]
        arena.close(unlink=False)
        # A daemon killed between taking pages and saying so.
        Arena.reopen(arena.path, LAYOUT).close(unlink=True)
        assert seen.backings().tolist() == [0, 5, 3, 0]


def test_a_number_is_not_used_again_when_memory_ran_out(tmp_path: Path) -> None:
    class Full(PageOps):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            if offset >= arena.geometry.rows_offset:
                raise OSError(errno.ENOSPC, "no space")

    arena = Arena.create(tmp_path, LAYOUT, 2, namespace_id=NAMESPACE)
    arena._pages = Full()
    assert arena.back([0]) == 0
    with ArenaMap(arena.path, arena.geometry.arena_id) as seen:
        assert seen.backings().tolist() == [2, 0]
    arena.close(unlink=True)


@pytest.mark.parametrize("word_of", ["generation_word", "backed_word"])
def test_a_count_at_its_end_costs_the_arena_and_no_start(tmp_path: Path, word_of: str) -> None:
    """Engines can write to the slot table. A number at 2**64 - 1 was a ValueError, and so the daemon did not start."""
    arena = Arena.create(tmp_path, LAYOUT, 4, namespace_id=NAMESPACE)
    word = getattr(arena.geometry, word_of)(2)
    arena._words[word] = 2**64 - 1
    arena.back([2])
    arena.unback([2])
    arena._words[word] = 2**64 - 1
    arena.close(unlink=False)
    with pytest.raises(ArenaError, match="is not what it wrote"):
        Arena.reopen(arena.path, LAYOUT)


def rewrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def other_layout(path: Path) -> None:
    geometry = left_header(path)
    header = pack_header(
        type(geometry)(
            arena_id=geometry.arena_id,
            num_slots=geometry.num_slots,
            row_bytes=geometry.row_bytes,
            num_ranks=geometry.num_ranks,
            rank_bytes=geometry.rank_bytes,
            namespace_id=NAMESPACE,
            layout_digest=bytes(32),
        )
    )
    rewrite(path, 0, header)


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replaced(path: Path) -> None:
        path.rename(path.with_name("moved"))
        make(path)

    return replaced


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: rewrite(path, 0, b"X"), "not a kvtier arena"),
        (lambda path: rewrite(path, 8, bytes([FORMAT_VERSION - 1])), "arena format is 2"),
        (lambda path: rewrite(path, 32, b"\x05"), "header is damaged"),
        (lambda path: rewrite(path, 70, b"x"), "header is damaged"),
        (lambda path: os.truncate(path, HEADER_BYTES - 4000), "not a kvtier arena"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "not a file of ours"),
        (lambda path: os.truncate(path, path.stat().st_size + 4096), "not a file of ours"),
        (lambda path: os.truncate(path, 0), "not a kvtier arena"),
        (replace_by(lambda path: path.symlink_to("moved")), "cannot open"),
        (replace_by(lambda path: path.mkdir()), "cannot open"),
        (replace_by(lambda path: os.mkfifo(path)), "cannot"),
        (other_layout, "another layout"),
    ],
)
def test_any_doubt_about_the_file_is_an_error(left: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(left)
    with pytest.raises(ArenaError, match=said):
        Arena.reopen(left, LAYOUT)


def test_a_file_of_another_name_is_not_taken(left: Path) -> None:
    renamed = left.rename(left.with_name("arena-" + "00" * 16))
    with pytest.raises(ArenaError, match="says that it is arena"):
        left_header(renamed)


def test_another_layout_of_the_same_sizes_is_another_layout(left: Path) -> None:
    same_sizes = KVLayout(num_ranks=2, rank_bytes=LAYOUT.rank_bytes, num_writers=1, groups=LAYOUT.groups)
    assert same_sizes.row_bytes == LAYOUT.row_bytes
    with pytest.raises(ArenaError, match="another layout"):
        Arena.reopen(left, same_sizes)
