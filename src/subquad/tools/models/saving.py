"""`--save`: the model with the attention that was chosen, in a folder that loads with it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from subquad import hf
from subquad.core import files
from subquad.core.errors import InputError, as_input_error
from subquad.core.reading import exists, read_bytes
from subquad.hf.model_files import (
    called,
    from_pretrained,
    is_sentence_transformer,
    optional_file,
    read_tokenizer,
)
from subquad.hf.reattaching import ADAPTER
from subquad.hf.swapping import record
from subquad.methods import BoundMethod, ByLength, Full, Method
from subquad.methods.by_length import Step
from subquad.tools.data.texts import read_documents, standard_library
from subquad.tools.models.dtypes import convert
from subquad.tools.models.longer import extension_note
from subquad.tools.models.model_types import class_of
from subquad.tools.models.pretrained import architecture_of, config_of, model_location
from subquad.tools.models.saved_card import Measured, saved_card
from subquad.tools.models.saved_settings import (
    POSITIONS,
    EmbeddedTexts,
    differing_settings,
    limit_name,
    longest_text,
    text_settings,
)

CARD = "README.md"
EAGER = {"attn_implementation": "eager"}  # a swap that the folder records is not what the user asks about


@runtime_checkable
class SavingSettings(Protocol):
    """The settings of a command that can save the model that it measured."""

    @property
    def model(self) -> str | None:
        """Hub id or folder; None: a model of the demo extra."""

    @property
    def text(self) -> Sequence[Path]:
        """Files and folders of text; empty: the standard library's."""

    @property
    def column(self) -> str:
        """The column of tables with the text."""

    @property
    def extend(self) -> int | None:
        """The number of positions that rotary ones are extended to."""

    @property
    def named_lengths(self) -> Sequence[int]:
        """The lengths that the user named."""

    @property
    def model_lengths(self) -> Sequence[int]:
        """The lengths at which the model is run."""


@dataclass(frozen=True)
class Chosen:
    """The methods for the layers of a model, the lengths at which they are recommended, and their measurements."""

    name: str
    methods: Mapping[int, Method | BoundMethod]
    lengths: Sequence[int]
    measured: Measured
    dtype: torch.dtype | None = None  # the dtype of the weights; None: as they are
    recorded: Mapping[str, Any] = field(default_factory=dict)  # the part of a plan that `swap` records
    pays_in_dtype: bool = False  # whether exact attention in this dtype is a recommendation too

    @property
    def tokens(self) -> int:
        """The longest length at which it is recommended."""
        return max(self.lengths)

    def pays_within(self, tokens: int) -> bool:
        """True if anything other than the model's own attention runs in inputs of at most `tokens` tokens."""
        methods = [each.method if isinstance(each, BoundMethod) else each for each in self.methods.values()]
        steps = [step for each in methods for step in (each.at if isinstance(each, ByLength) else [Step(0, each)])]
        return self.pays_in_dtype or any(step.start <= tokens and step.method != Full() for step in steps)


@dataclass(frozen=True)
class SavedModel:
    """The result of `--save`.

    Attributes:
        chosen: what runs in the saved model; None if nothing was saved.
        accepted: the tokens of the longest input that it accepts; None if there is no limit.
        differing: a line for each setting that differs from the original model's.
        closeness: of a SentenceTransformer, how close its embeddings are to the original's.
        why_not: why nothing was saved, where it is not for exact attention.
    """

    chosen: Chosen | None
    accepted: int | None = None
    differing: Sequence[str] = ()
    closeness: Sequence[str] = ()
    why_not: str = ""


def check(folder: Path | None, out: Path, settings: SavingSettings) -> str:
    """Refuse, before anything is measured, what could not be saved; without a folder nothing is to be saved.

    Returns what the user must know of the saved model in advance; empty if there is nothing.

    Raises:
        InputError: the folder is not empty, contains `out` or cannot be made; no such model, or one that
            sentence-transformers, which is not installed, must save.
    """
    if folder is None:
        return ""
    if exists(folder) and not folder.is_dir():
        raise InputError(f"--save {folder} is a file; give a folder")
    _check_empty(folder)
    if out.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--save {folder} must not be the folder of --out ({out}) or one around it")
    files.check_writable(folder)
    where = model_location(settings.model)
    config_of(where)
    original = text_settings(*_loaded(where))
    limit = longest_text(original)
    if limit is None or settings.named_lengths or limit >= max(original[POSITIONS] or 0, *settings.model_lengths, 0):
        return ""
    return (
        f"The saved model will keep {limit_name(original)} {limit:,} of the original; --lengths with a longer one "
        "raises it."
    )


def save(chosen: Chosen | None, settings: SavingSettings, folder: Path) -> SavedModel:
    """Write the model with the chosen methods as its own library does, and compare what was written with the original.

    The longest text that it reads is that of the original model, unless a longer one was named in `settings.lengths`
    and is among the chosen lengths; then its positions are extended to that. A SentenceTransformer stays one. Learned
    parameters are written as an adapter inside of the folder. Nothing is written if nothing was chosen, or if no method
    would run in the texts that the model reads.

    Raises:
        InputError: the folder was filled meanwhile, or a layer cannot run its method.
    """
    if chosen is None:
        return SavedModel(None)
    _check_empty(folder)
    where = model_location(settings.model)
    loaded, tokenizer = _loaded(where)
    original = text_settings(loaded, tokenizer)
    limit = longest_text(original)
    tokens = chosen.tokens
    if limit is not None:
        tokens = max([limit, *(n for n in chosen.lengths if n in (*settings.named_lengths, settings.extend))])
        if not chosen.pays_within(tokens):
            return SavedModel(None, why_not=_nothing_within(original, limit))
    texts = None
    if is_sentence_transformer(where):
        texts = EmbeddedTexts(loaded, partial(_documents, settings), limit, min(tokens, chosen.tokens))
        loaded, tokenizer = _loaded(where)  # encoding changes the truncation that a tokenizer is saved with
    _attach(chosen, loaded, tokenizer, tokens, settings.extend)
    with files.whole_folder(folder) as part:
        loaded.save_pretrained(str(part))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(part))
        if any(bound.learned is not None for bound in hf.bounds(loaded).values()):
            hf.save_adapter(loaded, part / ADAPTER)
        again = _as_saved(loaded, part)
        differing = differing_settings(original, text_settings(*again))
        closeness = [] if texts is None else texts.compared(again[0])
        saved = SavedModel(chosen, _accepted(again[0]), differing, closeness)
        note = _note_on_positions(again[0], original[POSITIONS], tokens)
        _write_card(part / CARD, _card_of(where), folder.resolve().name, again[0], saved, note)
    return saved


def _attach(chosen: Chosen, loaded: Any, tokenizer: Any, tokens: int, extend: int | None) -> None:
    """Put the dtype, the positions and the methods into a model."""
    if chosen.dtype is not None:
        convert(loaded, chosen.dtype)
    methods = {
        n: copy.deepcopy(each).cpu() if isinstance(each, BoundMethod) else each for n, each in chosen.methods.items()
    }
    with as_input_error():
        limit = longest_text(text_settings(loaded, tokenizer))
        if limit is not None and limit < tokens:
            hf.extend_positions(loaded, max(tokens, extend or 0), tokenizer=tokenizer)
        hf.swap(loaded, methods, max_length=hf.position_limit(loaded) or chosen.tokens)
        record(loaded, **chosen.recorded)


def _nothing_within(original: Mapping[str, Any], limit: int) -> str:
    return (
        f"what is recommended runs in longer inputs only than the model reads, because {limit_name(original)} is "
        f"{limit:,}; --lengths with a longer one raises it"
    )


def _note_on_positions(model: Any, limit: int | None, tokens: int) -> str:
    """A note on inputs of `tokens` tokens in a saved model; empty if the original's positions reach as far."""
    if limit is None or limit >= tokens:
        return ""
    return extension_note(limit, hf.rotary_limit(model), causal=hf.transformers_model(model).can_generate())


def _accepted(model: Any) -> int | None:
    positions = getattr(hf.transformers_model(model).config, "max_position_embeddings", None)
    accepted: int | None = getattr(model, "max_seq_length", None) or hf.position_limit(model) or positions
    return accepted


def _documents(settings: SavingSettings) -> Sequence[str]:
    """The documents that a command read."""
    return read_documents(settings.text, settings.column) if settings.text else standard_library()


def _card_of(where: str) -> str:
    """The card of the original model; empty if it has none."""
    file = optional_file(where, CARD)
    return "" if file is None else read_bytes(file).decode("utf-8", errors="replace")


def _write_card(path: Path, original: str, folder: str, loaded: Any, saved: SavedModel, note: str) -> None:
    """Our section above the card that the model's own library wrote, or above the original one."""
    original = path.read_text("utf-8") if path.exists() else original
    runs, chosen = hf.describe(loaded).methods, saved.chosen
    assert chosen is not None
    measured = replace(chosen.measured, differing=saved.differing, closeness=saved.closeness)
    card = saved_card(folder, type(loaded), chosen.name, chosen.tokens, runs, measured, original, note)
    files.write(path, card)


def _check_empty(folder: Path) -> None:
    if not files.empty_but_for(folder):
        raise InputError(f"--save {folder}: the folder is not empty; give a new or an empty one")


def _loaded(where: str) -> tuple[Any, Any]:
    """The model with its own attention, and its tokenizer where it does not hold it itself."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if is_sentence_transformer(where):
        loaded = called(_sentence_transformer_class(where), where, model_kwargs=EAGER, device="cpu")
    else:
        loaded = from_pretrained(_class_of(where), where, **EAGER)
    inner = hf.transformers_model(loaded.eval())
    hf.restore(inner)
    inner.set_attn_implementation("sdpa" if inner._supports_sdpa else "eager")
    return loaded, None if loaded is not inner else read_tokenizer(where)


def _as_saved(loaded: Any, folder: Path) -> tuple[Any, Any]:
    """The model, and its tokenizer where it does not hold it itself, as they load from the folder of a saved one."""
    if loaded is hf.transformers_model(loaded):
        return from_pretrained(type(loaded), str(folder)), read_tokenizer(str(folder))
    return called(type(loaded), str(folder), device="cpu"), None


def _class_of(where: str) -> Any:
    """The class of a model that its config names, with all of its heads; else the one without any."""
    import transformers

    model_class = class_of(architecture_of(config_of(where)))
    return model_class if hasattr(model_class, "from_pretrained") else transformers.AutoModel


def _sentence_transformer_class(where: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise InputError(
            f"{where} is a SentenceTransformer, and --save needs sentence-transformers, which is not installed: pip "
            "install sentence-transformers"
        ) from None
    return SentenceTransformer
