"""Write the pictures, those whose path contains one of the words given, or all: `python docs/pictures [WORD …]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pictures import layers, patterns, plan, schematics, terminal, tree

ASSETS = Path(__file__).parents[1] / "assets" / "pictures"


def main(words: list[str]) -> None:
    """Draw and write."""
    for part in (schematics, tree, plan, layers, terminal, patterns):
        for name, make in part.FILES.items():
            if not words or any(word in name for word in words):
                path = ASSETS / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(make(), "utf-8")
                print(f"{path.relative_to(ASSETS.parents[2])}: {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
