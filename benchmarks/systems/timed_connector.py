"""Any connector, with a clock around each call of vLLM's; named to vLLM as `TimedConnector` of this module.

Which one it is says CONNECTOR_VARIABLE: `module:class`, or a name that vLLM knows. Calls are kept in memory, and
written into the folder of FOLDER_VARIABLE, one file for each process, once none has come for IDLE_S: writing takes the
interpreter's lock. Runs in vLLM's processes, in any environment: imports nothing but vLLM.
"""

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

CONNECTOR_VARIABLE = "KVTIER_BENCH_CONNECTOR"
FOLDER_VARIABLE = "KVTIER_BENCH_FOLDER"
IDLE_S = 0.5


def _timed_class() -> type[KVConnectorBase_V1]:
    module, _, name = os.environ[CONNECTOR_VARIABLE].rpartition(":")
    base: Any = (
        getattr(importlib.import_module(module), name)
        if module
        else KVConnectorFactory.get_connector_class_by_name(name)
    )
    timed: dict[str, Any] = {}
    for hook in dir(KVConnectorBase_V1):
        found = getattr(base, hook, None)
        if not hook.startswith("_") and callable(found) and not hasattr(found, "__self__"):  # no class methods
            timed[hook] = _timed(hook, found)
    return type("TimedConnector", (base,), timed)


def _timed(hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _inside.hook:  # a hook that calls another is one
            return call(*args, **kwargs)
        _inside.hook = hook
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            _calls.append((hook, began_s, time.perf_counter() - began_s, time.thread_time() - began_cpu_s))
            _inside.hook = ""

    return timed


class _Inside(threading.local):
    hook = ""


_inside = _Inside()
_calls: list[tuple[str, float, float, float]] = []


def _write() -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{os.getpid()}.jsonl"
    while True:
        time.sleep(IDLE_S)
        if not _calls or time.perf_counter() - _calls[-1][1] < IDLE_S:
            continue
        num_calls = len(_calls)
        with path.open("a") as file:
            file.writelines(json.dumps(call) + "\n" for call in _calls[:num_calls])
        del _calls[:num_calls]


def __getattr__(name: str) -> Any:
    if name != "TimedConnector":
        raise AttributeError(name)
    globals()[name] = timed = _timed_class()
    threading.Thread(target=_write, name="timed-connector", daemon=True).start()
    return timed
