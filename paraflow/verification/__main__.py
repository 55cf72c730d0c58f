"""What each rank of ``paraflow verify`` runs: a script up to its first fit, which is verified in place of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paraflow.errors import ParaflowError
from paraflow.first_fit import at_first_fit
from paraflow.launch.environment import is_main
from paraflow.verification import verify


def main() -> int:
    """Verifies a script's first fit; returns 1 where it does not train as one process does, and 2 where it is refused.

    Where ``--status`` names a file, rank 0 writes that number to it, and 0 is returned: no process has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m paraflow.verification", description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
    parser.add_argument("--status", type=Path, help="a file to write the status to")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    said = parser.parse_args()
    status = _verify(said.script, said.arguments, said.steps)
    if said.status is None:
        return status
    if is_main():
        said.status.write_text(str(status))
    return 0


def _verify(script: str, arguments: list[str], steps: int) -> int:
    try:
        found = at_first_fit(
            script,
            arguments,
            lambda trainer, model, data, batch_size: verify(trainer, model, data, steps, batch_size),
        )
    except ParaflowError as error:
        if is_main():
            print(f"paraflow verify: {error}", file=sys.stderr)
        return 2
    if is_main():
        print(found, flush=True)
    return 0 if found.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
