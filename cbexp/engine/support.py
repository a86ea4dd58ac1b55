"""What the engine runs with: versions of transformers, models, a C++ compiler. Needs no transformers to be imported."""

from __future__ import annotations

import functools
import math
import re
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cbexp.engine.requests import Positions
from cbexp.engine.types import EngineError, UnsupportedModelError, UnsupportedTransformersError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

# First supported and first unsupported minor version: the internals change between minor versions.
SUPPORTED_TRANSFORMERS = ((5, 24), (5, 25))
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "conv", "recurrent")
# Rotary embeddings that stretch the positions by their factor, while `max_position_embeddings` may stay as it was. That
# of llama3 is none of these: Llama 3.2 says 131,072, and its factor would make it twice as many.
STRETCHED_ROPE_TYPES = ("linear", "yarn")
COMPILED_MODULE = "torch._dynamo.eval_frame.OptimizedModule"
DEEPSPEED_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
MODULE_WRAPPERS = (
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    DEEPSPEED_ENGINE,
)
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
# Above the class that `fully_shard` gives a module.
FULLY_SHARDED = "torch.distributed.fsdp.FSDPModule"
QUANTISERS = {
    *("bitsandbytes", "torchao", "gptqmodel", "auto_gptq", "awq", "hqq", "aqlm", "eetq", "quanto", "optimum"),
    *("auto_round", "compressed_tensors", "quark", "vptq"),
}
KEEP_WHOLE = "a drive reads them whole, on one device: use DDP, or DeepSpeed ZeRO-1 or 2"
SHARDED_BY_FSDP = f"its parameters are sharded by FSDP; {KEEP_WHOLE}"
LOAD_WHOLE = "load all of it on one device"


def check_transformers_version(found: str) -> None:
    """Raise `UnsupportedTransformersError` (one line: found, range) unless version `found` is supported."""
    match = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(match[1]), int(match[2])) if match else None
    first, end = SUPPORTED_TRANSFORMERS
    if minor is None or not first <= minor < end:
        raise UnsupportedTransformersError(
            f"transformers {found} is not supported: install >={first[0]}.{first[1]},<{end[0]}.{end[1]}."
        )


def require_supported_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model`, see `list_wrappers`; PEFT's layers stay in it.

    Raises `UnsupportedModelError`, naming the model and the reason, for other wrappers, sharded, offloaded or quantised
    models, and architectures that the paged cache cannot serve.
    """
    from transformers import PreTrainedModel

    base = list_wrappers(model)[-1]
    if not isinstance(base, PreTrainedModel):
        raise unsupported(base, "it is not a transformers model; pass the module inside the wrapper")
    reason = (
        _placement_problem(base)
        or _quantisation_problem(base)
        or find_architecture_problem(base.config, type(base))
    )
    if reason is None and not base.can_generate():
        reason = "it has no language-model head; load it with AutoModelForCausalLM"
    if reason is not None:
        raise unsupported(base, reason)
    return base


def list_wrappers(model: Any) -> list[Any]:
    """`model` and what is inside of it, wrapper by wrapper; the last is the module that is driven.

    Taken off are what torch.compile makes, (Distributed)DataParallel, DeepSpeed's engine and PEFT, where the wrapper's
    own forward adds nothing to the base model's. Raises `UnsupportedModelError` where it does.
    """
    found = [model]
    while (inner := _take_off(found[-1])) is not None:
        found.append(inner)
    return found


def unsupported(model: Any, reason: str) -> UnsupportedModelError:
    """The error that names `model`; `reason` is half a sentence."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    kind = "" if model_type is None else f" (model type {model_type})"
    return UnsupportedModelError(f"{type(model).__name__}{kind} cannot be driven: {reason}.")


def read_engine_autocast(module: Any) -> torch.dtype | None:
    """The dtype of the autocast that DeepSpeed's engine puts around the forward; None for anything else."""
    is_on = getattr(module, "torch_autocast_enabled", None) if _is_a(module, DEEPSPEED_ENGINE) else None
    if is_on is None or not is_on():  # engines of before do not know it
        return None
    dtype: torch.dtype = module.torch_autocast_dtype()
    return dtype


def _take_off(model: Any) -> Any:
    """What is in the wrapper; None: it is none."""
    # The second is what accelerate makes, with layers compiled one by one.
    if _is_a(model, COMPILED_MODULE) or "_orig_mod" in getattr(model, "__dict__", ()):
        return model._orig_mod
    if _is_a(model, *MODULE_WRAPPERS):
        return model.module
    if _is_a(model, FSDP):
        raise unsupported(model, SHARDED_BY_FSDP)
    return _unwrap_peft(model)


def _is_a(model: Any, *classes: str) -> bool:
    """Whether its class is one of those or of their kind, by name: none of them is imported for it."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in classes for kind in type(model).__mro__)


def _unwrap_peft(model: Any) -> Any:
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return None
    if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
        raise unsupported(model, "prompt-learning adapters change the inputs; LoRA and its kin are supported")
    if any(_depends_on_wrapper(config) for config in model.peft_config.values()):
        raise unsupported(
            model, "activated LoRA and X-LoRA change with the prompt; LoRA and its kin are supported"
        )
    return model.get_base_model()


def _depends_on_wrapper(peft_config: Any) -> bool:
    is_xlora = getattr(peft_config, "peft_type", None) == "XLORA"
    return is_xlora or getattr(peft_config, "alora_invocation_tokens", None) is not None


def _placement_problem(model: PreTrainedModel) -> str | None:
    if getattr(model, "_device_mesh", None) is not None or (getattr(model, "_tp_size", None) or 1) > 1:
        return "it is tensor-parallel, and only models on one device are supported"
    if any(_is_a(module, FSDP, FULLY_SHARDED) for module in model.modules()):
        return SHARDED_BY_FSDP
    if any(_is_offloaded(module) for module in model.modules()):
        return f"accelerate offloads its weights; {LOAD_WHOLE}"
    placements = set(getattr(model, "hf_device_map", {}).values())
    devices = {parameter.device for parameter in model.parameters()}
    if len(placements) > 1 or len(devices) > 1:
        names = sorted(str(place) for place in (placements if len(placements) > 1 else devices))
        return f"it is spread over {', '.join(names)}, and only models on one device are supported"
    return next(filter(None, map(find_parameter_problem, model.parameters())), None)


def find_parameter_problem(parameter: Tensor) -> str | None:
    """Why the values of a model's parameter are not at hand, as half a sentence; None when they are."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "ds_status"):
        return f"its parameters are sharded by DeepSpeed ZeRO-3; {KEEP_WHOLE}"
    if hasattr(parameter, "device_mesh"):
        return f"its parameters are sharded (DTensor); {KEEP_WHOLE}"
    if parameter.is_meta:
        return f"its weights are on the meta device: offloaded, or never loaded; {LOAD_WHOLE}"
    return None


def _is_offloaded(module: Any) -> bool:
    """Whether a hook of accelerate's brings the module's weights when it runs, and takes them away again."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(each, "offload", False) or type(each).__name__ == "CpuOffload" for each in hooks)


def _quantisation_problem(model: PreTrainedModel) -> str | None:
    quantizer: Any = getattr(model, "hf_quantizer", None)
    found = [] if quantizer is None else [type(quantizer).__name__]
    for module in model.modules():
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        packages = {type(owner).__module__.partition(".")[0] for owner in (module, *parameters)}
        found += sorted(packages & QUANTISERS)
        found += [str(p.dtype) for p in parameters if not p.is_floating_point() or p.dtype.itemsize == 1]
    if not found:
        return None
    return (
        f"its weights are quantised ({found[0]}), and only plain floats are served: load it in bfloat16 or float32, "
        "without a quantization_config"
    )


def find_architecture_problem(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Why a model of `config` would not run, or run wrongly, on a paged cache; None when nothing speaks against it.

    `model_class` is transformers' class of the model; None, when it is not known, leaves out what only it can tell.
    """
    return (
        _kind_problem(config)
        or _layer_problem(config)
        or _attention_problem(config)
        or (None if model_class is None else _class_problem(model_class))
    )


def read_positions(config: PreTrainedConfig) -> Positions:
    """How long a request of a model with `config` may be: as its layers' rotary embeddings allow, the strictest one.

    Some of those change with the longest sequence of a forward, for all of its rows: a row would get other tokens
    beside a long one than alone. The positions of such a model end where the change begins.
    """
    stated: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    of_layer_types = [values for values in rope.values() if isinstance(values, Mapping)] or [rope]
    found = [_rope_positions(values, stated) for values in of_layer_types]
    return min(found, key=lambda positions: math.inf if positions.count is None else positions.count)


def _rope_positions(rope: Mapping[str, Any], stated: int | None) -> Positions:
    kind = rope.get("rope_type") or "default"
    original = rope.get("original_max_position_embeddings") or stated
    # As in transformers' `dynamic_rope_update`.
    end = original if kind == "longrope" else stated if "dynamic" in kind else None
    if end is not None and (stated is None or end <= stated):
        return Positions(
            end, f"rope_type={kind}: a longer sequence would change its whole batch's frequencies"
        )
    factor = rope.get("factor")
    if kind in STRETCHED_ROPE_TYPES and original and factor and original * factor > (stated or 0):
        return Positions(int(original * factor), f"rope_type={kind}: {factor:g} times {original}")
    return Positions(stated, "max_position_embeddings")


def _kind_problem(config: PreTrainedConfig) -> str | None:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder:
        return "it is an encoder-decoder model, and only decoders are served"
    if getattr(config, "is_decoder", True) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return "it is an encoder, and only decoders are served"
    if _is_composite(config):
        return "it takes more than text (images, audio or video), and only text models are served"
    return None


def _layer_problem(config: PreTrainedConfig) -> str | None:
    if config.is_heterogeneous or getattr(config, "global_head_dim", None) is not None:
        return "its layers differ in shape"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(SUPPORTED_LAYER_TYPES))
    if others:
        state = ", which keep a recurrent state" if set(others) & set(RECURRENT_LAYER_TYPES) else ""
        return (
            "a paged cache serves full and sliding attention only "
            f"(it has layers of the kind {', '.join(others)}{state})"
        )
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers use the keys and values of others"
    return None


def _attention_problem(config: PreTrainedConfig) -> str | None:
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its multi-head latent attention has keys and values of different shapes"
    if getattr(config, "v_head_dim", None) not in (None, getattr(config, "head_dim", None)):
        return "its keys and values differ in head size"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention looks ahead, and only causal attention can go on from a cache"
    return None


def _class_problem(model_class: Any) -> str | None:
    if model_class._is_stateful:
        return "its layers keep a recurrent state, which a paged cache cannot hold"
    if not model_class._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    # The second is the older name, still to be found in code that comes with a checkpoint.
    if not (model_class._supports_flash_attn or getattr(model_class, "_supports_flash_attn_2", False)):
        return "its attention makes masks of its own, which batches of packed sequences do without"
    return None


def _is_composite(config: PreTrainedConfig) -> bool:
    if any(key in config.sub_configs for key in ("vision_config", "audio_config")):
        return True
    try:
        return config.get_text_config() is not config
    except ValueError:  # transformers' word for several nested text configs
        return True


def require_cpp_compiler(mode: str) -> None:
    """Raise `EngineError` where torch.compile finds no C++ compiler, without which it makes no code for a CPU."""
    problem = _find_cpp_compiler_problem()
    if problem is not None:
        raise EngineError(
            f"compile_mode={mode!r} compiles C++ for the CPU, and {problem}: install g++ or name one in the "
            "environment variable CXX, or use 'eager'."
        )


def _find_cpp_compiler_problem() -> str | None:
    """What is wrong with the C++ compiler that torch.compile would take, as half a sentence; None: it compiles C++."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # late: it takes seconds
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no compiler was found"
    except OSError as error:
        return f"the compiler cannot be run ({error})"
    return None if _knows_cpp(compiler) else f"{compiler} is no C++ compiler"


@functools.cache
def _knows_cpp(compiler: str) -> bool:
    """Whether it has the language's own macro; PyTorch is content with any program that takes --version."""
    command = [compiler, "-x", "c++", "-E", "-dM", "-"]
    try:
        macros = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return b"__cplusplus" in macros
