"""Fuzzers of everything that comes from outside: files on disk, files of users, every RPC, and HTTP.

`base` has the contract of a target, `mutation` makes inputs from a corpus. `file_targets` and `text_targets` are
readers in this process. `rpc_target` and `http_target` have an `attacked_daemon` in another one; `wire` has what the
latter sends. `python -m tests.fuzz` runs them for minutes (`make fuzz`); the tests here replay the corpus and try a few
inputs each.
"""
