"""A rollout worker that starts an engine process in a thread that ends, and waits to be killed."""

from __future__ import annotations

import sys
import threading
import time

from fsm_trainer.engines.embedded import SERVER
from fsm_trainer.engines.process import EngineProcess


def main() -> None:
    started: list[EngineProcess] = []
    thread = threading.Thread(target=lambda: started.append(EngineProcess("rollout-9", SERVER)))
    thread.start()
    thread.join(60)
    # The kernel would have killed a child of that thread by now.
    time.sleep(0.2)
    print("torch" in sys.modules, started[0].pid, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
