"""What requests of all namespaces begin with: in memory for those in use, on disk for those that were."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping

from kvtier.discovery.choices import PinnedPrefix, Selection
from kvtier.discovery.namespace_traffic import NamespaceTraffic, PinUse
from kvtier.discovery.saved_traffic import SavedTraffic
from kvtier.errors import TierIOError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

MAX_NAMESPACES = 16
"""In memory, 2 MB each at most; counts of others are on disk until their engines report again."""


class TrafficBook:
    """Loop thread only.

    Args:
        resources: The disk, and a thread for it.
        prompts: All prompts; automatic pins say in their recipe which prefix they are.
        namespaces: By id; they come and go.
    """

    def __init__(self, resources: Resources, prompts: PromptBook, namespaces: Mapping[str, Namespace]) -> None:
        self._resources, self._prompts, self._namespaces = resources, prompts, namespaces
        self._saved = SavedTraffic(resources.config.disk.disk_dir, resources.ledger.ring)
        self._traffic: dict[str, NamespaceTraffic] = {}  # the one that was used last at the end
        self._loading: dict[str, Namespace] = {}
        self._writing = asyncio.Lock()  # while one is being written it is not on disk yet, though `is_saved` says so

    def of(self, namespace: Namespace) -> NamespaceTraffic | None:
        """Return what is known of a namespace; None while it is loaded, which begins in the background.

        An engine's messages are read one after the other, so none of them waits here for a disk that may hang.
        """
        namespace_id = namespace.namespace_id
        if namespace_id in self._traffic:
            traffic = self._traffic[namespace_id] = self._traffic.pop(namespace_id)
            return traffic
        if self._loading.get(namespace_id) is not namespace:
            self._loading[namespace_id] = namespace
            namespace.tasks.start("traffic", self._load(namespace))
        return None

    async def _load(self, namespace: Namespace) -> None:
        namespace_id = namespace.namespace_id
        try:
            traffic = await self._resources.in_background(self._saved.load, namespace_id)
        finally:
            self._loading.pop(namespace_id, None)
        for use in self._uses_in_ledger(namespace_id):
            traffic.uses.setdefault(use.prefix.digest, use)
        self._traffic[namespace_id] = traffic
        await self._drop_surplus()

    async def _drop_surplus(self) -> None:
        """Drop those that were used longest ago from memory, each once it is on disk."""
        for oldest_id, oldest in list(self._traffic.items())[:-MAX_NAMESPACES]:
            async with self._writing:
                await self._save(oldest_id, oldest)
                surplus = dict(list(self._traffic.items())[:-MAX_NAMESPACES])  # it may have been used meanwhile
                if oldest.is_saved and surplus.get(oldest_id) is oldest:
                    del self._traffic[oldest_id]
        # What cannot be written stays for the next time, as long as that is not for ever.
        for oldest_id in list(self._traffic)[: -2 * MAX_NAMESPACES]:
            del self._traffic[oldest_id]

    def take_over_pins(self, namespace: Namespace) -> None:
        """Know the automatic pins of a previous daemon before any request comes."""
        if any(self._uses_in_ledger(namespace.namespace_id)):
            self.of(namespace)

    def current(self) -> list[tuple[Namespace, NamespaceTraffic]]:
        """Return what is in memory, of namespaces that there still are."""
        known = ((self._namespaces.get(namespace_id), traffic) for namespace_id, traffic in self._traffic.items())
        return [(namespace, traffic) for namespace, traffic in known if namespace is not None]

    def selected(self) -> list[tuple[NamespaceTraffic, Selection]]:
        """Return what each namespace has chosen."""
        return [(traffic, each) for _, traffic in self.current() if (each := traffic.selection) is not None]

    def is_chosen_elsewhere(self, traffic: NamespaceTraffic, digest: bytes) -> bool:
        """Say whether another namespace of the model has the same pin, and would keep it."""
        name = own.name if (own := traffic.uses.get(digest)) is not None else None
        for other, selection in self.selected():
            uses = [other.uses.get(choice.digest) for choice in selection.chosen]
            if other is not traffic and any(use is not None and use.name == name for use in uses):
                return True
        return False

    async def save(self) -> None:
        """Write what was counted since the last time to disk; what fails is logged, and written the next time."""
        for namespace_id, traffic in list(self._traffic.items()):
            async with self._writing:
                await self._save(namespace_id, traffic)

    async def _save(self, namespace_id: str, traffic: NamespaceTraffic) -> None:
        if traffic.is_saved:
            return
        traffic.is_saved = True  # so that what comes meanwhile is noticed
        files = self._saved.encode(traffic)
        try:
            await self._resources.in_background(self._saved.write, namespace_id, files)
        except (OSError, TierIOError) as error:
            traffic.is_saved = False  # the next time, whether something comes until then or not
            log_event(logger, "traffic_not_saved", level=logging.WARNING, problem=str(error))

    def _uses_in_ledger(self, namespace_id: str) -> Iterator[PinUse]:
        for prompt in self._prompts.pinned():
            if prompt.origin == "auto" and (prefix := _prefix_of(prompt, namespace_id)) is not None:
                yield PinUse(name=prompt.name, prefix=prefix, last_used_unix_s=time.time())


def recipe_of(namespace_id: str, prefix: PinnedPrefix) -> str:
    """Return where an automatic pin comes from; the prompt keeps it, so that a restart knows it again."""
    parent = prefix.parent.hex() if prefix.parent is not None else ""
    found = {"digest": prefix.digest.hex(), "parent": parent, "is_system_prompt": prefix.is_system_prompt}
    return json.dumps({"source": "auto", "namespace": namespace_id, **found})


def namespace_of(prompt: PromptRow) -> str | None:
    """Return the namespace that an automatic pin was found in."""
    try:
        return str(json.loads(prompt.recipe_json)["namespace"])
    except (ValueError, KeyError, TypeError):  # an operator has changed it
        return None


def _prefix_of(prompt: PromptRow, namespace_id: str) -> PinnedPrefix | None:
    """Return the prefix that an automatic pin of this namespace is; None for another's."""
    try:
        recipe = json.loads(prompt.recipe_json)
        if recipe["namespace"] != namespace_id:
            return None
        digest, parent = bytes.fromhex(recipe["digest"]), bytes.fromhex(recipe["parent"]) or None
        return PinnedPrefix(digest, len(prompt.tokens), bool(recipe["is_system_prompt"]), parent)
    except (ValueError, KeyError, TypeError):  # an operator has changed it
        return None
