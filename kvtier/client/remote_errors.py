"""What the daemon refuses, as exceptions."""

from functools import cache

from kvtier import errors
from kvtier.errors import KvtierError


class RemoteError(KvtierError):
    """The daemon refused a call; the message is the daemon's own.

    What is raised is also of the class in `kvtier.errors` that the daemon raised, so `except PromptNotFoundError` works
    as `except RemoteError` does. Of that class it has the name only: the attributes that the daemon computed (how many
    bytes are missing, say) are in the message.

    Attributes:
        code: gRPC's status, for example `NOT_FOUND`.
        kind: Name of the error's class in `kvtier.errors`; empty when the daemon gave none.
    """

    def __init__(self, code: str, kind: str, message: str) -> None:
        # Not super(): the other base would compose a message of its own.
        KvtierError.__init__(self, message)
        self.code, self.kind = code, kind


def remote_error(code: str, kind: str, message: str) -> RemoteError:
    """Return the error for a refusal; of a kind that this kvtier does not know, a plain RemoteError."""
    known = getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, KvtierError) and known is not KvtierError
    return (_class_of(known) if is_ours else RemoteError)(code, kind, message)


@cache
def _class_of(known: type[KvtierError]) -> type[RemoteError]:
    return type(known.__name__, (RemoteError, known), {"__doc__": known.__doc__, "__module__": __name__})
