"""The contract of all methods on a GPU, on whatever backends run there.

New tensors are on the GPU by default here. What that could hide, a tensor that a method makes on the CPU, is found in
`test_methods.py`.
"""

import subquad as sq
from tests.library import test_contract


class TestEveryMethodOnAGpu(test_contract.TestEveryMethod):
    test_compiled_equals_eager_forward_and_backward = None  # in a process of its own, on the CPU
    test_operations_grow_as_the_traits_state = None  # counted by torch's counter, and the same everywhere

    def is_long(self, test: str, method: sq.Method) -> bool:
        """Backends are compared for all examples: which of them have Triton kernels is known only when they run."""
        if test == "test_every_backend_that_runs_here_equals_the_reference":
            return method not in self.examples
        return super().is_long(test, method)
