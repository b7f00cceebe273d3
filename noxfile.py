"""The tests with every supported Python, and with the lowest versions of dependencies that pyproject.toml allows."""

import re

import nox

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
WITH_FLOORS = ("torch", "transformers", "scipy", "jaxtyping")  # those whose floors the code depends on most

nox.options.sessions = ["tests", "floors"]


def lowest() -> list[str]:
    """The lowest allowed versions, as requirements: "torch==2.13.0"."""
    declared = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    found = dict(match.groups() for line in declared if (match := re.match(r"([\w-]+)>=([\d.]+)", line)))
    return [f"{name}=={found[name]}" for name in WITH_FLOORS]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests with current versions of the dependencies."""
    session.install(".[test]")
    session.run("pytest", "-n", "2", "tests", *session.posargs)


@nox.session(python=PYTHONS[0])
def floors(session: nox.Session) -> None:
    """The tests with the floors, on the lowest Python."""
    session.install(".[test]", *lowest())
    session.run("pytest", "-n", "2", "tests", *session.posargs)
