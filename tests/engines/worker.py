"""A rollout worker that starts an engine in a thread that ends, and waits to be killed."""

from __future__ import annotations

import sys
import threading
import time

from fsm_trainer.engines import EmbeddedEngine


def main() -> None:
    engine = EmbeddedEngine("rollout-9", sys.argv[1])
    thread = threading.Thread(target=engine.start)
    thread.start()
    thread.join(120)
    # The kernel would have killed a child of that thread by now.
    time.sleep(0.2)
    print("torch" in sys.modules, engine.health().pid, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
