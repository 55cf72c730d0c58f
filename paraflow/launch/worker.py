"""The program that a launched process runs: `script` runs a user's script, `call` runs a pickled function.

It is run by its path and imports nothing but the standard library, so that a script finds its process untouched: it can
still set environment variables that torch reads on import.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FAILURE_FILE = "failure.json"  # beside the error file that torch's launcher names for each rank
_FAILURE_VARIABLE = "PARAFLOW_FAILURE_FILE"  # under torchrun it is not set, for nobody would read the file


def exit_status(returncode: int) -> int:
    """The exit status a shell reports for a `Popen.returncode`: 128 + the signal's number where a signal ended it.

    Example:
        >>> exit_status(3), exit_status(-9)
        (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(returncode: int) -> str | None:
    """The name of the signal that ended a process, or None where it ended by itself.

    Example:
        >>> signal_name(-9), signal_name(1)
        ('SIGKILL', None)
    """
    if returncode >= 0:
        return None
    return signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"


def end_with_parent(parent: int) -> None:
    """Have this process killed when the process `parent` ends, so that no rank outlives its launcher."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def run_script(command: list[str]) -> None:
    """Run `script.py args...` or `-m module args...` so that it finds argv, path and `__main__` as if run directly."""
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif os.path.isdir(sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            _run_file(sys.argv[0])
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        code = error.code if isinstance(error.code, int) else 1
        told = write_failure(code, error, None if isinstance(error.code, int) else f"SystemExit: {error.code}")
        if not told:
            raise
        sys.exit(code)  # with a text, Python would print it
    except KeyboardInterrupt as error:
        if write_failure(130, error, None) and not _has_own_excepthook():
            sys.excepthook = _print_nothing
        raise
    except BaseException as error:
        error = error.with_traceback(_users_frames(error.__traceback__))
        told = write_failure(1, error, _message(error))
        if not told or _has_own_excepthook():
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _has_own_excepthook() -> bool:
    hook: Any = sys.excepthook
    while (
        getattr(hook, "__name__", "") == "_distributed_excepthook"
    ):  # torch wraps the one there was at a group's start
        inner = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False)).get("old_hook")
        hook = sys.__excepthook__ if inner is None else inner.cell_contents
    return hook is not sys.__excepthook__


def _print_nothing(*_: object) -> None:
    """Stands in for `sys.excepthook` where the launcher prints the failure."""


def _run_file(path: str) -> None:
    # runpy would take __main__ away again when the script ends, before its atexit functions run.
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _users_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        frames = frames.tb_next
    return frames


def _format(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # Python shows no traceback of it either
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, _users_frames(error.__traceback__)))


def _message(error: BaseException) -> str:
    notes = getattr(error, "__notes__", ())
    return "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *map(str, notes)])


def _is_refusal(error: BaseException) -> bool:
    """Whether Paraflow raised the error on purpose: then its sentence says all, unless the traceback is asked for."""
    bases = {base.__name__ for base in type(error).__mro__ if base.__module__ == "paraflow.errors"}
    return "ParaflowError" in bases and "StallError" not in bases and os.environ.get("PARAFLOW_TRACEBACK") != "1"


def write_failure(exit_code: int, error: BaseException, message: str | None) -> bool:
    """Tell the launcher how this rank failed; False where no launcher named a file for it."""
    failure_file = os.environ.get(_FAILURE_VARIABLE)
    if failure_file is None:
        return False
    said = {
        "time": time.time(),
        "exit_code": exit_code,
        "traceback": _format(error),
        "message": message,
        "refused": _is_refusal(error),
    }
    path = Path(failure_file)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(said), encoding="utf-8")
    aside.replace(path)
    return True


def call_function(connection: Connection) -> None:
    """Receive a pickled (function, args, kwargs), call it, and send ("returned" or "raised", time, bytes)."""
    sys.path[:], payload = connection.recv()
    try:
        import cloudpickle

        function, args, kwargs = pickle.loads(payload)
        outcome = ("returned", time.time(), cloudpickle.dumps(function(*args, **kwargs)))
    except KeyboardInterrupt:
        sys.exit(130)  # the parent was interrupted, and says so itself
    except Exception as error:
        outcome = ("raised", time.time(), _format(error).encode())
    connection.send(outcome)
    sys.exit(0 if outcome[0] == "returned" else 1)


def main() -> None:
    """Run what the command line asks for: `script PARENT COMMAND...` or `call PARENT FILE_DESCRIPTOR`."""
    entry, parent, *rest = sys.argv[1:]
    end_with_parent(int(parent))
    if entry == "script":
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file is not None:
            os.environ[_FAILURE_VARIABLE] = str(Path(error_file).with_name(FAILURE_FILE))
        run_script(rest)
    else:
        call_function(Connection(int(rest[0])))


if __name__ == "__main__":
    main()
