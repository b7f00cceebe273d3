"""SVG for pages: matplotlib's figures with the theme's colours, and with a text in each point."""

import re
from xml.etree import ElementTree

import pytest
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from subquad.tools.report import drawing, vector


def figure(xs=(1, 2, 3), texts=("one", "two", "three"), color="#0072b2", label="line"):
    made = Figure(figsize=(3, 2))
    axes = made.subplots()
    (line,) = axes.plot(xs, xs, marker="o", color=color, label=label)
    vector.named(line, texts)
    axes.legend()
    return made


def drawn(made, salt="a"):
    return ElementTree.fromstring(vector.svg(made, salt))


def titles(root):
    return [title.text for title in root.iter("title")]


def test_each_point_has_its_text():
    root = drawn(figure(texts=('a<b & "c"', "{}\n[]", "\x01")))
    points = [element for element in root.iter("use") if element.get("class") == "point"]
    assert [point.find("title").text for point in points] == ['a<b & "c"', "{}\n[]", "\ufffd"]


def test_texts_that_do_not_fit_the_points_are_left_out():
    """A figure that matplotlib does not draw, of a logarithm of 0 for example, must not shift the others' texts."""
    made = figure(xs=(1, 2, float("nan")))
    assert titles(drawn(made)) == []


def test_a_letter_that_xml_does_not_have_is_replaced():
    assert "li\ufffdne" in vector.svg(figure(label="li\x0bne"), "a")


def test_only_what_is_referred_to_has_an_id_and_no_two_figures_share_one():
    wide, narrow = (drawn(figure(), salt) for salt in ("a", "b"))
    for root in (wide, narrow):
        ids = [element.get("id") for element in root.iter() if "id" in element.attrib]
        assert ids
        assert all(f"#{name}" in ElementTree.tostring(root, "unicode") for name in ids)
    assert not {e.get("id") for e in wide.iter()} & {e.get("id") for e in narrow.iter()} - {None}


def test_a_figure_is_the_same_twice_and_has_no_date():
    text = vector.svg(figure(), "a")
    assert text == vector.svg(figure(), "a")
    assert not re.search(r"20\d\d-\d\d|matplotlib\.org|xmlns|<style", text)


def test_the_palette_has_each_colour_in_both_themes():
    with drawing.look():
        text = vector.svg(figure(), "a")
    css = vector.palette([vector.Drawing(text, Markup(""))])
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    for color in vector.VARIABLE.findall(text):
        assert f"--plot-{color}: #{color};" in light
        assert f"--plot-{color}: {vector.on_dark(f'#{color}')};" in dark
    assert "--plot-0072b2" in css
    assert "--plot-d55e00" not in css


def luminance(color):
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


NAMES = ["full", *(f"{family}:k={k}" for family in (*drawing.FAMILIES, *"abcdefghij") for k in range(3))]


@pytest.mark.parametrize("color", sorted({each.color.lower() for each in drawing.styles(NAMES).values()}))
def test_methods_are_legible_in_the_dark_theme(color):
    dark = vector.on_dark(color)
    assert contrast(dark, vector.DARK[drawing.PAPER]) >= 3  # WCAG 2.2, 1.4.11
    assert contrast(dark, vector.DARK[drawing.ON_COLOR]) >= 3


def test_shades_of_a_family_stay_different_in_the_dark_theme():
    colors = [vector.on_dark(each.color.lower()) for each in drawing.styles(NAMES[:7]).values()]
    assert len(set(colors)) == 7
