"""The contract of decoding: what a method whose trait `recurrent` is true promises, and what the others refuse."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad import Mask, Method
from subquad.testing.contract import TOLERANCE, Contract, bound_for, close, lengths_to_bool, pad, where
from subquad.testing.oracle import gradients, qkv, tracked

State = dict[str, Tensor]


def by_steps(
    bound: sq.BoundMethod, inputs: Iterable[Tensor], sizes: Iterable[int], **options: object
) -> tuple[Tensor, State]:
    """All outputs of steps of these sizes, in tokens, from the first token on, and the last state."""
    q, k, v = inputs
    state = bound.init_state(len(q), like=q, value_dim=v.shape[3])
    outs = []
    for start, size in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), sizes, strict=False):
        out, state = bound.step(*(x[:, :, start : start + size] for x in (q, k, v)), state, **options)
        outs.append(out)
    return torch.cat(outs, dim=2), state


def numbers(state: State) -> list[Tensor]:
    """The tensors of a state, in the order of their names."""
    return [tensor for _, tensor in sorted(state.items())]


class DecodingContract(Contract):
    """Every promise of a method that decodes from a state of fixed size, one test each."""

    @where(lambda traits: traits.recurrent)
    def test_a_recurrent_method_is_strictly_causal(self, method: Method):
        assert method.traits.causal == "strict"

    @pytest.mark.parametrize("sizes", [[1] * 24, [24], [13, *[1] * 11], [5, 1, 7, 11]], ids=str)
    @where(lambda traits: traits.recurrent)
    def test_steps_equal_the_causal_call(self, method: Method, sizes: list[int]):
        inputs = qkv()
        bound = bound_for(method, *inputs)
        close(by_steps(bound, inputs, sizes)[0], bound(*inputs, is_causal=True))

    @pytest.mark.parametrize("options", [{"scale": 0.9}, {"seed": 5}], ids=str)
    @where(lambda traits: traits.recurrent)
    def test_steps_with_options_and_shared_key_heads_equal_the_causal_call(self, method: Method, options: dict):
        inputs = qkv(H=4, G=2)
        bound = bound_for(method, *inputs)
        close(by_steps(bound, inputs, [5, 1, 18], **options)[0], bound(*inputs, is_causal=True, **options))

    @where(lambda traits: traits.recurrent)
    def test_a_left_padded_prompt_leaves_the_state_of_its_tokens(self, method: Method):
        lengths = (17, 1, 0, 5)
        items = [qkv(n + 6, B=1, seed=i) for i, n in enumerate(lengths)]
        valid = lengths_to_bool(lengths, 17, "left")
        prompt = pad([tuple(x[:, :, :n] for x in item) for item, n in zip(items, lengths, strict=True)], valid, 300.0)
        continued = [torch.cat([x[:, :, -6:] for x in parts]) for parts in zip(*items, strict=True)]
        bound = bound_for(method, *prompt)
        out, state = bound.step(*prompt, bound.init_state(4, like=prompt[0], value_dim=6), mask=Mask.padding(valid))
        last, _ = bound.step(*continued, state)
        assert (out.transpose(1, 2)[~valid] == 0).all()
        for row, (item, n) in enumerate(zip(items, lengths, strict=True)):
            want = bound(*item, is_causal=True)[0]
            close(out[row][:, valid[row]], want[:, :n])
            close(last[row], want[:, n:])

    @where(lambda traits: traits.recurrent)
    def test_a_step_of_padding_changes_no_state(self, method: Method):
        q, k, v = qkv(8)
        bound = bound_for(method, q, k, v)
        _, state = by_steps(bound, (q, k, v), [8])
        pads = torch.zeros(2, 3, dtype=torch.bool)
        out, after = bound.step(*(300 * x[:, :, :3] for x in (q, k, v)), state, mask=Mask.padding(pads))
        assert (out == 0).all()
        close(numbers(after), numbers(state))

    @where(lambda traits: traits.recurrent)
    def test_a_state_is_left_as_it_is_and_keeps_its_size(self, method: Method):
        inputs = qkv()
        bound = bound_for(method, *inputs)
        first = bound.init_state(2, like=inputs[0], value_dim=6)
        copies = {name: tensor.clone() for name, tensor in first.items()}
        _, second = bound.step(*inputs, first)
        again, _ = bound.step(*inputs, first)
        assert all(torch.equal(first[name], copies[name]) for name in copies)
        assert torch.equal(again, by_steps(bound, inputs, [24])[0])
        for name, tensor in first.items():
            assert len(tensor) == 2
            assert (second[name].shape, second[name].dtype) == (tensor.shape, tensor.dtype)
            assert not tensor.is_floating_point() or tensor.dtype == torch.float32

    @where(lambda traits: traits.recurrent)
    def test_items_of_a_state_can_be_chosen(self, method: Method):
        q, k, v = qkv(12, B=3)
        bound, order = bound_for(method, q, k, v), torch.tensor([2, 2, 0])
        _, state = by_steps(bound, (x[:, :, :9] for x in (q, k, v)), [9])
        chosen = {name: tensor.index_select(0, order) for name, tensor in state.items()}
        out, _ = bound.step(*(x[order, :, 9:] for x in (q, k, v)), chosen)
        close(out, bound(*(x[order] for x in (q, k, v)), is_causal=True)[:, :, 9:])

    @where(lambda traits: traits.recurrent)
    def test_the_cost_of_a_step_does_not_depend_on_the_past(self, method: Method):
        def operations(past: int) -> int:
            inputs = qkv(past + 1)
            bound = bound_for(method, *inputs)
            _, state = by_steps(bound, (x[:, :, :past] for x in inputs), [past])
            with FlopCounterMode(display=False) as counter:
                bound.step(*(x[:, :, past:] for x in inputs), state)
            return counter.get_total_flops()

        assert operations(5) == operations(50) > 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    @where(lambda traits: traits.recurrent)
    def test_steps_in_other_dtypes(self, method: Method, dtype: torch.dtype):
        inputs = qkv(dtype=dtype)
        bound = bound_for(method, *inputs)
        out, state = by_steps(bound, inputs, [20, 1, 1, 1, 1])
        exact = torch.promote_types(dtype, torch.float32)
        assert out.dtype == dtype
        assert all(tensor.dtype == exact for tensor in state.values() if tensor.is_floating_point())
        want = bound(*(x.double() for x in inputs), is_causal=True)
        torch.testing.assert_close(out.double(), want, atol=TOLERANCE.get(dtype, 1e-5), rtol=0)

    @where(lambda traits: traits.recurrent)
    def test_gradients_flow_through_a_state(self, method: Method):
        stepped, whole = tracked(*qkv()), tracked(*qkv())
        bound = bound_for(method, *whole)
        out, _ = by_steps(bound, stepped, [13, 4, *[1] * 7])
        close(gradients(out, *stepped), gradients(bound(*whole, is_causal=True), *whole))

    @where(lambda traits: traits.recurrent)
    def test_states_of_something_else_are_refused(self, method: Method):
        q, k, v = qkv(1)
        bound = bound_for(method, q, k, v)
        state = bound.init_state(2, like=q, value_dim=6)
        name = next(name for name, tensor in state.items() if tensor.is_floating_point())
        wrong = {
            "of 3 items, but the batch of this step is 2": bound.init_state(3, like=q, value_dim=6),
            r"make it with init_state\(…, value_dim=6\) of the layer": bound.init_state(2, like=q),
            f"contains .*, but '{method.name}' with 2 heads": {"other": q},
            "is on meta but `query` is on cpu": {**state, name: state[name].to("meta")},
            f"{name!r} is torch.float64, but that of a torch.float32": {**state, name: state[name].double()},
        }
        for message, wrong_state in wrong.items():
            with pytest.raises(ValueError, match=message):
                bound.step(q, k, v, wrong_state)
        with pytest.raises(ValueError, match="make it with init_state of the layer"):
            bound.step(q, k, q, state)
        with pytest.raises(ValueError, match="bound for 2 heads of width 8"):
            bound.step(*qkv(1, H=4), state)

    @where(lambda traits: traits.recurrent)
    def test_masks_of_more_than_padding_are_refused(self, method: Method):
        q, k, v = qkv(3)
        bound = bound_for(method, q, k, v)
        state = bound.init_state(2, like=q, value_dim=6)
        segments, dense = torch.zeros(2, 3, dtype=torch.int64), torch.ones(1, 1, 3, 3, dtype=torch.bool)
        for mask in (
            Mask.segments(segments),
            Mask.window(1),
            Mask.dense(dense),
            Mask.causal(),
            Mask.padding(keys=[3, 3]),
        ):
            with pytest.raises(ValueError, match="a step supports only a mask of its new tokens' padding"):
                bound.step(q, k, v, state, mask=mask)
        with pytest.raises(TypeError, match="mask"):
            bound.step(q, k, v, state, mask=torch.ones(2, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="batch=0"):
            bound.init_state(0, like=q)

    @where(lambda traits: not traits.recurrent)
    def test_what_is_not_recurrent_refuses_to_step(self, method: Method):
        bound = method.bind(heads=2, head_dim=8, max_length=64)
        with pytest.raises(ValueError, match=f"'{method.name}' keeps no state of a fixed size"):
            bound.init_state(2, like=torch.zeros(1))
        with pytest.raises(ValueError, match=f"'{method.name}' keeps no state of a fixed size"):
            bound.step(*qkv(1), {})
