"""What messages tell users to type exists."""

from __future__ import annotations

import argparse
import ast
import re
from itertools import chain
from pathlib import Path

import lightning_videoscale
from lightning_videoscale.cli import build_parser
from tests.cli.test_main import COMMANDS

OF_OTHERS = {
    "--nproc-per-node", "--no-python", "--module", "--rdzv-backend", "--standalone",  # torchrun
    "--dereference", "--concatenate",  # tar
    "--distribution",  # srun
    "--std", "--gpu-architecture", "--extra-device-vectorization",  # nvcc and NVRTC
    "--trainer", "--data", "--model",  # of LightningCLI
}  # fmt: skip


def texts() -> dict[str, str]:
    """Every string of the package that is no name, and where it stands."""
    found = {}
    home = Path(str(lightning_videoscale.__file__)).parent
    for file in chain(home.rglob("*.py"), (home / "callbacks").resolve().rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[f"{file}:{node.lineno}:{node.col_offset}"] = node.value
    return found


def test_options_and_commands_in_messages_are_known() -> None:
    parser = build_parser([*COMMANDS])
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    options = {option for each in (parser, *subparsers.choices.values()) for option in each._option_string_actions}
    seen = set()
    for place, text in texts().items():
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text):
            assert option in options | OF_OTHERS, f"{place} advises {option}"
            seen.add(option)
        for command in re.findall(r"[`:(]\s?videoscale ([a-z][a-z-]+)", text):
            assert command in subparsers.choices, f"{place} advises videoscale {command}"
            seen.add(command)
    assert {"--captions", "--best-m-comp", "pack", "benchmark-shapes"} <= seen
