"""Tables as plain text, for objects that print as one."""

from rich.console import Console
from rich.table import Table


def as_text(table: Table) -> str:
    """The table at 120 columns, without colours and without spaces at the line ends."""
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
