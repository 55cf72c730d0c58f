"""What `Trainer(debug=True)` turns on: collectives are compared before they run, parameters every few steps.

Nothing here is imported, and nothing costs anything, in a run without it.
"""

from __future__ import annotations

from paraflow.debug.collectives import CollectiveCheck
from paraflow.debug.parameters import require_equal

__all__ = ["CollectiveCheck", "require_equal"]
