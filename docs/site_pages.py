"""What the site's pages are made of beside the files of this folder: a hook of MkDocs.

The README is the home page, the command line's reference is what the commands say of themselves, and each room's
reference is what the room exports. Links to files outside of this folder lead to the repository where `repo_url` names
one, and are plain names of files elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lightning_videoscale.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[1]
COPIES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
ROOMS = {
    "strategies": "what `Trainer(strategy=…)` receives",
    "callbacks": "what watches a run and acts on it",
    "data": "from shards to batches that keep within a budget",
    "cost": "budgets, and models of time and memory",
    "metrics": "torchmetrics of balance and use",
    "parallel": "sequence parallelism for plain PyTorch",
    "kernels": "fused operations with their gradients",
    "injection": "fused forwards in place of a model's own",
    "report": "the log of a run and its page",
    "timing": "the clock that tells work from waiting",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are no files of the folder."""
    for uri, name in COPIES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "reference/cli.md", content="\n".join(command_line())))
    for room, about in ROOMS.items():
        names = "\n".join(f"\n::: lightning_videoscale.{path}\n" for path in exported(room))
        page = f"# {room}\n\n`lightning_videoscale.{room}`: {about}.\n{names}"
        files.append(File.generated(config, f"reference/{room}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mends the links that lead out of the folder, as those of the copied pages do from the start."""
    copied = COPIES.get(page.file.src_uri)
    folder = "" if copied else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def mend(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = {source: uri for uri, source in COPIES.items()}.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(inside) is not None:
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"{image}[{text}]({posixpath.relpath(inside, start)}{anchor})"
        if config.repo_url:
            return f"{image}[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(mend, markdown)


def exported(room: str) -> Iterator[str]:
    """The public names of a room, each by the module that defines it."""
    package = ROOT / "lightning_videoscale" / room / "__init__.py"
    tree = ast.parse(package.read_text())
    origins = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            for name in ast.literal_eval(node.value):
                yield origins.get(name, f"lightning_videoscale.{room}.{name}").removeprefix("lightning_videoscale.")


def command_line() -> Iterator[str]:
    """What ``videoscale --help`` and the help of each command say, as a page."""
    yield "# The command `videoscale`\n"
    for name, command in subcommands(build_parser([*COMMANDS])).items():
        yield f"## videoscale {name}\n\n{command.description}\n\n```text\n{command.format_usage().strip()}\n```\n"
        yield "| argument | |\n|---|---|"
        for action in command._actions:
            if not isinstance(action, argparse._HelpAction):
                yield f"| {named(action)} | {described(action)} |"
        yield ""


def subcommands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers of the commands, by name."""
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def named(action: argparse.Action) -> str:
    """An option with its value, or the name of what is given by place."""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    value = "{…}" if action.choices and not action.metavar else value
    return " ".join(filter(None, [", ".join(f"`{o}`" for o in action.option_strings), f"`{value}`" if value else ""]))


def described(action: argparse.Action) -> str:
    """An argument's help, with what it may be."""
    text = (action.help or "").replace("|", "\\|").replace("%%", "%")
    return text + (f": {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else "")
