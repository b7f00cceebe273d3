"""Layers for sets: the formula, order, padding, sets of size 0 and 1, what is refused."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal

SIZES = (11, 1, 6, 0)
PADDING = Mask.padding(SIZES)
CROSS = [name for name in sq.list_methods() if sq.METHODS[name].traits.cross]
WITHOUT_CROSS = ("local", "reformer", "sinkhorn", "shared-full", "mixed-heads:methods=local+full")


def example(name: str) -> sq.Method:
    return sq.from_dict({"name": name, **sq.METHODS[name].traits.example})


def made(kind: str, method: str | sq.Method = "full", **options) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "SetTransformer":
            options = {"width": 12, "points": 5, "seeds": 3, "max_length": 64, **options}
            return sq.nn.SetTransformer(12, 7, method=method, **options).eval()
        return getattr(sq.nn, kind)(12, 4, method=method, max_length=64, **options).eval()


KINDS = ("SetAttention", "InducedSetAttention", "PoolingByAttention", "SetTransformer")
every_kind = pytest.mark.parametrize("kind", KINDS)
EQUIVARIANT = KINDS[:2]


def block_by_hand(block: sq.nn.SetAttention, x: Tensor, y: Tensor) -> Tensor:
    """MAB by torch's own functions, one set at a time."""
    layer = block.attention
    q, k, v = layer.q_proj(x), layer.k_proj(y), layer.v_proj(y)
    heads = [x.view(len(x), -1, 4, 3).transpose(1, 2) for x in (q, k, v)]
    attended = layer.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    hidden = block.attention_norm(x + attended)
    inside, _, outside = block.feed_forward
    return block.feed_forward_norm(hidden + outside(torch.relu(inside(hidden))))


def test_a_block_is_the_formula():
    x, y, block = normal(2, 9, 12), normal(2, 5, 12, seed=1), made("SetAttention", feed_forward=8)
    torch.testing.assert_close(block(x, y), block_by_hand(block, x, y))
    torch.testing.assert_close(block(x), block_by_hand(block, x, x))


def test_induced_attention_is_the_formula():
    x, layer = normal(2, 9, 12), made("InducedSetAttention", points=5)
    summary = block_by_hand(layer.gather, layer.points.expand(2, -1, -1), x)
    torch.testing.assert_close(layer(x), block_by_hand(layer.spread, x, summary))


def test_pooling_is_the_formula():
    x, layer = normal(2, 9, 12), made("PoolingByAttention", seeds=3)
    wanted = block_by_hand(layer.pool, layer.seeds.expand(2, -1, -1), layer.feed_forward(x))
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("points", [0, 5])
def test_the_model_is_its_parts(points):
    x, model = normal(4, 11, 12), made("SetTransformer", points=points, decoder_layers=2)
    kinds = [type(block) for block in (*model.encoder, *model.decoder)]
    encoder = sq.nn.InducedSetAttention if points else sq.nn.SetAttention
    assert kinds == [encoder] * 2 + [sq.nn.SetAttention] * 2
    hidden = model.embed(x)
    for part in (*model.encoder, model.pool, *model.decoder, model.head):
        hidden = part(hidden)
    torch.testing.assert_close(model(x), hidden)
    assert hidden.shape == (4, 3, 7)


# ---------------------------------------------------------------------- order


@every_kind
def test_order(kind):
    x, layer, order = normal(2, 9, 12), made(kind), normal(9, seed=5).argsort()
    out, permuted = layer(x), layer(x[:, order])
    torch.testing.assert_close(permuted, out[:, order] if kind in EQUIVARIANT else out)
    assert not torch.allclose(layer(2 * x), out, atol=1e-2)


# ---------------------------------------------------------------------- padding and small sets


def alone(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return [layer(x[i : i + 1, :size])[0] for i, size in enumerate(SIZES)]


def assert_padding_does_not_matter(kind: str, method: str | sq.Method) -> None:
    x, layer = normal(4, 11, 12), made(kind, method)
    valid = torch.arange(11) < torch.tensor(SIZES)[:, None]
    noisy = x.masked_fill(~valid[..., None], torch.nan)
    for mask in (PADDING, Mask.padding(valid)):
        out = layer(noisy, mask=mask)
        for got, wanted, size in zip(out, alone(layer, x), SIZES, strict=True):
            torch.testing.assert_close(got[:size] if kind in EQUIVARIANT else got, wanted, atol=1e-5, rtol=1e-4)
            assert kind not in EQUIVARIANT or (got[size:] == 0).all()
    layer(noisy, mask=PADDING).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@every_kind
def test_padding_and_small_sets(kind):
    assert_padding_does_not_matter(kind, "full")


@pytest.mark.parametrize("method", [m for m in CROSS if m != "full"])
def test_padding_with_every_method(method):
    assert_padding_does_not_matter("SetTransformer", example(method))


def test_a_set_of_one_attends_to_that_one():
    x, y, block = normal(2, 9, 12), normal(2, 1, 12, seed=1), made("SetAttention")
    attention = block.attention
    wanted = attention.out_proj(attention.v_proj(y)).expand(2, 9, 12)
    hidden = block.attention_norm(x + wanted)
    torch.testing.assert_close(block(x, y), block.feed_forward_norm(hidden + block.feed_forward(hidden)))


def test_an_empty_set_is_attended_to_as_zero():
    x, none, block = normal(2, 9, 12), torch.empty(2, 0, 12), made("SetAttention")
    hidden = block.attention_norm(x + block.attention.out_proj.bias)
    wanted = block.feed_forward_norm(hidden + block.feed_forward(hidden))
    torch.testing.assert_close(block(x, none), wanted)
    padded = block(x, normal(2, 3, 12), mask=Mask.padding(keys=[0, 0]))
    torch.testing.assert_close(padded, wanted)
    with_padded_queries = block(x, none, mask=Mask.padding(queries=[9, 4]))
    torch.testing.assert_close(with_padded_queries[0], wanted[0])
    assert (with_padded_queries[1, 4:] == 0).all()


@every_kind
def test_sets_of_size_zero_have_outputs_and_gradients(kind):
    layer = made(kind)
    out = layer(torch.empty(2, 0, 12))
    assert out.shape[1] == (0 if kind in EQUIVARIANT else out.shape[1])
    assert out.isfinite().all()
    out.square().sum().backward()
    assert layer(torch.empty(0, 9, 12)).shape[0] == 0


# ---------------------------------------------------------------------- precision, saving, learning


@every_kind
def test_bf16_is_near_fp32(kind):
    x, layer = normal(4, 11, 12), made(kind)
    wanted = layer(x, mask=PADDING)
    out = layer.bfloat16()(x.bfloat16(), mask=PADDING)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=6e-2, rtol=6e-2)


@every_kind
def test_a_saved_layer_comes_back(kind):
    x, one = normal(2, 9, 12), made(kind, example("lsh"))
    other = made(kind, example("lsh"))
    for parameter in other.parameters():
        parameter.data.add_(0.1)
    assert not torch.allclose(one(x), other(x))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(one(x), other(x))
    assert torch.equal(copy.deepcopy(one)(x), one(x))


@every_kind
def test_every_parameter_gets_a_gradient(kind):
    layer = made(kind)
    layer(normal(4, 11, 12), mask=PADDING).pow(3).sum().backward()
    named = {name: p.grad for name, p in layer.named_parameters() if not name.endswith("k_proj.bias")}
    assert all(grad is not None and grad.abs().max() > 0 for grad in named.values())


def test_the_seed_reaches_the_method():
    x, layer = normal(2, 60, 12), made("PoolingByAttention", "rfa")
    assert torch.equal(layer(x, seed=3), layer(x, seed=3))
    assert not torch.equal(layer(x, seed=3), layer(x, seed=4))


def test_dropout_is_for_training_only():
    x, without = normal(2, 9, 12), made("SetTransformer")(normal(2, 9, 12))
    layer = made("SetTransformer", dropout=0.5)
    assert torch.equal(layer(x), without)
    assert not torch.allclose(layer.train()(x), without)


def test_the_largest_of_three_learns():
    """A function that a mean of the elements does not know."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sq.nn.SetTransformer(1, 1, width=16, heads=2, layers=1, points=4)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        x = torch.rand(256, 5, 1)
        sizes = torch.randint(1, 6, (256,))
        largest = torch.stack([row[:size].max() for row, size in zip(x, sizes, strict=True)])
        for _ in range(80):
            loss = F.mse_loss(model(x, mask=Mask.padding(sizes))[:, 0, 0], largest)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss < 0.2 * largest.var()


# ---------------------------------------------------------------------- refusals


@every_kind
@pytest.mark.parametrize("method", WITHOUT_CROSS)
def test_methods_without_cross_attention_are_refused_by_name(kind, method):
    name = method.split(":")[0]
    if kind == "SetAttention":
        block = made(kind, method)
        block(normal(2, 12, 12))
        with pytest.raises(ValueError, match=f"'{name}' does not support cross-attention"):
            block(normal(2, 12, 12), normal(2, 12, 12, seed=1))
    else:
        where = "InducedSetAttention" if kind == "SetTransformer" else kind
        with pytest.raises(ValueError, match=f"'{name}' cannot run in {where}, which attends from learned elements"):
            made(kind, method)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("InducedSetAttention", {"points": 0}, "points=0, but it must be at least 1"),
        ("PoolingByAttention", {"seeds": 0}, "seeds=0, but it must be at least 1"),
        ("SetTransformer", {"points": -1}, "points=-1, but it must be at least 0"),
        ("SetTransformer", {"layers": 0}, "layers=0, but it must be at least 1"),
        ("SetAttention", {"feed_forward": 0}, "feed_forward=0, but it must be at least 1"),
    ],
)
def test_bad_sizes_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        made(kind, **options)


@every_kind
@pytest.mark.usefixtures("unchecked")
def test_bad_sets_and_masks_are_refused(kind):
    x, layer = normal(2, 9, 12), made(kind)
    with pytest.raises(ValueError, match=r"`x` is \(2, 9, 5\), but it must be \(batch, elements, 12\)"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match=r"`x` is \(9, 12\), but it must be"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"accepts padding only, .* the mask is Mask\.causal\(\)"):
        layer(x, mask=Mask.causal())
    with pytest.raises(ValueError, match="is for a batch of 3, but the batch is 2"):
        layer(x, mask=Mask.padding([3, 4, 5]))
    with pytest.raises(ValueError, match="has a length of 10, but there are 9 positions"):
        layer(x, mask=Mask.padding([3, 10]))


@pytest.mark.usefixtures("unchecked")
def test_two_sets_must_match():
    block = made("SetAttention")
    with pytest.raises(ValueError, match="`x` contains 2 sets but `y` contains 3"):
        block(normal(2, 9, 12), normal(3, 9, 12))
    with pytest.raises(ValueError, match=r"one set here, .* the mask is Mask\.padding\(keys=…\)"):
        made("PoolingByAttention")(normal(2, 9, 12), mask=Mask.padding(keys=[3, 4]))
