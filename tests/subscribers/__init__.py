"""Models of programs that take vLLM's KV cache events: how they decode them, and what they then know of a prompt.

Written from reading their sources, none of whose code is here; each module names the files and the commit that it
follows, and what it leaves out. Hashes of their own are replaced by another: only which blocks are the same counts.
"""
