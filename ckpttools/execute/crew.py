"""Threads that share out tasks, each with a worker of its own, and that stop within a tile when anything goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Generic, TypeVar

Worker = TypeVar("Worker")


class StoppedError(Exception):
    """Ends a task because another one failed or the run was interrupted; never leaves the crew."""


class Crew(Generic[Worker]):
    """Runs lists of tasks, one list after the other."""

    def __init__(self, workers: Sequence[Worker], stop: threading.Event) -> None:
        self._workers = workers
        self._stop = stop

    def run(self, tasks: Iterable[Callable[[Worker], None]]) -> None:
        """Give every task to a worker, in order; returns when all are done.

        The first exception, or an interruption of this thread, stops the others and is raised when they have stopped.
        """
        remaining = iter(tasks)
        lock = threading.Lock()

        def work(worker: Worker) -> None:
            while not self._stop.is_set():
                with lock:
                    task = next(remaining, None)
                if task is None:
                    return
                task(worker)

        with ThreadPoolExecutor(len(self._workers), "ckpttools") as pool:
            try:
                for future in as_completed([pool.submit(work, worker) for worker in self._workers]):
                    future.result()
            except BaseException:  # Ctrl-C and SIGTERM too
                self._stop.set()
                raise
