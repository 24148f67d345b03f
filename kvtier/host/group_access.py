"""Which of the daemon's files are for the members of a group too (`server.group`): socket, arenas, session locks.

Folders of these are passable for the group (0710) and no more: a member that could write there could put another socket
or arena in their place, and one that can list nothing opens only what the daemon has named to it.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

GROUP_MAY_WRITE = stat.S_IRGRP | stat.S_IWGRP
GROUP_MAY_READ = stat.S_IRGRP
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_PASSAGE = stat.S_IRWXU | stat.S_IXGRP


def set_group_access(fd: int, gid: int | None, group_bits: int) -> None:
    """Make an open file of ours one that members of a group may use; None: one of its owner alone.

    Raises:
        OSError: We are not in the group, or the file is another user's.
    """
    if gid is None:
        if os.fstat(fd).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(fd, _OWNER_ONLY)
        return
    os.fchown(fd, -1, gid)
    os.fchmod(fd, _OWNER_ONLY | group_bits)


def share_socket(path: Path, gid: int | None) -> None:
    """Let members of a group connect to a socket that we have bound in a folder that no one else may write to.

    Raises:
        OSError: We are not in the group.
    """
    if gid is not None:
        os.chown(path, -1, gid)
        path.chmod(_OWNER_ONLY | GROUP_MAY_WRITE)


def open_passage(folder: Path, gid: int | None, is_own_file: Callable[[str], bool]) -> None:
    """Let members of a group pass through a folder that we made for ourselves; None: no longer.

    That is one of ours with nothing in it but our own files: no home folder, which may have been named, opens by this.

    Raises:
        OSError: We are not in the group.
    """
    facts = folder.stat()
    mode, wanted = stat.S_IMODE(facts.st_mode), stat.S_IRWXU if gid is None else _PASSAGE
    was_made_by_us = mode in (stat.S_IRWXU, _PASSAGE) and facts.st_uid == os.geteuid()
    if (mode, facts.st_gid) == (wanted, facts.st_gid if gid is None else gid) or not was_made_by_us:
        return
    if all(is_own_file(each.name) for each in folder.iterdir()):
        if gid is not None:
            os.chown(folder, -1, gid)
        folder.chmod(wanted)
