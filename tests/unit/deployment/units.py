"""systemd's unit files, as far as tests read them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The assignments of a unit, in order: (section, key, value)."""

    lines: tuple[tuple[str, str, str], ...]

    def values(self, section: str, key: str) -> list[str]:
        """Return every value that was given."""
        return [value for where, name, value in self.lines if (where, name) == (section, key)]

    def value(self, section: str, key: str) -> str:
        """Return the only value."""
        (value,) = self.values(section, key)
        return value

    def words(self, section: str, key: str) -> list[str]:
        """Return the words of all values."""
        return [word for value in self.values(section, key) for word in value.split()]

    @property
    def environment(self) -> dict[str, str]:
        """What Environment= sets."""
        return dict(word.split("=", 1) for word in self.words("Service", "Environment"))


def read_unit(path: Path) -> Unit:
    """Read a unit or a drop-in."""
    section, lines = "", []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            lines.append((section, key, value))
    return Unit(lines=tuple(lines))
