"""The thread that copies, and the core that vLLM binds it to."""

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier_connector.workers import cpu_affinity

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def _worker(pipe: Connection) -> None:
    """Bind itself as vLLM binds a worker, and say where it and a thread of its run."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found: list[set[int]] = []

    def run() -> None:
        cpu_affinity.use_all_cores_of_node()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    pipe.send([os.sched_getaffinity(0), *found])


@needs_two_cores
@pytest.mark.parametrize("is_vllms", [True, False], ids=["vllm's worker", "somebody's process"])
def test_copies_may_use_what_the_engine_may(is_vllms: bool) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(there,), daemon=is_vllms)
    process.start()
    assert here.poll(60)
    main, copier = here.recv()
    process.join(60)
    given = os.sched_getaffinity(0)
    assert main == {min(given)}
    assert copier == (main | (given & cpu_affinity._same_nodes(main)) if is_vllms else main)


def test_a_worker_in_the_engines_process_stays_where_the_operator_bound_it() -> None:
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def run() -> None:
        os.sched_setaffinity(0, {min(before)})
        cpu_affinity.use_all_cores_of_node()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{min(before)}]


@needs_two_cores
def test_what_cannot_be_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(own: set[int]) -> set[int]:
        raise ValueError("invalid literal for int()")

    monkeypatch.setattr(cpu_affinity, "_same_nodes", unreadable)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    before = os.sched_getaffinity(0)
    cpu_affinity.use_all_cores_of_node()
    assert os.sched_getaffinity(0) == before


def test_only_cores_of_the_same_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_affinity, "_NODES", tmp_path)
    assert cpu_affinity._same_nodes({0}) == set(range(os.cpu_count() or 1))
    for node, cpulist in enumerate(("0-3,8\n", "4-7,9\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpulist)
    assert cpu_affinity._same_nodes({2}) == {0, 1, 2, 3, 8}
    assert cpu_affinity._same_nodes({0, 9}) == set(range(10))
