"""`sq.nn.swap`: methods in torch's own layers and in timm's, and the layers' own attention back."""

import copy
import io
import json
import math
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.testing.oracle import gradients, normal
from subquad.tools.modules.planned import ModulePlan
from tests.forks import output_of

ROUGH = "clustered:clusters=2"
VALID = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
FUTURE = nn.Transformer.generate_square_subsequent_mask(9)


def encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0} | options
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, **options), 2).eval()


def swapped(model: nn.Module, method, **options) -> nn.Module:
    copied = copy.deepcopy(model)
    sq.nn.swap(copied, method, **options)
    return copied


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask": ~VALID}, {"mask": FUTURE}, {"mask": FUTURE, "is_causal": True}], ids=str
)
def test_full_equals_torchs_encoder(training, grad, batch_first, masks):
    model = encoder(batch_first=batch_first).train(training)
    ours = swapped(model, "full")
    x = normal(2, 9, 12) if batch_first else normal(9, 2, 12)
    with torch.set_grad_enabled(grad):
        x.requires_grad_(grad)
        want, got = model(x, **masks), ours(x, **masks)  # padded queries too, which torch makes 0 in eval mode
        torch.testing.assert_close(got, want)
        if grad:
            torch.testing.assert_close(gradients(got, x), gradients(want, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", ROUGH])
def test_a_mask_that_is_an_outer_product_of_padding_is_padding_of_both_sides(method):
    """In torch's layer, a query that sees no key has no attention; in a batch, it changes no other query."""
    x, model = normal(2, 9, 12), nn.MultiheadAttention(12, 2, batch_first=True).eval()
    hides = ~(VALID[:, None] & VALID[:, :, None]).repeat_interleave(2, 0)
    ours = swapped(model, method)
    out = ours(x, x, x, attn_mask=hides, need_weights=False)[0]
    if method == "full":
        torch.testing.assert_close(out, model(x, x, x, attn_mask=hides, need_weights=False)[0])
    for item, valid in enumerate(VALID):
        alone = x[item : item + 1, valid]
        torch.testing.assert_close(out[item, valid], ours(alone, alone, alone, need_weights=False)[0][0])
        assert torch.equal(out[item, ~valid], model.out_proj.bias.expand_as(out[item, ~valid]))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": ~VALID}], ids=["all real", "padded"])
def test_the_method_runs_in_eval_mode(grad, masks):
    model, x = encoder(), normal(2, 9, 12)
    ours = swapped(model, ROUGH)  # without hooks, which would keep torch from its fused path
    with torch.set_grad_enabled(grad):
        assert not torch.allclose(ours(x, **masks)[VALID], model(x, **masks)[VALID], atol=1e-3)
        torch.testing.assert_close(ours(x, **masks)[VALID], ours.train()(x, **masks)[VALID])  # there is no dropout


def test_padding_does_not_change_real_tokens():
    ours, x = swapped(encoder(), ROUGH), normal(2, 9, 12)
    out = ours(x, src_key_padding_mask=~VALID)
    torch.testing.assert_close(out[1:, :5], ours(x[1:, :5]), atol=1e-5, rtol=1e-4)


def test_full_equals_torchs_decoder():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 4, 24, batch_first=True), 2).eval()
    x, y = normal(2, 9, 12), normal(2, 5, 12, seed=1)
    hidden = torch.zeros(2, 9).masked_fill(~VALID, -math.inf)
    masks = {"tgt_mask": FUTURE, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": ~VALID[:, 2:7]}
    torch.testing.assert_close(swapped(model, "full")(x, y, **masks), model(x, y, **masks))


def test_methods_that_mix_queries_do_not_go_into_a_decoders_cross_attention():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 4, 24, batch_first=True), 1).eval()
    with pytest.raises(ValueError, match=r"'layers.0.multihead_attn' cannot run clustered.*mixes queries"):
        sq.nn.swap(model, ROUGH)
    with pytest.raises(ValueError, match="is for self-attention, and this is cross-attention"):
        sq.nn.swap(model, "shared-full")
    assert not any(hasattr(part, "subquad") for part in model.modules())
    sq.nn.swap(model, {"*.self_attn": "smyrf"})
    with pytest.raises(ValueError, match="does not support a causal mask"):
        model(normal(2, 9, 12), normal(2, 5, 12), tgt_mask=FUTURE)


def test_a_layer_itself_with_other_widths():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 4, kdim=6, vdim=7, batch_first=True).eval()
    x, y, z = normal(2, 9, 12), normal(2, 5, 6, seed=1), normal(2, 5, 7, seed=2)
    want, _ = layer(x, y, z, need_weights=False)
    assert "(the module itself)" in str(sq.nn.swap(layer, "full"))
    torch.testing.assert_close(layer(x, y, z, need_weights=False)[0], want)


def test_attention_weights_are_refused():
    layer, x = nn.MultiheadAttention(12, 4, batch_first=True), normal(2, 9, 12)
    sq.nn.swap(layer, "full")
    with pytest.raises(ValueError, match="need_weights=True, torch's default"):
        layer(x, x, x)


def test_layers_with_keys_of_their_own_are_refused():
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="adds keys of its own"):
            sq.nn.swap(nn.MultiheadAttention(12, 4, **{option: True}), "full")


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_layers_with_a_forward_pass_of_their_own_are_named():
    model = nn.ModuleDict({"torchs": nn.MultiheadAttention(12, 4), "own": OwnForward(12, 4)})
    with pytest.raises(ValueError, match="'own' cannot run full: its class, OwnForward"):
        sq.nn.swap(model, "full")
    assert sq.nn.swap(model, {"torchs": "full"}).layers["own"] is None


@pytest.mark.long
def test_layers_compile_in_one_graph():
    equal = json.loads(output_of("tests.library.nn.compiled"))
    assert len(equal) == 12
    assert {name for name, right in equal.items() if not right} == set()


def test_parameters_and_hooks_stay():
    model = encoder()
    names, parameters = list(model.state_dict()), list(model.parameters())
    seen = []
    model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    sq.nn.swap(model, ROUGH)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(normal(2, 9, 12))
    assert seen == [1]


def test_restore_gives_back_what_was_there():
    model, x = encoder(), normal(2, 9, 12)
    with torch.inference_mode():
        want = model(x, src_key_padding_mask=~VALID)
        before = [dict(vars(part)) for part in model.modules()]
        sq.nn.swap(model, ROUGH)
        sq.nn.swap(model, "full")
        sq.nn.restore(model)
        assert torch.equal(model(x, src_key_padding_mask=~VALID), want)
    assert [dict(vars(part)) for part in model.modules()] == before
    assert set(sq.nn.describe(model).layers.values()) == {None}
    sq.nn.restore(model)  # nothing to do


def test_copies_and_files_keep_the_method():
    ours, x = swapped(encoder(), ROUGH), normal(2, 9, 12)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), ours(x))
        for one, own in zip(other.parameters(), ours.parameters(), strict=True):
            one.data = own.data * 2
        assert not torch.equal(other(x), ours(x))  # it reads its own weights
        sq.nn.restore(other)
        assert not hasattr(other.layers[0].self_attn, "subquad")


def outputs_and_methods(module: nn.Module, x: torch.Tensor) -> tuple[list, str]:
    """Return the outputs and methods of a module, as computed in another process."""
    return module(x).tolist(), str(sq.nn.describe(module))


@pytest.mark.slow  # a process of its own
@pytest.mark.parametrize("method", [ROUGH, "lha:buckets=2,hidden=4"])
def test_a_process_that_is_spawned_computes_the_same(method):
    ours, x = swapped(encoder(), method), normal(2, 9, 12)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        out, methods = processes.submit(outputs_and_methods, ours, x).result(timeout=300)
    torch.testing.assert_close(torch.tensor(out), ours(x))
    assert methods == str(sq.nn.describe(ours))


@pytest.mark.parametrize("method", ["lha:buckets=2,hidden=4", "linformer:k=3", "performer:redraw=2"])
def test_a_swap_under_another_default_device_leaves_the_module_where_it_is(method):
    model, x = encoder(), normal(2, 9, 12)
    with torch.device("meta"):
        sq.nn.swap(model, method, max_length=9)
        out = model(x, src_key_padding_mask=~VALID)
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
    torch.testing.assert_close(out, model(x, src_key_padding_mask=~VALID))


def test_learned_methods_get_parameters_that_train():
    model = encoder()
    sq.nn.swap(model, "learned-feature-map:features=4,window=2")
    learned = [name for name, _ in model.named_parameters() if ".subquad." in name]
    assert learned
    model.train()(normal(2, 9, 12)).square().sum().backward()
    assert all(dict(model.named_parameters())[name].grad is not None for name in learned)


def test_dropout_is_the_methods_in_training():
    model, x = encoder(dropout=0.5), normal(2, 9, 12)
    ours = swapped(model, ROUGH)
    assert torch.equal(ours(x), ours(x))
    layer = ours.layers[0].self_attn.train()
    torch.manual_seed(0)
    assert not torch.equal(layer(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])


def test_some_layers_only_and_the_table():
    model, x = encoder(), normal(2, 9, 12)
    table = sq.nn.swap(model, {"*": "full", "layers.1.*": ROUGH})
    assert {name: str(method) for name, method in table.layers.items()} == {
        "layers.0.self_attn": "full",
        "layers.1.self_attn": ROUGH,
    }
    sq.nn.swap(model, {"layers.1.*": ROUGH})
    assert sq.nn.describe(model).layers["layers.0.self_attn"] is None
    assert "(the layer's own)" in str(sq.nn.describe(model))
    model(x)


PLAN = ModulePlan("", "", 0.9, {}, {}, {}, verified=None, why_exact=None, notes=())


@pytest.mark.parametrize(
    ("module", "method", "kind", "message"),
    [
        (nn.Linear(2, 2), "full", ValueError, "no torch.nn.MultiheadAttention and no timm Attention in this Linear"),
        ("bert", "full", TypeError, "expected a torch.nn.Module, got str"),
        (encoder(), {"layers.7": "full"}, ValueError, "no layer is named by 'layers.7'; there are 2"),
        (encoder(), {0: "full"}, TypeError, r"has the key 0, but .*; there are 2, from 'layers.0.self_attn'"),
        (encoder(), PLAN, TypeError, r"is a ModulePlan; give .*sq.nn.swap\(module, plan.layers\)"),
        (encoder(), {}, ValueError, "mapping from layers to methods is empty"),
        (encoder(), "fulll", ValueError, "did you mean 'full'"),
    ],
)
def test_mistakes_are_named(unchecked, module, method, kind, message):
    with pytest.raises(kind, match=message):
        sq.nn.swap(module, method)


def test_an_audit_finds_the_layers():
    model = encoder()
    sq.nn.swap(model, ROUGH)
    with torch.inference_mode(), sq.audit(model, tolerance=9.0, every=1) as audit:
        model(normal(2, 9, 12))
    assert [layer.name for layer in audit.report().layers] == ["layers.0.self_attn", "layers.1.self_attn"]


# ---------------------------------------------------------------- timm


def vit(**options) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4, **options).eval()


def test_timms_attention():
    model, x = vit(qk_norm=True), normal(2, 3, 64, 64)
    want = model(x)
    table = sq.nn.swap(model, "full")
    assert table.kinds == {"blocks.0.attn": "Attention", "blocks.1.attn": "Attention"}
    got = model(x)
    torch.testing.assert_close(got, want)
    weight = model.blocks[0].attn.qkv.weight
    torch.testing.assert_close(gradients(got, weight), gradients(want, weight), atol=1e-5, rtol=1e-4)
    sq.nn.swap(model, ROUGH)
    assert not torch.allclose(model(x), want, atol=1e-4)
    sq.nn.restore(model)
    assert torch.equal(model(x), want)


def test_timms_attention_with_learned_parameters():
    model, x = vit(), normal(2, 3, 64, 64)
    sq.nn.swap(model, "linformer:k=4", max_length=17)
    model.train()(x).square().sum().backward()
    learned = [p for name, p in model.named_parameters() if ".subquad." in name]
    assert learned
    assert all(p.grad is not None for p in learned)


def test_timms_attention_without_sdpa_is_refused():
    model, x = vit(), normal(2, 3, 64, 64)
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(ValueError, match="its fused_attn is False"):
        sq.nn.swap(model, "full")
    model.blocks[0].attn.fused_attn = True
    sq.nn.swap(model, "full")
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(ValueError, match="called no scaled_dot_product_attention"):
        model(x)


def test_refusals_are_by_layer_name():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, batch_first=True), 2)
    reasons = sq.nn.refusals(decoder, "clustered")
    assert list(reasons) == ["layers.0.multihead_attn", "layers.1.multihead_attn"]
    assert all("mixes queries" in reason for reason in reasons.values())
    assert sq.nn.refusals(decoder, "performer") == {}
    with pytest.raises(ValueError, match=r"no torch\.nn\.MultiheadAttention"):
        sq.nn.refusals(nn.Linear(2, 2), "clustered")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_padding_of_another_shape_is_refused_with_both_shapes(batch_first, train):
    model = swapped(encoder(batch_first=batch_first), ROUGH).train(train)
    x = torch.randn(2, 9, 12) if batch_first else torch.randn(9, 2, 12)
    model(x, src_key_padding_mask=~VALID)
    with pytest.raises(ValueError, match=r"`src_key_padding_mask` is \(2, 8\), but it must be \(2, 9\)"):
        model(x, src_key_padding_mask=~VALID[:, :8])
    sq.nn.restore(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_inputs_of_another_width_are_refused_with_both_widths():
    layer = nn.MultiheadAttention(12, 4, batch_first=True)
    sq.nn.swap(layer, "local:window=2")
    x = torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="the values are 11 wide, but this layer takes values of width 12"):
        layer(x, x, x[..., :11], need_weights=False)


def test_an_encoder_without_a_swapped_layer_is_left_as_it_is():
    pair = nn.ModuleList([encoder(), encoder()])
    sq.nn.swap(pair, {"1.layers.0.*": "local:window=2"})
    assert not pair[0]._forward_pre_hooks
    assert pair[1]._forward_pre_hooks


class EncoderOfLengths(nn.TransformerEncoder):
    """An encoder that makes its padding mask itself, so its third argument is no mask."""

    def forward(self, src, mask, lengths):
        return super().forward(src, mask, torch.arange(src.shape[1])[None] >= lengths[:, None])


def test_an_encoder_with_arguments_of_its_own_runs():
    encoder = EncoderOfLengths(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    inputs = torch.randn(2, 5, 16), None, torch.tensor([3, 5])
    exact = encoder(*inputs)
    sq.nn.swap(encoder, "full")
    torch.testing.assert_close(encoder(*inputs)[1], exact[1])


def test_training_that_would_leak_the_future_is_refused():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), 1)
    x, causal = torch.randn(2, 9, 12), nn.Transformer.generate_square_subsequent_mask(9)
    sq.nn.swap(model, "clustered:clusters=2,block=4,last=2")
    with pytest.raises(ValueError, match="training under a causal mask would leak the future"):
        model(x, mask=causal)
    assert model(x).requires_grad
    with torch.no_grad():
        model(x, mask=causal)
    model.eval()(x, mask=causal)
    sq.nn.swap(model.train(), "local:window=2")
    assert model(x, mask=causal).requires_grad
