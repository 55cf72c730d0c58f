"""Where in a user's program a call was made."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = ("torch", "torchmetrics")
_PASSING_ON = ("paraflow.debug", "paraflow.mesh", "paraflow.collectives")  # they call for somebody else


def call_site() -> str:
    """Returns the line of the user's program that is running, and the line of Paraflow it called, where there is one.

    The user's line is in the innermost frame outside torch, torchmetrics, Paraflow and the standard library. Without
    one, what is returned is a line of Paraflow.
    """
    ours = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = _module(frame)
        library = module.partition(".")[0]
        if library == "paraflow":
            if not ours and not module.startswith(_PASSING_ON):
                ours = _line(frame, module)
        elif library not in _LIBRARIES and not _is_standard(frame.f_code.co_filename):
            theirs = _line(frame)
            return f"{theirs} ({ours})" if ours else theirs
        frame = frame.f_back
    return ours or "a place unknown"


def _module(frame: FrameType) -> str:
    """The name of a frame's module, also of one that is run with ``python -m``."""
    spec = frame.f_globals.get("__spec__")
    name = getattr(spec, "name", None) or frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _is_standard(filename: str) -> bool:
    return filename.startswith("<frozen ") or (
        filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    )


def _line(frame: FrameType, module: str = "") -> str:
    path = Path(frame.f_code.co_filename)
    name = path.name
    if module:
        name = "/".join(module.split(".")[:-1] + [name])
    elif name in ("__init__.py", "__main__.py"):
        name = f"{path.parent.name}/{name}"
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
