"""Requests in each engine: functions of token ids (1, N) and a number of new tokens, which return an `Answer`."""

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_models import Converted, swapped
from engine_sparse import save_stateful
from request_engines import PACKAGES, UNGUARDED, Answer, Clock, Job, Row

from subquad import hf
from subquad.core.errors import InputError
from subquad.tools.models.pretrained import Pretrained

Run = Callable[[np.ndarray, int], Answer]


# ---------------------------------------------------------------------- PyTorch


def torch_run(models: Mapping[str, Pretrained], job: Job, row: Row) -> Run:
    """`generate` of transformers, with the cache of the row."""
    model = swapped(models[row.weights], row.method).model
    settings = copy.deepcopy(model.generation_config)
    settings.eos_token_id, settings.do_sample = None, False
    settings.pad_token_id = settings.pad_token_id or 0
    whole = job.prompt + job.new
    compiled = False

    def run(ids: np.ndarray, new: int) -> Answer:
        nonlocal compiled
        mine = copy.deepcopy(settings)
        mine.max_new_tokens, clock, options = new, Clock(), {}
        unguarded = compiled and row.cache == UNGUARDED  # the first request compiles
        with torch.compiler.set_stance(skip_guard_eval_unsafe=unguarded):
            if row.cache == "growing":
                options = {"past_key_values": hf.GrowingCache(model, length=whole)}
            elif row.cache is not None:
                options = hf.compiled_steps(whole)
            model.generate(torch.from_numpy(ids), generation_config=mine, streamer=clock, **options)
        compiled = True
        return clock.answer

    return run


# ---------------------------------------------------------------------- OpenVINO


def openvino_settings(row: Row, threads: int) -> dict[str, Any]:
    """The settings of a row: floating-point rows compute and cache in their own format, the others as by default."""
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    if row.has_float_weights:
        precision = {"fp32": "f32", "bf16": "bf16"}[row.weights]
        settings |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return settings


def openvino_model(model: Pretrained, job: Job, row: Row) -> Path:
    """The stateful model with the weights of a row, converted first if it is not in the job's folder."""
    import nncf
    import openvino

    converted = Converted(job.folder, job.model, 0, PACKAGES["openvino"])
    plain = converted.path("openvino-decoder", model, partial(save_stateful, model, output="logits"), FILE)
    if row.has_float_weights:
        return plain
    modes = {"int8": nncf.CompressWeightsMode.INT8_ASYM, "int4": nncf.CompressWeightsMode.INT4_SYM}
    settings = {"int8": {}, "int4": {"group_size": 64}}[row.weights]

    def compress(path: Path) -> None:
        made = nncf.compress_weights(openvino.Core().read_model(plain), mode=modes[row.weights], **settings)
        openvino.save_model(made, path, compress_to_fp16=False)

    return converted.path(f"openvino-decoder-{row.weights}", model, compress, FILE)


FILE = "openvino_model.xml"  # as openvino-genai expects it


def openvino_run(model: Pretrained, job: Job, row: Row) -> Run:
    """The stateful model, one inference for the prompt and one for each token."""
    import openvino

    path = openvino_model(model, job, row)
    settings = openvino_settings(row, job.threads)
    network = openvino.Core().compile_model(path, "CPU", settings)
    for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"):
        used = network.get_property(name).to_string()
        if settings.get(name, used) != used:
            raise InputError(f"OpenVINO uses {used} on this processor as {name}, not {settings[name]}")
    request = network.create_infer_request()
    beams = np.zeros(1, np.int32)

    def step(ids: np.ndarray, past: int) -> int:
        whole = past + ids.shape[1]
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones((1, whole), np.int64),
            "position_ids": np.arange(past, whole)[None],
            "beam_idx": beams,
        }
        request.infer(inputs, share_inputs=True)
        return int(request.get_tensor("logits").data[0, -1].argmax())

    def run(ids: np.ndarray, new: int) -> Answer:
        clock = Clock()
        request.reset_state()
        clock.add(step(ids, 0))
        for past in range(ids.shape[1], ids.shape[1] + new - 1):
            clock.add(step(np.array([clock.tokens[-1:]]), past))
        return clock.answer

    return run


def genai_run(model: Pretrained, job: Job, row: Row) -> Run:
    """The pipeline of openvino-genai with its default scheduler, on the same model."""
    import openvino
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer

    folder = openvino_model(model, job, row).parent
    if not (folder / "openvino_detokenizer.xml").exists():
        made = convert_tokenizer(model.tokenizer, with_detokenizer=True)
        for part, name in zip(made, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
            openvino.save_model(part, folder / name)
        (folder / "config.json").write_text(json.dumps(model.model.config.to_dict(), default=str), "utf-8")
    pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **openvino_settings(row, job.threads))

    class Stream(openvino_genai.StreamerBase):
        """Gives each token to a clock."""

        def __init__(self, clock: Clock):
            super().__init__()
            self.clock = clock

        def write(self, token: Any) -> Any:
            for each in token if isinstance(token, list) else [token]:
                self.clock.add(each)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """All tokens were there."""

    def run(ids: np.ndarray, new: int) -> Answer:
        settings = openvino_genai.GenerationConfig(max_new_tokens=new, do_sample=False, ignore_eos=True)
        settings.apply_chat_template = False
        stream = Stream(Clock())
        pipeline.generate(openvino.Tensor(np.ascontiguousarray(ids)), settings, stream)
        return stream.clock.answer

    return run
