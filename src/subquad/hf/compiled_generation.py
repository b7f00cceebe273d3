"""Options of `generate` with which its steps are compiled, on every device."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, cast

from torch import Tensor, fx, nn
from transformers import CompileConfig, GenerationMixin, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from subquad.core.versions import name_of_cache
from subquad.hf.unwrapping import AnyModel, transformers_model

NAME_OF_BACKEND = "subquad_steps"
NAME_OF_CACHE = name_of_cache(GenerationMixin.prepare_inputs_for_generation)  # among the options of `generate`
_OFF = "turn it off (TORCHINDUCTOR_FREEZING=0)"

GENERATED_PRODUCTS = {  # by Inductor instead of oneDNN, where this is faster; those of one input are joined
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp.enable_concat_linear": True,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}


def compiled_steps(length: int, model: AnyModel | None = None, **options: Any) -> dict[str, Any]:
    """The options with which `generate` compiles its steps once, on a static cache for up to `length` tokens.

        model.generate(prompt, max_new_tokens=128, **sq.hf.compiled_steps(2048))

    Requests of all lengths up to there run the same compiled step; the prompt itself is not compiled. transformers
    compiles by itself on GPUs and other accelerators alone. The step must be one graph: a model that breaks it is an
    error of `torch.compile`.

    On a CPU, the steps of a single request read the weights at nearly the speed of memory: `step_backend` compiles
    them, unless other `options`, a `mode` or a `backend` are given. For steps of several requests at once, freeze the
    weights: with `torch._inductor.config.freezing`, Inductor takes them for constants and stores them once more in the
    order in which the processor reads them. It takes transformers' static cache for a constant too, so that tokens
    would be wrong; given the model, the options contain a static cache that stays a cache. It is that of one request,
    so make the options anew for each:

        torch._inductor.config.freezing = True
        model.generate(prompts, max_new_tokens=128, **sq.hf.compiled_steps(2048, model))

    A frozen weight that changes later does not change the compiled step until `torch._dynamo.reset()`.

    Args:
        length: tokens of the longest request, its new ones included. The cache has room for the next power of two.
        model: the model that will generate, needed where weights are frozen.
        options: options of `torch.compile`, such as `backend`.

    Raises:
        ValueError: the length is below 1; or torch freezes weights (`torch._inductor.config.freezing`), and the model
            is not given, has an encoder too, or has layers that keep something else than keys and values.
        TypeError: the length is not a whole number.

    >>> compiled_steps(1500)["max_cache_len"]
    2048
    """
    if not isinstance(length, Integral) or isinstance(length, bool):
        got = f"a {type(length).__name__}" if isinstance(length, nn.Module) else repr(length)
        raise TypeError(
            f"expected a whole number of tokens as the first argument, got {got}; call sq.hf.compiled_steps(2048), or "
            "sq.hf.compiled_steps(2048, model) with frozen weights"
        )
    if length < 1:
        raise ValueError(f"length={length}, but a request has at least 1 token")
    from torch._inductor import config as inductor  # here, because only compilation needs it

    if inductor.freezing and model is None:
        raise ValueError(
            "torch._inductor.config.freezing is on, and transformers marks its static cache as fixed, so it would be a "
            "constant of the compiled step, and tokens would be wrong: give the model too, as in "
            f"sq.hf.compiled_steps({length}, model), whose cache is not marked; or {_OFF}"
        )
    if not options.keys() & {"options", "mode", "backend"}:
        options["backend"] = _registered()
    config = CompileConfig(**({"fullgraph": True, "mode": None} | options))
    config._compile_all_devices = True  # its only switch for CPUs
    slots = 1 << (int(length) - 1).bit_length()
    if model is None:
        return {"cache_implementation": "static", "max_cache_len": slots, "compile_config": config}
    return {NAME_OF_CACHE: UnmarkedStaticCache(model, slots), "compile_config": config}


def _registered() -> str:
    """The name by which `torch.compile` knows `step_backend`, so that transformers can print and save the options."""
    from torch._dynamo import list_backends, register_backend  # here, because only compilation needs them

    if NAME_OF_BACKEND not in list_backends(exclude_tags=()):
        register_backend(step_backend, name=NAME_OF_BACKEND)
    return NAME_OF_BACKEND


def step_backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a step of generation by Inductor, with other products on CPUs: a backend of `torch.compile`.

        step = torch.compile(model.forward, fullgraph=True, backend=sq.hf.step_backend)

    The products of one row with weights are [written as sums][subquad.hf.products_of_one_row.SumsOfOneRow], for which
    Inductor makes code at the speed of memory. Of products of several rows, where weights are frozen, Inductor writes
    those itself for which this is faster than oneDNN, and joins the products that have one input.

    The rewriting takes the place of `torch._inductor.config.joint_custom_pre_pass`.

    Args:
        graph: the program to compile, as Dynamo gives it to a backend.
        inputs: the tensors and numbers that the program takes, weights included.
    """
    from torch._inductor import compile_fx  # here, because only compilation needs them
    from torch._inductor import config as inductor

    from subquad.hf.products_of_one_row import SumsOfOneRow

    patches: dict[str, Any] = {"joint_custom_pre_pass": SumsOfOneRow()}
    if inductor.freezing and all(x.device.type == "cpu" for x in inputs if isinstance(x, Tensor)):
        patches |= GENERATED_PRODUCTS
    return cast(Callable[..., Any], compile_fx.compile_fx(graph, inputs, config_patches=patches))


class UnmarkedStaticCache(StaticCache):
    """transformers' `StaticCache` of a model, whose tensors Inductor does not take for constants.

    `StaticCache` marks them as static inputs (`torch._dynamo.mark_static_address`), for CUDA graphs. With frozen
    weights, Inductor replaces each static input by the value that it has when a step is compiled.

    Raises:
        ValueError: the model has an encoder too, or a layer keeps something else than keys and values.
    """

    def __init__(self, model: AnyModel, max_cache_len: int):
        config = transformers_model(model).config
        if config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} has an encoder too, for whose keys there is no static cache without marks; "
                f"where torch._inductor.config.freezing is on, {_OFF}"
            )
        super().__init__(config=config, max_cache_len=max_cache_len)
        for layer in self.layers:
            if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
                raise ValueError(
                    f"a layer of {type(model).__name__} keeps something else than keys and values "
                    f"({type(layer).__name__}), for which there is no static cache without marks; where "
                    f"torch._inductor.config.freezing is on, {_OFF}"
                )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, and return all slots."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
            _unmark(layer)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate all layers before the first call."""
        super().early_initialization(*args, **kwargs)
        for layer in self.layers:
            _unmark(layer)


def _unmark(layer: StaticLayer) -> None:
    """Replace the empty tensors of a layer by others, which have no mark."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, Tensor):
            setattr(layer, name, value.clone())
