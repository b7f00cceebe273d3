"""`python -m subquad`: the command line, for launchers that start a module."""

from subquad.tools.cli.main import main

if __name__ == "__main__":  # worker processes import it under another name
    main()
