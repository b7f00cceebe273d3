"""A tokenizer of bytes, for the models that read them: saved next to such a model, it makes text its input."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BYTES = 256
SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that are written as the letter of their number


def byte_tokenizer(
    first: int,
    longest: int,
    *,
    pad: tuple[str, int],
    start: tuple[str, int] | None = None,
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """The bytes of a text in UTF-8 as tokens `first` to `first` + 255; what a text contains is never a special token.

    Args:
        longest: tokens to which `truncation=True` cuts, those of the text and the one before it.
        pad: name and number of the token that fills batches up.
        start: name and number of the token before every text, where there is one.
    """
    letters = {letter: first + byte for byte, letter in enumerate(_letters())}
    special = [each for each in (pad, start) if each is not None]
    core = Tokenizer(models.BPE(vocab=letters | dict(special), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in special])
    if start is not None:
        core.post_processor = processors.TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad[0],
        bos_token=None if start is None else start[0],
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
        padding_side=padding_side,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _letters() -> list[str]:
    """The letter that represents each byte in the vocabulary of `tokenizers`' ByteLevel."""
    hidden = [byte for byte in range(BYTES) if byte not in SHOWN]
    return [chr(byte) if byte in SHOWN else chr(BYTES + hidden.index(byte)) for byte in range(BYTES)]
