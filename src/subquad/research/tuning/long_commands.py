"""Long commands in several lines that a shell reads as one."""

import shlex

WIDTH = 100


def in_lines(command: str, width: int = WIDTH) -> str:
    r"""A command with line ends, escaped for a shell, before options that would make a line too long.

    >>> print(in_lines("subquad train text --set training.steps=3 --method full", width=45))
    subquad train text --set training.steps=3 \
      --method full
    """
    lines: list[str] = []
    for part in _parts(command):
        if lines and len(lines[-1]) + len(part) + len(r"  \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n  ".join(lines)


def _parts(command: str) -> list[str]:
    """Split a command into what precedes the first option, then each option with its values."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return [shlex.join(part) for part in parts]
