"""The thread that copies, and the core that vLLM binds it to."""

import multiprocessing
import os
import threading
from collections.abc import Iterable
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


@pytest.mark.parametrize(
    ("engines", "copies"),
    [
        pytest.param(range(12), {4, 5, 6, 7, 9}, id="all cores of its node"),
        pytest.param({1, 4, 5}, {4, 5}, id="no cores that the engine may not use"),
        pytest.param({0, 1}, {5}, id="its own in any case"),
    ],
)
def test_copies_stay_on_the_node_and_on_cores_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Iterable[int], copies: set[int]
) -> None:
    for node, cpulist in enumerate(("0-3,8\n", "4-7,9\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpulist)
    monkeypatch.setattr(cpu_affinity, "_NODES", tmp_path)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=77))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    allowed = {0: {5}, 77: set(engines)}
    monkeypatch.setattr(os, "sched_getaffinity", allowed.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", allowed.__setitem__)
    cpu_affinity.use_all_cores_of_node()
    assert allowed[0] == copies


@pytest.mark.parametrize("engine", [None, SimpleNamespace(pid=None)])
def test_a_process_whose_engine_is_not_known_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: engine)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("moved"))
    cpu_affinity.use_all_cores_of_node()


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
