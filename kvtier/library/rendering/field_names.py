"""How error messages name what was given: `url` to a caller from Python, `--url` to one of the command line."""


class FieldNames(dict[str, str]):
    """The caller's name of each field; without an entry, the field's own. `url=...` stands for it with its value."""

    def __missing__(self, field: str) -> str:
        return field


PYTHON_NAMES = FieldNames()
"""Of arguments."""
