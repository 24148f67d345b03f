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
def _printable_usage_errors() -> Iterator[None]:
    try:
        yield
    except _UsageError as exc:
        exc.message = printable(exc.message)  # type: ignore[attr-defined]
        raise


class _Printable:
    """Escapes what a usage error repeats of the arguments, while they are parsed and while the command runs."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _printable_usage_errors():
            return super().make_context(*arguments, **more)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage_errors():
            return super().invoke(ctx)  # type: ignore[misc]


class PrintableCommand(_Printable, TyperCommand):
    """A command whose usage errors are printable."""


class PrintableGroup(_Printable, TyperGroup):
    """A group of commands whose usage errors are printable."""
