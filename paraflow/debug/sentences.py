"""What is told of ranks that have come apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paraflow.debug.said import Said

_ADVICE = (
    "Every rank must run the same collectives in the same order: look for one under a condition that is not the same "
    "on every rank, such as `if trainer.is_main:`, or for a loop that is longer on one rank."
)
_SILENT = (
    "A rank that says nothing has ended, stands still, or is slow: give the check more patience where a rank may take "
    "this long."
)


def come_apart(here: Sequence[Said], away: Sequence[Said], gone: Collection[int], waited: float) -> str:
    """Returns what is raised on every rank that waits.

    Args:
        here: The ranks that have come to the place, in order of rank; at least one.
        away: The ranks that have not.
        gone: Those of them that have left the run.
        waited: For how long the others were waited for, in seconds.
    """
    steps = {said.step for said in here}
    same_key = len({said.what for said in here}) == 1 and len({said.key for said in here}) > 1
    clauses: dict[str, list[int]] = {}
    for said in here:
        clauses.setdefault(_doing(said, many_steps=len(steps) > 1, tell_key=same_key), []).append(said.rank)
    for said in away:
        clauses.setdefault(_absent(said, said.rank in gone, waited), []).append(said.rank)
    told = ", and ".join(f"{name_ranks(ranks)} {_agreeing(clause, len(ranks))}" for clause, ranks in clauses.items())
    when = f"Step {steps.pop()}" if len(steps) == 1 else "The ranks are at different steps"
    return f"{when}: {told}.{_advice(here, away, gone)}"


def _advice(here: Sequence[Said], away: Sequence[Said], gone: Collection[int]) -> str:
    if any(said.reason for said in away if said.rank in gone):
        return ""  # its error says what is to be done
    apart = len({(said.key, said.step) for said in here}) > 1
    return f" {_ADVICE if apart or gone else _SILENT}"


def of_two_lines(here: Sequence[Said]) -> str:
    """Returns what is warned of where ranks run the same collective from different lines."""
    sites: dict[str, list[int]] = {}
    for said in here:
        sites.setdefault(said.site, []).append(said.rank)
    places = ", and ".join(f"{name_ranks(ranks)} at {site}" for site, ranks in sites.items())
    return (
        f"Step {here[0].step}: {here[0].what} is run by {places}. They were taken for the same collective; if they are "
        "two, run in different orders, each rank gets the other's numbers."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns the ranks as one reads them.

    Example:
        >>> name_ranks([3]), name_ranks([0, 2]), name_ranks([0, 2, 3])
        ('rank 3', 'ranks 0 and 2', 'ranks 0, 2 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _agreeing(clause: str, count: int) -> str:
    if count == 1:
        return clause
    verb, _, rest = clause.partition(" ")
    return f"{'are' if verb == 'is' else 'have'} {rest}"


def _doing(said: Said, *, many_steps: bool, tell_key: bool) -> str:
    doing = f'has come to "{said.what}"' if said.announced else f"is about to run {said.what}"
    step = f" in step {said.step}" if many_steps else ""
    return f"{doing}{f' [{said.key}]' if tell_key else ''} at {said.site}{step}"


def _absent(said: Said, gone: bool, waited: float) -> str:
    state = f"has said nothing for {waited:.0f} s"
    if gone:
        state = "has left the run" + (f" because of {said.reason}" if said.reason else "")
    if not said.what:
        return f"{state}; no collective of its own came before"
    last = f'came to "{said.what}"' if said.announced else f"ran {said.what}"
    return f"{state}; before that it {last} at {said.site} in step {said.step}"
