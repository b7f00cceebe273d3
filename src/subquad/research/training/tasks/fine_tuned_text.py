"""Text, token by token of a pretrained model that is fine-tuned: which class is it?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from subquad import hf
from subquad.hf.reattaching import ADAPTER
from subquad.research.training.fine_tuning import PretrainedSettings, classifier, outline, tokenizer_of
from subquad.research.training.tasks.text_classification import LabelledTexts


@dataclass(frozen=True, kw_only=True)
class FineTunedText(LabelledTexts):
    """Texts as tokens of a pretrained model, and the label of each.

    Attributes:
        length: number of tokens that are read of each text; the rest is cut off. 0 means what the positions of the
            model reach, at most 512. Positions that end before it are interpolated.
        pretrained: the model that `model.pretrained` names.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "a text, read by a pretrained model that is fine-tuned; accuracy of its label"
    summary_of_files: ClassVar[str] = (
        "the texts in {files}, read by a pretrained model that is fine-tuned; accuracy of their labels"
    )
    start: ClassVar = {
        "training": {
            "steps": 200,
            "batch": 16,
            "learning_rate": 3e-5,
            "weight_decay": 0.01,
            "warmup": 20,
            "schedule": "linear",
            "every": 50,
        }
    }

    length: int = 0
    pretrained: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 0:
            raise ValueError(f"length={self.length}, but it must be at least 1 token, or 0 for the model's own")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the pretrained model."""
        return tokenizer_of(self.pretrained, self.length)

    @property
    def padding(self) -> int:
        """The token that fills a batch up."""
        return self.tokenizer.pad_token_id

    def model(self, settings: PretrainedSettings) -> PreTrainedModel:
        """The pretrained model, with a head for the labels and the methods in its layers."""
        return classifier(self.pretrained, settings, self.labels(), self.length)

    def outline(self, settings: PretrainedSettings) -> PreTrainedModel:
        """The model with other weights and without methods."""
        return outline(self.pretrained)

    def to_dict(self) -> dict[str, Any]:
        """The settings of the task itself."""
        return {name: value for name, value in super().to_dict().items() if name != "pretrained"}

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """The model with its tokenizer, and what its methods learned."""
        super().save(model, folder)
        if any(bound.learned is not None for bound in hf.bounds(model).values()):
            hf.save_adapter(model, folder / ADAPTER)

    @property
    def longest(self) -> int:
        """The number of tokens of a text that are read."""
        return int(self.tokenizer.model_max_length)

    def size(self, text: str) -> int:
        """The number of tokens of a text, with the special ones."""
        return len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def ids(self, text: str) -> NDArray[np.int64]:
        """The first tokens of a text, with the special ones."""
        return np.asarray(self.tokenizer(text, truncation=True)["input_ids"], dtype=np.int64)

    def cut(self, text: str) -> str:
        """The part of a text that the model reads; without offsets, decoded from the tokens."""
        if not self.tokenizer.is_fast:
            return str(self.tokenizer.decode(self.ids(text), skip_special_tokens=True))
        offsets = self.tokenizer(text, truncation=True, return_offsets_mapping=True)["offset_mapping"]
        return text[: max(end for _, end in offsets)]
