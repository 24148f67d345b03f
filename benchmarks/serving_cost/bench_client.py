"""The process that runs `vllm bench serve` again and again for `bench_serve`, started once.

usage: bench_client.py SOCKET

Importing vLLM takes as long as a run. Reads the arguments of one run from the socket, answers with the error or with an
empty string, and ends with the connection.
"""

import asyncio
import sys
from multiprocessing.connection import Listener

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Serve one connection."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection:
        while True:
            try:
                argv = connection.recv()
            except EOFError:
                return
            try:
                asyncio.run(main_async(parser.parse_args(argv)))
            except Exception as error:  # the next run may succeed; the caller decides
                connection.send(repr(error))
            else:
                connection.send("")


if __name__ == "__main__":
    main()
