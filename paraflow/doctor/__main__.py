"""One rank of the doctor, for several nodes: `paraflow launch --nnodes 2 ... -m paraflow.doctor [--json]`."""

from __future__ import annotations

import os
import sys

from paraflow.doctor.examination import examine, has_errors
from paraflow.doctor.report import as_json, show
from paraflow.errors import LaunchError
from paraflow.launch.environment import is_main


def main() -> None:
    """Examines, and prints the report on rank 0; an error that was found ends every rank with status 1."""
    unknown = set(sys.argv[1:]) - {"--json"}
    if unknown:
        raise LaunchError(f"python -m paraflow.doctor was given {' '.join(sorted(unknown))}; it takes --json only.", 2)
    ranks = examine()
    if is_main() and "--json" in sys.argv:
        print(as_json(ranks))
    elif is_main():
        show(ranks)
    if has_errors(ranks):
        raise LaunchError("The doctor found an error; its report says what to do.")


if __name__ == "__main__":
    try:
        main()
    except LaunchError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise  # the launcher prints its sentence
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
