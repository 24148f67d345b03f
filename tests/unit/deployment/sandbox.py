"""`python -m tests.unit.deployment.sandbox UNIT COMMAND ...`: runs a command under a unit's system call rules.

Without systemd: libseccomp by ctypes, and the sets that `systemd-analyze syscall-filter` lists. A forbidden call ends
the process instead of failing with EPERM, so that none goes unseen. Forbidden socket families fail with EAFNOSUPPORT,
as under systemd.
"""

import ctypes
import ctypes.util
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.unit.deployment.units import Unit, read_unit

_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_EQUAL = 4
_NUM_FAMILIES = 64


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of seccomp.h."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def library() -> ctypes.CDLL | None:
    """Return libseccomp, if it is installed."""
    name = ctypes.util.find_library("seccomp")
    if name is None:
        return None
    seccomp = ctypes.CDLL(name, use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = [ctypes.c_uint32]
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    seccomp.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    seccomp.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison),
    ]  # fmt: skip
    return seccomp


def expanded(names: list[str]) -> set[str]:
    """Return the system calls of names and @sets."""
    return set(_expand(names))


def _expand(names: list[str]) -> Iterator[str]:
    for name in names:
        if not name.startswith("@"):
            yield name
            continue
        listed = subprocess.run(
            ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True, timeout=60
        )
        lines = [line.strip() for line in listed.stdout.splitlines()[1:]]
        yield from _expand([line for line in lines if line and not line.startswith("#")])


def confine(seccomp: ctypes.CDLL, unit: Unit) -> None:
    """Apply the rules to this process, for good."""
    rules = seccomp.seccomp_init(_KILL_PROCESS)
    for name in expanded(unit.words("Service", "SystemCallFilter")) - {"socket"}:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # not of another architecture
            _check(seccomp.seccomp_rule_add_array(rules, _ALLOW, number, 0, None))
    allowed = {getattr(socket, family) for family in unit.words("Service", "RestrictAddressFamilies")}
    number = seccomp.seccomp_syscall_resolve_name(b"socket")
    for family in range(_NUM_FAMILIES):
        action = _ALLOW if family in allowed else _ERRNO | errno.EAFNOSUPPORT
        only = _Comparison(0, _EQUAL, family, 0)
        _check(seccomp.seccomp_rule_add_array(rules, action, number, 1, only))
    _check(seccomp.seccomp_load(rules))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))


if __name__ == "__main__":
    found = library()
    assert found is not None, "libseccomp is not installed"
    confine(found, read_unit(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
