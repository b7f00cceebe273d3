"""Text: token ids, their masks, and what stands beside them."""

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form, special_ids


def ids(form: Form) -> Tensor:
    """Token ids; behind the places of an image, where one is given."""
    text = form.ids(form.length)
    if not form.image_tokens:
        return text
    image = dict(special_ids(form.config))
    token = next(i for name, i in image.items() if name in IMAGE_TOKENS)
    return torch.cat([torch.full((form.batch, form.image_tokens), token), text], dim=1)


IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id", "image_patch_id")


def mask(form: Form) -> Tensor | None:
    """The attention mask of a text; an image is never padded."""
    text = form.mask(form.length) if "input_ids" in form.parameters else None
    if text is None or not form.image_tokens:
        return text
    if form.padding == "left":  # pads come before the image
        text = text.sort(dim=1).values
    return torch.cat([torch.ones(form.batch, form.image_tokens, dtype=torch.long), text], dim=1)


def every_mask(form: Form) -> Tensor:
    """The attention mask of a text, also where nothing is padded."""
    text = mask(form)
    return torch.ones(form.batch, form.image_tokens + form.length, dtype=torch.long) if text is None else text


def classes(form: Form) -> Tensor:
    """A class for each item."""
    return form.integers(0, form.number("num_labels", default=2), form.batch)


def token_kinds(form: Form) -> Tensor | None:
    """1 where an image stands, 0 at text."""
    if not form.image_tokens:
        return None
    kinds = torch.zeros(form.batch, form.image_tokens + form.length, dtype=torch.long)
    kinds[:, : form.image_tokens] = 1
    return kinds


def decoder_length(form: Form) -> int:
    """Another than the encoder's, so that cross-attention is told from self-attention by its shape."""
    return form.length - 2 if form.length > 4 else form.length + 2


def decoder_ids(form: Form) -> Tensor:
    """Ids for the decoder."""
    return form.ids(decoder_length(form), decoder_vocabulary(form))


def decoder_vocabulary(form: Form) -> int:
    """The decoder's vocabulary, which can be another than the encoder's."""
    decoder = form.config.get_text_config(decoder=True)
    return int(getattr(decoder, "vocab_size", None) or form.vocabulary)


def decoder_mask(form: Form) -> Tensor | None:
    """The decoder's attention mask."""
    return form.mask(decoder_length(form)) if "decoder_input_ids" in form.parameters else None


def boxes(form: Form) -> Tensor:
    """Where each word stands on its page: (x0, y0, x1, y1)."""
    corner = form.integers(0, 20, form.batch, form.length, 2)
    return torch.cat([corner, corner + form.integers(1, 10, form.batch, form.length, 2)], dim=-1)


def embedded(form: Form) -> Tensor:
    """Tokens as the model's width of numbers."""
    return form.floats(form.batch, form.length, form.number("hidden_size", "d_model", "dim"))


def encoded(form: Form) -> Tensor:
    """What an encoder hands to cross-attention."""
    return form.floats(form.batch, decoder_length(form), form.number("encoder_hidden_size", "hidden_size"))


def image_places(form: Form) -> Tensor:
    """1 where the text leaves place for the vectors of an image."""
    places = torch.zeros(form.batch, form.length, dtype=torch.long)
    places[:, 1 : 1 + form.number("latent_query_num")] = 1
    return places


def unit_boxes(form: Form) -> Tensor:
    """`boxes` as shares of the page."""
    return boxes(form) / 100


def channel_ids(form: Form) -> Tensor:
    """One id for each channel of sound, at every step of the decoder."""
    ids = form.ids(decoder_length(form), decoder_vocabulary(form))
    return ids[..., None].expand(-1, -1, form.number("num_channels"))


def real_tokens(form: Form) -> Tensor:
    """Which of `embedded` are real, ones where no padding is asked for."""
    return form.full_mask(form.length)


def task_ids(form: Form) -> Tensor:
    """The text that says which task an image model is given."""
    return form.ids(form.number("task_seq_len", "max_seq_len"), form.number("text_encoder_vocab_size", "vocab_size"))
