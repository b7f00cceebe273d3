"""Imports what subquad imports, before it: a library first imported under the shape checks is compiled again."""

import accelerate  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pydantic  # noqa: F401
import rich.progress  # noqa: F401
import sklearn.cluster  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.modeling_utils  # noqa: F401
import typer  # noqa: F401
