"""The cyclic collector while a large index is built: it would walk it again and again, and nothing of it is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector from running, in all threads, until the end of the block. Blocks may nest, in one thread.

    Nobody else in this process may switch it meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_index() -> None:
    """Have the collector pass over everything that exists now, in this process: none of it will become garbage.

    Without that each of its full rounds walks the index, on whichever thread happens to allocate. What leaves the index
    later goes by its reference count, as before.
    """
    gc.freeze()


def thaw_index() -> None:
    """The opposite of `freeze_index`: the index is going."""
    gc.unfreeze()
