"""An inspection's plots, as PNGs."""

from subquad.report import drawing
from subquad.report.bucket_plots import histograms, sizes
from subquad.report.inspect_schema import InspectReport
from subquad.report.map_plot import attention_maps
from subquad.report.utility_plot import utility

# file name -> what it shows
PLOTS = {
    "utility.png": "Attention utility: one point a layer, the mean over its heads; boxes span the quartiles.",
    "bucket-sizes.png": "Sizes of the buckets of each head in one layer, sorted, by each token's highest score.",
    "bucket-histograms.png": "Sizes and query–key ratios of the buckets of all heads in all layers.",
    "attention-maps.png": "Attention weights of one head between the first tokens of the text.",
}
DRAW = dict(zip(PLOTS, (utility, sizes, histograms, attention_maps), strict=True))


def plots(report: InspectReport) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out."""
    with drawing.look():
        figures = {name: make(report) for name, make in DRAW.items()}
        return {name: drawing.png(figure) for name, figure in figures.items() if figure is not None}
