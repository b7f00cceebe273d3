"""A step of generation on transformers' DynamicCache, on sq.hf.GrowingCache, and compiled on static caches.

    python benchmarks/caches.py [--lengths "512 2000 7900"] [--dtypes "bfloat16 float32"] [--methods "own …"]
        [--compiled "own full:kernel=subquad"] [--batch 8] [--shortest 2000] [--longest 4000] [--frames 1500]
        [--out FILE.md]

SmolLM2-135M-Instruct, which needs the demo decoder; and the decoder of Whisper tiny with random weights, whose steps
attend to the frames of a recording. "own" is the model with its own attention, SDPA. The caches contain random keys and
values, on whose numbers no time depends. With --dry-run, small random models take the place of both.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import sheet
import torch
import transformers
import typer
from torch import Tensor
from torch._inductor import config as inductor
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutput

import subquad as sq
from subquad.hf.compiled_generation import UnmarkedStaticCache
from subquad.tools.models import demo

OWN = "own"
NEW = 128  # tokens of a request: the cache goes back to its prompt behind so many steps
KINDS = {
    "dynamic": "DynamicCache, ms",
    "growing": "GrowingCache, ms",
    "static": "StaticCache compiled, ms",
    "frozen": "the same with frozen weights, ms",
}
BATCH_KINDS = {
    "dynamic": "DynamicCache, tokens/s",
    "growing": "GrowingCache, tokens/s",
    "frozen": "StaticCache, compiled and frozen, tokens/s",
}
HEAD = ("tokens before", "dtype", "attention", *KINDS.values())


def load(dtype: torch.dtype, dry: bool) -> Any:
    """The model, on its own attention."""
    if dry:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=60, **sizes, num_key_value_heads=2)
        model: Any = transformers.LlamaForCausalLM(config).to(dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(demo.decoder(), dtype=dtype)
    model.set_attn_implementation("sdpa")
    return model.eval()


def variants(model: Any, methods: list[str]) -> dict[str, Any]:
    """The model with each method, all with the same weights in memory."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    models = {method: copy.deepcopy(model, dict(weights)) for method in methods}
    for method, each in models.items():
        if method != OWN:
            sq.hf.swap(each, method)
    return models


def fill(cache: Any, config: Any, batch: int, length: int, dtype: torch.dtype) -> Any:
    """Give a cache so many tokens."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key = torch.randn(batch, config.num_key_value_heads, length, width, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(key, key, layer)
    return cache


class Steps:
    """Steps of one token on a cache of a prompt. Called as a function, it makes one step."""

    def __init__(self, model: Any, forward: Callable[..., Any], cache: Any, mask: Tensor):
        self.forward, self.cache, self.mask, self.made = forward, cache, mask, 0
        self.static = isinstance(cache, transformers.StaticCache)
        self.token = torch.ones(len(mask), 1, dtype=torch.long)
        self.config = model.config
        self.embedded = torch.empty(len(mask), 1, model.config.hidden_size, dtype=model.dtype)

    def __call__(self) -> None:
        """One step; the last one of a request takes its tokens out of the cache."""
        with torch.inference_mode():
            inputs: dict[str, Any] = {}
            if not (self.static and self.mask.all()):  # a static cache sees its own length
                mask = torch.nn.functional.pad(self.mask, (0, self.made + 1), value=1)
                inputs = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            if self.static and inputs:  # as `generate` does it, for one compiled step at all lengths
                masks = {"config": self.config, "inputs_embeds": self.embedded, "past_key_values": self.cache}
                inputs["attention_mask"] = create_masks_for_generate(**masks, **inputs)
            self.forward(input_ids=self.token, past_key_values=self.cache, use_cache=True, **inputs)
            self.made += 1
            if self.made == NEW:
                self.rewind()

    def rewind(self) -> None:
        """Go back to the prompt."""
        if self.static:
            for layer in self.cache.layers:
                layer.cumulative_length -= self.made
        else:
            self.cache.crop(-self.made)
        self.made = 0


def spread(shortest: int, longest: int, batch: int) -> list[int]:
    """The lengths of a batch's requests, equally far from each other; of one request, the longest."""
    return [round(longest - item * (longest - shortest) / max(batch - 1, 1)) for item in reversed(range(batch))]


def padding(lengths: list[int]) -> Tensor:
    """The mask of a batch of such lengths, padded on the left."""
    longest = max(lengths)
    return torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])


def steps_of(
    models: dict[str, Any], mask: Tensor, dtype: torch.dtype, compiled: list[str], kinds: Iterable[str] = KINDS
) -> Iterator[tuple[tuple[str, str], Steps]]:
    """Steps after a prompt, by (method, kind of cache)."""
    batch, length = mask.shape
    with torch.inference_mode():
        for method, model in models.items():
            for kind in kinds:
                if kind in ("static", "frozen") and method not in compiled:
                    continue
                config, forward = model.config, model.forward
                if kind == "dynamic":
                    cache: Any = transformers.DynamicCache(config=config)
                elif kind == "growing":
                    cache = sq.hf.GrowingCache(model)
                else:
                    static = {"static": transformers.StaticCache, "frozen": UnmarkedStaticCache}[kind]
                    cache = static(config if kind == "static" else model, max_cache_len=length + NEW)
                    forward = torch.compile(model.forward, fullgraph=True, backend=sq.hf.step_backend)
                steps = Steps(model, forward, fill(cache, config, batch, length, dtype), mask)
                if kind == "frozen":
                    with inductor.patch(freezing=True):
                        steps()
                yield (method, kind), steps


def medians(calls: dict[Any, Steps], seconds: float) -> dict[Any, float]:
    """Milliseconds of a step, all in turn; two of each first, in which caches grow and models are compiled."""
    for call in calls.values():
        call()
        call()
    named = {str(key): call for key, call in calls.items()}
    times = sheet.milliseconds(named, seconds)
    return {key: statistics.median(times[str(key)]) for key in calls}


def load_speech(dtype: torch.dtype, dry: bool) -> Any:
    """A model with the decoder of Whisper tiny, on its own attention."""
    width, heads, layers = (32, 2, 1) if dry else (384, 6, 4)
    sizes = {"d_model": width, "decoder_ffn_dim": 4 * width, "decoder_layers": layers, "decoder_attention_heads": heads}
    encoder = {"encoder_layers": 1, "encoder_ffn_dim": width, "encoder_attention_heads": heads}  # which is never run
    model: Any = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **encoder)).to(dtype)
    model.set_attn_implementation("sdpa")
    return model.eval()


def speech_steps(models: dict[str, Any], frames: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """A step of each model after four tokens, over so many frames of a recording."""
    steps = {}
    for method, model in models.items():
        states = BaseModelOutput(torch.randn(1, frames, model.config.d_model, dtype=dtype))
        own, crossed = (transformers.DynamicCache(config=model.config) for _ in range(2))
        inputs = {"encoder_outputs": states, "past_key_values": transformers.EncoderDecoderCache(own, crossed)}

        def step(model: Any = model, inputs: dict[str, Any] = inputs, count: int = 1) -> None:
            with torch.inference_mode():
                model(decoder_input_ids=torch.ones(1, count, dtype=torch.long), **inputs)
                if count == 1:
                    inputs["past_key_values"].self_attention_cache.crop(-1)

        step(count=4)
        steps[method] = step
    return steps


def updates(model: Any, length: int, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """Milliseconds that all layers of a DynamicCache and of a GrowingCache take to add a token, without the model."""
    config, caches = model.config, (transformers.DynamicCache(config=model.config), sq.hf.GrowingCache(model))
    calls = {}
    with torch.inference_mode():
        for cache in caches:
            fill(cache, config, 1, length, dtype)
            key = cache.layers[0].keys[:, :, :1].clone()

            def call(cache: Any = cache, key: Tensor = key) -> None:
                with torch.inference_mode():
                    for layer in range(config.num_hidden_layers):
                        cache.update(key, key, layer)
                    cache.crop(-1)

            call()
            calls[type(cache).__name__] = call
        times = sheet.milliseconds(calls, seconds)
    dynamic, growing = (statistics.median(own) for own in times.values())
    return dynamic, growing


@dataclass
class Tables:
    """The rows of the tables, dtype by dtype."""

    methods: tuple[str, ...]
    compiled: tuple[str, ...]
    seconds: float
    batch: int
    shortest: int
    longest: int
    frames: int
    dry_run: bool
    steps: list[list[str]] = field(default_factory=list)
    added: list[list[str]] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    speech: list[list[str]] = field(default_factory=list)

    def add_steps(self, models: dict[str, Any], length: int, name: str) -> None:
        """Steps of one item after so many tokens, and what adding a token to the caches takes."""
        methods, dtype = self.methods, getattr(torch, name)
        torch.compiler.reset()
        start = time.perf_counter()
        ms = medians(dict(steps_of(models, padding([length]), dtype, self.compiled)), self.seconds)
        print(f"{length} tokens in {name}: {time.perf_counter() - start:.0f} s", flush=True)
        base = ms[methods[0], "dynamic"]
        for method in methods:
            times = [ms.get((method, kind)) for kind in KINDS]
            cells = [sheet.MISSING if each is None else f"{each:.1f} ({base / each:.2f}×)" for each in times]
            self.steps.append([f"{length:,}", name, f"`{method}`", *cells])
        dynamic, growing = updates(models[methods[0]], length, dtype, self.seconds / 4)
        self.added.append([f"{length:,}", name, f"{dynamic:.2f}", f"{growing:.2f}"])

    def add_batch(self, models: dict[str, Any], name: str) -> None:
        """Steps of requests of several lengths, padded on the left."""
        batch, methods = self.batch, self.methods
        mask = padding(spread(self.shortest, self.longest, batch))
        torch.compiler.reset()
        steps = steps_of(models, mask, getattr(torch, name), self.compiled, BATCH_KINDS)
        ms = medians(dict(steps), self.seconds)
        base = ms[methods[0], "dynamic"]
        for method in methods:
            times = [ms.get((method, kind)) for kind in BATCH_KINDS]
            cells = [
                sheet.MISSING if each is None else f"{1e3 * batch / each:.1f} ({base / each:.2f}×)" for each in times
            ]
            self.batches.append([name, f"`{method}`", *cells])

    def add_speech(self, name: str) -> None:
        """Steps of a decoder of speech."""
        dtype, methods = getattr(torch, name), list(self.methods[:2])
        steps = speech_steps(variants(load_speech(dtype, self.dry_run), methods), self.frames, dtype)
        times = sheet.milliseconds(steps, self.seconds)
        base = statistics.median(times[methods[0]])
        for method in methods:
            each = statistics.median(times[method])
            self.speech.append([name, f"`{method}`", f"{each:.2f} ({base / each:.2f}×)"])

    def parts(self) -> list[str]:
        """The sheet."""
        parts = [
            "One step of one item: a token after those in the cache. All in turn at each length and dtype; medians; in "
            f"brackets, the speed-up over the first line. A StaticCache has {NEW} free slots, and its model is "
            "compiled by `torch.compile(model.forward, fullgraph=True, backend=sq.hf.step_backend)`; weights are "
            "frozen by `torch._inductor.config.freezing`.",
            sheet.table(HEAD, self.steps),
            "What all layers take to add one token to the cache, without the model:",
            sheet.table(["tokens before", "dtype", "DynamicCache, ms", "GrowingCache, ms"], self.added),
        ]
        if self.batches:
            parts += [
                f"Steps of a batch of {self.batch} requests of {self.shortest:,} to {self.longest:,} tokens, "
                "padded on the left: tokens per second.",
                sheet.table(["dtype", "attention", *BATCH_KINDS.values()], self.batches),
            ]
        if self.speech:
            parts += [
                f"A step of Whisper tiny's decoder (random weights) over {self.frames:,} frames of a recording:",
                sheet.table(["dtype", "attention", "step, ms"], self.speech),
            ]
        return parts


def main(
    lengths: tuple[int, ...] = (512, 2000, 7900),
    methods: tuple[str, ...] = (OWN, "full:kernel=subquad", "clustered-tail"),
    compiled: tuple[str, ...] = (OWN, "full:kernel=subquad"),
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    seconds: float = 3.0,
    batch: int = 8,
    shortest: int = 2000,
    longest: int = 4000,
    frames: int = 1500,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A small random model, and no compiler.")] = False,
    out: Path | None = None,
) -> None:
    """Print the tables, and write them if --out is given."""
    torch.manual_seed(0)
    tables = Tables(methods, () if dry_run else compiled, seconds, batch, shortest, longest, frames, dry_run)
    for name in dtypes:
        models = variants(load(getattr(torch, name), dry_run), list(methods))
        for length in lengths:
            tables.add_steps(models, length, name)
        if batch > 1:
            tables.add_batch(models, name)
        if frames:
            tables.add_speech(name)
    sheet.publish("Caches of keys and values", tables.parts(), out, "bf16 and fp32")


if __name__ == "__main__":
    sheet.run(main)
