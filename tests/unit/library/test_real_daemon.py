"""`kvtier.Client` with a daemon in a process of its own, which restarts."""

from contextlib import closing
from pathlib import Path

import pytest

from kvtier import Client, PromptState
from kvtier.errors import DaemonUnreachableError, PromptNotFoundError, PromptUnrenderedError
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in

UNUSED_URL = "http://127.0.0.1:9"


def test_a_client_outlives_a_restart(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    command = daemon_command(config)
    with Client(config.server.socket, url=UNUSED_URL) as client:
        with pytest.raises(
            DaemonUnreachableError, match=r"there is no such socket\); start `kvtier-daemon`, or pass socket"
        ):
            client.status()
        with daemon_process(command, tmp_path / "log"):
            pinned = client.pin("bot", tokens=range(80), ttl_s=3600, public=True)
            assert (pinned.state, pinned.num_tokens, pinned.public) == (PromptState.WAITING, 80, True)
            assert client.pin("source", system="You are a parrot.").state is PromptState.UNRENDERED
            with pytest.raises(PromptUnrenderedError, match="'source' is not turned into tokens yet"):
                client.tokens("source")
            watch = client.watch("bot")
            assert next(watch).pin_id == pinned.pin_id
        with closing(watch), pytest.raises(DaemonUnreachableError):
            next(watch)
        with daemon_process(command, tmp_path / "log"):
            assert [prompt.name for prompt in client.list()] == ["bot", "source"]
            assert client.tokens("bot") == tuple(range(80))
            assert client.get("source").recipe["content"] == "You are a parrot."
            assert client.status().num_pinned == 2
            assert client.advise().mode
            assert client.fsck().findings == ()
            client.unpin("bot")
            client.evict("bot")
            with pytest.raises(PromptNotFoundError):
                client.set("bot", priority=1)
