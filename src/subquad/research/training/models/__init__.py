"""Transformers with any attention, as Hugging Face models: save, load, Trainer, accelerate and `sq.hf` apply.

config = EncoderConfig(num_labels=2, method="i-clustered:clusters=25")
model = EncoderClassifier(config)
model.save_pretrained(folder); EncoderClassifier.from_pretrained(folder)   # its methods and what they learned, too
AutoModelForSequenceClassification.from_pretrained(folder)                 # where this module is imported
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from subquad.research.training.models.blocks import Prediction
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.ctc_encoder import CTCEncoder, SpeechConfig, Transcription
from subquad.research.training.models.encoder import (
    EncoderClassifier,
    EncoderConfig,
    EncoderModel,
    MaskedSymbolEncoder,
)
from subquad.research.training.models.forecaster import EncoderDecoderForecaster, EncoderForecaster, ForecastConfig
from subquad.research.training.models.language import CausalLanguageModel, LanguageConfig
from subquad.research.training.models.mixture_model import MixtureModel, SetConfig
from subquad.research.training.models.segment_memory import Memory

__all__ = [
    "AttentionConfig",
    "CTCEncoder",
    "CausalLanguageModel",
    "EncoderClassifier",
    "EncoderConfig",
    "EncoderDecoderForecaster",
    "EncoderForecaster",
    "EncoderModel",
    "ForecastConfig",
    "LanguageConfig",
    "MaskedSymbolEncoder",
    "Memory",
    "MixtureModel",
    "Prediction",
    "SetConfig",
    "SpeechConfig",
    "Transcription",
]

for config in (EncoderConfig, ForecastConfig, LanguageConfig, SetConfig, SpeechConfig):
    AutoConfig.register(config.model_type, config, exist_ok=True)
AutoModel.register(EncoderConfig, EncoderModel, exist_ok=True)
AutoModel.register(SetConfig, MixtureModel, exist_ok=True)
AutoModelForCTC.register(SpeechConfig, CTCEncoder, exist_ok=True)
AutoModelForCausalLM.register(LanguageConfig, CausalLanguageModel, exist_ok=True)
AutoModelForMaskedLM.register(EncoderConfig, MaskedSymbolEncoder, exist_ok=True)
AutoModelForSequenceClassification.register(EncoderConfig, EncoderClassifier, exist_ok=True)
