"""Models, lengths and versions that the driver does not take: refused by name, with the reason."""

from copy import deepcopy
from importlib.metadata import requires
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.utils import compile_regions
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import parallel
from transformers import (
    Gemma3TextConfig,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from cbexp.engine import (
    CBSyncConfig,
    EngineError,
    SyncCBDriver,
    UnsupportedModelError,
    UnsupportedTransformersError,
    check_transformers_version,
)
from cbexp.engine.support import list_wrappers, read_positions
from tests.engine.driving import drive
from tests.engine.forward.models import with_lora

TINY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def changed(change):
    """A change of a good model, given back."""
    return lambda model: change(model) or model


class DeepSpeedEngine(Wrapper):
    """Stands in for DeepSpeed's, which is not installed."""

    __module__ = "deepspeed.runtime.engine"
    autocast = None

    def torch_autocast_enabled(self):
        return self.autocast is not None

    def torch_autocast_dtype(self):
        return self.autocast


class FullyShardedDataParallel(Wrapper):
    """Stands in for torch's, which takes no CPU."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"


class Linear4bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"


def partition(model):
    """As ZeRO-3 does it."""
    for parameter in model.parameters():
        parameter.ds_id, parameter.ds_shape = 0, parameter.shape
        parameter.data = torch.empty(0)


def pack(model, dtype):
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)


PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
ACTIVATED = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1, 2])

# What is made of a good model -> the reason; its class is named beside it. Architectures are in test_families.
REFUSED = {
    "a wrapped model": (Wrapper, "not a transformers model; pass the module inside"),
    "the meta device": (lambda model: model.to("meta"), "meta device"),
    "several devices": (changed(lambda model: model.lm_head.to("meta") and None), "spread over cpu, meta"),
    "a disk": (changed(lambda m: setattr(m, "hf_device_map", {"a": 0, "b": "disk"})), "spread over 0, disk"),
    "tensor-parallel": (changed(lambda model: setattr(model, "_device_mesh", object())), "tensor-parallel"),
    "ZeRO-3": (changed(partition), "sharded by DeepSpeed ZeRO-3; .*: use DDP, or DeepSpeed ZeRO-1 or 2"),
    "ZeRO-3's engine": (
        lambda model: DeepSpeedEngine(changed(partition)(model)),
        "sharded by DeepSpeed ZeRO-3",
    ),
    "offloaded": (
        changed(lambda model: accelerate.cpu_offload(model, execution_device="cpu") and None),
        "accelerate offloads its weights; load all of it on one device",
    ),
    "offloaded as a whole": (
        changed(lambda model: accelerate.cpu_offload_with_hook(model, execution_device="cpu") and None),
        "accelerate offloads its weights",
    ),
    "a quantiser": (
        changed(lambda model: setattr(model, "hf_quantizer", SimpleNamespace())),
        r"weights are quantised \(SimpleNamespace\), .*without a quantization_config",
    ),
    "bitsandbytes": (
        changed(lambda model: setattr(model.model.layers[0].mlp, "up_proj", Linear4bit(32, 48))),
        r"quantised \(bitsandbytes\)",
    ),
    "int8": (changed(lambda model: pack(model, torch.int8)), r"quantised \(torch\.int8\)"),
    "float8": (changed(lambda m: pack(m, torch.float8_e4m3fn)), r"quantised \(torch\.float8_e4m3fn\)"),
    "no head": (lambda model: LlamaModel(model.config), "no language-model head"),
    "another kind of layer": (
        changed(lambda m: setattr(m.config, "layer_types", ["full_attention", "chunked_attention"])),
        "full and sliding attention only .*chunked_attention",
    ),
    "a failing forward": (
        lambda model: OPTForCausalLM(OPTConfig(**TINY, ffn_dim=48, word_embed_proj_dim=32)),
        r"its forward fails on a paged cache \((TypeError|AttributeError)",
    ),
    "a config that takes no flash attention": (
        lambda model: HrmTextForCausalLM(HrmTextConfig(**TINY, intermediate_size=48)),
        r"its forward fails on a paged cache \(ValueError: .*prefix_lm=True[^\n]*$",
    ),
    "prompt learning": (lambda model: get_peft_model(model, PROMPT_TUNING), "prompt-learning"),
    "activated LoRA": (
        lambda model: get_peft_model(model, ACTIVATED),
        "activated LoRA .* change with the prompt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_driven(new_model, case):
    make, reason = REFUSED[case]
    model = make(new_model("llama"))
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        SyncCBDriver(model)
    assert type(list_wrappers(model)[-1] if "engine" in case else model).__name__ in str(error.value)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def distribute(model, mesh):
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
    return model


KEPT_WHOLE = "; a drive reads them whole, on one device: use DDP, or DeepSpeed ZeRO-1 or 2"


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (distribute, r"its parameters are sharded \(DTensor\)"),
        (lambda model, mesh: fully_shard(model, mesh=mesh), "sharded by FSDP"),
        (lambda model, mesh: FullyShardedDataParallel(model), "sharded by FSDP"),
        (
            lambda model, mesh: torch.compile(FullyShardedDataParallel(model), backend="eager"),
            "sharded by FSDP",
        ),
    ],
)
def test_sharded_parameters(new_model, one_process, shard, reason):
    sharded = shard(new_model("qwen3"), one_process)
    with pytest.raises(UnsupportedModelError, match=f"(Qwen3|FullySharded).*{reason}{KEPT_WHOLE}"):
        SyncCBDriver(sharded)


def test_a_model_that_is_sharded_later(new_model, make_driver, prompts, one_process):
    model = new_model("qwen3")
    driver = make_driver(model)
    fully_shard(model, mesh=one_process)
    driver.add_requests(prompts)
    with pytest.raises(
        EngineError, match=rf"cannot be driven as it is now: .*sharded \(DTensor\){KEPT_WHOLE}"
    ):
        driver.drive_until_empty()


def in_ddp(model):
    return parallel.DistributedDataParallel(model)


WRAPPERS = {
    "torch.compile": (lambda model: torch.compile(model, backend="eager"), 2),
    "accelerate's compiled regions": (lambda model: compile_regions(model, backend="eager"), 2),
    "DDP": (in_ddp, 2),
    "DataParallel": (lambda model: parallel.DataParallel(model), 2),
    "DeepSpeed": (DeepSpeedEngine, 2),
    "PEFT in DDP": (lambda model: in_ddp(with_lora(model)), 3),
    "PEFT in DDP, compiled": (lambda model: torch.compile(in_ddp(with_lora(model)), backend="eager"), 4),
    "PEFT of a compiled model in DeepSpeed": (
        lambda model: DeepSpeedEngine(with_lora(torch.compile(model, backend="eager"))),
        4,
    ),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_wrappers_that_are_taken_off(new_model, make_driver, prompts, one_process, case):
    wrap, depth = WRAPPERS[case]
    model = new_model("qwen3")
    wrapped = wrap(model)
    assert len(list_wrappers(wrapped)) == depth
    tokens = drive(make_driver(wrapped), prompts[:2])
    assert tokens == drive(make_driver(model), prompts[:2])
    assert wrapped is not model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_autocast_of_deepspeeds_engine(new_model, make_driver, prompts, dtype):
    engine = DeepSpeedEngine(new_model("qwen3"))
    engine.autocast = dtype
    driver = make_driver(engine)
    drive(driver, prompts[:1])
    assert driver.resolved["dtype"] == ("float32" if dtype is None else "bfloat16")


def test_an_attention_implementation_that_reads_no_paged_cache(new_model):
    model = new_model("qwen3")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match=r"qwen3 .*='flex_attention'.*sdpa, eager or a flash"):
        SyncCBDriver(model, config=CBSyncConfig(attn_implementation="flex_attention"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory_is_no_refusal(new_model, error):
    model = new_model("qwen3")

    def run_out(module, args):
        raise error

    model.model.layers[0].register_forward_pre_hook(run_out)
    with pytest.raises(type(error)) as raised:
        SyncCBDriver(model)
    assert raised.value is error


def test_the_versions_of_transformers_that_are_served(monkeypatch):
    for version in ("5.24.0", "5.24.3", "5.24.0.dev0", "5.24.1rc1"):
        check_transformers_version(version)
    for version in ("4.57.1", "5.23.9", "5.25.0", "unknown"):
        with pytest.raises(UnsupportedTransformersError) as error:
            check_transformers_version(version)
        assert str(error.value) == f"transformers {version} is not supported: install >=5.24,<5.25."
    declared = [line for line in requires("cbexp") or [] if line.startswith("transformers")]
    assert set(declared[0].removeprefix("transformers").split(",")) == {">=5.24", "<5.25"}
    # The driver checks it first. Importing peft has transformers imported a second time: the driver's own it is.
    monkeypatch.setattr("cbexp.engine.model_driver.transformers.__version__", "5.25.0")
    with pytest.raises(UnsupportedTransformersError, match=r"5\.25\.0 is not supported"):
        SyncCBDriver(object())


# How long a request may be

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


@pytest.mark.parametrize(
    ("config_class", "stated", "rope", "count", "source"),
    [
        (PreTrainedConfig, None, None, None, "max_position_embeddings"),
        (Qwen3Config, 40_960, None, 40_960, "max_position_embeddings"),
        # As Qwen's cards have it, and where what is stated has the factor in it.
        (Qwen3Config, 40_960, YARN, 131_072, "rope_type=yarn: 4 times 32768"),
        (Qwen3Config, 131_072, YARN, 131_072, "max_position_embeddings"),
        (Qwen3Config, 4096, {"type": "linear", "factor": 4.0}, 16_384, "rope_type=linear: 4 times 4096"),
        # Llama 3.2, whose factor is not of its length.
        (Qwen3Config, 131_072, LLAMA3 | {"original_max_position_embeddings": 8192}, 131_072, "max_position"),
        (Qwen3Config, 4096, {"rope_type": "dynamic", "factor": 4.0}, 4096, "rope_type=dynamic: a longer seq"),
        (
            Phi3Config,
            8192,
            LONGROPE,
            4096,
            "rope_type=longrope: a longer sequence would change its whole batch's",
        ),
        # Of several kinds of layers the strictest: only the full ones are stretched.
        (
            Gemma3TextConfig,
            4096,
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
            4096,
            "max_position_embeddings",
        ),
    ],
)
def test_the_positions_that_a_config_gives(config_class, stated, rope, count, source):
    sizes = TINY | {"head_dim": 8, "num_key_value_heads": 4, "pad_token_id": None}
    config = config_class(**sizes, max_position_embeddings=stated, rope_parameters=deepcopy(rope))
    positions = read_positions(config)
    assert (positions.count, positions.source[: len(source)]) == (count, source)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "phi3, sliding",
            {
                "sliding_window": None,
                "original_max_position_embeddings": 64,
                "rope_parameters": LONGROPE,
            },
        ),
        (
            "llama",
            {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        ),
    ],
)
def test_frequencies_of_a_whole_batch_are_those_of_each_row(
    new_model, make_driver, make_prompts, greedy, family, changes
):
    """Where they change with the longest row, requests end before that; what `generate` leaves behind is no matter."""
    model = new_model(family, **deepcopy(changes))
    prompts = make_prompts((1, 7, 40, 52))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    driver = make_driver(model)
    assert drive(driver, prompts) == expected
    greedy(model, prompts[-1] * 2, 2)
    assert drive(driver, prompts) == expected
    message = (
        r"prompts\[1\]: 53 prompt \+ 12 new tokens = 65 exceed the model's 64 positions \(rope_type=\w+: a"
    )
    with pytest.raises(ValueError, match=message):
        driver.add_requests(make_prompts((1, 53)))


def test_a_config_that_changes_between_drives(new_model, make_driver, make_prompts, greedy):
    """A trainer may let a model read more positions, or fewer, and give it more tokens: the next drive is of that."""
    model = new_model("qwen3", max_position_embeddings=64)
    driver, prompts = make_driver(model, num_blocks=80), make_prompts((3, 52))
    assert drive(driver, prompts) == [greedy(model, prompt, 12) for prompt in prompts]
    engine = driver._engine
    assert drive(driver, prompts) == [greedy(model, prompt, 12) for prompt in prompts]
    assert driver._engine is engine
    for positions in (200, 100):
        model.config.max_position_embeddings = positions
        (prompt,) = make_prompts((positions - 12,))
        assert drive(driver, [prompt]) == [greedy(model, prompt, 12)]
        with pytest.raises(ValueError, match=f"exceed the model's {positions} positions"):
            driver.add_requests([[*prompt, 1]])
    model.resize_token_embeddings(150, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[97:] = 3 * model.lm_head.weight[:53]
    prompts = [[*prompts[0], 149], prompts[1]]
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    assert max(map(max, expected)) >= 97
    assert drive(driver, prompts) == expected
