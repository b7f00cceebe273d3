from itertools import chain
from types import FunctionType
from zlib import crc32

import pytest

import subquad as sq
from subquad.testing import BatchContract, CallContract, DecodingContract
from tests.library.backends import runs_compiled_code

VARIANTS = [  # settings that change what a method does, beside each method's example
    "lsh:buckets=0,bucket_size=8,merge=union",
    "lsh:buckets=4,hash=random",
    "lsh:buckets=3,tail=3",
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lsh:buckets=3,hash=random,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "lha:buckets=4,hash=linear,merge=union,enlarge=1.0",
    "lha:buckets=0,bucket_size=8,hidden=8",
    "local:window=1",
    "local:window=17",
    "local:window=3,positions=relative",
    "longformer:window=2,first=0,dilation=3",
    "longformer:window=5,first=1",
    "bigbird:block=3,window=0,random=2,first=2,last=0",
    "bigbird:block=2,random=1,first=0,last=2",
    "strided:stride=5,sets=heads",
    "strided:stride=3,sets=far",
    "strided:stride=7,sets=near",
    "fixed:block=5,columns=2,sets=heads",
    "fixed:block=4,columns=2,sets=far",
    "fixed:block=7,columns=2,sets=near",
    "logsparse:window=0",
    "full:positions=relative",
    "full:kernel=subquad",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "mixed-heads:methods=local:window=3;positions=relative+oracle-top:topk=4",
    "mixed-heads:methods=lha:buckets=0;bucket_size=8;hidden=8+local:window=5",
    "by-length:steps=0:full+9:linear+17:local:window=3",
    "by-length:steps=0:linear+10:lha:buckets=3;hidden=8",
    "keep:every=7,sides=columns",
    "local:window=3+keep:first=2+lha-tail:buckets=4,keys=6,cells=3,hidden=8",
    "local:window=3+lha:buckets=3,hidden=8",
    "lsh:buckets=3+smyrf:cluster_size=7+clustered-tail:clusters=5,topk=4,cells=3",
    "clustered-tail:clusters=5,topk=4,cells=3,bits=15,iterations=3,block=4,last=0,queries=earlier",
    "clustered-tail:clusters=5,topk=4,cells=3,window=3,bits=15,iterations=3,block=4,last=3",
    "clustered-tail:clusters=5,topk=4,cells=3,window=2,bits=15,iterations=3,block=4,last=0,queries=earlier",
    "smyrf:cluster_size=7,rounds=1",
    "reformer:rounds=1,chunk=3,buckets=6",
    "routing:clusters=5,cluster_size=4",
    "cluster-former:window=0,chunk=9,clusters=3",
    "sinkhorn:block=5,cut=2,iterations=5",
    "performer:features=8,kind=hyperbolic",
    "performer:features=12,kind=favor++,rows=iid",
    "performer:features=16,kind=favor++,norm=30.0",
    "performer:features=512,kind=trigonometric",
    "performer:features=9,kind=relu",
    "performer:features=16,inputs=learned,redraw=3",
    "rfa:features=96,gates=none",
    "linear:feature_map=exp",
    "linear:feature_map=softmax",
    "linformer:k=5,sharing=none,ends=pooled",
    "linformer:k=5,sharing=none,start=random",
    "linformer:k=5,sharing=key-value,start=random,ends=pooled",
    "linformer:k=5,projection=convolution",
    "linformer:k=5,projection=convolution,sharing=none,start=random,ends=pooled",
    "linformer:k=5,projection=mean-pool",
    "linformer:k=5,projection=mean-pool,ends=pooled",
    "probsparse:factor=1",
    "adaptive-span:span=6,ramp=1,start=3",
    "adaptive-span:span=30,ramp=9,start=8",
    "synthesizer:logits=factorised-random,rank=3",
    "synthesizer:logits=dense",
    "synthesizer:logits=factorised-dense-and-dot,rank=5",
    "synthesizer:logits=random-and-dense",
    "nystrom:landmarks=7,iterations=3",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:pools=4,window=2,sinks=2",
    "tilted-pool:pools=7,window=0",
    "tilted-pool:pools=0,window=5",
    "learned-feature-map:features=7,window=3,sinks=2",
    "learned-feature-map:features=12,window=0,sinks=0",
    "learned-feature-map:features=12,window=0,sinks=2",
]


OF_OTHER_CODE = (  # than their method's example
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "local:window=3,positions=relative",
    "full:positions=relative",
    "full:kernel=subquad",
    "strided:stride=5,sets=heads",
    "fixed:block=5,columns=2,sets=heads",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "local:window=3+keep:first=2+lha-tail:buckets=4,keys=6,cells=3,hidden=8",
    "performer:features=9,kind=relu",
    "performer:features=16,kind=favor++,norm=30.0",
    "linformer:k=5,sharing=key-value,start=random,ends=pooled",
    "linformer:k=5,projection=convolution",
    "synthesizer:logits=factorised-dense-and-dot,rank=5",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:pools=0,window=5",
    "learned-feature-map:features=12,window=0,sinks=2",
)


# What the base class does before and after every method: once for a method of each way through it.
OF_THE_BASE_CLASS = (
    "test_a_bias_is_refused",
    "test_a_dense_mask_is_refused",
    "test_a_window_is_refused",
    "test_autocast_gives_the_dtype_of_sdpa",
    "test_autocast_takes_mixed_dtypes_as_sdpa_does",
    "test_bound_equals_the_bare_call",
    "test_bound_for_other_heads_is_refused",
    "test_causal_masks_are_refused_with_the_reason",
    "test_cross_attention_is_refused",
    "test_empty_inputs_are_refused",
    "test_impossible_dropout_is_refused",
    "test_learned_methods_exist_only_bound",
    "test_lengths_equal_the_bool_that_they_stand_for",
    "test_masks_of_more_than_padding_are_refused",
    "test_states_of_something_else_are_refused",
    "test_unknown_settings_are_refused_by_name",
    "test_what_is_not_recurrent_refuses_to_step",
)
REPRESENTATIVES = (
    "full",
    "clustered",
    "smyrf",
    "lha",
    "linear",
    "performer",
    "probsparse",
    "by-length",
    "mixed-heads",
    "sum",
)

# What settings do not change: once for a class, with the settings of its example.
OF_THE_CLASS = (
    "test_a_step_of_padding_changes_no_state",
    "test_activation_checkpointing_changes_no_gradient",
    "test_equal_settings_are_equal_and_fixed",
    "test_expanded_inputs_equal_copies",
    "test_inputs_are_left_as_they_are",
    "test_items_of_a_state_can_be_chosen",
    "test_overlapping_inputs_equal_copies",
    "test_segments_that_are_all_padding_give_zero",
    "test_strided_inputs_equal_contiguous_ones",
    "test_the_seed_of_a_method_without_randomness_changes_nothing",
    "test_the_cost_of_a_step_does_not_depend_on_the_past",
    "test_traits_speak",
)


def copied(test: FunctionType) -> FunctionType:
    """A copy of a test, so that a mark does not reach the contract of other packages."""
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.__dict__.update(test.__dict__)
    return copy


class TestEveryMethod(CallContract, BatchContract, DecodingContract):
    """Two values of a parameter beside the method need not meet every method, but every class of methods."""

    pytestmark = pytest.mark.covering
    examples = [sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()]  # noqa: RUF012
    methods = [*examples, *map(sq.parse_method, VARIANTS)]  # noqa: RUF012
    compiled_in_steps_of = (12, pytest.param(1, marks=pytest.mark.long))
    of_other_code = tuple(map(sq.parse_method, OF_OTHER_CODE))

    test_compiled_equals_eager_forward_and_backward = pytest.mark.slow(  # a process of its own
        copied(CallContract.test_compiled_equals_eager_forward_and_backward)
    )

    def is_long(self, test: str, method: sq.Method) -> bool:
        """Tell whether a case is long; a third of those of variants with their example's code always runs."""
        if test in OF_THE_BASE_CLASS:
            return method not in self.examples or method.name not in REPRESENTATIVES
        if test in OF_THE_CLASS:
            return method not in self.examples
        if test == "test_every_backend_that_runs_here_equals_the_reference" and not runs_compiled_code(method):
            return True
        if method in self.examples or method in self.of_other_code:
            return False
        return crc32(f"{test} {method}".encode()) % 3 > 0


def test_the_lists_name_tests():
    assert {*OF_THE_BASE_CLASS, *OF_THE_CLASS} <= {*dir(TestEveryMethod)}
    assert {*REPRESENTATIVES} <= {method.name for method in TestEveryMethod.examples}


def test_every_test_has_cases_that_run_always():
    """With the conditions of the tests on traits: no promise is checked under `-m long` alone."""
    every = TestEveryMethod()
    for name in chain(OF_THE_BASE_CLASS, OF_THE_CLASS):
        condition = getattr(getattr(every, name), "condition", lambda traits: True)
        assert any(condition(m.traits) and not every.is_long(name, m) for m in every.methods), name
