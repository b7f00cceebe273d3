"""A small writer of SVG files: the same text for the same picture, without links, scripts and fonts of its own."""

from collections.abc import Iterable, Sequence
from html import escape

SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
PAPER, INK, FAINT, LINE = "#ffffff", "#1f2328", "#59636e", "#8c959f"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#eef1f4"
PALE_BLUE, PALE_ORANGE, PALE_GREEN = "#d6e9f5", "#fbe3d3", "#d5efe6"


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def width_of(text: str, size: float, mono: bool = False) -> float:
    """About how wide a text is, in pixels, in the widest of the usual fonts."""
    if mono:
        return 0.61 * size * len(text)
    widths = (0.36 if c in "iljtfr.,:;'|!()[] " else 0.9 if c in "mwMW" else 0.68 if c.isupper() else 0.6 for c in text)
    return size * sum(widths)


class Picture:
    """An SVG that grows by one element at a time, on paper of its own: it looks the same on light and dark pages."""

    def __init__(self, width: float, height: float, title: str, about: str):
        self.width, self.height, self.title, self.about = width, height, title, about
        self.parts: list[str] = []

    def svg(self) -> str:
        """The whole file."""
        size = f"{number(self.width)} {number(self.height)}"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{number(self.width)}" '
            f'height="{number(self.height)}" role="img" font-family="{SANS}" font-size="12" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.about)}</desc>",
            f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        ]
        return "\n".join([*head, *self.parts, "</svg>"]) + "\n"

    def add(self, element: str) -> None:
        """An element as it is."""
        self.parts.append(element)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "", radius: float = 0
    ) -> None:
        """A rectangle."""
        corners = f' rx="{number(radius)}"' if radius else ""
        edge = f' stroke="{stroke}"' if stroke else ""
        sizes = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.add(f'<rect {sizes}{corners} fill="{fill}"{edge}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = "",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """A line of text with its base line at y; an error if it would leave the picture."""
        wide = width_of(text, size, mono) * (1.1 if bold else 1.0)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if left < 0 or left + wide > self.width or not size * 0.7 <= y <= self.height:
            raise ValueError(f"{text!r} does not fit: it needs {left:.0f} to {left + wide:.0f} of {self.width:.0f}")
        looks = f' font-size="{number(size)}"' if size != 12 else ""
        looks += f' fill="{fill}"' if fill else ""
        looks += f' text-anchor="{anchor}"' if anchor != "start" else ""
        looks += ' font-weight="600"' if bold else ""
        looks += f' font-family="{MONO}"' if mono else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}"{looks}>{escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, texts: Iterable[str], *, size: float = 12, **looks: object) -> None:
        """Lines of text, one below the other."""
        for i, text in enumerate(texts):
            self.text(x, y + 1.35 * size * i, text, size=size, **looks)  # type: ignore[arg-type]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        texts: Sequence[str],
        *,
        fill: str = GREY,
        stroke: str = LINE,
        size: float = 12,
        mono: int = 0,
        bold: int = 0,
    ) -> None:
        """A box with centred lines of text, of which the first `mono` are code and the first `bold` are bold."""
        self.rect(x, y, width, height, fill, stroke, radius=4)
        step = 1.35 * size
        top = y + height / 2 - step * (len(texts) - 1) / 2 + 0.36 * size
        for i, text in enumerate(texts):
            if width_of(text, size, i < mono) > width - 4:
                raise ValueError(f"{text!r} is wider than its box")
            self.text(x + width / 2, top + step * i, text, size=size, anchor="middle", mono=i < mono, bold=i < bold)

    def path(self, data: str, stroke: str = LINE, width: float = 1.2, fill: str = "none", more: str = "") -> None:
        """A path."""
        self.add(f'<path d="{data}" fill="{fill}" stroke="{stroke}" stroke-width="{number(width)}"{more}/>')

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = FAINT) -> None:
        """Lines through some points with a head at the last one; the last line is horizontal or vertical."""
        self.path("M" + "L".join(f"{number(x)} {number(y)}" for x, y in points), stroke)
        (x0, y0), (x, y) = points[-2:]
        dx, dy = ((x > x0) - (x < x0), (y > y0) - (y < y0))
        left, right = (x - 6 * dx - 3 * dy, y - 6 * dy + 3 * dx), (x - 6 * dx + 3 * dy, y - 6 * dy - 3 * dx)
        ends = f"M{number(x)} {number(y)}L{number(left[0])} {number(left[1])}L{number(right[0])} {number(right[1])}z"
        self.path(ends, stroke, fill=stroke)
