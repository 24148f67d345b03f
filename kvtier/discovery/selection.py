"""Which prefixes are worth a pin: seconds of prefill saved per byte, greedily, under a budget.

Prefixes are a tree: one that begins with another shares its chunks. A chosen prefix holds the chunks of all shorter
ones, so a longer one costs, and saves, what it adds to the longest that is held. With full attention alone that is
`requests x added tokens` for `added tokens` of bytes: worth falls along each branch, so taking the best first is the
best that whole prefixes can do, but for the last that does not fit. Layers that keep a window or a state for each
prompt cost bytes for every pin (`bytes_per_pin`), and a request hits only where a pin ends.

At the end a prefix that holds no requests of its own is dropped in favour of the longer ones: its chunks stay with
them. What is pinned already stays unless something is worth a quarter more (`STAY`), so pins do not flap; that it was
not used lately is no reason to drop it while there is space.

What comes next is expected from what came: at the rate of its requests, but no more than twice (`_EXPECTED_IN_GAP`) in
the time for which there was none. So the pin of a conversation that has ended yields to one that is used now.

What a pin with a name begins with is chosen beforehand and takes no bytes: that pin holds its chunks, whatever is
chosen here.

Counts are the certain ones, `requests - error`: an estimate under a flood must not make a pin.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, nlargest
from operator import attrgetter

from kvtier.discovery.choices import STAY, PinCosts, PinnedPrefix, PinRules, PrefixChoice, Selection, Verdict
from kvtier.discovery.seen import PrefixCount, SeenTraffic

MAX_WANTED = 64
"""Prefixes that engines are asked for at once; the others follow."""
# Without it, pins hit 1 to 2 % less of a trace of conversations. With 1 it is 1 to 2 % more, for up to three times as
# many changes of pins (`python -m benchmarks.detect`).
_EXPECTED_IN_GAP = 2.0
_OWN_SHARE, _OWN_SHARE_PINNED = 0.15, 0.05  # of its requests; with fewer of its own a fixed length is contained
_MAX_DEPTH = 32  # of the tree: an engine names 7 prefixes a request
_BY_LENGTH = attrgetter("num_tokens", "digest")
_SLICE = 256  # prefixes between two turns of the loop


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix in the tree.

    Attributes:
        requests: Certain ones: its own counter's, or more when a longer one has more.
        expected: By these it is ranked, see the module's text.
        is_covered: A pin that is not automatic begins with it.
        is_held: Its chunks are held by a chosen prefix, itself or a longer one.
        is_free: They are held by a pin that is not automatic, and take none of the budget.
        explained: Requests of it that begin with a longer one that is chosen.
        heir: The chosen prefix that its chunks are accounted to: itself, or the most used longer one.
    """

    count: PrefixCount
    is_pinned: bool
    is_covered: bool
    requests: float
    num_prompts: int
    last_seen_s: float
    expected: float = 0.0
    parent: "_Node | None" = None
    depth: int = 0
    verdict: Verdict | None = None
    is_held: bool = False
    is_free: bool = False
    explained: float = 0.0
    heir: "_Node | None" = None
    added_tokens: int = 0
    free_tokens: int = 0  # of the added ones
    saved_tokens: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.count.num_tokens

    def ancestors(self) -> "Iterator[_Node]":
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def held_tokens(self) -> int:
        """Tokens of it whose chunks are held."""
        if self.is_held:
            return self.num_tokens
        return next((node.num_tokens for node in self.ancestors() if node.is_held), 0)


_Rank = tuple[float, bool, bytes]


@dataclass
class SelectionRun:
    """One selection: `steps` to its end, then `selection`.

    Args:
        traffic: A reading of the sketch.
        pinned: The automatic pins there are; one that the sketch has lost counts as not used.
        rules: What a prefix must have.
        costs: What a pin costs and saves.
        covered: Prefixes that pins with names begin with.
        refused: Prefixes that cannot be pinned now; what they would take is there for others.
    """

    traffic: SeenTraffic
    pinned: Collection[PinnedPrefix]
    rules: PinRules
    costs: PinCosts
    covered: Collection[bytes] = ()
    refused: Collection[bytes] = ()
    selection: Selection | None = None
    _nodes: list[_Node] = field(default_factory=list)  # longest last
    _used_bytes: float = 0.0

    def steps(self) -> Iterator[None]:
        """Select; between two steps the loop may take a turn."""
        yield from self._build_tree()
        yield from self._sum_up()
        yield from self._choose()
        yield from self._drop_contained()
        yield from self._account()
        yield from self._rank()

    def _build_tree(self) -> Iterator[None]:
        pinned = {each.digest for each in self.pinned}
        counts = list(self.traffic.prefixes)
        seen = {each.digest for each in counts}
        counts += [
            PrefixCount(each.digest, each.num_tokens, each.is_system_prompt, each.parent, 0.0, 0.0, 0, 0.0, 0.0)
            for each in self.pinned
            if each.digest not in seen
        ]
        counts.sort(key=_BY_LENGTH)
        yield
        nodes: dict[bytes, _Node] = {}
        for number, each in enumerate(counts):
            node = nodes[each.digest] = _Node(
                each,
                each.digest in pinned,
                each.digest in self.covered,
                each.requests_at_least,
                each.num_prompts,
                each.last_seen_s,
            )
            parent = None if each.parent is None else nodes.get(each.parent)
            # Shorter ones come first, so there can be no circle, whatever an engine says.
            if parent is not None and parent.num_tokens < each.num_tokens and parent.depth < _MAX_DEPTH:
                node.parent, node.depth = parent, parent.depth + 1
            if number % _SLICE == _SLICE - 1:
                yield
        self._nodes = list(nodes.values())

    def _sum_up(self) -> Iterator[None]:
        """What began with a longer prefix began with the shorter one, whatever its counter has lost."""
        for number, node in enumerate(reversed(self._nodes)):
            gap_s = max(self.traffic.now_s - node.last_seen_s, 1.0)
            node.expected = min(node.requests, _EXPECTED_IN_GAP * self.traffic.window_s / gap_s)
            if (parent := node.parent) is not None:
                parent.requests = max(parent.requests, node.requests)
                parent.num_prompts = max(parent.num_prompts, node.num_prompts)
                parent.last_seen_s = max(parent.last_seen_s, node.last_seen_s)
            if number % (4 * _SLICE) == 0:
                yield

    def _choose(self) -> Iterator[None]:
        """Take the best per byte first. What others took since a rank was computed only lowers it, so look again."""
        for node in self._nodes:
            if node.is_covered:
                self._hold(node)
                for each in (node, *node.ancestors()):
                    each.is_free = True
        yield
        heap: list[tuple[_Rank, _Node]] = []
        for number, node in enumerate(self._nodes):
            if node.is_covered:
                continue
            node.verdict = self._unfit(node)
            if node.verdict is None:
                heap.append((self._rank_of(node), node))
            if number % _SLICE == _SLICE - 1:
                yield
        heapify(heap)
        number = 0
        while heap:
            rank, node = heap[0]
            now = self._rank_of(node)
            if now > rank:
                heapreplace(heap, (now, node))
            else:
                heappop(heap)
                self._take(node)
            number += 1
            if number % _SLICE == 0:
                yield

    def _unfit(self, node: _Node) -> Verdict | None:
        if node.num_tokens < self.rules.min_tokens:
            return Verdict.TOO_SHORT
        if node.is_pinned:
            return None
        if node.count.digest in self.refused:
            return Verdict.OVER_BUDGET
        if node.requests < self.rules.min_requests - 0.5:
            return Verdict.TOO_FEW_REQUESTS
        if node.num_prompts < 2:
            return Verdict.ONE_PROMPT
        return None

    def _rank_of(self, node: _Node) -> _Rank:
        """Return the order in which it is taken, the lowest first: worth per byte, then system prompts."""
        added_tokens, added_bytes = self._added(node)
        own = min(node.expected, node.requests - node.explained) if node.is_held else node.expected
        worth = max(own, 0.0) * max(added_tokens, 1) / max(added_bytes, 1.0)
        return -worth * (STAY if node.is_pinned else 1.0), not node.count.is_system_prompt, node.count.digest

    def _added(self, node: _Node) -> tuple[int, float]:
        """Return the tokens by which it is longer than what is chosen of it, and the bytes that choosing it takes."""
        num_bytes = (node.num_tokens - node.held_tokens()) * self.costs.bytes_per_token + self.costs.bytes_per_pin
        shorter = next((each for each in node.ancestors() if each.verdict is Verdict.CHOSEN), None)
        return node.num_tokens - (0 if shorter is None else shorter.num_tokens), num_bytes

    def _take(self, node: _Node) -> None:
        own = node.requests - node.explained
        if node.is_held and not node.is_pinned and own < self.rules.min_requests - 0.5:
            node.verdict = Verdict.CONTAINED
            return
        added_bytes = self._added(node)[1]
        if self._used_bytes + added_bytes > self.rules.max_bytes:
            node.verdict = Verdict.OVER_BUDGET
            return
        self._used_bytes += added_bytes
        self._hold(node)

    @staticmethod
    def _hold(node: _Node) -> None:
        own = node.requests - node.explained
        node.verdict, node.is_held = Verdict.CHOSEN, True
        is_below_chosen = True
        for shorter in node.ancestors():
            shorter.is_held = True
            if is_below_chosen:
                shorter.explained += max(own, 0.0)
                is_below_chosen = shorter.verdict is not Verdict.CHOSEN

    def _drop_contained(self) -> Iterator[None]:
        """Leave the chunks of prefixes without requests of their own to longer ones; from the longest."""
        for node in self._nodes:
            node.explained = 0.0
        for number, node in enumerate(reversed(self._nodes)):
            if node.verdict is Verdict.CHOSEN and node.heir is not None and not self._stays(node, node.heir):
                node.verdict = Verdict.CONTAINED
                self._used_bytes -= self.costs.bytes_per_pin
            if node.verdict is Verdict.CHOSEN:
                node.heir = node
            if (parent := node.parent) is not None and (heir := node.heir) is not None:
                parent.explained += node.requests if heir is node else node.explained
                if parent.heir is None or heir.requests > parent.heir.requests:
                    parent.heir = heir
            if number % (2 * _SLICE) == 0:
                yield

    def _stays(self, node: _Node, longer: _Node) -> bool:
        """Say whether a chosen prefix has requests of its own, or is the pin that holds the chunks until now."""
        if node.is_covered or (node.is_pinned and not longer.is_pinned):
            return True
        own = node.requests - node.explained
        least = 0.5 if node.is_pinned else self.rules.min_requests - 0.5
        share = _OWN_SHARE_PINNED if node.is_pinned else _OWN_SHARE
        return own >= least and (node.count.is_system_prompt or own >= share * node.requests)

    def _account(self) -> Iterator[None]:
        """Give each held chunk to one chosen prefix, with what it saves; from the shortest."""
        for number, node in enumerate(self._nodes):
            if (heir := node.heir) is not None:
                shorter_tokens = 0 if node.parent is None else node.parent.num_tokens
                heir.added_tokens += node.num_tokens - shorter_tokens
                heir.free_tokens += node.num_tokens - shorter_tokens if node.is_free else 0
                if not self.costs.bytes_per_pin:
                    heir.saved_tokens += node.requests * (node.num_tokens - shorter_tokens)
                elif heir is node:
                    node.saved_tokens = node.requests * self._added(node)[0]
            if number % _SLICE == _SLICE - 1:
                yield

    def _rank(self) -> Iterator[None]:
        ranked: dict[bool, list[tuple[float, bytes, PrefixChoice]]] = {True: [], False: []}
        for number, node in enumerate(self._nodes):
            choice = self._choice(node)
            is_chosen = choice.verdict is Verdict.CHOSEN
            ranked[is_chosen].append((-choice.saved_s_per_hour, choice.digest, choice))
            if number % _SLICE == _SLICE - 1:
                yield
        for choices in ranked.values():
            choices.sort()
            yield
        chosen = [choice for _, _, choice in ranked[True]]
        self.selection = Selection(
            choices=(*chosen, *(choice for _, _, choice in ranked[False])),
            total_bytes=sum(each.added_bytes for each in chosen),
            saved_s_per_hour=sum(each.saved_s_per_hour for each in chosen),
            saved_share=sum(each.saved_share for each in chosen),
        )

    def _choice(self, node: _Node) -> PrefixChoice:
        is_chosen = node.verdict is Verdict.CHOSEN
        if not is_chosen:
            node.added_tokens = node.num_tokens - node.held_tokens()
            node.saved_tokens = node.requests * node.added_tokens
        num_bytes = (node.added_tokens - node.free_tokens) * self.costs.bytes_per_token
        num_bytes += 0.0 if node.is_covered else self.costs.bytes_per_pin
        count, tokens = node.count, self.traffic.tokens
        assert node.verdict is not None
        return PrefixChoice(
            digest=count.digest,
            num_tokens=count.num_tokens,
            is_system_prompt=count.is_system_prompt,
            verdict=node.verdict,
            contained_in=node.heir.count.digest if node.verdict is Verdict.CONTAINED and node.heir else None,
            is_pinned=node.is_pinned,
            requests_per_hour=node.requests * self.traffic.per_hour,
            num_prompts=node.num_prompts,
            last_seen_s=node.last_seen_s,
            added_tokens=node.added_tokens,
            added_bytes=int(num_bytes),
            saved_s_per_hour=node.saved_tokens * self.traffic.per_hour / self.costs.prefill_tokens_per_s,
            saved_share=node.saved_tokens / tokens if tokens else 0.0,
        )


def select(
    traffic: SeenTraffic,
    pinned: Collection[PinnedPrefix],
    rules: PinRules,
    costs: PinCosts,
    covered: Collection[bytes] = (),
) -> Selection:
    """Return what is worth a pin, in one go. On an event loop take SelectionRun, in turns."""
    run = SelectionRun(traffic, pinned, rules, costs, covered)
    for _ in run.steps():
        pass
    assert run.selection is not None
    return run.selection


def first_wanted(choices: Iterable[PrefixChoice]) -> list[PrefixChoice]:
    """Return those whose tokens to ask engines for, of those that were chosen, the most valuable first.

    Tokens come with the next request, so those that were seen last come first: what never comes again would keep others
    from their place for hours.
    """
    return nlargest(MAX_WANTED, choices, key=attrgetter("last_seen_s"))
