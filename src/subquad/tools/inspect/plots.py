"""An inspection's plots, as PNGs."""

from functools import partial

from matplotlib.figure import Figure

from subquad.tools.inspect.bucket_plots import histograms, sizes
from subquad.tools.inspect.dynamics_plot import dynamics_figure
from subquad.tools.inspect.map_plot import attention_maps
from subquad.tools.inspect.schema import InspectedFit, InspectReport
from subquad.tools.inspect.spectrum_plot import spectrum
from subquad.tools.inspect.utility_plot import utility
from subquad.tools.report import drawing

# file name -> what it shows
PLOTS = {
    "utility.png": "Attention utility: one point a layer, the mean over its heads; boxes span the quartiles.",
    "bucket-sizes.png": "Sizes of the buckets of each head in one layer, sorted, by each token's highest score.",
    "bucket-histograms.png": "Sizes and query–key ratios of the buckets of all heads in all layers.",
    "attention-maps.png": "Attention weights of one head between the first tokens of the text.",
    "spectrum.png": "Singular values of exact attention's weights: their cumulative share, a line for each head and "
    "the median of each layer's; on the right the share of the first ones, for each layer and head.",
}
FIT = "hash-dynamics.png"
ABOUT_FIT = "Divergences and negative entropies while the hash functions of {method} were fitted."
DRAW = dict(zip(PLOTS, (utility, sizes, histograms, attention_maps, spectrum), strict=True))


def plots(report: InspectReport) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out."""
    return drawing.pngs(DRAW | {name: partial(_fit, fit) for name, fit in fits(report).items()}, report)


def _fit(fit: InspectedFit, report: InspectReport) -> Figure | None:
    return dynamics_figure(fit.history, report.model["name"], fit.buckets, subject=fit.method)


def fits(report: InspectReport) -> dict[str, InspectedFit]:
    """The plots of fits: one for each adapter with hash functions."""
    return {FIT if i == 0 else FIT.replace(".", f"-{i + 1}."): fit for i, fit in enumerate(report.fits)}


def about(report: InspectReport) -> dict[str, str]:
    """The captions of the plots, by name."""
    return PLOTS | {name: ABOUT_FIT.format(method=fit.method) for name, fit in fits(report).items()}
