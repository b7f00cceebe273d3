import pytest
import torch

pytest.register_assert_rewrite("tests.contract", "tests.oracle")

torch.set_num_threads(1)  # tests are tiny and run side by side: more threads would only wait for each other

collect_ignore = ["before/make.py"]  # it runs on the code that it was made with
