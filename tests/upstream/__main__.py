"""Runs diffusers' own tests with every model changed: `python -m tests.upstream --diffusers FOLDER`; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from tests.upstream.checkout import FAMILIES, has_tests, lacking
from tests.upstream.in_step import Way
from tests.upstream.verdict import run_family


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family", default=sorted(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--diffusers", type=Path, required=True, help="a checkout of diffusers, or its folder tests")
    parser.add_argument("-k", dest="select", default="", help="run the tests that match, as pytest's -k")
    parser.add_argument("--way", choices=get_args(Way), default="split", help="what is done to every model")
    arguments = parser.parse_args()
    wrong = []
    for family in arguments.families:
        if missing := lacking(family):
            print(f"{family}: skipped, as it needs {missing}", flush=True)
            continue
        if not has_tests(arguments.diffusers, family):
            print(f"{family}: skipped, as this checkout has no tests of it", flush=True)
            continue
        verdict = run_family(arguments.diffusers, family, arguments.select, way=arguments.way)
        print(f"{family}: {verdict.summary}", flush=True)
        for line in verdict.injected:
            print(f"  {line}", flush=True)
        for reason, count in verdict.skips.most_common():
            print(f"  {count} {reason}", flush=True)
        wrong += [f"{test}\n{reason}" for test, reason in verdict.wrong.items()]
    print("\n\n".join(["", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
