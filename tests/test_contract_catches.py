"""The contract catches what it is for: methods that are broken on purpose fail the test that guards against it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from subquad import Clustered, Full, Mask, Method
from subquad.methods.base import Call
from tests.contract import MethodContract

CLUSTERED = {"clusters": 5, "bits": 15, "iterations": 3}
the = MethodContract()


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

    traits = replace(Clustered.traits, causal="strict")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query, key, value, call.under(Mask(both=call.mask.both)))


@dataclass(frozen=True)
class BatchCoupling(Full):
    """Scales by a statistic of the whole batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return super().attend(query / query.std(), key, value, call)


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


BROKEN = [
    (PaddingLeak(**CLUSTERED), lambda m: the.test_padding_changes_no_output(m, "right", 3.0)),
    (PaddingInTheMeans(**CLUSTERED), lambda m: the.test_padding_changes_no_output(m, "left", 3.0)),
    (FutureLeak(), the.test_the_future_changes_no_output),
    (ClusteredCausal(**CLUSTERED), the.test_the_future_changes_no_output),
    (ClusteredCausal(**CLUSTERED), the.test_a_prefix_alone_equals_the_prefix_of_the_whole),
    (BatchCoupling(), the.test_batch_items_are_independent),
    (GlobalGenerator(**CLUSTERED), the.test_same_seed_same_output_and_the_global_generator_untouched),
    (Detached(), the.test_gradients_in_fp64),
    (WrongHeads(), the.test_shared_key_heads_equal_repeated_ones),
]


@pytest.mark.parametrize(("method", "test"), BROKEN, ids=[type(method).__name__ for method, _ in BROKEN])
def test_broken_methods_are_caught(method: Method, test: Callable[[Method], None]):
    with pytest.raises((AssertionError, RuntimeError)):
        test(method)
