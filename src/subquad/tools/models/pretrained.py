"""Load a pretrained text model and read text with it."""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import hf
from subquad.core.errors import InputError, as_input_error, check_device
from subquad.core.spelling import nearest
from subquad.hf.model_files import (
    Pooling,
    has_pooling,
    is_sentence_transformer,
    pooling_of,
    read_config,
    read_model,
    read_tokenizer,
)
from subquad.hf.positions import check_extension
from subquad.hf.saved import without_marks
from subquad.hf.weights import check_weights
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.models import demo, next_tokens
from subquad.tools.models.dtypes import TORCH, convert
from subquad.tools.models.model_types import registered

Kind = Literal["embedding", "masked-lm", "causal-lm"]

logger = logging.getLogger(__name__)

MAIN_LENGTH = {"embedding": 512, "masked-lm": 512, "causal-lm": 2048}  # at most, by default
BATCH = 8  # items of the model's own length


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer, and how its outputs are read.

    Every process of a group has the whole model, and reads its part of the tokens inside `running`.
    """

    name: str
    model: Any
    tokenizer: Any
    kind: Kind
    pooling: Pooling
    limit: int | None  # tokens that its positions reach
    notes: tuple[str, ...] = ()  # sentences on its weights
    group: MeasuringGroup = ALONE
    library: str = "transformers"  # the library of its folder
    extend: int | None = None  # tokens to which its positions are extended for inputs that exceed them

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def is_causal_lm(self) -> bool:
        """True if it is a causal language model, which is judged by its next tokens."""
        return self.kind == "causal-lm"

    def length(self, asked: int | None, option: str, most: int = 512) -> int:
        """Tokens of an input: those that are asked for, else the positions of the model, at most `most`.

        A length that is asked for may reach as far as the positions are extended.

        Raises:
            InputError: its positions do not reach so far; names the option.
        """
        reach = self.limit and max(self.limit, self.extend or 0)
        if asked is not None and reach is not None and asked > reach:
            raise InputError(f"{option} {asked} is past the {reach} positions of {self.name}; give at most {reach}")
        return min(self.limit or most, most) if asked is None else asked

    def extended_to(
        self, tokens: int | None, lengths: Sequence[int] = (), *, rotary_only: bool = False
    ) -> "Pretrained":
        """A copy whose positions are extended to this many tokens for longer inputs; None: as far as these need.

        The positions of a model with rotary ones are extended only if that is asked for: a table of learned positions
        has no row for longer inputs, but rotary positions give worse and worse outputs without an error.

        Args:
            tokens: the positions to extend to; None if nothing is asked for.
            lengths: lengths of inputs that the user named.
            rotary_only: learned positions are not extended.

        Raises:
            InputError: the model has as many positions, or cannot be extended; or a length is beyond them.
        """
        longest, rows = max(lengths, default=0), hf.rotary_limit(self.model)
        if tokens is not None:
            if self.limit is None or (rows is None and hf.position_limit(self.model) is None):
                raise InputError(f"--extend {tokens}: the positions of {self.name} have no limit; leave it out")
            if rotary_only and rows is None:
                raise InputError(
                    f"--extend {tokens} extends rotary positions only, and those of {self.name} are learned; leave it "
                    "out"
                )
            if tokens <= self.limit:
                raise InputError(
                    f"--extend {tokens} is within the {self.limit:,} positions of {self.name}; give more, or leave it "
                    "out"
                )
            with as_input_error(f"--extend {tokens}: "):
                check_extension(self.model, tokens)
            if longest > tokens:
                raise InputError(f"--lengths {longest} is beyond --extend {tokens}; give --extend {longest}")
        elif rows is not None and longest > rows:
            raise InputError(
                f"--lengths {longest} is past the {rows:,} positions of {self.name}; --extend {longest} extends them "
                f"by YaRN, without training, or give at most {rows}"
            )
        return replace(self, extend=tokens)

    @property
    def is_rotary(self) -> bool:
        """True if its limit is that of rotary positions."""
        return hf.rotary_limit(self.model) is not None

    def reach_after(self, length: int) -> int | None:
        """Tokens that a request may have whose prompt has this length; None if there is no limit.

        A prompt within the model's own positions is read by these, and so are the tokens after it.
        """
        return self.limit if self.limit is None or length <= self.limit else max(self.extend or 0, self.limit)

    def with_model(self, model: Any) -> "Pretrained":
        """A copy with another model and the same tokenizer and pooling."""
        return replace(self, model=model)

    def in_dtype(self, dtype: torch.dtype) -> "Pretrained":
        """A copy whose floating-point weights have another dtype."""
        model = copy.deepcopy(self.model)
        convert(model, dtype)
        return self.with_model(model)

    def reaching(self, length: int) -> "Pretrained":
        """The model if its positions reach this length, otherwise a copy whose positions are extended."""
        if self.limit is None or length <= self.limit:
            return self
        return self.with_model(hf.extend_positions(copy.deepcopy(self.model), max(length, self.extend or 0)))

    def content_ids(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def wrap(self, ids: Sequence[int], length: int) -> list[int]:
        """Special tokens around content ids, cut so that all is at most `length` tokens."""
        before, after = self._specials()
        return [*before, *ids[: max(length - len(before) - len(after), 0)], *after]

    @property
    def first_tokens(self) -> list[int]:
        """The special tokens that a prompt begins with."""
        return self._specials()[0]

    def _specials(self) -> tuple[list[int], list[int]]:
        probe = self.content_ids("a")
        whole = self.tokenizer("a", verbose=False)["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), 0)
        return whole[:at], whole[at + len(probe) :]

    def batch(self, items: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Right-padded input ids and their attention mask, on the model's device; a token or more for each process."""
        longest = max(*map(len, items), self.group.count)
        reach, known = hf.position_limit(self.model), self.model.get_input_embeddings().num_embeddings
        if reach is not None and longest > reach:
            raise InputError(f"{longest:,} tokens are past the {reach:,} positions of {self.name}; give shorter ones")
        most = max(map(max, items))
        if most >= known:
            raise InputError(
                f"{self.name}: its tokenizer gives token {most:,}, but the model knows {known:,}; the two must belong "
                "together"
            )
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*item, *[pad] * (longest - len(item))] for item in items])
        attention_mask = torch.tensor([[1] * len(item) + [0] * (longest - len(item)) for item in items])
        return {"input_ids": ids.to(self.device), "attention_mask": attention_mask.to(self.device)}

    def metadata(self) -> dict[str, Any]:
        """The description of the model in reports."""
        layers = hf.find_layers(self.model)
        heads, kv_heads, width = hf.head_counts(layers[0])
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "kind": self.kind,
            "library": self.library,
            "pooling": self.pooling,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "layers": [{"number": layer.number, "name": layer.name, "kind": layer.kind} for layer in layers],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": width,
            "position_limit": self.limit,
            **({"extended_to": self.extend, "rotary": self.is_rotary} if self.extend is not None else {}),
        }

    def identity(self) -> list[Any]:
        """The facts that tell this model from another one: name, config, some of its weights."""
        config = without_marks(self.model.config.to_dict())
        weights = sum(float(p.detach().flatten()[:64].double().sum()) for p in self.model.parameters())
        extended = [] if self.extend is None else [self.extend]
        return [self.name, repr(sorted(config.items(), key=str)), str(self.model.dtype), weights, *extended]

    # ------------------------------------------------------------------ reading

    @torch.inference_mode()
    def embed(self, items: Sequence[Sequence[int]]) -> Tensor:
        """One vector (n, width) for each item: the mean of its last hidden states, or the first one under "cls"."""
        batch = self.batch(items)
        hidden = self.model(**self._cut(batch)).last_hidden_state
        if self.pooling == "cls":  # the first process has the first token
            first = hidden[:, 0]
            return self.group.all_reduce(first if self.group.is_main else torch.zeros_like(first)).float().cpu()
        attention_mask = batch["attention_mask"][..., None]
        return (
            (self.group.all_reduce((hidden * self.group.cut(attention_mask)).sum(1)) / attention_mask.sum(1))
            .float()
            .cpu()
        )

    def embed_all(self, items: Sequence[Sequence[int]]) -> Tensor:
        """`embed` of any number of items, in their order; batches hold items of like length."""
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        size = max(BATCH, min(64, BATCH * 512 // max(len(items[order[len(order) // 2]]), 1)))
        parts = [self.embed([items[i] for i in order[at : at + size]]) for at in range(0, len(order), size)]
        vectors = torch.cat(parts)
        return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)

    @torch.inference_mode()
    def prefill(self, items: Sequence[Sequence[int]], cached: bool = False) -> next_tokens.Prefill:
        """A causal language model over whole prompts, as generation begins; of a group, with all logits.

        `cached`: with the cache that generation fills.
        """
        split = self.group.ranks is not None  # the last token is on one of the processes
        batch = self.batch(items)
        made = next_tokens.prefill(self.model, self._cut(batch), all_logits=split, cached=cached)
        return replace(made, valid=batch["attention_mask"].bool())

    def quarters(
        self, items: Sequence[Sequence[int]], run: next_tokens.Prefill, most: int | None = None
    ) -> list[float]:
        """The negative log-likelihoods and the numbers of next tokens in each quarter of these items: 4 and 4 sums.

        `most`: positions of an item that are read, as in `next_tokens`.
        """
        tokens, counted = next_tokens.next_of(self.batch(items))
        step = 1 if most is None or self.group.count > 1 else -(-tokens.shape[1] // most)
        tokens, counted = (next_tokens.one_of_each(step, each) for each in (tokens, counted))
        return next_tokens.quarter_sums(run.every(step), tokens, counted, self.group)

    def next_tokens(
        self, items: Sequence[Sequence[int]], runs: dict[str, next_tokens.Prefill], exact: str, most: int | None = None
    ) -> dict[str, next_tokens.NextTokens]:
        """The next-token distributions of some prefills of these items against those of the run named `exact`.

        They are those of all positions, or of at most `most` in each item, evenly spaced, where tokens are not split.
        """
        tokens, counted = next_tokens.next_of(self.batch(items))
        step = 1 if most is None or self.group.count > 1 else -(-tokens.shape[1] // most)
        runs = {name: run.every(step) for name, run in runs.items()}
        tokens, counted = (next_tokens.one_of_each(step, each) for each in (tokens, counted))
        return next_tokens.differences(runs, exact, tokens, counted, self.group)

    @torch.inference_mode()
    def losses(self, items: Sequence[Sequence[int]], seed: int = 0) -> tuple[float, int]:
        """Sum of negative log-likelihoods in nats of 15 % of the tokens, which are masked, and of how many."""
        batch = self.batch(items)
        ids, attention_mask = batch["input_ids"], batch["attention_mask"].bool()
        generator = torch.Generator().manual_seed(seed)
        special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids, device=ids.device))
        drawn = torch.rand(ids.shape, generator=generator, device="cpu").to(ids.device) < 0.15
        counted = drawn & attention_mask & ~special
        batch["input_ids"] = ids.masked_fill(counted, self.tokenizer.mask_token_id)
        logits, local = self.model(**self._cut(batch)).logits, self.group.cut(counted)
        nll = F.cross_entropy(logits[local].float(), self.group.cut(ids)[local], reduction="sum")
        return self.group.sums(float(nll))[0], int(counted.sum())

    def _cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.group.cut(x) for name, x in batch.items()}

    def probe(self) -> Tensor:
        """The last hidden states or the logits of the model on a short input, under autograd if that is on."""
        read: Tensor = self.model(**self.batch([self.content_ids("a b c") or [0]]))[0]
        return read  # the last hidden states or the logits: the first output of either kind of model

    def forward(self, items: Sequence[Sequence[int]], cached: bool = False) -> Any:
        """The whole forward pass as it is timed: embeddings, losses, or a prefill, which may fill a cache."""
        if self.is_causal_lm:
            return self.prefill(items, cached)
        return self.embed(items) if self.kind == "embedding" else self.losses(items)


def load(name: str | None, device: str = "cpu", group: MeasuringGroup = ALONE, dtype: str | None = None) -> Pretrained:
    """Load a model by hub id or folder; "demo-encoder" (or None) and "demo-decoder" are those of the extra `demo`.

    With a dtype ("fp32", "bf16", "fp16"), its weights are converted; otherwise they keep their own. Each process of a
    group loads the whole model.

    Raises:
        InputError: nothing loads under this name, no tokenizer, weights that are not the model's, or a model that reads
            no text or is not supported.
    """
    import transformers

    check_device(device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = model_location(name)
    config = config_of(where)
    kind = _kind(config, where)
    auto = {
        "embedding": transformers.AutoModel,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "causal-lm": transformers.AutoModelForCausalLM,
    }[kind]
    model, loading = read_model(auto, where)
    model = model.eval().to(device)
    hf.restore(model)  # methods that ran when the folder was saved are not what the user asks about
    with as_input_error():
        hf.find_layers(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    tokenizer = read_tokenizer(where)
    if kind == "masked-lm" and tokenizer.mask_token_id is None:
        raise InputError(f"{where}: a masked language model whose tokenizer has no mask token")
    limit = hf.position_limit(model) or getattr(config, "max_position_embeddings", None)
    pooling = _pooling(config, where) if kind == "embedding" else "mean"
    pretrained = Pretrained(demo.NAMES.get(name or demo.ENCODER) or str(name), model, tokenizer, kind, pooling, limit)
    try:
        pretrained.probe()
    except Exception as error:  # of the model's own code, with settings that nothing checked before
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{where}: the model does not run with its config.json: {reason}") from error
    with as_input_error(f"{where}: "):
        notes = check_weights(where, model, loading, pretrained.probe)
    for note in notes:
        logger.warning("%s: %s", where, note)
    library = "sentence-transformers" if is_sentence_transformer(where) else "transformers"
    pretrained = replace(pretrained, notes=tuple(notes), group=group, library=library)
    if dtype is not None and model.dtype != TORCH[dtype]:
        pretrained = pretrained.in_dtype(TORCH[dtype])
    if group.count > 1:
        with as_input_error(f"{where}: "), running(pretrained.model, None, group):
            pass
    return pretrained


def check_model(name: str | None, device: str) -> None:
    """Check a model without its weights: the device, its folder or hub id, and its config.

    Raises:
        InputError: one of them does not work.
    """
    check_device(device)
    config_of(model_location(name))


def model_location(name: str | None) -> str:
    """The folder or hub id of a model; "demo-encoder" (or None) and "demo-decoder" are those of the extra `demo`."""
    if name == demo.DECODER:
        return demo.decoder()
    return demo.encoder() if name in (None, demo.ENCODER) else name


def _kind(config: Any, where: str) -> Kind:
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{where} is an encoder-decoder ({config.model_type}); this command accepts encoders, masked and "
            "causal language models. sq.hf.swap puts methods into encoder-decoders"
        )
    architecture = architecture_of(config)
    if architecture.endswith("ForMaskedLM"):  # which some embedding models still name, such as all-mpnet-base-v2
        return "embedding" if has_pooling(where) else "masked-lm"
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "CausalLanguageModel")):
        return "causal-lm"
    return "embedding"


def config_of(where: str) -> Any:
    """The config of a model folder or hub id, of registered model types too.

    Raises:
        InputError: there is none; the message names the demo model that is spelled like that, if there is one.
    """
    registered()
    try:
        return read_config(where)
    except InputError as error:
        hint = nearest(where, demo.NAMES, 0.75)
        if not hint:
            raise
        raise InputError(f"{error}{hint}") from error


def architecture_of(config: Any) -> str:
    """The name of the saved class, if a config has it."""
    return (getattr(config, "architectures", None) or [""])[0]


def _pooling(config: Any, where: str) -> Pooling:
    """The pooling of hidden states to an embedding, as in a model of `subquad train` or as its folder configures it."""
    if config.model_type == "subquad-encoder":
        return "cls" if config.pooling == "first" else "mean"
    return pooling_of(where)


@dataclass(frozen=True)
class OtherAttention:
    """An implementation of attention that is not subquad's, by the name that `attn_implementation` takes."""

    name: str


@contextmanager
def running(model: Any, methods: Any, group: MeasuringGroup = ALONE) -> Iterator[None]:
    """Run `methods` (as `hf.swap` takes them, or an `OtherAttention`; None = the model's own) in a model, for a while.

    Of a group, each process then runs the model on its part of the tokens; the model's own attention is "full" there.
    """
    if methods is None and group.ranks is None:
        yield
        return
    if isinstance(methods, OtherAttention):
        before = model.config._attn_implementation
        model.set_attn_implementation(methods.name)
        try:
            yield
        finally:
            model.set_attn_implementation(before)
        return
    hf.swap(model, "full" if methods is None else methods, parallel=group.ranks)
    try:
        yield
    finally:
        hf.restore(model)
