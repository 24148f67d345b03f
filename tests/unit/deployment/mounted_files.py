"""A folder as the kubelet mounts a ConfigMap: each version in a folder of its own, to which the link `..data` leads."""

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path


class MountedFiles:
    """What a container sees at `path`.

    Source: AtomicWriter of Kubernetes, pkg/volume/util/atomic_writer.go.
    """

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        path.mkdir(parents=True)
        self.path, self._versions = path, count()
        self.write(files)

    def write(self, files: Mapping[str, str]) -> None:
        """Replace all files at once, as after a change of the ConfigMap; the old ones are gone then."""
        version = self.path / f"..2026_11_26_{next(self._versions)}"
        version.mkdir()
        for name, text in files.items():
            (version / name).write_text(text)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        data, made = self.path / "..data", self.path / "..data_tmp"
        before = data.resolve() if data.is_symlink() else None
        made.symlink_to(version.name)
        made.rename(data)
        for path in self.path.iterdir():
            if path.is_symlink() and not path.exists():
                path.unlink()
        if before is not None:
            shutil.rmtree(before)
