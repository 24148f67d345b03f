import warnings

with warnings.catch_warnings():
    # vLLM 0.32 and its dependencies warn at import time; nothing of that is ours.
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler  # noqa: F401
