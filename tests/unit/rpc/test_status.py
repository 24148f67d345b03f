"""Every error of kvtier has a gRPC status, or is one that a daemon never raises in a call."""

from kvtier import errors
from kvtier.rpc.error_statuses import STATUS_OF, status_of

CLIENT_SIDE = (
    errors.DaemonUnreachableError,
    errors.UntrustedSocketError,
    errors.SessionRefusedError,
    errors.PromptUnusableError,
    errors.RenderError,
)
AT_THE_END = {errors.StuckError}


def test_the_table_is_complete() -> None:
    leaves = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvtierError)}
    client_side = {kind for kind in leaves if issubclass(kind, CLIENT_SIDE)}
    assert leaves - set(STATUS_OF) - client_side - AT_THE_END == {errors.KvtierError}


def test_subclasses_take_the_nearest_status() -> None:
    assert status_of(errors.ArenaFullError("x")) is STATUS_OF[errors.ArenaFullError]
