"""Looks up private names of other packages: `Package`, and the error if one is gone, `MissingNameError`.

`installed_version` says which version of a package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed, as one that runs from a folder of sources."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class MissingNameError(RuntimeError):
    """The installed version of a package lacks a private name that is needed now."""


class Package(NamedTuple):
    """A package whose private names we use, as it is installed, and the versions that they were read in."""

    name: str
    tried: str

    def get(self, owner: Any, name: str) -> Any:
        """Returns an attribute of an object, or of a module that is given by its path.

        Raises:
            MissingNameError: If it is not there.
        """
        try:
            return getattr(import_module(owner) if isinstance(owner, str) else owner, name)
        except (ImportError, AttributeError) as error:
            raise self.missing(owner, name) from error

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute that must be there already.

        Raises:
            MissingNameError: If it is not: whoever should read it would not.
        """
        self.get(owner, name)
        setattr(owner, name, value)

    def function(self, module: str, name: str) -> Callable[..., Any]:
        """Returns a function of a module, or one that raises `MissingNameError` when it is called.

        For functions that run too often, or under a tracer, to be looked up in each call.
        """
        try:
            found: Callable[..., Any] = self.get(module, name)
        except MissingNameError as error:
            raised = error

            def found(*_: Any, **__: Any) -> Any:
                raise raised

        return found

    def missing(self, owner: Any, name: str) -> MissingNameError:
        """Returns the error that says what is missing, what is installed and what would do."""
        where = owner if isinstance(owner, str) else f"{type(owner).__module__}.{type(owner).__qualname__}"
        installed = installed_version(self.name) or "(not installed)"
        return MissingNameError(
            f"{where} has no {name} in {self.name} {installed}. It is private, and was tried with {self.name} "
            f"{self.tried}: install one of these."
        )
