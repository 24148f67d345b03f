"""The methods of `Client` that are about prompts."""

import builtins
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from kvtier._pb import cache_pb2 as pb
from kvtier.client.warm_requests import by_importance
from kvtier.errors import InvalidArgumentError, NamespaceNotFoundError, PromptNotFoundError
from kvtier.library.connection import Connection
from kvtier.library.flows.pin_flow import PinFlow, PinJob
from kvtier.library.flows.prompt_history import drop_replacement, last_version, roll_back, versions_of
from kvtier.library.flows.warm_flow import WarmFlow
from kvtier.library.progress_events import OnProgress, Warmed, Warming, ignore
from kvtier.library.rendering.recipe import Recipe, SourceKind, recipe_of
from kvtier.library.values.conversion import checked_message, from_message, given, one_of, prompt_of
from kvtier.library.values.public_values import ChunkMap, Evicted, Prompt, PromptPage, PromptState
from kvtier.library.values.selectors import parse_selector
from kvtier.library.watches import Watch

MAX_PAGE_SIZE = 1000
TierName = Literal["host", "disk"]
_TIERS = {None: pb.TIER_ANY, "host": pb.TIER_HOST, "disk": pb.TIER_DISK}


class PromptCalls(Connection):
    """Pin, list, change and watch prompts."""

    def pin(
        self,
        name: str,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        text: str | None = None,
        tokens: Iterable[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        cache_salt: str = "",
        ttl_s: int | None = None,
        priority: int | None = None,
        public: bool | None = None,
        sliding: bool | None = None,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        replace: bool = False,
        warm: bool = True,
        timeout_s: float = 600.0,
        on_progress: OnProgress = ignore,
    ) -> Prompt:
        """Pin a prompt, have vLLM compute it, and wait until it is durable.

        Give one source, exactly as requests send it. Without one, a known prompt is rendered again from the source
        that is stored with it.

        Args:
            name: Of the prompt.
            system: A system prompt.
            messages: Chat messages as in the OpenAI API; the prompt is what every conversation with them begins with.
            text: Text for the completions API, which has no chat template.
            tokens: Token ids; they need no vLLM.
            tools: OpenAI tools; with `system` or `messages`.
            chat_template_kwargs: As requests send them; with `system` or `messages`.
            model: Name of a served model or LoRA; empty: the first one.
            cache_salt: As requests send it.
            ttl_s: Seconds until the pin ends by itself; 0: never. None, as for the next five: as it is, and for a new
                pin never, 0, False, "" and none.
            priority: -100 to 100; the higher, the more important.
            public: Let requests with any cache_salt use it.
            sliding: The time to live begins again with each use.
            owner: Whose prompt it is: a team, a service. The daemon may limit what an owner has pinned.
            labels: What prompts are selected by; in place of those of before.
            replace: Replace another prompt of that name. That one serves until the new one is durable.
            warm: False: only register it; chunks are captured when vLLM next computes them.
            timeout_s: Seconds for the capture.
            on_progress: Called with each step.

        Returns:
            The prompt as it is at the end. Look at its `state`: it is not durable yet when no engine is attached, the
            time is up, or the disk is full; UNRENDERED when no vLLM answered. If its `name` is not `name`, it is a
            version that replaces the prompt when it is durable.

        Raises:
            InvalidArgumentError: An argument cannot be used.
            RenderError: vLLM cannot turn the source into tokens.
            PromptExistsError: Another prompt has the name, and `replace` is False.
            QuotaExceededError: It does not fit.
            KvtierError: The pin is registered, and vLLM cannot use it.
        """
        vllm = self._vllm
        source = recipe_of(
            system=system,
            messages=messages,
            text=text,
            tokens=tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        if source is None:
            known = self._known(name)
            source = self._stored_recipe(known), ()
            model, cache_salt = model or known.lora_name or known.model, cache_salt or known.cache_salt
            replace = True  # the template may have changed since then, and the new rendering follows it
        job = PinJob(
            name=name,
            recipe=source[0],
            tokens=source[1],
            model=model,
            cache_salt=cache_salt,
            ttl_s=ttl_s,
            priority=priority,
            public=public,
            sliding=sliding,
            owner=owner,
            labels=labels,
            replace=replace,
            warm=warm,
            timeout_s=timeout_s,
        )
        return PinFlow(self._daemon, vllm, on_progress, self._NAMES).run(job)

    def _known(self, name: str) -> Prompt:
        names = self._NAMES
        try:
            known = self.get(name)
            return self.get(known.replacement) if known.replacement else known
        except PromptNotFoundError as exc:
            remedy = (
                f"is no known prompt; say what to pin: {names['system']}, {names['messages']}, {names['text']} or "
                f"{names['tokens=...']}"
            )
            raise InvalidArgumentError(names["name"], name, remedy) from exc

    def _stored_recipe(self, known: Prompt) -> Recipe:
        recipe = Recipe.from_values(known.recipe, self._NAMES)
        if recipe.kind is SourceKind.TOKENS:
            remedy = f"was pinned by token ids; give them again with {self._NAMES['tokens=...']}"
            raise InvalidArgumentError(self._NAMES["name"], known.name, remedy)
        return recipe

    def adopt(
        self,
        name: str,
        automatic: str,
        *,
        ttl_s: int | None = None,
        priority: int | None = None,
        public: bool | None = None,
        replace: bool = False,
    ) -> Prompt:
        """Give an automatic pin a name; it stays from then on. Its chunks are kept throughout.

        Args:
            name: The new name.
            automatic: Name of the automatic pin, as `list` has it.
            ttl_s: As in `pin`; `priority`, `public` and `replace` too.
            priority: See above.
            public: See above.
            replace: See above.
        """
        public = self.get(automatic).public if public is None else public
        how = {"ttl_s": ttl_s, "priority": priority, "public": public, "replace": replace}
        request = checked_message(pb.PinRequest, name=name, adopt=automatic, **how)
        return prompt_of(self._daemon.pin(request))

    def set(
        self,
        name: str,
        *,
        ttl_s: int | None = None,
        priority: int | None = None,
        public: bool | None = None,
        sliding: bool | None = None,
        owner: str | None = None,
        labels: Mapping[str, str | None] | None = None,
    ) -> Prompt:
        """Change how a prompt is pinned; what is None stays as it is. Needs no vLLM.

        Args:
            name: Of the prompt.
            ttl_s: As in `pin`; from now on.
            priority: See `pin`.
            public: See `pin`.
            sliding: See `pin`.
            owner: See `pin`.
            labels: Added to those that there are; None as a value removes one.

        Raises:
            PromptNotPinnedError: It is not pinned by a person.
            OwnerQuotaError: The new owner would have too much.
        """
        changed = labels or {}
        request = checked_message(
            pb.UpdatePromptRequest,
            name=name,
            ttl_s=ttl_s,
            priority=priority,
            **given(public=public, sliding=sliding),
            owner=owner,
            set_labels={key: value for key, value in changed.items() if value is not None},
            removed_labels=[key for key, value in changed.items() if value is None],
        )
        return prompt_of(self._daemon.update(request))

    def rename(self, name: str, new_name: str) -> Prompt:
        """Give a prompt another name; its versions go with it. Needs no vLLM.

        Raises:
            PromptExistsError: The new name is taken.
            InvalidArgumentError: It has that name already, or no prompt can have it.
        """
        request = pb.RenamePromptRequest(name=name, new_name=new_name)
        return prompt_of(self._daemon.rename(request))

    def list(self, *, selector: str = "", owner: str | None = None) -> builtins.list[Prompt]:
        """Return every prompt by name, without recipe, which `get` has.

        Args:
            selector: Only those whose labels it selects: `team=support,tier!=1,canary,!draft`.
            owner: Only those of this owner; "": only those without one.
        """
        wanted = parse_selector("selector", *filter(None, [selector]))
        prompts = map(prompt_of, self._read(self._daemon.list))
        return [each for each in prompts if wanted.matches(each.labels) and owner in (None, each.owner)]

    def list_page(
        self,
        *,
        selector: str = "",
        owner: str | None = None,
        states: Collection[PromptState] = (),
        page_size: int = 100,
        page_token: str = "",
    ) -> PromptPage:
        """Return a part of what `list` returns, for lists that are too long to hold.

        Args:
            selector: See `list`; `owner` too.
            owner: See above.
            states: Only prompts in one of these; none: in any.
            page_size: At most this many, and at most 1000.
            page_token: `next_page_token` of the page before; empty: from the first on.
        """
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise InvalidArgumentError(self._NAMES["page_size"], page_size, f"use 1 to {MAX_PAGE_SIZE}")
        wanted = parse_selector("selector", *filter(None, [selector]))
        is_filtered = bool(selector or states or owner is not None)
        found: list[Prompt] = []
        while True:
            # A page of what is wanted may need several of the daemon's; a full one of those holds no more than fits.
            size = MAX_PAGE_SIZE if is_filtered else page_size - len(found)
            request = pb.ListPromptsRequest(page_size=size, page_token=page_token)
            page = self._read(functools.partial(self._daemon.list_page, request))
            for prompt in map(prompt_of, page.prompts):
                if len(found) == page_size:
                    return PromptPage(prompts=tuple(found), next_page_token=found[-1].name)
                if wanted.matches(prompt.labels) and owner in (None, prompt.owner):
                    found += [prompt] if not states or prompt.state in states else []
            page_token = page.next_page_token
            if not page_token or (len(found) == page_size and not is_filtered):
                return PromptPage(prompts=tuple(found), next_page_token=page_token)

    def get(self, name: str) -> Prompt:
        """Return a prompt. PromptNotFoundError: none has this name."""
        return prompt_of(self._read(lambda: self._daemon.get(name)))

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a prompt's token ids. PromptUnrenderedError: it has none yet."""
        return self._read(lambda: self._daemon.tokens(name))

    def chunks(self, name: str, *, namespace_id: str = "") -> ChunkMap:
        """Return where each chunk of a prompt lies; without a namespace in the one that was used last.

        Raises:
            PromptNotBoundError: No engine has recognized the prompt, or none in that namespace.
        """
        return from_message(ChunkMap, self._read(lambda: self._daemon.chunk_map(name, namespace_id)))

    def history(self, name: str) -> builtins.list[Prompt]:
        """Return the versions of a prompt, the oldest first; the one without a number serves."""
        return self._read(lambda: versions_of(self._daemon, name))

    def rollback(self, name: str, version: int | None = None, *, on_progress: OnProgress = ignore) -> Prompt:
        """Replace a prompt with a version that it has replaced, which serves at once if its chunks are still held.

        Args:
            name: Of the prompt.
            version: Its number; None: the last one before. If a version waits to replace the prompt, None only ends
                that one, which never served: the prompt stays as it is.
            on_progress: Called with each step.

        Returns:
            What was made, or stays. If its name is not `name`, it takes its place when it is durable; `warm` makes it
            so.
        """
        if version is None:
            versions = self.history(name)
            current = next((each for each in versions if each.name == name), None)
            if current is not None and current.replacement:
                return drop_replacement(self._daemon, current, on_progress)
            version = last_version(name, versions, self._NAMES["name"])
        return roll_back(self._daemon, name, version, on_progress)

    def unpin(self, name: str) -> Prompt:
        """End a pin. The chunks stay as cache until they are evicted."""
        return prompt_of(self._daemon.unpin(name))

    def evict(self, name: str, *, tier: TierName | None = None, force: bool = False) -> Evicted:
        """Drop a prompt's chunks, except those that other pinned prompts have.

        A prompt that is not pinned is forgotten, unless `tier` is given.

        Args:
            name: Of the prompt.
            tier: From this one only.
            force: Though it is pinned; the pin stays.

        Raises:
            InvalidArgumentError: There is no such tier.
            PromptPinnedError: It is pinned, and `force` is False.
        """
        wanted = one_of(self._NAMES["tier"], tier, _TIERS)
        return from_message(Evicted, self._daemon.evict(name, force=force, tier=wanted))

    def evict_all(
        self, *, tier: TierName | None = None, force: bool = False, namespace_id: str | None = None
    ) -> Evicted:
        """Drop every chunk that no pinned prompt has; with `force` those of pinned prompts too, which stay pinned.

        Args:
            tier: From this one only.
            force: See above.
            namespace_id: Its chunks only, and no prompt is forgotten; or the beginning of it, if no other begins so.

        Raises:
            InvalidArgumentError: There is no such tier.
            NamespaceNotFoundError: There is none.
        """
        wanted = one_of(self._NAMES["tier"], tier, _TIERS)
        if namespace_id == "":  # an unset variable, and the daemon would take it for all of them
            raise NamespaceNotFoundError(namespace_id)
        whole_id = self._whole_id(namespace_id) if namespace_id is not None else ""
        return from_message(Evicted, self._daemon.evict_all(force=force, tier=wanted, namespace_id=whole_id))

    def _whole_id(self, beginning: str) -> str:
        """Return the id of the only namespace that begins so; what is unknown is left to the daemon to refuse."""
        ids = [each.namespace_id for each in self._daemon.status().namespaces]
        found = [each for each in ids if each.startswith(beginning)]
        if not beginning or beginning in ids or not found:
            return beginning
        if len(found) > 1:
            remedy = f"begins the ids of {len(found)} namespaces; give more of it"
            raise InvalidArgumentError(self._NAMES["namespace_id"], beginning, remedy)
        return found[0]

    def warm(
        self,
        *names: str,
        unpinned: bool = False,
        max_ratio: float = 0.5,
        wait_s: float = 60.0,
        timeout_s: float = 600.0,
        on_progress: OnProgress = ignore,
    ) -> builtins.list[Warmed]:
        """Load prompts into vLLM's prefix cache: by priority, then the newest first.

        Args:
            names: Of prompts; none: all that are pinned.
            unpinned: Without names: the others too, last.
            max_ratio: Share of vLLM's cache to fill at most; 0: no limit.
            wait_s: Total time to wait while requests wait in vLLM; after it, no more prompts are warmed.
            timeout_s: For one prompt.
            on_progress: Called with Warming once, then with what is returned.
        """
        vllm = self._vllm
        if names:
            prompts = by_importance([self.get(name) for name in dict.fromkeys(names)])
        else:
            prompts = by_importance([prompt for prompt in self.list() if prompt.pinned or unpinned])
        flow = WarmFlow(client=self._daemon, vllm=vllm, max_ratio=max_ratio, wait_s=wait_s, timeout_s=timeout_s)
        flow.prepare()
        on_progress(Warming(prompts=tuple(prompts), limit_tokens=flow.limit_tokens))
        done = []
        for warmed in flow.run(prompts):
            done.append(warmed)
            on_progress(warmed)
        return done

    def watch(self, name: str, *, timeout_s: float | None = None) -> Watch[Prompt]:
        """Return an iterator of a prompt: as it is now, then again at each change.

        It follows the prompt when a replacement is renamed, and ends after `timeout_s` (None: never) or by `close`.
        """
        return Watch(self._daemon.watch(self.get(name).pin_id, timeout_s=timeout_s), prompt_of)
