"""Where pages of arena rows are to come from: sysfs and the GPU are fakes, the system call is Linux's own."""

import ctypes
import errno
import logging
import mmap
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier.linux import MemoryPolicy
from kvtier_connector.workers.cuda import numa_policy
from kvtier_connector.workers.cuda.numa_policy import place_rows, prefer_node
from tests.fakes.arena_file import write_arena

GPU = torch.device("cuda", 1)
PAGE = mmap.PAGESIZE
ONE_RANK = ArenaGeometry(arena_id=b"A" * 16, num_slots=8, row_bytes=4 * PAGE, num_ranks=1, rank_bytes=4 * PAGE)
TWO_RANKS = ArenaGeometry(arena_id=b"A" * 16, num_slots=8, row_bytes=4 * PAGE, num_ranks=2, rank_bytes=2 * PAGE)
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2


class Machine:
    """Sysfs of a machine with a GPU, and what is asked of its kernel.

    Attributes:
        asked: Address, length and node.
        refusal: What the kernel answers.
    """

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs
        self.asked: list[tuple[int, int, int]] = []
        self.refusal: Exception | None = None

    def has(self, *, memory: str, cores: str, gpu: str) -> None:
        nodes = self.sysfs / "devices/system/node"
        nodes.mkdir(parents=True)
        (nodes / "has_memory").write_text(f"{memory}\n")
        (nodes / "has_cpu").write_text(f"{cores}\n")
        device = self.sysfs / "bus/pci/devices/0001:dc:0a.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu}\n")

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        self.asked.append((address, num_bytes, node))
        if self.refusal is not None:
            raise self.refusal

    def place(self, arena: ArenaMap, first: int, length: int) -> None:
        place_rows(arena, first, length, GPU, sysfs=self.sysfs, prefer=self.prefer)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {GPU: properties}[device])
    return Machine(tmp_path / "sys")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in tmpfs, where arenas are."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def arena(folder: Path) -> Iterator[ArenaMap]:
    """Rows of one rank."""
    write_arena(folder / "one", ONE_RANK)
    with ArenaMap(folder / "one", ONE_RANK.arena_id) as arena:
        yield arena


@pytest.fixture
def shared(folder: Path) -> Iterator[ArenaMap]:
    """Rows of two ranks."""
    write_arena(folder / "two", TWO_RANKS)
    with ArenaMap(folder / "two", TWO_RANKS.arena_id) as arena:
        yield arena


def test_all_rows_of_a_rank_that_is_alone_are_one_range(machine: Machine, arena: ArenaMap) -> None:
    machine.has(memory="0-1", cores="0-1", gpu="1")
    machine.place(arena, 0, 4 * PAGE)
    assert machine.asked == [(arena.row_address(0), 8 * 4 * PAGE, 1)]


def test_a_rank_among_others_asks_for_its_part_of_each_row_only(machine: Machine, shared: ArenaMap) -> None:
    machine.has(memory="0-1", cores="0-1", gpu="0")
    machine.place(shared, 2 * PAGE, 2 * PAGE)
    assert machine.asked == [(shared.row_address(slot) + 2 * PAGE, 2 * PAGE, 0) for slot in range(8)]


def test_too_many_ranges_are_left_alone(machine: Machine, shared: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_policy, "MAX_RANGES", 7)
    machine.has(memory="0-1", cores="0-1", gpu="0")
    machine.place(shared, 0, 2 * PAGE)
    assert not machine.asked


@pytest.mark.parametrize(
    ("memory", "cores", "gpu"),
    [
        pytest.param("0", "0", "0", id="one node"),
        pytest.param("0-1", "0-1", "-1", id="the firmware does not say"),
        pytest.param("0-1", "0-1", "", id="nor in a number"),
        pytest.param("0-8", "0", "0", id="the others are memory of devices"),
        pytest.param("0-2", "0-1", "2", id="the GPU's is such a one"),
    ],
)
def test_nothing_is_asked_where_there_is_no_choice_or_no_answer(
    machine: Machine, arena: ArenaMap, memory: str, cores: str, gpu: str
) -> None:
    machine.has(memory=memory, cores=cores, gpu=gpu)
    machine.place(arena, 0, 4 * PAGE)
    assert not machine.asked


def test_a_sandbox_without_sysfs_or_a_torch_without_pci_ids_changes_nothing(
    machine: Machine, arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.place(arena, 0, 4 * PAGE)
    machine.has(memory="0-1", cores="0-1", gpu="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    machine.place(arena, 0, 4 * PAGE)
    assert not machine.asked
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


def test_a_kernel_that_refuses_is_asked_once_and_reported(
    machine: Machine, shared: ArenaMap, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has(memory="0-1", cores="0-1", gpu="1")
    machine.refusal = PermissionError(errno.EPERM, "Operation not permitted")
    machine.place(shared, 0, 2 * PAGE)
    assert len(machine.asked) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cuda:1, whose memory node is 1" in record.message
    assert "Operation not permitted" in record.message


def test_a_policy_is_the_files_and_leaves_the_mapping_whole(shared: ArenaMap) -> None:
    """With a range for each row, a worker would have thousands of mappings more."""
    before = _mappings(shared)
    try:
        for slot in range(0, 8, 2):
            prefer_node(shared.row_address(slot) + PAGE, 2 * PAGE, 0)
    except OSError as exc:
        pytest.skip(f"this kernel, or the container, refuses: {exc}")
    assert _mappings(shared) == before
    with ArenaMap(shared.path, TWO_RANKS.arena_id) as other:
        found = [[_preferred(other.row_address(slot) + page * PAGE) for page in range(4)] for slot in range(8)]
    assert found == [[None, 0, 0, None], [None] * 4] * 4


def test_what_linux_refuses_is_an_error_and_leaves_no_mapping(arena: ArenaMap) -> None:
    before = _mappings(arena)
    with pytest.raises(OSError):
        prefer_node(arena.row_address(0), PAGE, 900)  # there is no such node
    with pytest.raises(OSError):
        prefer_node(PAGE, PAGE, 0)  # nothing is mapped there
    assert _mappings(arena) == before


def _mappings(arena: ArenaMap) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(arena.path) in line]


def _preferred(address: int) -> int | None:
    """Return the node that pages at an address prefer, None for no policy."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    bits, where, flags = ctypes.c_ulong(1025), ctypes.c_void_p(address), ctypes.c_ulong(OF_ADDRESS)
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, bits, where, flags) == 0
    return int(mask[0]).bit_length() - 1 if mode.value == MemoryPolicy.PREFERRED else None
