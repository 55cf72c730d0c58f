"""What each rank of ``paraflow verify`` runs: a script up to its first fit, which is verified in place of it."""

from __future__ import annotations

import argparse
import sys

from paraflow.errors import ParaflowError
from paraflow.first_fit import at_first_fit
from paraflow.launch.environment import is_main
from paraflow.verification import verify


def main() -> int:
    """Verifies a script's first fit; returns 1 where it does not train as one process does."""
    parser = argparse.ArgumentParser(prog="python -m paraflow.verification", description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    said = parser.parse_args()
    try:
        found = at_first_fit(
            said.script,
            said.arguments,
            lambda trainer, model, data, batch_size: verify(trainer, model, data, said.steps, batch_size),
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
