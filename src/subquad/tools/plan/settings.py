"""The settings of `subquad plan`, with their options on the command line."""

from dataclasses import dataclass
from pathlib import Path

from subquad.core.errors import InputError
from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

PLANNED_LENGTHS = (512, 2048, 4096)  # for which a plan is made
FROM_TEXT = "from-text"  # in place of lengths: those of the text's batches


def _lengths_to_plan(text: str) -> tuple[int, ...] | str:
    if text.strip() == FROM_TEXT:
        return FROM_TEXT
    try:
        return common.read_lengths(text)
    except InputError as error:
        raise InputError(f"{error}, or {FROM_TEXT}") from None


@dataclass(frozen=True)
class PlanSettings:
    """The settings of `plan`: the model, the text, and the error that is accepted."""

    model: str | None = option(None, **common.MODEL)
    text: tuple[Path, ...] = option((), common.TEXT)
    column: str = option("text", common.COLUMN)
    min_fidelity: float | None = option(None, common.FLOORS["fidelity"])
    max_kl: float | None = option(None, common.FLOORS["kl"])
    min_agreement: float | None = option(None, common.FLOORS["agreement"])
    shift: float = option(
        1.6, "Safety factor for other text: the accepted loss on this text is divided by it; 1: plan for this text."
    )
    lengths: tuple[int, ...] | str | None = option(
        None,
        "Lengths to plan for, in tokens, separated by commas, or from-text for those that batches of the text have; "
        "default: 512,2048,4096.",
        read=_lengths_to_plan,
    )
    extend: int | None = option(None, common.EXTEND)
    new_tokens: int | None = option(None, common.NEW_TOKENS)
    batch: int = option(1, "Texts per forward pass; several are padded and keep their different lengths.")
    methods: tuple[str, ...] = option((), f"{common.METHODS} Default: a grid that grows with the length.")
    adapters: tuple[Path, ...] = option(
        (), **(common.ADAPTERS | {"help": "Folder of an adapter from subquad calibrate, as a candidate; repeatable."})
    )
    calibrate: tuple[Path, ...] = option(
        (), "Fit methods with learned parameters on this text first, as candidates; it must not be --text. Repeatable."
    )
    minutes: float = option(10.0, "Time limit in minutes, without --calibrate.")
    device: str = option("cpu", common.DEVICE)
    dtype: str | None = option(None, common.DTYPE)
    seed: int = option(0, "Random seed for the passages.")

    def __post_init__(self) -> None:
        common.check_model_runs(self.dtype, self.batch, self.extend, self.new_tokens)

    @property
    def is_from_text(self) -> bool:
        """True if the lengths to plan for are those of the text's batches."""
        return self.lengths == FROM_TEXT

    @property
    def named_lengths(self) -> tuple[int, ...]:
        """The lengths that the user named."""
        return () if self.lengths is None or isinstance(self.lengths, str) else self.lengths

    @property
    def model_lengths(self) -> tuple[int, ...]:
        """The lengths to plan for, the shortest first, each once; empty if they are those of the text."""
        planned = PLANNED_LENGTHS if self.extend is None else (*PLANNED_LENGTHS, self.extend)
        return tuple(sorted(set(planned if self.lengths is None else self.named_lengths)))
