"""Signals that ask a run to stop, heard even while the main thread waits in a collective."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn

_SAME_SECONDS = 1.0  # a launcher and a batch system may both pass one signal on


def signal_number(name: str | int | None) -> int | None:
    """Returns a signal's number.

    Raises:
        ValueError: There is no such signal, or it cannot be caught.

    Example:
        >>> signal_number("SIGUSR1") == signal.SIGUSR1, signal_number(None)
        (True, None)
    """
    if name is None:
        return None
    try:
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise ValueError(f"preempt_signal={name!r} is no signal here; write its name, such as 'SIGUSR1'.") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"preempt_signal={name!r} cannot be caught by any process; write 'SIGUSR1' or 'SIGUSR2'.")
    return int(number)


def interruption(number: int) -> BaseException:
    """Returns what is raised when a signal has ended a run in order: the process exits with 128 + its number."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class Signals:
    """Catches signals while it is in place; a second one ends the process at once.

    Python runs a handler between two of its instructions, which do not come while the main thread waits in a
    collective. So the handlers do nothing, and the byte that the interpreter writes for a signal is read by a thread.

    Args:
        numbers: The signals.
    """

    _in_place: ClassVar[Signals | None] = None

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1
        self._outer: Signals | None = None
        self._first: tuple[int, float] | None = None
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)

    def install(self) -> None:
        """Puts the handlers in place; in a thread that is not the main one there can be none, and nothing is done."""
        if not self._numbers or threading.current_thread() is not threading.main_thread():
            return
        # What is ignored (a job in the background, nohup) stays so; what was not set from Python cannot be put back.
        self._numbers = [n for n in self._numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._numbers:
            self._handlers[number] = signal.signal(number, _heard)
        self._outer, Signals._in_place = Signals._in_place, self

    def remove(self, *, stopping: bool) -> None:
        """Puts back what was there before.

        Args:
            stopping: Whether this process is about to end as it was asked to: from here a further signal ends it at
                once, and a launcher that looks at the handlers sees that it has heard.
        """
        if self._handlers:
            for number, handler in self._handlers.items():
                signal.signal(number, _end_by_signal if stopping else handler)
            signal.set_wakeup_fd(self._wakeup)
            self._handlers = {}
            Signals._in_place = self._outer
            late = None if stopping or self._first is not None else self.wait(0)
            if late is not None:  # it came after the last look, and is for whoever comes next
                os.kill(os.getpid(), late)
        os.close(self._read_end)
        os.close(self._write_end)

    @property
    def first(self) -> int | None:
        """The first signal that has come, or None."""
        return None if self._first is None else self._first[0]

    def arm(self, number: int) -> None:
        """Takes a signal that came to another rank for the first one: the next ends this process at once."""
        self._first = self._first or (number, time.monotonic())

    def wake(self) -> None:
        """Ends a wait of another thread."""
        os.write(self._write_end, b"\0")

    def wait(self, seconds: float) -> int | None:
        """Waits for so long, or until a signal comes; returns the first signal, once. A second one ends the process."""
        ready = select.poll()  # select knows no descriptor above 1,023
        ready.register(self._read_end, select.POLLIN)
        if not ready.poll(seconds * 1000):
            return None
        try:
            return self._read(os.read(self._read_end, 64))
        except BlockingIOError:  # another thread was faster
            return None

    def _read(self, numbers: bytes) -> int | None:
        for number in numbers:
            if number not in self._numbers:
                continue
            if self._first is None:
                self._first = (number, time.monotonic())
                return number
            if time.monotonic() - self._first[1] > _SAME_SECONDS:
                end_at_once(128 + number)
        return None


def _heard(number: int, frame: FrameType | None) -> None:
    """Keeps the signal from doing what it does by default."""


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    end_at_once(128 + number)


def _let_go() -> None:
    """In a forked process (a loader's worker): its signals are its own, and are not written to the parent's pipe.

    A Ctrl-C in a terminal reaches the workers too, which must live on for the steps until the run stops.
    """
    if Signals._in_place is None:
        return
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in Signals._in_place._numbers:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    Signals._in_place = None


os.register_at_fork(after_in_child=_let_go)


def end_at_once(status: int) -> NoReturn:
    """Ends the process without its clean-up, whatever the main thread waits for."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a progress bar hides the cursor
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
