"""At which step all ranks stop, agreed while some wait in collectives of a step that others have not begun."""

from __future__ import annotations

import threading


class Boundary:
    """One rank's side of the agreement.

    A step's boundary comes after all that ends with the step. When a stop is asked for, the watch holds the main thread
    at its next boundary and tells all ranks that boundary's step. The greatest of all of them is where the run stops:
    each rank can still reach it, since nobody has passed it, and those that wait in the step's collectives are joined
    by those that were held before.

    Attributes:
        passed: The last step whose boundary the main thread has passed.
        waiting: Whether the main thread waits for the other ranks' word.

    Example:
        >>> boundary = Boundary(); boundary.start(4)
        >>> boundary.passes(5)
        True
        >>> boundary.hold()
        6
        >>> boundary.decide(7)
        >>> boundary.passes(6), boundary.passes(7)
        (True, False)
    """

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._held = False
        self._stop_at = 0
        self.passed = 0
        self.waiting = False

    def start(self, step: int) -> None:
        """Begins at a step, whose boundary is passed."""
        self.passed = step

    def passes(self, step: int) -> bool:
        """Whether the main thread, at the boundary of a step, goes on; it may wait here for the other ranks' word."""
        # First the step, then the look: a watch that holds meanwhile names this boundary or the next; both are right.
        self.passed = step
        if not self._held:
            return True
        self.waiting = True
        self._decided.wait()
        self.waiting = False
        return step < self._stop_at

    def hold(self) -> int:
        """Holds the main thread at its next boundary, and returns that boundary's step."""
        self._held = True
        return self.passed + 1

    def decide(self, step: int) -> None:
        """Lets the main thread go on, to stop at the boundary of a step."""
        self._stop_at = step
        self._decided.set()
