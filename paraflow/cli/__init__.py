"""The command line: `paraflow launch`, `doctor`, `explain`, `export`, `inspect`, `compatibility` and `version`.

A file a group of commands; what they do is elsewhere, and imported when it is asked for.
"""

from paraflow.cli import checkpoints, plans, running
from paraflow.cli.app import main

__all__ = ["checkpoints", "main", "plans", "running"]
