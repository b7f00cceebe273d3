"""Small random models with a tokenizer of their own, in folders, as a user would have them."""

from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "attention key value query cluster softmax the a of and to each token model layer head sees reads finds keeps"
SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
BERT = SIZES | {"pad_token_id": 0, "max_position_embeddings": 64}


def documents(count: int = 12, sentences: int = 30) -> list[str]:
    words, draw = WORDS.split(), torch.Generator().manual_seed(0)
    picks = torch.randint(len(words), (count, sentences, 9), generator=draw).tolist()
    return [" ".join(" ".join(words[i] for i in sentence) + "." for sentence in document) for document in picks]


def tokenizer(special: bool) -> hf.PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(documents(), trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    if special:
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, **names)


def _nan(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.encoder.layer[1].attention.self.key.weight.data[0, 0] = float("nan")
    return model


MAKERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**BERT)),
    "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "nan": lambda: _nan(hf.BertModel(hf.BertConfig(**BERT))),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES | {"max_position_embeddings": 512, "pad_token_id": 0}, num_key_value_heads=2)
    ),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(
            **BERT | {"num_hidden_layers": 3},
            local_attention=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=2,
            sep_token_id=3,
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SIZES | {"max_position_embeddings": 64, "pad_token_id": 0}, ffn_dim=48, word_embed_proj_dim=32)
    ),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**BERT | {"num_hidden_layers": 3}, embedding_size=32)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES | {"max_position_embeddings": 64, "pad_token_id": 0}, num_key_value_heads=2, head_dim=8)
    ),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**BERT | {"pad_token_id": 1})),
    "deberta": lambda: hf.DebertaModel(hf.DebertaConfig(**BERT)),
    "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**BERT | {"pad_token_id": 1}, num_key_value_heads=2, head_dim=8)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=200, d_model=32, d_kv=8, d_ff=48, num_layers=2)),
}


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = MAKERS[name]()
    for parameter in model.parameters():  # sharper attention than at initialisation: methods must differ
        if parameter.ndim > 1:
            parameter.data.mul_(15.0)
    model.save_pretrained(folder)
    tokenizer(special=name not in ("gemma2", "gpt2", "llama", "opt")).save_pretrained(folder)
    return folder
