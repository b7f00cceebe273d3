"""Attention in a model that is not subquad's: another implementation that transformers knows by a name."""

from collections.abc import Sequence

import torch
from transformers import AttentionInterface

from subquad import hf
from subquad.core.errors import InputError
from subquad.core.spelling import instead
from subquad.methods import Full
from subquad.tools.models.compare_rows import CompareRow
from subquad.tools.models.pretrained import OtherAttention, Pretrained, running

TOKENS = 32  # of the input on which an implementation is tried


def row_of_attention(pretrained: Pretrained, name: str, item: Sequence[int]) -> CompareRow:
    """The row of another implementation of attention, which is tried on the beginning of an item first.

    Raises:
        InputError: the name is one of subquad's, or transformers does not know it, or the implementation cannot run
            here, with its own message; tokens are split over processes; or the model's own attention is another one
            after it ran.
    """
    if pretrained.group.ranks is not None:
        raise InputError(f"--attention {name} runs on all tokens of an input, and here they are split over processes")
    if name.partition(":")[0] == "subquad":
        raise InputError(f"--attention {name} is subquad's own; name its method in --methods")
    known = sorted({"eager", *AttentionInterface().valid_keys()})
    if name not in known and "/" not in name:  # a kernel of the Hub has the name of its repository
        raise InputError(f"transformers has no attention {name!r}{instead(name, known, '')}")
    other, item = OtherAttention(name), item[:TOKENS]
    before = _first_output(pretrained, item)
    try:
        with running(pretrained.model, other):
            _first_output(pretrained, item)
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError) as error:
        raise InputError(f"--attention {name} cannot run in {pretrained.name}: {_first_line(error)}") from error
    if not torch.equal(before, _first_output(pretrained, item)):
        raise InputError(
            f"--attention {name} changes {pretrained.name} for good: after it, the model's own attention has other "
            "outputs than before, so nothing could be compared with it"
        )
    return CompareRow(Full(), [layer.number for layer in hf.find_layers(pretrained.model)], other=other)


@torch.inference_mode()
def _first_output(pretrained: Pretrained, item: Sequence[int]) -> torch.Tensor:
    output: torch.Tensor = pretrained.model(**pretrained.batch([item]))[0]
    return output


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
