"""What can be combined with what: every strategy with every feature, judged by the legality table.

The tests train each pair that is legal and break each rule of those that are not; docs/compatibility.md is this table.
"""

from paraflow.compatibility.entries import FEATURES, STRATEGIES, Entry
from paraflow.compatibility.page import page
from paraflow.compatibility.situations import SITUATIONS, Situation
from paraflow.compatibility.table import Pair, Verdict, columns, judge, missing, pairs, rows

__all__ = [
    "FEATURES",
    "SITUATIONS",
    "STRATEGIES",
    "Entry",
    "Pair",
    "Situation",
    "Verdict",
    "columns",
    "judge",
    "missing",
    "page",
    "pairs",
    "rows",
]
