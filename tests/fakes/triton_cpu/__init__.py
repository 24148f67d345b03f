"""A Triton backend for machines without a GPU, on which Triton's own interpreter runs the kernels.

vLLM for CPU uses Triton, and so its Model Runner V2, only if there is a backend named "cpu". `make test-triton` puts
this folder among Triton's backends. It compiles nothing.
"""
