import warnings

with warnings.catch_warnings():
    # vLLM 0.32 and its dependencies warn at import time; nothing of that is ours.
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.factory  # noqa: F401
