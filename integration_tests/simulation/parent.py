"""Processes that end with the one that started them, however that ends."""

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_parent() -> None:
    """End this process at once when its parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def wait() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
