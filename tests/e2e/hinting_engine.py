"""A vLLM in this process, as an orchestrator embeds it: each line of stdin is a KV hint that goes with a prompt.

Usage: hinting_engine.py CONFIG, a file with model, prompt (token ids) and kv_transfer_config as JSON. It
prints `ready`, and `done` after each request; what vLLM logs to stdout goes to stderr.
"""

import asyncio
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import vllm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

# In each process of vLLM, since they import this file too: a start once hung for minutes, and nothing said where.
faulthandler.dump_traceback_later(200)


def own_stdout() -> TextIO:
    """Return stdout for the answers alone: a log line of another thread or process may come into the middle of one."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


async def main(config: dict[str, Any], answers: TextIO) -> None:
    engine = AsyncLLM.from_engine_args(
        vllm.AsyncEngineArgs(
            model=config["model"],
            served_model_name=["model"],
            dtype="bfloat16",
            enforce_eager=True,
            block_size=32,
            max_model_len=1024,
            num_gpu_blocks_override=64,
            kv_transfer_config=vllm.config.KVTransferConfig(**config["kv_transfer_config"]),
        )
    )
    try:
        await asyncio.to_thread(answers.write, "ready\n")
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            number += 1
            action = KvHintAction(action_id="a", action_version="1.0", **json.loads(line))
            envelope = KvHintsEnvelope(protocol_version="0.1", message_id=str(number), actions=[action])
            outputs = engine.generate(
                {"prompt_token_ids": config["prompt"]},
                vllm.SamplingParams(max_tokens=1, temperature=0),
                f"hinted-{number}",
                kv_hints=envelope,
            )
            async for _ in outputs:
                pass
            await asyncio.to_thread(answers.write, "done\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), own_stdout()))
