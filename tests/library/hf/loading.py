"""The ways in which services load a saved model. Run as a script, in a process that has never heard of subquad.

python loading.py FOLDER    prints, as JSON, {"way": "Error: its text", or the attention that the model got}
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ways(folder: Path) -> dict[str, Callable[..., Any]]:
    """Functions that load `folder`/model, /sentences or /pairs; each takes `from_pretrained`'s options."""
    import transformers as hf
    from sentence_transformers import CrossEncoder, SentenceTransformer

    model, sentences, pairs = (str(folder / name) for name in ("model", "sentences", "pairs"))

    def of_its_config(**options: Any) -> Any:
        return hf.AutoModel.from_pretrained(model, config=hf.AutoConfig.from_pretrained(model), **options)

    def with_info(**options: Any) -> Any:
        return hf.AutoModel.from_pretrained(model, output_loading_info=True, **options)[0]

    return {
        "AutoModel": lambda **options: hf.AutoModel.from_pretrained(model, **options),
        "the class": lambda **options: hf.BertModel.from_pretrained(model, **options),
        "with another head": lambda **options: hf.AutoModelForMaskedLM.from_pretrained(model, **options),
        "with a config": of_its_config,
        "with loading info": with_info,
        "pipeline": lambda **options: hf.pipeline(
            "feature-extraction", model=model, model_kwargs=options, device="cpu"
        ),
        "SentenceTransformer": lambda **options: SentenceTransformer(sentences, model_kwargs=options, device="cpu"),
        "plain SentenceTransformer": lambda **options: SentenceTransformer(model, model_kwargs=options, device="cpu"),
        "CrossEncoder": lambda **options: CrossEncoder(pairs, model_kwargs=options, device="cpu"),
    }


NAMES = list(ways(Path()))


def transformers_inside(given: Any) -> Any:
    """The model, without subquad's help."""
    from transformers import PreTrainedModel

    given = given.model if hasattr(given, "task") else given
    return next(part for part in given.modules() if isinstance(part, PreTrainedModel))


if __name__ == "__main__":
    results = {}
    for how, options in {"": {}, ", sdpa": {"attn_implementation": "sdpa"}}.items():
        for way, load in ways(Path(sys.argv[1])).items():
            try:
                results[way + how] = transformers_inside(load(**options)).config._attn_implementation
            except Exception as error:
                results[way + how] = f"{type(error).__name__}: {error}"
    assert not any(name.startswith("subquad") for name in sys.modules)
    print(json.dumps(results))
