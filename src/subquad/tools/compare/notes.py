"""The notes of a report: what its reader must know beyond the figures."""

import math
from collections.abc import Mapping, Sequence

from subquad.core.spelling import listed
from subquad.methods import METHODS, BoundMethod
from subquad.tools.compare.compare_jobs import EAGER, OP, STEPS
from subquad.tools.compare.comparison import MOST_POSITIONS, TOO_SLOW, Comparison
from subquad.tools.compare.schema import MethodReport, Requests
from subquad.tools.compare.settings import COMPARED, LENGTHS, OP_LENGTHS, CompareSettings
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.noise import TIE
from subquad.tools.models.compare_rows import IN, CompareRow
from subquad.tools.models.dtypes import FP32, TORCH, has_products
from subquad.tools.models.generation import ROUNDS, takes_cache
from subquad.tools.models.longer import extension_note, quarters_note
from subquad.tools.models.split_methods import split_note, what_is_sent

_INTERVAL = "95 % interval of the median of its ratios (by order statistics; the whole range of fewer than six turns)"


def notes_of(c: Comparison, methods: Sequence[MethodReport]) -> list[str]:
    """All notes of a report with these rows, its cautions first."""
    tried = {row.method.name for row in (*c.rows, *c.refused)}
    notes = [
        f"{len(tried)} of the library's {len(METHODS)} methods are in this comparison, with these settings only; "
        "`subquad methods` lists all of them.",
        f"A speed-up is the median of the ratios to exact attention (SDPA) within a turn, on {_batches(c)}; a time is "
        "exact attention's median time divided by the speed-up.",
        *_of_long(c),
        "A method counts as faster or slower if its speed-up differs from 1 by more than exact attention, timed "
        f"twice in each turn, differs from itself (and by more than {TIE:g}×), and the {_INTERVAL} "
        "is on one side of 1.",
        "One attention call is timed on N(0,1) inputs of one layer's shape; these times have no fidelity.",
        *_of_dtypes(c),
        *c.pretrained.notes,
    ]
    if c.settings.layers:
        notes.append(
            "Layer errors and distances of weights are measured on the exact model's own queries, keys and values."
        )
    if EAGER(c.length) in c.results:
        notes.append(
            "Eager attention is the model's own code that forms the whole matrix of weights, in fp32; it ran once at "
            "each length."
        )
    failed = [f"{n:,}" for n in c.lengths if EAGER(n) in c.results and not c.ran_eager(n)]
    notes += [f"Eager attention ran out of memory at {listed(failed)} tokens."] if failed else []
    notes[:0] = cautions_of(c)
    if c.group.count > 1:
        notes.append(split_note(c.group.count) + " Distances of attention weights are not measured then.")
    notes += _not_measured(c.settings)
    if c.settings.batch == 1 and len(c.reading.tokens) < c.lengths[-1]:
        notes.append(f"The text has {len(c.reading.tokens):,} tokens; longer sequences repeat it.")
    if c.pretrained.is_causal_lm:
        notes.append(
            "A time is that of a prefill: the whole input, and the logits of its last token. KL, top tokens and "
            f"perplexity are those of the same passes, at up to {MOST_POSITIONS:,} positions of each, evenly spaced."
        )
        notes += _of_requests(c)
        if c.settings.methods == COMPARED:
            notes.append(
                "Left out by default in a causal language model: smyrf and nystrom are not causal, and performer, "
                "linear and other feature maps are far from exact attention there without training. --methods names "
                "others."
            )
    if c.pretrained.kind == "masked-lm":
        notes.append("Pseudo-perplexity: 15 % of the tokens masked at once, the same ones for every method.")
    measured = zip(c.rows, methods, strict=False)  # those that were refused come last
    notes += [note for row, method in measured if (note := _left_out(c, row, method))]
    notes += [note for row in (*c.rows, *c.refused) if (note := _defaults(row))]
    notes += [f"{row.name}: {row.note}." for row in c.rows if row.note]
    return notes + c.resumed_note


def _of_requests(c: Comparison) -> list[str]:
    """The way in which steps and requests were measured, and the lengths at which they were not."""
    notes = []
    if c.step_lengths_done:
        notes.append(
            "A generated token is one step on the cache of a prompt of that length (`DynamicCache`), without the "
            f"choice of the token; in {ROUNDS} rounds, all rows run it on the same keys and values. A request is the "
            "prefill and a step of the median time for each further new token: later steps read a few more tokens, "
            "which is not counted. Its extra memory includes the cache. Steps are not compiled; "
            "`sq.hf.compiled_steps` compiles those of `generate`."
        )
        cut = {n: most for n in c.step_lengths_done if (most := c.prompt_of_request(n)) < n}
        notes += [
            f"The model has {c.pretrained.limit:,} positions: the new tokens of requests with {n:,} tokens come after "
            f"the first {most:,}, and the prefill is timed with all."
            for n, most in cut.items()
        ]
        notes += [f"{name} has no steps: {reason}." for name, reason in requests_of(c).refused.items()]
    without = [f"{n:,}" for n in c.lengths if n not in c.step_lengths]
    if without and c.settings.new_tokens != 0:
        limit = c.pretrained.limit
        why = f"the model has {limit:,} positions, and --new-tokens and --lengths choose others"
        if c.group.count > 1:
            why = "tokens that are split over processes have no cache"
        elif not takes_cache(c.pretrained.model):
            why = "the model takes no cache"
        notes.append(f"No requests after {listed(without)} tokens: {why}.")
    return notes


def requests_of(c: Comparison) -> Requests:
    """Facts about the requests of all rows."""
    lengths = c.step_lengths_done
    rows = {n: c.results[STEPS(n)].times.rows for n in lengths}
    approximate = [row for row in c.rows if not (row.is_full or row.has_exact_steps)]
    kls: dict[str, tuple[float, int]] = {}  # of each method in the first of its dtypes, and at its longest length
    for row in approximate:
        of_row = [(kl, n) for n in lengths if row.name in rows[n] and (kl := rows[n][row.name].kl) is not None]
        if of_row and not any(name.partition(IN)[0] == row.name.partition(IN)[0] for name in kls):
            kls[row.name] = of_row[-1]
    return Requests(
        new_tokens=c.new_tokens_after(lengths[-1]),
        prompts={str(n): c.prompt_of_request(n) for n in lengths},
        cache_mib={str(n): c.results[STEPS(n)].times.cache_mib for n in lengths},
        steps=_steps_in_words(kls),
        refused={name: row.reason for n in lengths for name, row in rows[n].items() if row.reason is not None},
    )


def _steps_in_words(kls: Mapping[str, tuple[float, int]]) -> str:
    """The rows whose steps are exact attention; `kls` has the divergences of the other steps, each with its past."""
    exact = "Steps are exact attention by construction, over the keys and values of the row's own prefill"
    if not kls:
        return f"{exact}."
    shown = [f"{name} (a KL of {kl:.2g} to an exact step after {n:,} tokens)" for name, (kl, n) in kls.items()]
    others = f", and {len(shown) - 5} more rows" if len(shown) > 5 else ""
    return f"{exact}, except those of {listed(shown[:5])}{others}."


def _of_long(c: Comparison) -> list[str]:
    """The notes on how causal models are run at long lengths."""
    lengths = [f"{n:,}" for n in c.lengths_done if c.is_long(n)]
    if not lengths:
        return []
    where, dtype = f"At {listed(lengths)} tokens", c.dtypes[-1]
    once = f", exact attention in fp32 ran once, and the other rows ran in {dtype} only" if dtype != FP32 else ""
    return [f"{where}, all turns read one text{once}; the noise is estimated from how far the turns' speed-ups differ."]


def _batches(c: Comparison) -> str:
    size = c.settings.batch
    return "batches of one" if size == 1 else f"batches of {size} padded texts, with the lengths that the text has"


def _of_dtypes(c: Comparison) -> list[str]:
    """The notes on 16-bit dtypes: what their figures are relative to, and which the processor is not made for."""
    small = [dtype for dtype in c.dtypes if dtype != FP32]
    notes = [
        f"In {dtype}, weights and activations have 16 bits. Fidelity is to exact attention in fp32; a speed-up is over "
        f"exact attention in {dtype}, and the column “over fp32” is over exact attention in fp32."
        for dtype in small
    ]
    slow = [dtype for dtype in small if not has_products(c.settings.device, dtype)]
    return notes + [f"This processor has no products in {dtype}, which it computes in fp32 instead." for dtype in slow]


def cautions_of(c: Comparison) -> list[str]:
    """The notes to read before the figures: what is missing, and that positions were extended."""
    limit, missing = c.pretrained.limit, [*_out_of_time(c), *_beyond_texts(c)]
    if limit is None or not c.is_extended(c.lengths[-1]):
        return missing
    yarn = (c.pretrained.extend or c.lengths[-1]) if c.pretrained.is_rotary else None
    read = [quarters_note(n, c.quarters(n)) for n in c.lengths_done if c.quarters(n)]
    return [*missing, extension_note(limit, yarn, causal=c.pretrained.is_causal_lm), *read]


def _out_of_time(c: Comparison) -> list[str]:
    """A note on what is still to come, or on what the time limit left out; none if the run is finished."""
    if c.is_finished:
        return []
    if not c.ended:
        return [
            "Unfinished: a run that goes on writes this report again, and one that has stopped resumes with the same "
            "command."
        ]
    batches = {n: (c.sequence_count(n) - len(c.rounds_at(n)), c.sequence_count(n)) for n in c.lengths}
    rounds = {n: "turns" if c.is_long(n) else "batches" for n in c.lengths}
    calls = [f"{n:,}" for n in c.call_lengths if OP(n) not in c.results]
    steps = [f"{n:,}" for n in c.step_lengths if STEPS(n) not in c.results]
    eager = [f"{n:,}" for n in c.lengths if c.has_eager and not c.is_long(n) and EAGER(n) not in c.results]
    left_out = [
        *(f"{missing} of {most} {rounds[n]} of {n:,} tokens" for n, (missing, most) in batches.items() if missing),
        *([] if c.has_passages or c.pretrained.is_causal_lm else [f"{len(c.reading.passages)} passages"]),
        *([f"requests after {listed(steps)} tokens"] if steps else []),
        *([f"eager attention at {listed(eager)} tokens"] if eager else []),
        *([f"one attention call at {listed(calls)} tokens"] if calls else []),
    ]
    return [f"Left out for lack of time (--minutes {c.settings.minutes:g}): {'; '.join(left_out)}."]


def _beyond_texts(c: Comparison) -> list[str]:
    """A note on the usual lengths that texts in batches do not have."""
    lengths = [f"{n:,}" for n in c.beyond_texts]
    return [f"Not run at {listed(lengths)} tokens: {c.why_beyond_texts}."] if lengths else []


def _not_measured(settings: CompareSettings) -> list[str]:
    """The usual lengths that exceed the maximum length, as a note."""
    most = settings.max_length
    if most is None or settings.lengths is not None or settings.op_lengths is not None:
        return []
    skipped = [f"{n:,}" for n in sorted({*LENGTHS, *OP_LENGTHS}) if n > most]
    return [f"Not measured, because they exceed --max-length {most:,}: {', '.join(skipped)} tokens."] if skipped else []


def _defaults(row: CompareRow) -> str | None:
    """The settings of a method that is named without settings."""
    settings = ", ".join(f"{name}={value}" for name, value in row.method.to_dict().items() if name != "name")
    return f"{row.name} alone means {settings}." if settings and ":" not in row.name else None


def _left_out(c: Comparison, row: CompareRow, method: MethodReport) -> str | None:
    """The length from which on a method was too slow, as a note."""
    op_lengths = c.call_lengths_done if row.is_called_alone else []
    lengths = [n for n in c.lengths_done if row in c.rows_at(n, 0)]
    wanted = ((lengths, method.model), (op_lengths, method.op))
    skipped = [n for lengths, have in wanted for n in lengths if str(n) not in (have or {}) and row.takes(n)]
    if not skipped:
        return None
    where = f"from {min(skipped):,} tokens on"
    return f"{method.method} was left out {where}: it is predicted to exceed {TOO_SLOW:g} s per call."


def notes_on_row(row: CompareRow, length: int, causal: bool) -> list[str]:
    """Remarks that the figures of a row do not show."""
    methods = [each.method if isinstance(each, BoundMethod) else each for each in row.planned.values()] or [row.method]
    notes, most = [], min(exact_up_to(method, causal, TORCH[row.dtype]) for method in methods)
    if row.modes:
        notes.append(what_is_sent(row.modes))
    if not row.is_full and row.other is None and most >= length:
        where = f"on at most {most:,.0f} tokens" if math.isfinite(most) else "with these settings"
        by_halves = causal and row.method.traits.by_halves  # whose exact blocks run subquad's kernel
        notes.append(f"is exact attention {where}{'' if by_halves else '; a speed-up there is due to chance'}")
    if row.longest is not None:
        notes.append(f"its parameters are for at most {row.longest:,} tokens, and it was not run on more")
    return notes
