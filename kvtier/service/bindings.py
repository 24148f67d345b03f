"""Which chunks of a namespace are which prompt: engines report it, the ledger keeps it."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from kvtier.concurrency.pauses import RETRY_S
from kvtier.concurrency.tasks import Changes
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.errors import LedgerError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.obs.log import LastProblem, log_event
from kvtier.prompts.book import PromptBook
from kvtier.prompts.pins import Pins
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


class Bindings:
    """Records by which keys engines recognize prompts. Loop thread only."""

    def __init__(
        self,
        resources: Resources,
        prompts: PromptBook,
        pins: Pins,
        namespaces: Mapping[str, Namespace],
        live_sessions: Callable[[], Sequence[Session]],
        changes: Changes,
    ) -> None:
        self._resources, self._prompts, self._pins, self._namespaces = resources, prompts, pins, namespaces
        self._live_sessions, self._changes = live_sessions, changes
        self._problem = LastProblem()

    async def run(self) -> None:
        """Try again what the ledger refused to record, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            for session in self._live_sessions():
                await self._bind_unrecorded(session)

    async def _bind_unrecorded(self, session: Session) -> None:
        for pin_id in list(session.unrecorded):
            if (row := session.unrecorded.get(pin_id)) is None:  # the engine has sent it again meanwhile
                continue
            await self._changes.run_shielded("bind", self._bind_again(session, row))
            if pin_id in session.unrecorded:  # it refuses still
                return

    async def _bind_again(self, session: Session, row: BindingRow) -> None:
        async with self._changes.lock:
            if session.unrecorded.get(row.pin_id) is not row:
                return  # the engine has sent another one while this waited for the lock
            del session.unrecorded[row.pin_id]
            prompt = self._prompts.by_pin_id(row.pin_id)
            if prompt is None or session.ended:
                return
            await self._take_in(session, prompt, row)
        await session.send_held(row.keys)

    async def bind(
        self, session: Session, pin_id: str, keys: Sequence[ChunkKey], covered_tokens: int, error: str
    ) -> None:
        """An engine recognizes a prompt by these keys (or says why it cannot).

        If the ledger refuses to record that, the prompt stays unbound until it does not refuse any longer (`run`): what
        is held of it is served, no more is stored.

        Raises:
            InvalidArgumentError: There are no keys and no error, or the keys, or the tokens they cover, cannot be.
        """
        await self._changes.run_shielded("bind", self._bind(session, pin_id, keys, covered_tokens, error))

    async def _bind(
        self, session: Session, pin_id: str, keys: Sequence[ChunkKey], covered_tokens: int, error: str
    ) -> None:
        namespace = session.namespace
        async with self._changes.lock:
            session.unrecorded.pop(pin_id, None)
            prompt = self._prompts.by_pin_id(pin_id)
            if prompt is None or session.ended:
                return
            if error:
                session.bind_errors[pin_id] = error
                session.bound.discard(pin_id)
                log_event(logger, "pin_not_bound", level=logging.WARNING, name=prompt.name, problem=error)
                return
            await self._resources.in_io(limits.check_keys, "bind_pin.keys", keys, namespace.layout)
            if session.ended:
                return
            limits.Whole(1, len(prompt.tokens)).check("bind_pin.covered_tokens", covered_tokens)
            row = BindingRow(
                pin_id=pin_id, namespace_id=namespace.namespace_id, keys=tuple(keys), covered_tokens=covered_tokens
            )
            await self._take_in(session, prompt, row)
        await session.send_held(keys)

    async def _take_in(self, session: Session, prompt: PromptRow, row: BindingRow) -> None:
        if await self._is_bound(session.namespace, prompt, row):
            session.recognizes(row.pin_id)
        else:
            session.unrecorded[row.pin_id] = row

    async def _is_bound(self, namespace: Namespace, prompt: PromptRow, row: BindingRow) -> bool:
        """Have the ledger and then memory follow; False if the ledger refuses, or the namespace has ended meanwhile."""
        old = self._prompts.binding(row.pin_id, row.namespace_id)
        if old == row:
            return True
        if not namespace.ephemeral and not await self._is_recorded(row, prompt.name):
            return False
        if prompt.pinned:
            await self._pins.count(namespace, row.keys, pinned=True)
            await self._pins.count(namespace, old.keys if old else (), pinned=False)
        if self._namespaces.get(row.namespace_id) is not namespace:  # ephemeral, and ended meanwhile
            return False
        self._prompts.bind(row)
        return True

    async def _is_recorded(self, row: BindingRow, name: str) -> bool:
        """Record a binding; False if the ledger refuses, which ends no session: requests are served meanwhile."""
        try:
            await self._resources.in_ledger(self._resources.ledger.promises.put_binding, row)
        except LedgerError as error:
            if self._problem.becomes(str(error)):
                log_event(logger, "pin_not_bound", level=logging.WARNING, name=name, problem=str(error))
            return False
        self._problem.becomes("")
        return True
