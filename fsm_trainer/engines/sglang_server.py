"""The main process of an SGLang server of our own; it ends with its worker.

SGLang kills this process when one of its others dies; so it is never the worker itself.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

from fsm_trainer.engines.process import Answer, Call, portable
from fsm_trainer.machine.errors import CapabilityMissing


def main(connection: Connection) -> None:
    """Take one call, ``serve(arguments)``, and serve until the end; it is answered on failure."""
    call: Call = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    # SGLang would turn it off where it isn't set, and NCCL can't map the memory of a peer that has
    # it on, as it is by default: the first collective of a link would fail.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")
    # It would make log-probs those of another temperature.
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    try:
        try:
            from sglang.launch_server import run_server
            from sglang.srt.plugins import load_plugins
            from sglang.srt.server_args import prepare_server_args
        except ImportError as error:
            raise CapabilityMissing(
                f"SGLang can't be imported: {error}; install .[sglang]"
            ) from error

        load_plugins()
        run_server(prepare_server_args(list(call.arguments)))
    except BaseException as error:
        failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        connection.send(Answer(call.number, None, portable("serve", failure)))
        os._exit(1)
    os._exit(0)


def _end_with(connection: Connection) -> None:
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(0)
