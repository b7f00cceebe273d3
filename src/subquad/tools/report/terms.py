"""The terms of reports, each explained once: in the heads of tables and in the glossary at the end of a page."""

import re
from collections.abc import Iterable, Sequence

from subquad.methods import METHODS, parse_method
from subquad.methods.core.names import name_of
from subquad.methods.core.plugins import find_method
from subquad.methods.full import EXACT

TERMS = {
    # Comparisons
    "adapter": "A folder with the learned parameters of a method, from subquad calibrate. Such a row is called "
    "method@folder.",
    "baseline": "The row of the model's own exact attention (full, torch's SDPA), which all other rows are compared "
    "with. full:kernel=subquad is exact too, with subquad's kernel.",
    "cosine mean": "Mean cosine between the embeddings with this method and those of the exact model.",
    "cosine p5": "5th percentile of the cosines to the exact model's embeddings: the least similar texts.",
    "exact attention": "Softmax attention of every query to every key, computed by torch's SDPA; the method full.",
    "extra MiB": "Peak memory during the call, on top of what was allocated before it.",
    "faster from": "The number of tokens from which on the method is faster than exact attention, beyond the noise, at "
    "every longer length that was measured. ≤ is a length that was measured: the method is faster there, and may be so "
    "below it.",
    "fidelity": "How close the model's output is to the exact model's, from 0 to 1. For embedding models it is the "
    "mean cosine to the exact embeddings, for masked language models the exact perplexity / this one's, for causal "
    "ones e^−KL, or the share of equal top tokens if --min-agreement is given.",
    "KL": "Mean divergence KL(exact ‖ this) of the next-token distributions in nats; 0 if they are equal.",
    "KL, last quarter": "KL over the last quarter of each text, which has the most text before it.",
    "same top token": "Share of the positions at which the most likely next token is the exact model's.",
    "same top token, last quarter": "Share of equal top tokens in the last quarter of each text.",
    "relative error": "‖out − exact‖ / ‖exact‖ of the embeddings. Cosines near 1 hide differences that it shows.",
    "layer": "An attention layer of the model, by its number in the model's order.",
    "layer error": "‖out − exact‖ / ‖exact‖ of a layer's attention output, on the exact model's own queries, keys and "
    "values; mean over layers.",
    "method": "One attention mechanism with its settings, written as name:setting=value,setting=value.",
    "minimum fidelity": "The fidelity that a recommended method must reach (--min-fidelity, --max-kl or "
    "--min-agreement).",
    "ms": "Exact attention's median time in milliseconds / the speed-up; of exact attention itself the median.",
    "not subquad's": "A row of --attention: attention that transformers runs by this name. It is measured like all "
    "others, and is never recommended.",
    "not calibrated": "The learned parameters of this method have their initial values; subquad calibrate fits them.",
    "Pareto front": "The methods that no other method exceeds in both fidelity and speed.",
    "perplexity": "exp of the mean negative log-likelihood per token; lower is better.",
    "quartiles": "The time in milliseconds at the quartiles of the speed-up.",
    "recall@10": "Share of the exact model's ten best passages of a query that are among the ten best here.",
    "recommended": "At the marked lengths, the fastest of the settings tried that reaches the minimum "
    "fidelity and is faster than exact attention by at least 1.1× and by more than the noise; of those whose speeds "
    "differ from the fastest by at most 5 % or the noise, the closest to exact attention.",
    "reference": "A reference method computes all logits, as exact attention does. It shows what a certain kind of "
    "approximation can reach, it is not faster, and it is never recommended.",
    "refused": "The method cannot run in this model; the reason is in the row.",
    "some layers": "The method runs in these layers only; the others keep exact attention.",
    "seconds": "The time of a whole request: the prefill's, and that of a step for each further new token.",
    "speed-up": "Exact attention's time in the same dtype / this one's, the median of the ratios within a round; above "
    "1 is faster.",
    "over fp32": "The time of exact attention in fp32 / this one's, the median of the ratios within a round.",
    "task score": "The score of the labelled task (--task) with this method; the head of the column is its metric.",
    "tokens/s": "Tokens, without padding, that a forward pass reads in a second.",
    "top-1": "Share of queries whose best passage is the exact model's best passage.",
    "weights L1": "Mean ‖A − exact A‖₁ of rows of the attention weights, from 0 (equal) to 2 (disjoint).",
    "within the noise": "The speed-up differs from 1 by no more than exact attention, timed twice, differs from "
    "itself. It is marked with ≈ and is neither faster nor slower.",
    # Plans
    "best single method": "The fastest method with an accepted predicted loss if it runs in all layers.",
    "candidate": "A method that a plan may choose for a layer.",
    "floor": "The fidelity that the plan must keep (--min-fidelity, --max-kl or --min-agreement).",
    "held-out passages": "Passages that were not used to choose the plan.",
    "length": "The number of tokens of an input.",
    "loss": "1 − fidelity. In the table of layers it is the model's loss with the method in this layer alone.",
    "lower bound": "At the confidence of the settings, the mean fidelity on such text is at least this.",
    "passages": "The number of held-out passages on which a choice was verified.",
    "plan": "A method for each layer and length, with which the model's output keeps a minimum fidelity.",
    "predicted loss": "The sum of the losses of single layers.",
    "round": "One choice of methods for all layers that was verified on held-out passages.",
    "shift": "The factor by which the loss may be larger on other text (--shift).",
    "upper bound": "At the confidence of the settings, the mean loss on such text is at most this.",
    "time": "Time of a layer's attention as a share of exact attention's.",
}
COMPARED = (
    "baseline", "exact attention", "fidelity", "method", "minimum fidelity", "Pareto front", "recommended",
    "speed-up", "within the noise",
)  # fmt: skip
PLANNED = (
    "best single method", "candidate", "exact attention", "fidelity", "floor", "held-out passages", "loss", "method",
    "plan", "round", "shift", "speed-up",
)  # fmt: skip
ALIASES = {"its speed-up": "speed-up", "length, floor": "floor", "length, round": "round"}


def term_of(word: str) -> str:
    """The term in the glossary that explains a column's head or a mark; empty if there is none."""
    if re.fullmatch(r"\d+ of \d+ layers", word):
        return "some layers"
    if word.startswith("recommended at "):
        return "recommended"
    word = ALIASES.get(word, word)
    return word if word in TERMS else ""


def family_of(row: str) -> str:
    """The name of the method in the name of a row, "clustered" of "clustered:clusters=25"; empty if it has none."""
    name = name_of(row)
    return "" if find_method(name) is None else name


def is_reference(row: str) -> bool:
    """True if a row's method computes all logits, as exact attention does."""
    name = row.partition(" in ")[0].partition("@")[0]
    return bool(family_of(row)) and parse_method(name).traits.quadratic_baseline


def anchor(word: str) -> str:
    """The id of a term's or method's entry in a page's glossary."""
    return f"term-{re.sub('[^a-z0-9]+', '-', word.lower())}"


def glossary(words: Iterable[str]) -> list[tuple[str, str]]:
    """(term, meaning) of the terms among some words, in alphabetical order."""
    return [(term, TERMS[term]) for term in sorted(set(map(term_of, words)) - {""}, key=str.lower)]


def described(rows: Sequence[str]) -> list[tuple[str, str]]:
    """(method, description) of the methods in some rows, in their order."""
    return [(name, description(name)) for name in dict.fromkeys(map(family_of, rows)) if name]


def description(name: str) -> str:
    """The description of a method: its computation, its cost and its source."""
    method = METHODS[name]
    first_line = (method.__doc__ or "").partition("\n")[0].replace("`", "")
    kind = " It is a reference method, never recommended." if method.traits.quadratic_baseline and name != EXACT else ""
    return f"{first_line}{kind} Cost: {method.traits.complexity}. Source: {method.traits.source}."
