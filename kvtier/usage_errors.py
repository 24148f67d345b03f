"""What every command line of kvtier shares: complaints about arguments are shown as printable text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvtier.printable import printable

# Typer has its own copy of Click since 0.22 or so: the base is named by what is public of both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def printable_usage_errors() -> Iterator[None]:
    """Escape what a usage error repeats of the arguments."""
    try:
        yield
    except _UsageError as exc:
        exc.message = printable(exc.message)  # type: ignore[attr-defined]
        raise


class PrintableCommand(TyperCommand):
    """A command whose usage errors are printable."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """Parse the arguments."""
        with printable_usage_errors():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with printable_usage_errors():
            return super().invoke(ctx)


class PrintableGroup(TyperGroup):
    """A group of commands whose usage errors are printable."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """Parse the arguments before the command's name."""
        with printable_usage_errors():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """Parse the others, and run the command."""
        with printable_usage_errors():
            return super().invoke(ctx)
