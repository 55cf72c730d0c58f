"""How a process of many ends: not before gloo's threads have let go of what they share with Python."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path


def wait_for_gloo_threads(seconds: float = 5) -> None:
    """Waits until gloo's worker threads are asleep, for at most so many seconds.

    A collective is done for its caller before gloo's worker thread has dropped it. To drop the tensors the thread takes
    the interpreter's lock; where the interpreter is ending by then, Python (before 3.14) ends the thread, and that
    unwinds a C++ destructor: SIGABRT. Destroying the group joins its threads only when nothing else holds the group,
    and a `DistributedDataParallel` holds it until the interpreter ends.
    """
    end = time.monotonic() + seconds
    asleep: dict[str, str] | None = None
    while time.monotonic() < end:
        before, asleep = asleep, _sleeping_gloo_threads()
        if asleep == {} or (asleep is not None and asleep == before):
            return
        time.sleep(0.03)  # without the lock: a thread that waits for it asks every 5 ms, which its counters show


def _sleeping_gloo_threads() -> dict[str, str] | None:
    """The counters of gloo's worker threads by thread id; None where one is awake."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # not Linux: they cannot be seen, and have a moment instead
        time.sleep(0.1)
        return {}
    # A thread of gloo's that has not run yet is named as the process; so are Python's threads, which are not meant.
    names = {"pt_gloo_runloop", Path("/proc/self/comm").read_text().strip()}
    pythons = {str(thread.native_id) for thread in threading.enumerate()}
    threads = {}
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            status = (task / "status").read_text()
            name = status.split("\n", 1)[0].removeprefix("Name:\t")
            if task.name in pythons or name not in names:
                continue
            if "\nState:\tS" not in status:
                return None
            threads[task.name] = status[status.index("voluntary_ctxt_switches") :]
    return threads
