"""The package installs in every usual way, brings all of its files, and needs nothing but what it declares."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What a user writes who has installed the package and nothing else: Lightning alone, and a model of their own.
USERS_SCRIPT = """
import importlib, importlib.util, pkgutil, sys
import lightning_videoscale
import torch
from lightning.pytorch import LightningModule, Trainer

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) - 2 * batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for module in pkgutil.walk_packages(lightning_videoscale.__path__, "lightning_videoscale."):
    importlib.import_module(module.name)
assert {"lightning_videoscale.callbacks.run_report", "lightning_videoscale.parallel.ulysses"} <= set(sys.modules)

trainer = Trainer(strategy="ulysses_ddp", accelerator="cpu", devices=1, max_steps=3, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.rand(3, 1)))

optional = ["av", "deepspeed", "diffusers", "jsonargparse", "skvideo", "tensorboard", "transformers"]
print("steps:", trainer.global_step)
print("strategy:", type(trainer.strategy).__name__)
print("optional:", [name for name in optional if name in sys.modules or importlib.util.find_spec(name)])
"""


def run(*command: str | Path, cwd: Path | None = None, timeout: float = 240) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, timeout=timeout, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment outside this repository."""

    root: Path
    python: Path
    site_packages: Path

    def install(self, *arguments: str | Path) -> None:
        """Runs this interpreter's pip on the environment; dependencies come by `lend`, not from an index."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
        run(*pip, "--no-build-isolation", *arguments, cwd=self.root)

    def lend(self, *requirements: str) -> None:
        """Links the installed distributions that meet the requirements, and theirs in turn, and no others."""
        for installed in closure(*requirements):
            for part in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
                link = self.site_packages / part
                if not link.exists():
                    link.symlink_to(Path(str(installed.locate_file(part))))

    def package(self) -> Path:
        """The folder of `lightning_videoscale` as the environment's interpreter finds it, without importing it."""
        code = "import importlib.util as u; print(u.find_spec('lightning_videoscale').submodule_search_locations[0])"
        return Path(run(self.python, "-c", code, cwd=self.root).strip())


def closure(*requirements: str) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # declared but absent here, such as triton beside a CPU build of torch
            continue
        pending += [Requirement(text) for text in found[name].requires or ()]
    return list(found.values())


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    root = tmp_path / "environment"
    venv.create(root, with_pip=False)
    site_packages = sysconfig.get_path("purelib", "venv", vars={"base": str(root), "platbase": str(root)})
    return Environment(root, root / "bin" / "python", Path(site_packages))


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture
def wheel(archives: tuple[Path, Path]) -> Path:
    return archives[1]


def package_files() -> set[str]:
    """The files of the package in this tree, relative to the package, with `callbacks/` and `csrc/` at their links."""
    rooms = [(ROOT / "lightning_videoscale", ""), (ROOT / "callbacks", "callbacks/"), (ROOT / "csrc", "csrc/")]
    return {
        prefix + path.relative_to(folder).as_posix()
        for folder, prefix in rooms
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_whole_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name.removeprefix("lightning_videoscale/") for name in names if ".dist-info/" not in name}
    assert inside == package_files()
    assert {"py.typed", "callbacks/__init__.py", "csrc/README.md", "strategies/ddp.py"} <= inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_what_a_reader_needs(archives: tuple[Path, Path]) -> None:
    sdist = archives[0]
    prefix = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    assert {f"lightning_videoscale/{name}" for name in package_files()} <= names
    assert {"tests/test_packaging.py", "examples/train.py", "README.md", "CHANGELOG.md", "Makefile"} <= names
    assert not [name for name in names if ".venv" in name or "demo_data" in name]


def test_the_wheel_works_for_a_user_who_has_nothing_else(wheel: Path, environment: Environment) -> None:
    environment.lend(*PROJECT["dependencies"])
    environment.install(wheel)
    assert run(environment.python, "-c", USERS_SCRIPT, cwd=environment.root).splitlines()[-3:] == [
        "steps: 3",
        "strategy: SequenceParallelDDPStrategy",
        "optional: []",
    ]


def test_an_editable_install_reaches_the_working_tree(environment: Environment) -> None:
    environment.lend("hatchling", "editables")
    environment.install("--editable", ROOT)
    package = environment.package()
    assert package == ROOT / "lightning_videoscale"
    assert (package / "callbacks" / "__init__.py").resolve() == ROOT / "callbacks" / "__init__.py"
    assert (package / "csrc").resolve() == ROOT / "csrc"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_an_install_from_git_holds_the_linked_folders(environment: Environment) -> None:
    environment.lend("hatchling", "editables")
    environment.install(f"git+file://{ROOT}")
    package = environment.package()
    assert environment.root in package.parents
    assert (package / "callbacks" / "__init__.py").is_file()
    assert (package / "csrc" / "README.md").is_file()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_installs_from_the_index_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path, timeout=1500)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    assert run(python, "-c", USERS_SCRIPT, cwd=tmp_path).splitlines()[-1] == "optional: []"


def imported_at_the_top(source: Path) -> set[str]:
    """Names of the top-level packages that a file imports when it is itself imported."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_what_the_package_imports_is_declared() -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    sources = [*(ROOT / "lightning_videoscale").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
    imported = set().union(*map(imported_at_the_top, sources)) - {"lightning_videoscale", *sys.stdlib_module_names}
    assert {"torch", "lightning", "webdataset"} <= imported
    distributions = packages_distributions()
    for name in imported:
        assert declared & {canonicalize_name(owner) for owner in distributions[name]}, f"{name} is not declared"


def test_the_makefile_installs_versions_that_the_package_accepts() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    extras = PROJECT["optional-dependencies"]
    installed = ["video", "diffusers", "tensorboard", "text", "peft", "zero", "cli", "demo", "docs", "dev"]
    direct = [Requirement(text) for text in PROJECT["dependencies"] + [t for extra in installed for t in extras[extra]]]
    for requirement in direct:
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_no_file_knows_the_machine_it_was_written_on() -> None:
    absolute = re.compile(r"(?<![\w.}$/])/(?:home|root|Users|work|opt|mnt)/\w[^\s\"')]*")
    for name in run("git", "ls-files", "--cached", "-z", cwd=ROOT).split("\0"):
        path = ROOT / name
        if path.is_file() and path.suffix not in {".png", ".tar"}:
            assert not (found := absolute.findall(path.read_text())), f"{name}: {found}"


def test_the_pages_link_to_files_that_exist() -> None:
    pages = [page for page in ROOT.rglob("*.md") if not any(p.startswith(".") for p in page.relative_to(ROOT).parts)]
    assert {"README.md", "CONTRIBUTING.md", "architecture.md"} <= {page.name for page in pages}
    for page in pages:
        for target in re.findall(r"\]\((?!\w+://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_files_around_the_package_agree_with_it() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["test"]["steps"]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {command.removeprefix("make ") for command in commands if command.startswith("make ")} <= set(targets)
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= yaml.safe_load(template.read_text()).keys()
    (extras,) = re.findall(r"\.\[([\w,]+)\]", (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
