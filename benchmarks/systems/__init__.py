"""The systems compared (vLLM alone, kvtier, vLLM's own offloading, LMCache), and code of ours that runs in vLLM."""
