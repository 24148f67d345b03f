"""The cyclic collector while a large index is built: it would walk it again and again, and nothing of it is garbage."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector from running, in all threads, until the end of the block. Blocks may nest, in one thread.

    Nothing else in this process may switch it meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_LONG_S = 0.005
"""Of CPU time: the collector looks at some 50,000 objects in it."""


def freeze_index() -> None:
    """Have the collector pass over everything that exists now: each of its full rounds would walk the index.

    What leaves the index later goes by its reference count, as before. The index grows, too: with 65,536 chunks brought
    into memory since, one round held up the event loop for 60 ms. So what survived a long round is passed over from
    then on; what of it becomes garbage in a cycle later stays until `thaw_index`.
    """
    gc.freeze()
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def thaw_index() -> None:
    """The opposite of `freeze_index`: the index is going."""
    if _freeze_survivors in gc.callbacks:
        gc.callbacks.remove(_freeze_survivors)
    gc.unfreeze()


_round_began_s = 0.0


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    """See gc.callbacks."""
    global _round_began_s  # rounds do not overlap
    if phase == "start":
        _round_began_s = time.thread_time()
    elif info["generation"] == 2 and time.thread_time() - _round_began_s > _LONG_S:
        gc.freeze()
