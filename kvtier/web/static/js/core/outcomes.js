// What became of requests, in words, and what to do about it.

const KINDS = {
  hit: "good",
  part: "accent",
  unknown: "",
  too_short: "",
  slower: "",
  no_session: "warn",
  late: "warn",
  breaker_open: "warn",
};

/** What each means, and what helps; docs/troubleshooting.md says more. */
export const OUTCOMES = {
  hit: ["all that it shares with its pin came from a cache", "nothing"],
  part: ["some of its pin was restored, the rest computed", "explain the request: it says which chunks are missing"],
  diverged: [
    "it begins like a pin, and differs before the pin's end",
    "explain the request, and move what changes behind the pinned prompt",
  ],
  unknown: ["it begins like no pin", "see the advice: it may be worth a pin"],
  too_short: ["shorter than one chunk and one token", "nothing: vLLM computes it faster"],
  not_cacheable: ["its adapter was loaded in place of another", "load it under another name"],
  cache_skipped: [
    "it asks for prompt_logprobs, or a state is not stored yet",
    "ask for them only where they are needed",
  ],
  no_session: ["vLLM had no session with a daemon", "look at vLLM's log; it attaches by itself"],
  breaker_open: ["a lookup before it was late, so the daemon was not asked", "as late"],
  late: ["the daemon did not answer in time", "look whether the daemon is short of CPU"],
  slower: ["computing what was left was faster than loading it", "nothing"],
  not_stored: ["its chunks are not stored: not yet, evicted or lost", "the next request stores them"],
  no_slot: ["on disk, and no place in host memory could be freed", "raise host.bytes"],
  disk_off: ["on disk, and the disk is switched off after errors", "see the disk view"],
  over_limit: [
    "the engine held too many leases, or it has too many chunks",
    "fewer requests at once, or larger chunks",
  ],
  load_failed: ["chunks were found, and could not be loaded", "verify the prompt, and see the disk view"],
  adapter_not_ready: ["the content of its adapter was not known yet", "nothing: from the second request on it is"],
  not_promoted: [
    "on disk, and reading it would have taken longer than computing it",
    "if it goes on, raise host.bytes",
  ],
  quarantined: ["its namespace is quarantined", "see the disk view"],
};

export function outcomeKind(outcome) {
  return KINDS[String(outcome).toLowerCase()] ?? "warn";
}
