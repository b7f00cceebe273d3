"""`python -m subquad`: the command line, for launchers that start a module."""

from subquad.cli import main

main()
