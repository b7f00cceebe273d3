"""Tables of the sheets that scripts of benchmarks/ write."""


def rows_in(sheet: str, cells: int | None = None) -> dict[tuple[str, str], list[str]]:
    """The cells of each row of the tables, or of those with so many cells, by the first two: engine and numbers."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in sheet.splitlines() if line[:1] == "|"]
    lines = [line for line in lines if not line[0].startswith((":", "engine")) and cells in (None, len(line))]
    return {(line[0], line[1]): line[2:] for line in lines}
