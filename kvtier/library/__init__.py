"""The Python library: `Client` and `AsyncClient`, which `kvtier` itself exports; the CLI is built on them.

`rendering/` turns a prompt's source into tokens with vLLM, `values/` has what methods return, `flows/` what takes
several steps (pin, capture, warm, roll back). Nothing here prints: progress is reported as `progress_events`.
"""
