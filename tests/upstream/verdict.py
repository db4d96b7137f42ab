"""What the ranks found in a family's tests, held against what is known to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.distributed.pool import ProcessPool
from tests.upstream.checkout import LISTED_WITH, PACKAGE, files_of, linked
from tests.upstream.in_step import Outcome, Way, run_in_step
from tests.upstream.known_failures import KNOWN_FAILURES


@dataclass(frozen=True)
class Verdict:
    """How a family's tests ended.

    Attributes:
        outcomes: By test, without the folders of its file.
        wrong: By test, what is not as `KNOWN_FAILURES` has it.
    """

    outcomes: Mapping[str, Outcome]
    wrong: Mapping[str, str]

    @property
    def summary(self) -> str:
        """Numbers of tests by result, and of calls of models."""
        counts = Counter(outcome.result for outcome in self.outcomes.values())
        results = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        return f"{results}; {sum(outcome.calls for outcome in self.outcomes.values())} calls of models"

    @property
    def injected(self) -> list[str]:
        """Which blocks were fused, and which were left as they are and why."""
        return sorted(frozenset[str]().union(*(outcome.injected for outcome in self.outcomes.values())))

    @property
    def skips(self) -> Counter[str]:
        """Numbers of skipped tests by reason."""
        return Counter(outcome.message for outcome in self.outcomes.values() if outcome.result == "skipped")


def run_family(diffusers: Path, family: str, select: str = "", wait: float = 60.0, way: Way = "split") -> Verdict:
    """Runs a family's tests on two ranks in step, or in one process where models are not split; see `run_in_step`."""
    pool = ProcessPool(2 if "split" in way else 1, timeout=3000.0)
    try:
        with linked(diffusers) as parent:
            paths = files_of(family, parent)
            found = pool.run(run_in_step, parent, paths, select, wait, way)
    finally:
        pool.stop()
    files = [Path(file).name for file in paths]
    folder = f"{PACKAGE}/models/transformers/"
    outcomes = {name.removeprefix(folder): outcome for name, outcome in found[0].items()}
    named = KNOWN_FAILURES if "split" in way else {}  # all of them fail on one of several ranks
    known = {test: reason for test, reason in named.items() if test.partition("::")[0] in files}
    return Verdict(outcomes, wrong(outcomes, known, some=bool(select) or version("diffusers") != LISTED_WITH))


def wrong(outcomes: Mapping[str, Outcome], known: Mapping[str, str], some: bool = False) -> dict[str, str]:
    """By test, what is not as it is known to be; others may be named where only some were run, or another version's."""
    found = {test: f"is not there, though known to fail: {known[test]}" for test in known.keys() - outcomes if not some}
    for test, outcome in outcomes.items():
        if test in known and "failed" not in outcome.result:
            found[test] = f"{outcome.result}, though known to fail: {known[test]}"
        elif test not in known and outcome.result not in ("passed", "skipped"):
            found[test] = f"{outcome.result}\n{outcome.message}"
    return found
