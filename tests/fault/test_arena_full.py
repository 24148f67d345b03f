"""Memory runs out while an arena is made or grows: no slot is ever given out unbacked, nothing is left behind."""

import errno
from pathlib import Path

import pytest

from kvtier.errors import ArenaError, ArenaFullError
from kvtier.host.arena import Arena
from tests.fakes.chunks import layout_of
from tests.fakes.limited_pages import LimitedPages


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_backing_stops_where_memory_ends_and_goes_on_when_there_is_some(tmp_path: Path, number: int) -> None:
    layout = layout_of()
    pages = LimitedPages(2 * 4096 + 3 * layout.row_bytes, number)
    arena = Arena.create(tmp_path, layout, 10, pages=pages)
    before = arena.path.stat().st_blocks
    assert arena.back([7, 1, 4, 2, 0]) == 3
    assert (arena.path.stat().st_blocks - before) * 512 == 3 * layout.row_bytes
    assert arena.back([2]) == 0
    arena.unback([1])
    assert arena.back([2, 0]) == 1
    arena.close(unlink=True)


def test_a_slot_table_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArenaFullError, match=r"lower host\.bytes, or enlarge"):
        Arena.create(tmp_path, layout_of(), 10, pages=LimitedPages(0))
    assert list(tmp_path.iterdir()) == []


def test_another_error_while_creating_is_no_matter_of_size(tmp_path: Path) -> None:
    with pytest.raises(ArenaError) as caught:
        Arena.create(tmp_path, layout_of(), 10, pages=LimitedPages(0, errno.EIO))
    assert not isinstance(caught.value, ArenaFullError)
    assert list(tmp_path.iterdir()) == []


def test_another_error_while_backing_is_raised(tmp_path: Path) -> None:
    pages = LimitedPages(2 * 4096, errno.EIO)
    arena = Arena.create(tmp_path, layout_of(), 10, pages=pages)
    with pytest.raises(ArenaError, match="cannot allocate row 3"):
        arena.back([3])
    arena.close(unlink=True)
