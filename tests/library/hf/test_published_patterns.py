"""transformers' own Longformer and BigBird against plain encoders with their weights and our patterns."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import subquad as sq
from subquad.methods.bigbird import draw
from tests.library.hf.models import TEXT, padded_ids

SIZES = TEXT | {"max_position_embeddings": 128, "initializer_range": 0.3}  # attention that differs from a mean
close = {"atol": 1e-4, "rtol": 1e-4}


def longformer(window: int | list[int]) -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    """Longformer, whose global tokens have the projections of all others, and a RoBERTa with its weights."""
    torch.manual_seed(0)
    theirs = hf.LongformerModel(hf.LongformerConfig(**SIZES, attention_window=window)).eval()
    for layer in theirs.encoder.layer:
        attention = layer.attention.self
        for name in ("query", "key", "value"):
            getattr(attention, f"{name}_global").load_state_dict(getattr(attention, name).state_dict())
    plain = hf.RobertaModel(hf.RobertaConfig(**SIZES)).eval()
    missing, unexpected = plain.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing
    assert all("_global" in name for name in unexpected)
    return theirs, plain


@torch.no_grad()
def outputs(model: hf.PreTrainedModel, ids: Tensor, mask: Tensor, **more: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, **more).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("length", [7, 32, 45])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_longformer(first, length):
    theirs, plain = longformer([8, 4])
    ids, mask = padded_ids(length=length, pads=length // 3)
    is_global = (torch.arange(length) < first).long().expand(2, -1)
    wanted = outputs(theirs, ids, mask, global_attention_mask=is_global)
    assert not torch.allclose(outputs(plain, ids, mask), wanted, atol=1e-2)
    sq.hf.swap(plain, {layer: f"longformer:window={window},first={first}" for layer, window in enumerate([4, 2])})
    torch.testing.assert_close(outputs(plain, ids, mask), wanted, **close)


def test_global_tokens_anywhere_are_kept_tokens():
    theirs, plain = longformer(8)
    ids, mask = padded_ids(length=33, pads=9)
    is_global = (ids % 4 == 0) & mask.bool()
    assert is_global.any(1).all()
    wanted = outputs(theirs, ids, mask, global_attention_mask=is_global.long())
    sq.hf.swap(plain, "longformer:window=4,first=0")
    with sq.hf.keeping(plain, is_global):
        torch.testing.assert_close(outputs(plain, ids, mask), wanted, **close)


def test_projections_of_global_tokens_are_what_longformer_has_beside_these():
    theirs, plain = longformer(8)
    ids, mask = padded_ids(length=33)
    for layer in theirs.encoder.layer:
        layer.attention.self.value_global.weight.data.mul_(-1.0)
    wanted = outputs(theirs, ids, mask, global_attention_mask=(torch.arange(33) < 1).long().expand(2, -1))
    sq.hf.swap(plain, "longformer:window=4,first=1")
    assert not torch.allclose(outputs(plain, ids, mask), wanted, atol=1e-2)


class OurAttention(torch.nn.Module):
    """The attention of a Longformer's layer, with our layer and its weights, those of global attention too."""

    def __init__(self, theirs: torch.nn.Module, window: int, first: int):
        super().__init__()
        own = theirs.self
        method = f"longformer:window={window},first={first}"
        self.attend = sq.nn.MultiheadAttention(own.embed_dim, own.num_heads, method=method, global_projections=True)
        for letter, name in zip("qkv", ("query", "key", "value"), strict=True):
            setattr(self.attend, f"{letter}_proj", getattr(own, name))
            setattr(self.attend.global_tokens, f"{letter}_proj", getattr(own, f"{name}_global"))
        self.attend.out_proj, self.norm, self.first = theirs.output.dense, theirs.output.LayerNorm, first

    def forward(
        self, x: Tensor, *, is_index_masked: Tensor, is_index_global_attn: Tensor, **_: object
    ) -> tuple[Tensor]:
        keep = None if self.first else is_index_global_attn
        return (self.norm(x + self.attend(x, mask=sq.Mask.padding(~is_index_masked), keep=keep)),)


@pytest.mark.parametrize("first", [0, 2])
def test_longformer_with_its_own_projections_of_global_tokens(first):
    """The global tokens are the first ones, or any: then they are kept tokens."""
    torch.manual_seed(0)
    theirs = hf.LongformerModel(hf.LongformerConfig(**SIZES, attention_window=[8, 4])).eval()
    ids, mask = padded_ids(length=33, pads=9)
    is_global = (torch.arange(33) < first).expand(2, -1) if first else (ids % 4 == 0) & mask.bool()
    assert is_global.any(1).all()
    wanted = outputs(theirs, ids, mask, global_attention_mask=is_global.long())
    shared = longformer([8, 4])[0]
    assert not torch.allclose(outputs(shared, ids, mask, global_attention_mask=is_global.long()), wanted, atol=1e-2)
    for layer, window in zip(theirs.encoder.layer, [4, 2], strict=True):
        layer.attention = OurAttention(layer.attention, window, first)
    got = outputs(theirs, ids, mask, global_attention_mask=is_global.long())
    torch.testing.assert_close(got, wanted, **close)


def bigbird(random: int, block: int) -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    """BigBird and a BERT with its weights."""
    torch.manual_seed(0)
    shared = SIZES | {"hidden_act": "gelu_new"}
    theirs = hf.BigBirdModel(hf.BigBirdConfig(**shared, block_size=block, num_random_blocks=random), False).eval()
    plain = hf.BertModel(hf.BertConfig(**shared), add_pooling_layer=False).eval()
    plain.load_state_dict(theirs.state_dict())
    return theirs, plain


def ours(self, from_seq_length: int, from_block_size: int, num_heads: int, plan_num_rand_blocks: list, **_) -> list:
    """The random blocks of our method, in the form of transformers': for each head, blocks 1 to the last but one.

    Their numbers of blocks to choose from leave out the global blocks and the near ones, as ours do.
    """
    count, random = from_seq_length // from_block_size, plan_num_rand_blocks[0]
    heads = np.zeros((num_heads, count - 2, random), dtype=np.int64)
    for t in range(1, count - 1):
        others = [s for s in range(1, count - 1) if abs(s - t) > 1]
        picks = draw(torch.tensor([[len(others)]]), random, torch.arange(num_heads), torch.tensor([[t]]), seed=0)
        heads[:, t - 1] = np.array(others)[picks[0, :, 0].numpy()]
    return list(heads)


@pytest.mark.parametrize(("length", "random"), [(64, 2), (61, 1), (58, 2)])
def test_bigbird(length, random):
    theirs, plain = bigbird(random, block=4)
    ids, mask = padded_ids(length=length, pads=0)
    method = f"bigbird:block=4,random={random}"
    with patch.object(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", ours):
        wanted = outputs(theirs, ids, mask)
    assert theirs.attention_type == "block_sparse"
    assert not torch.allclose(outputs(plain, ids, mask), wanted, atol=1e-2)
    sq.hf.swap(plain, method)
    torch.testing.assert_close(outputs(plain, ids, mask), wanted, **close)


def test_bigbird_in_eval_mode_draws_no_blocks():
    """transformers puts block 0 in their place, so that it counts once more for each: ours do not do that."""
    theirs, plain = bigbird(2, block=4)
    ids, mask = padded_ids(length=64, pads=0)
    with patch.object(
        BigBirdBlockSparseAttention,
        "_bigbird_block_rand_mask_with_head",
        lambda self, num_heads, **_: [np.zeros((14, 2), dtype=np.int64)] * num_heads,
    ):
        zeros = outputs(theirs, ids, mask)
    torch.testing.assert_close(outputs(theirs, ids, mask), zeros)
    sq.hf.swap(plain, "bigbird:block=4,random=0")
    assert not torch.allclose(outputs(plain, ids, mask), zeros, atol=1e-2)


def test_the_last_block_of_bigbird_is_each_items_own():
    """transformers' is that of the padded tensor: there, what a shorter item gets depends on the batch."""
    theirs, plain = bigbird(1, block=4)
    ids, mask = padded_ids(length=64, pads=20)
    with patch.object(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", ours):
        together = outputs(theirs, ids, mask)[-44:]
        alone = outputs(theirs, ids[1:, :44], mask[1:, :44])
    assert not torch.allclose(together, alone, atol=1e-2)
    sq.hf.swap(plain, "bigbird:block=4,random=1")
    torch.testing.assert_close(outputs(plain, ids, mask)[-44:], alone, **close)
