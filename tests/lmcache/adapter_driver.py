"""Drives an L2 adapter as LMCache's controllers do: with its own keys and memory objects, by event descriptors.

A program, for LMCache's environment: `python -m tests.lmcache.adapter_driver SPEC` makes the adapter, then takes calls
as pickles from its standard input, and writes each answer to its standard output.
"""

import argparse
import hashlib
import os
import pickle
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from tests.lmcache.adapter_process import DEADLINE_S, ObjectId


class AdapterDriver:
    """Calls an adapter and waits for its event, as LMCache does."""

    def __init__(self, adapter: L2AdapterInterface) -> None:
        self._adapter = adapter

    def store(self, objects: Mapping[ObjectId, bytes]) -> bool:
        """Store objects; returns whether that went well."""
        buffers = [_memory_object(len(data), data) for data in objects.values()]
        task_id = self._adapter.submit_store_task([_key(each) for each in objects], buffers)
        ended: dict[int, Any] = {}

        def poll() -> Any:
            ended.update(self._adapter.pop_completed_store_tasks())
            return ended.get(task_id)

        return bool(_wait(self._adapter.get_store_event_fd(), poll).is_successful())

    def lookup(self, ids: Sequence[ObjectId], object_bytes: int) -> list[int]:
        """Return the indexes of objects that are found."""
        desc = MemoryLayoutDesc([torch.Size([object_bytes])], [torch.uint8])
        task_id = self._adapter.submit_lookup_and_lock_task([_key(each) for each in ids], {0: desc})
        event_fd = self._adapter.get_lookup_and_lock_event_fd()
        return [*_wait(event_fd, lambda: self._adapter.query_lookup_and_lock_result(task_id)).get_indices_list()]

    def load(self, ids: Sequence[ObjectId], object_bytes: int) -> dict[int, bytes]:
        """Return the objects that were loaded, by index."""
        buffers, keys = [_memory_object(object_bytes) for _ in ids], [_key(each) for each in ids]
        task_id = self._adapter.submit_load_task(keys, buffers)
        loaded = _wait(self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task_id))
        self._adapter.submit_unlock(keys)
        return {index: bytes(buffers[index].byte_array) for index in loaded.get_indices_list()}

    def usage(self) -> tuple[int, dict[str, int]]:
        """Return all bytes, and those of each salt."""
        usage = self._adapter.get_usage()
        return usage.total_bytes_used, dict(usage.bytes_by_cache_salt)

    def status(self) -> dict[str, Any]:
        """Return what the adapter reports to LMCache."""
        return dict(self._adapter.report_status())


def _key(each: ObjectId) -> ObjectKey:
    digest = hashlib.sha256(repr(each.name).encode()).digest()
    return ObjectKey(digest, each.model, ObjectKey.ComputeKVRank(1, 0, 1, 0), 0, each.salt)


def _memory_object(num_bytes: int, data: bytes = b"") -> MemoryObj:
    shape = torch.Size([num_bytes])
    facts = MemoryObjMetadata(
        shape=shape, dtype=torch.uint8, address=0, phy_size=num_bytes, fmt=MemoryFormat.KV_2LTD, ref_count=1
    )
    tensor = torch.frombuffer(bytearray(data or num_bytes), dtype=torch.uint8)
    return TensorMemoryObj(raw_data=tensor, metadata=facts, parent_allocator=None)


def _wait(event_fd: int, poll: Callable[[], Any]) -> Any:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while (result := poll()) is None:
        if not poller.poll(DEADLINE_S * 1000):
            raise TimeoutError("no event")
        consume_fd(event_fd)
    return result


def main() -> None:
    """Run until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # LMCache prints there
    configs = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[sys.argv[1]]))
    adapter = create_l2_adapter(configs.adapters[0])
    driver = AdapterDriver(adapter)
    while True:
        try:
            name, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        pickle.dump(getattr(driver, name)(*args), answers)
        answers.flush()
    adapter.close()


if __name__ == "__main__":
    main()
