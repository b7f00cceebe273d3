"""Runs the tests of the Triton kernels, each kind in a process of its own.

    python -m tests.library.triton interpreted [PYTEST ARGUMENTS]    in Triton's interpreter, on CPU tensors
    python -m tests.library.triton compiled [PYTEST ARGUMENTS]       compiled for GPUs that need not be there
    python -m tests.library.triton cuda [PYTEST ARGUMENTS]           on the GPU: all methods, and the cases above

The interpreter is chosen when Triton is imported, and the checks of shapes in the other tests would wrap the kernels.
"""

import sys

from tests.library.triton.processes import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1], *sys.argv[2:]))
