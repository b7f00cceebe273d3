"""The contract catches what it is for: methods that are broken on purpose fail the test that guards against it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import Clustered, ClusteredTail, Full, LinearAttention, Mask, Method
from subquad.methods.clustered_tail import OF_ITEM, Factors, root
from subquad.methods.core.call import Attend, Call
from subquad.testing.batch_contract import BatchContract
from subquad.testing.contract import CallContract
from subquad.testing.decoding_contract import DecodingContract, State
from subquad.testing.transforms_contract import TransformsContract

CLUSTERED = {"clusters": 5, "bits": 15, "iterations": 3}
the, batches, decoding, transforms = CallContract(), BatchContract(), DecodingContract(), TransformsContract()


@dataclass(frozen=True)
class PaddingLeak(Clustered):
    """Forgets that some keys are padding."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query, key, value, call.under(Mask(queries=call.mask.both)))


@dataclass(frozen=True)
class PaddingInTheMeans(Clustered):
    """Lets padded queries into the clusters."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query, key, value, call.under(Mask(keys=call.mask.both)))


@dataclass(frozen=True)
class FutureLeak(Full):
    """Sees one key too many."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        mask = call.mask
        shifted = replace(mask, offset=(mask.offset or 0) + 1) if mask.is_causal else mask
        return super().attend(query, key, value, call.under(shifted))


@dataclass(frozen=True)
class ClusteredCausal(Clustered):
    """Claims to be causal, and clusters over the whole sequence."""

    traits = replace(Clustered.traits, causal="strict", by_halves=False)

    def attend_for(self, mask: Mask) -> Attend:
        return self.attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query, key, value, call.under(Mask(both=call.mask.both)))


@dataclass(frozen=True)
class BatchCoupling(Full):
    """Scales by a statistic of the whole batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query / query.std(), key, value, call)


@dataclass(frozen=True)
class SizesOfTheBatch(ClusteredTail):
    """Takes its default number of clusters from the length of the batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, factors: Factors = OF_ITEM) -> Tensor:
        return ClusteredTail.attend(replace(self, clusters=root(2 * query.shape[2])), query, key, value, call, factors)


@dataclass(frozen=True)
class RectanglesOfTheBatch(ClusteredTail):
    """Takes its default number of clusters from the length of the batch, under a causal mask alone."""

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return ClusteredTail(clusters=root(query.shape[2])).attend_in_rectangle(query, key, value, call)


@dataclass(frozen=True)
class GlobalGenerator(Clustered):
    """Draws its planes from torch's own generator."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query, key, value, replace(call, seed=int(torch.randint(2**31, ()))))


@dataclass(frozen=True)
class Detached(Full):
    """Computes the right numbers with the wrong gradient."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query.detach(), key, value, call)


@dataclass(frozen=True)
class WrongHeads(Full):
    """Deals the key heads out in turn instead of in runs."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        times = query.shape[1] // key.shape[1]
        return super().attend(query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1), call)


@dataclass(frozen=True)
class PaddingInTheState(LinearAttention):
    """Adds padded tokens to the state."""

    def advance(self, query: Tensor, key: Tensor, value: Tensor, state: State, call: Call) -> tuple[Tensor, State]:
        return super().advance(query, key, value, state, call.under(Mask.causal()))


@dataclass(frozen=True)
class StateInPlace(LinearAttention):
    """Changes the state that it is given."""

    def advance(self, query: Tensor, key: Tensor, value: Tensor, state: State, call: Call) -> tuple[Tensor, State]:
        out, after = super().advance(query, key, value, state, call)
        return out, {name: tensor.copy_(after[name]) for name, tensor in state.items()}


@dataclass(frozen=True)
class StepsApart(LinearAttention):
    """Hides the tokens of one step from each other."""

    def advance(self, query: Tensor, key: Tensor, value: Tensor, state: State, call: Call) -> tuple[Tensor, State]:
        _, after = super().advance(query, key, value, state, call)
        parts = zip(*(x.split(1, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([super(StepsApart, self).advance(*part, state, call)[0] for part in parts], dim=2), after


@dataclass(frozen=True)
class ReadsLabels(Full):
    """Reads numbers, by torch's own `one_hot`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        largest = F.one_hot(query.argmax(-1), query.shape[-1])
        return super().attend(query * (1 + largest), key, value, call)


@dataclass(frozen=True)
class DefaultDevice(Full):
    """Makes a tensor on the default device."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query * torch.ones(query.shape[-1]), key, value, call)


@dataclass(frozen=True)
class DefaultDtype(Full):
    """Makes a tensor of the default dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query * torch.ones(query.shape[-1], device=query.device), key, value, call)


BROKEN = [
    (PaddingLeak(**CLUSTERED), lambda m: the.test_padding_changes_no_output(m, "right", 3.0)),
    (PaddingInTheMeans(**CLUSTERED), lambda m: the.test_padding_changes_no_output(m, "left", 3.0)),
    (FutureLeak(), the.test_the_future_changes_no_output),
    (ClusteredCausal(**CLUSTERED), the.test_the_future_changes_no_output),
    (ClusteredCausal(**CLUSTERED), the.test_a_prefix_alone_equals_the_prefix_of_the_whole),
    (SizesOfTheBatch(), lambda m: batches.test_padding_changes_nothing_at_default_settings(m, "right")),
    (SizesOfTheBatch(), batches.test_packing_changes_nothing_at_default_settings),
    (RectanglesOfTheBatch(), lambda m: batches.test_padding_changes_nothing_at_default_settings(m, "left")),
    (RectanglesOfTheBatch(), batches.test_packing_changes_nothing_at_default_settings),
    (BatchCoupling(), the.test_batch_items_are_independent),
    (GlobalGenerator(**CLUSTERED), the.test_same_seed_same_output_and_the_global_generator_untouched),
    (Detached(), the.test_gradients_in_fp64),
    (WrongHeads(), the.test_shared_key_heads_equal_repeated_ones),
    (PaddingInTheState(), decoding.test_a_left_padded_prompt_leaves_the_state_of_its_tokens),
    (PaddingInTheState(), decoding.test_a_step_of_padding_changes_no_state),
    (StateInPlace(), decoding.test_a_state_is_left_as_it_is_and_keeps_its_size),
    (ReadsLabels(), lambda m: transforms.test_transforms_inside_vmap_equal_a_loop(m, "grad")),
    (DefaultDevice(), transforms.test_the_default_device_changes_nothing),
    (DefaultDtype(), lambda m: transforms.test_the_default_dtype_changes_nothing(m, "fastest")),
    (StepsApart(), lambda m: decoding.test_steps_equal_the_causal_call(m, [5, 19])),
]


@pytest.mark.parametrize(("method", "test"), BROKEN, ids=[type(method).__name__ for method, _ in BROKEN])
def test_broken_methods_are_caught(method: Method, test: Callable[[Method], None]):
    with pytest.raises((AssertionError, RuntimeError)):
        test(method)
