"""Tests of `kvtier.gateway`, against an ASGI app that answers as vLLM does."""
