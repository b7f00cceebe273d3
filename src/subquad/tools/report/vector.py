"""Plots as SVG inside a page: their colours follow its theme, and each of their points has a text.

A figure is made twice, wide and narrow; the page's style sheet shows one of the two. Nothing in the SVG depends on the
time or on chance.
"""

import colorsys
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from subquad.tools.report import drawing

R = TypeVar("R")
Maker = Callable[[R, bool], Figure | None]  # from a report, and whether there is little room

DARK = {  # in the dark theme, of the colours that are not those of methods
    "#000000": "#a3adb8",
    drawing.PAPER: "#1c2126",
    drawing.ON_COLOR: "#14171b",
    "#222222": "#e6e9ed",
    "#e4e7ea": "#343b44",
    "#7a828a": "#7a858f",
    "#8a929a": "#8a929a",
    "#9aa2aa": "#8a929a",
    "#5b636b": "#a3adb8",
    "#59636e": "#a3adb8",
}
RC = {"font.sans-serif": ["DejaVu Sans"], "axes.facecolor": "none"}
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
COLOR = re.compile(r"#[0-9a-f]{6}\b")
VARIABLE = re.compile(r"--plot-([0-9a-f]{6})\b")


@dataclass(frozen=True)
class Drawing:
    """A figure as two SVG elements."""

    wide: Markup
    narrow: Markup


def drawings(makers: Mapping[str, Maker[R]], report: R) -> dict[str, Drawing]:
    """Drawings by the names of the makers; a figure without anything to draw is left out."""
    drawn: dict[str, Drawing] = {}
    with drawing.look(), rc_context(RC):
        for name, make in makers.items():
            full, narrow = make(report, False), make(report, True)
            if full is not None and narrow is not None:
                drawn[name] = Drawing(svg(full, f"{name} wide"), svg(narrow, f"{name} narrow"))
    return drawn


def named(artist: Any, texts: Iterable[str]) -> None:
    """Give a text to each point of a line, or to a patch."""
    artist.set_gid(json.dumps({"points": list(texts)}))  # matplotlib writes it as the element's id


def svg(figure: Figure, salt: str) -> Markup:
    """A figure as an SVG element for HTML; `salt` makes its ids differ from those of other figures of the page."""
    buffer = StringIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None})
    root = ElementTree.fromstring(NOT_XML.sub("\ufffd", buffer.getvalue()))
    _plain(root)
    for element in list(root.iter("g")):
        _name_points(element)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def palette(drawn: Iterable[Drawing]) -> Markup:
    """The style sheet with the colours of some drawings, in the light theme and in the dark one."""
    used = sorted({color for each in drawn for color in VARIABLE.findall(each.wide + each.narrow)})
    light = " ".join(f"--plot-{color}: #{color};" for color in used)
    dark = " ".join(f"--plot-{color}: {on_dark(f'#{color}')};" for color in used)
    return Markup(f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n")


def on_dark(color: str) -> str:
    """The colour in the dark theme: of the same hue, and light."""
    if color in DARK:
        return DARK[color]
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(color))
    return str(to_hex(colorsys.hls_to_rgb(hue, 0.88 - 0.4 * lightness, 0.85 * saturation)))


# ---------------------------------------------------------------------- matplotlib's SVG, made fit for a page


def _plain(root: ElementTree.Element) -> None:
    """Remove namespaces, metadata, style sheets and ids that nothing refers to; colours become variables."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    size = root.attrib["viewBox"].split()[2]
    root.attrib = {"viewBox": root.attrib["viewBox"], "style": f"max-width: {float(size) * 1.6:.0f}px"}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if element.tag == "g" and not attributes.get("id", "").startswith("{"):
            attributes.pop("id", None)
        if "style" in attributes:
            attributes["style"] = COLOR.sub(lambda match: f"var(--plot-{match[0][1:]})", attributes["style"])
        if "d" in attributes:
            attributes["d"] = " ".join(attributes["d"].split())
        element.attrib = attributes
        if element.tag not in ("text", "tspan", "title"):
            element.text = None


def _name_points(element: ElementTree.Element) -> None:
    """Put the texts of `named` where a pointer finds them: a title in each point of the line, or in the patch."""
    if "id" not in element.attrib:
        return
    texts = json.loads(element.attrib.pop("id"))["points"]
    points = list(element.iter("use")) or element.findall("path")
    if len(points) != len(texts):
        return
    for point, text in zip(points, texts, strict=True):
        point.attrib |= {"class": "point", "role": "img"}
        ElementTree.SubElement(point, "title").text = NOT_XML.sub("\ufffd", text)
