"""The pairs that were chosen are trained many at a time; a test asks for what came of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paraflow.compatibility import Pair, judge
from tests.matrix.models import CASES
from tests.matrix.references import saved_on_one_device
from tests.matrix.training import Job, Outcome, train_all, whole
from tests.pool import Pool, RankError

_SECONDS_A_JOB = 3.0


@pytest.fixture(scope="session")
def trained(
    ranks: Pool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Pair], tuple[Outcome, str]]:
    """`trained(pair)`: what came of a pair's training on all its ranks, and the folder of its checkpoint."""
    chosen = _chosen(request.session)
    folder = tmp_path_factory.mktemp("matrix")
    done: dict[str, tuple[list[Outcome | str], str]] = {}

    def outcome_of(pair: Pair) -> tuple[Outcome, str]:
        if pair.name not in done:
            group = [other for other in chosen if other.strategy is pair.strategy and other.ranks == pair.ranks]
            done.update(_train_group(ranks, group, folder / str(len(done))))
        outcomes, saved = done[pair.name]
        raised = [text for text in outcomes if isinstance(text, str)]
        if raised:
            pytest.fail(raised[0], pytrace=False)
        assert len(outcomes) == pair.ranks
        return whole([outcome for outcome in outcomes if isinstance(outcome, Outcome)]), saved

    return outcome_of


def _chosen(session: pytest.Session) -> list[Pair]:
    """The legal pairs of the tests that are run."""
    parameters = [getattr(item, "callspec").params for item in session.items if hasattr(item, "callspec")]  # noqa: B009
    pairs = [values["pair"] for values in parameters if isinstance(values.get("pair"), Pair)]
    return [pair for pair in dict.fromkeys(pairs) if pair.verdict.legal]


def _train_group(ranks: Pool, group: list[Pair], folder: Path) -> dict[str, tuple[list[Outcome | str], str]]:
    """Trains all in one call; where a rank of it dies or hangs, one by one, to know which it is."""
    jobs = [job_of(pair, str(folder / str(place))) for place, pair in enumerate(group)]
    results: list[list[Any]]
    try:
        answers = ranks(group[0].ranks, train_all, jobs, timeout=150 + _SECONDS_A_JOB * len(jobs))
        results = [list(outcomes) for outcomes in zip(*answers, strict=True)]
    except RankError as error:
        warnings.warn(f"{group[0].strategy.name}: trained one by one, for together {error}", stacklevel=1)
        results = [_train_alone(ranks, pair.ranks, job) for pair, job in zip(group, jobs, strict=True)]
    return {pair.name: (result, str(job.folder)) for pair, job, result in zip(group, jobs, results, strict=True)}


def _train_alone(ranks: Pool, count: int, job: Job) -> list[Any]:
    try:
        return [outcomes[0] for outcomes in ranks(count, train_all, [job], timeout=150)]
    except RankError as error:
        return [str(error)]


def job_of(pair: Pair, folder: str | None = None) -> Job:
    """A pair as a job: its gradient norm is measured wherever that is legal."""
    measured = {"clip_norm": math.inf, **pair.fields}
    fields = measured if judge(measured).legal else pair.fields
    source = saved_on_one_device(pair.run) if CASES[pair.run].resumes else None
    return Job(fields, pair.run, folder, source)
