"""`sq.plan`: a method for each layer of a model or of any module, for an accepted loss of its output."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.methods import Method
from subquad.tools.measure.metrics import Metric, Score, judge_of
from subquad.tools.measure.module_calls import as_calls, holds_transformers_model
from subquad.tools.modules.module_planning import plan_module
from subquad.tools.modules.planned import ModulePlan
from subquad.tools.plan.arguments import settings_from
from subquad.tools.runs.jobs import Progress, silent

if TYPE_CHECKING:
    from subquad.hf.plans import Plan


def plan(
    model: Any,
    inputs: Iterable[Any],
    *,
    methods: str | Method | Sequence[str | Method] | None = None,
    metric: str | Metric | None = None,
    score: Score | None = None,
    min_fidelity: float = 0.99,
    shift: float | None = None,
    lengths: Sequence[int] | None = None,
    minutes: float = 10.0,
    seed: int | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> "Plan | ModulePlan":
    """Choose a method for each attention layer of a model, within an accepted error of its final output.

        minimise Σ_l t(l, c_l)   subject to   Σ_l loss(l, c_l) ≤ budget            one method c_l in each layer l

    Times are measured in the layers, losses of the model's output with one method in one layer, on some of the inputs.
    The choice is verified on the others, which are held out, and made again with a smaller budget until it keeps
    `min_fidelity` there. Planning compares with the model's own attention; methods that are swapped into it run again
    afterwards.

    Transformers models are planned length by length, and such a plan can be saved. In a module around a transformers
    model, that model is planned, and `inputs`, `metric` and `score` are of its own inputs and outputs. For any other
    module whose layers `sq.nn.swap` takes, one plan is made for all inputs; the module runs in eval mode without
    gradients, and is afterwards exactly what it was.

    Args:
        model: what `sq.hf.swap` takes, in eval mode, or any module with `nn.MultiheadAttention` or timm's `Attention`.
        inputs: of a transformers model, mappings of its keywords to tensors, five or more of each length; for a
            SentenceTransformer also texts, which are cut into passages of `lengths` tokens. Of another module, what it
            is called with, as in `sq.compare`: at least four, with the lengths that occur in use.
        methods: what to try, one or several; by default settings of several methods that grow with the length.
        metric: as in `sq.compare`: a name, or a function of the model's output and its exact output for one input,
            larger where they are closer and 1 for the exact output itself. The loss is 1 − metric. The default loss of
            a transformers model is 1 − cosine of the mean last hidden state, or the divergence of the logits in nats;
            for another module, the default metric is that of `sq.compare`.
        score: as in `sq.compare`: instead of a metric, a function of the model's output and the input, larger is
            better, such as 1.0 where the class is right. What is accepted is that its mean falls by at most
            1 − `min_fidelity`.
        min_fidelity: the mean fidelity (1 − loss) that the plan must have on inputs that it was not made from, above
            0 and at most 1, at a confidence of 95 %.
        shift: for transformers models: how many times larger the loss may be on other inputs than on these. The plan
            keeps 1 − fidelity under (1 − `min_fidelity`) / `shift` here. By default 1.6; 1 plans for inputs like these.
        lengths: for transformers models: of passages, in tokens, where inputs are texts; by default 512, 2,048 and
            4,096, as far as rotary positions reach: see `sq.hf.extend_positions` for longer ones.
        minutes: how long it may take, within a fifth for transformers models; how much is measured follows from it and
            from the time of a pass.
        seed: for transformers models: of the passages that are drawn from texts; by default 0.
        out: for transformers models: a folder from which an interrupted run with the same arguments resumes, and into
            which the plan is saved; not one with the report of a command. A metric or score is the same where its name,
            its code and its plain defaults are; what it reads from elsewhere is not compared.
        progress: called with what is under way, and how much of it is done.

    Returns:
        For a transformers model a `Plan`: `sq.hf.swap(model, plan)`, `plan.save(folder)`, `sq.load_plan(folder)`. Its
        `verified` is what was measured on held-out inputs. If nothing reached the minimum fidelity, it is exact
        attention at that length. For another module a `ModulePlan`: `sq.nn.swap(module, plan.layers)` puts it in;
        `plan.layers` is empty if exact attention should stay, with the reason in its `why_exact`.

    Raises:
        ValueError: too few inputs, a floor outside (0, 1], a method that is unknown or has learned parameters; a
            transformers model in training mode, where dropout makes outputs random; a metric or a score
            for texts; methods that cannot be joined by length; too few minutes to decide anything, with the number that
            is needed; a module without layers that `sq.nn.swap` takes, or one that gets an argument for transformers
            models; and as `sq.compare`.
        TypeError: neither a module nor a model that `sq.hf.swap` takes, a compiled module, inputs of another type than
            described, or an argument of another type than it must have.

    >>> import torch, subquad as sq
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> encoder, inputs = torch.nn.TransformerEncoder(layer, 2), [torch.randn(1, 64, 32) for _ in range(6)]
    >>> plan = sq.plan(encoder, inputs, methods="clustered:clusters=8", min_fidelity=0.5, minutes=0.1)
    >>> list(plan.kinds)
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    by_length: dict[str, Any] = {"shift": shift, "lengths": lengths, "seed": seed}
    by_length = {name: value for name, value in by_length.items() if value is not None}
    if not isinstance(model, nn.Module) or holds_transformers_model(model):
        from subquad.tools.plan.run import plan_by_length  # which needs transformers

        settings = settings_from(min_fidelity, minutes, **by_length)
        return plan_by_length(
            model, inputs, settings, methods=methods, metric=metric, score=score, out=out, progress=progress
        )
    if refused := [*by_length, *([] if out is None else ["out"])]:
        raise InputError(
            f"{listed(refused)} {'is' if len(refused) == 1 else 'are'} for transformers models, which are planned "
            f"length by length, but {type(model).__name__} contains none: it gets one plan for all inputs"
        )
    judge, calls = judge_of(metric, score, min_fidelity), as_calls(inputs)
    return plan_module(model, calls, judge, methods, minutes, progress)
