"""Loading models and tokenizers: what comes out, and what a user reads when it cannot."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    Response,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import import_utils

import cbexp
from cbexp.config import AdapterConfig, ModelConfig
from cbexp.dataset.arithmetic import build_questions, verify_answer
from cbexp.drivers.registry import DRIVERS
from cbexp.errors import ConfigError, ModelError, NotApplicableError
from cbexp.model.attention_choice import (
    FLASH_PACKAGES,
    AttentionChoice,
    resolve_attention,
    resolve_loaded_attention,
)
from cbexp.model.loading import load_architecture, load_model, load_tokenizer, resolve_device, resolve_dtype
from tests.model_fixtures import GPT_OSS, QWEN3, save_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NO_ADAPTER = AdapterConfig()
QUESTIONS = build_questions(100, seed=123, split="heldout")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def own_copy(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def pretrained(folder: Path | str, **settings: Any) -> ModelConfig:
    return ModelConfig(name_or_path=str(folder), device="cpu", **settings)


def random_init(values: dict[str, Any], **settings: Any) -> ModelConfig:
    return ModelConfig(init="random", architecture=values, device="cpu", **settings)


def load(config: ModelConfig) -> Any:
    return load_model(config, NO_ADAPTER, seed=0)


# Devices and dtypes


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_auto_takes_the_gpu_and_the_dtype_that_it_computes_in(monkeypatch):
    assert resolve_dtype("auto", CPU) is torch.float32
    for capability in ((8, 0), (9, 0)):
        pretend_gpu(monkeypatch, capability)
        assert resolve_device("auto") == CUDA
        assert resolve_dtype("auto", CUDA) is resolve_dtype("bfloat16", CUDA) is torch.bfloat16
    pretend_gpu(monkeypatch, (7, 5))
    assert resolve_dtype("auto", CUDA) is torch.float16
    with pytest.raises(ModelError, match=r"compute capability 7\.5 and would only emulate it"):
        resolve_dtype("bfloat16", CUDA)


def test_devices_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(ModelError, match="Allowed: auto, cpu, cuda, cuda:INDEX"):
        resolve_device("mps")
    pretend_gpu(monkeypatch, (9, 0), count=2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ModelError, match=r"cuda:2: this machine has 2 CUDA device\(s\), cuda:0 to cuda:1"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ModelError, match=r"model\.device=cuda: .*Use model\.device=cpu or auto"):
        resolve_device("cuda")


# Attention


@pytest.fixture
def install(monkeypatch):
    """Makes the packages of the named versions all that there are, on a machine with a GPU."""

    def put(names, capability=(9, 0)):
        for name, package in FLASH_PACKAGES.items():
            found = dataclasses.replace(package, is_available=lambda name=name: name in names)
            monkeypatch.setitem(FLASH_PACKAGES, name, found)
        pretend_gpu(monkeypatch, capability)

    return put


def resolve(name, driver="sync", model_type="qwen3", device=CUDA, dtype=torch.bfloat16):
    return resolve_attention(name, DRIVERS[driver], AutoConfig.for_model(model_type), device, dtype)


@pytest.mark.parametrize("name", FLASH_PACKAGES)
def test_a_version_of_flash_attention_runs_where_its_package_is_and_not_where_the_others_are(install, name):
    assert FLASH_PACKAGES[name].is_available is getattr(import_utils, f"is_flash_attn_{name[-1]}_available")
    install([name])
    assert resolve(name).implementation == name
    with pytest.raises(ConfigError, match=f"{name} runs in bfloat16 or float16 only"):
        resolve(name, dtype=torch.float32)
    install(FLASH_PACKAGES.keys() - {name})
    with pytest.raises(ModelError, match=f"={name} needs the package flash-attn.*Use sdpa or auto"):
        resolve(name)


def test_a_model_may_have_one_version_alone(install):
    install(FLASH_PACKAGES)
    assert resolve("flash_attention_4", model_type="gpt_oss").implementation == "flash_attention_4"
    with pytest.raises(ModelError, match=r"GptOssForCausalLM does not work with it. Use .*flash_attention_4"):
        resolve("flash_attention_3", model_type="gpt_oss")


@pytest.mark.parametrize(
    ("capability", "installed", "dtype", "expected"),
    [
        ((9, 0), ["flash_attention_2", "flash_attention_3"], torch.bfloat16, "flash_attention_3"),
        ((9, 0), ["flash_attention_2"], torch.bfloat16, "flash_attention_2"),
        ((9, 0), ["flash_attention_3"], torch.float32, "sdpa"),
        ((8, 0), ["flash_attention_2", "flash_attention_3"], torch.float16, "flash_attention_2"),
    ],
)
def test_auto_is_the_managers_best_attention(install, capability, installed, dtype, expected):
    install(installed, capability)
    choice = resolve("auto", "manager", dtype=dtype)
    assert choice.implementation == expected
    assert (choice.reason is None) == (expected == "sdpa")
    assert resolve("auto", "generate", dtype=dtype).implementation == "sdpa"


def test_auto_is_the_engines_own_for_the_synchronous_driver_alone():
    assert resolve("auto") == resolve("cbexp") == AttentionChoice("cbexp")
    assert resolve("sdpa").implementation == "sdpa"
    for driver in ("manager", "generate"):
        assert resolve("auto", driver, device=CPU).implementation == "sdpa"
        with pytest.raises(ConfigError, match=f"=cbexp .* does not work with driver={driver}"):
            resolve("cbexp", driver)


@pytest.mark.parametrize(
    ("model_type", "implementation", "reason"),
    [("qwen3", "sdpa", None), ("gpt_oss", "eager", "attention sinks"), ("gemma2", "eager", "soft cap")],
)
def test_model_is_loaded_with_sdpa_where_it_has_it(model_type, implementation, reason):
    choice = resolve_loaded_attention("cbexp", AutoConfig.for_model(model_type), CPU, torch.float32)
    assert choice.implementation == implementation
    assert (choice.reason is None) if reason is None else (reason in choice.reason)
    if reason is not None:
        with pytest.raises(ModelError, match=reason):
            resolve("sdpa", model_type=model_type)


def test_attention_that_cannot_run_is_refused_with_its_reason():
    with pytest.raises(NotApplicableError, match="needs a CUDA device"):
        resolve("flash_attention_2", device=CPU)
    with pytest.raises(ModelError, match="needs the package kernels"):
        resolve("kernels-community/flash-attn2")
    with pytest.raises(ConfigError, match=r"Did you mean 'sdpa'.*flash_attention_4"):
        resolve("sdpaa")


# Random weights


def test_random_weights_have_the_true_shape_dtype_and_scale():
    loaded = load(random_init({**QWEN3, "initializer_range": 0.03}, dtype="bfloat16"))
    weights = dict(loaded.model.named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.bfloat16}
    deviation = weights["model.layers.0.mlp.up_proj.weight"].detach().float().std()
    assert float(deviation) == pytest.approx(0.03, rel=0.1)
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.detach().float().abs().max() > 0.01, name
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert not loaded.model.training
    assert loaded.num_parameters == sum(p.numel() for p in weights.values())
    assert loaded.weight_bytes == 2 * loaded.num_parameters
    assert loaded.generation_eos_ids == (257,)


def test_random_weights_follow_the_seed_and_leave_the_generators_alone():
    before = torch.get_rng_state()
    config = random_init(QWEN3)
    first, again, other = (load_model(config, NO_ADAPTER, seed).model.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_random_weights_are_created_on_the_device_itself(monkeypatch):
    """Nothing is drawn elsewhere and copied, which the meta device would refuse."""
    monkeypatch.setattr("cbexp.model.loading.resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setattr("cbexp.model.loading.resolve_dtype", lambda name, device: torch.bfloat16)
    loaded = load(random_init(QWEN3))
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}


def test_random_experts_and_attention_sinks_give_finite_logits():
    with torch.no_grad():
        logits = load(random_init(GPT_OSS)).model(torch.arange(1, 20)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


# Pretrained weights


def test_a_local_folder_loads_with_its_own_weights_and_tokenizer(saved):
    loaded = load(pretrained(saved, dtype="bfloat16"))
    stored = load_file(saved / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded.model.state_dict()[name], stored[name].bfloat16())
    assert (loaded.device, loaded.dtype, loaded.vocab_size) == (CPU, torch.bfloat16, 300)
    assert loaded.load_s > 0
    tokenizer = load_tokenizer(pretrained(saved))
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [64, 65]
    assert load_architecture(ModelConfig(name_or_path="builtin:tiny")).model_type == "qwen3"


def test_stop_ids_come_from_the_generation_config_before_the_config(own_copy):
    loaded = load(pretrained(own_copy))
    assert (loaded.generation_eos_ids, loaded.special_token_ids) == ((257,), {257})
    values = json.loads((own_copy / "generation_config.json").read_text())
    (own_copy / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": [5, 0]}))
    assert load(pretrained(own_copy)).generation_eos_ids == (5, 0)
    (own_copy / "generation_config.json").unlink()
    assert load(pretrained(own_copy)).generation_eos_ids == (257,)
    assert load(random_init({**QWEN3, "bos_token_id": 1, "pad_token_id": 0})).special_token_ids == {0, 1, 257}


def test_a_model_without_a_tokenizer_and_a_folder_with_a_revision_say_so(tmp_path, saved):
    with pytest.raises(ModelError, match="is a folder here and has no revisions: remove revision=v2"):
        load_architecture(pretrained(saved, revision="v2"))
    folder = save_model(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(pretrained(folder))
    with pytest.raises(ModelError, match=r"model\.name_or_path is not set"):
        load_tokenizer(random_init(QWEN3))


def test_damaged_or_missing_weights_are_named_and_not_made_up(own_copy):
    file = own_copy / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    missing = r"lacks 1 of the model's weights: model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(ModelError, match=missing):
        load(pretrained(own_copy))
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(ModelError, match="damaged safetensors file"):
        load(pretrained(own_copy))
    file.unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded: .*no file named"):
        load(pretrained(own_copy))


def test_out_of_memory_is_not_taken_for_a_bad_model(saved, monkeypatch):
    def run_out(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        load(pretrained(saved))


# The hub


def http_error(kind: type[Exception], status: int) -> Exception:
    http_client = importlib.import_module(Response.__module__.partition(".")[0])
    response = Response(status, request=http_client.Request("GET", "https://huggingface.co/org/model"))
    return kind(f"{status} Client Error", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (http_error(GatedRepoError, 403), "gated or private: accept its licence .*hf auth login"),
        (http_error(RepositoryNotFoundError, 401), "no such folder here and no such repository on"),
        (http_error(RevisionNotFoundError, 404), r"'org/model' \(revision v9\): the hub has no such"),
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached. Give a local folder .*HF_HOME"),
    ],
)
def test_hub_failures_are_explained(monkeypatch, failure, message):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("There was an error.\nLong story.") from failure  # as transformers does

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", fail)
    for load_part in (load_tokenizer, load):
        with pytest.raises(ModelError, match=message) as caught:
            load_part(pretrained("org/model", revision="v9"))
        assert "\n" not in str(caught.value)


# What is refused

OWN_CODE = '{"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}'
QUANTISED = '{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model_type": "qwen4"}, "does not know. Did you mean 'qwen3'"),
        ({"model_type": "qwen3", "hidden_sise": 8}, "hidden_sise is not a setting of qwen3. Did you mean"),
        ({"model_type": "qwen3", "hidden_size": "big"}, "'hidden_size' expected int, got str"),
        ({"model_type": "bert"}, "bert.* is not supported: .*it is an encoder"),
        ({"model_type": "qwen3_next"}, "layers of the kind linear_attention"),
        ({"model_type": "qwen3_5"}, "more than text"),
        ({"model_type": "gemma3n_text"}, "use the keys and values of others"),
        ("builtin:huge", r"builtin:huge is unknown. Built in: builtin:tiny"),
        ("a/b/c", "there is no such folder"),
        (("model.gguf", ""), "this is a file"),
        (("config.json", "{broken"), "damaged JSON file"),
        (("config.json", OWN_CODE), "trust_remote_code=true"),
        (("config.json", QUANTISED), "its checkpoint is quantised"),
    ],
    ids=str,
)
def test_what_is_no_model_or_not_supported_is_refused(tmp_path, source, message):
    """An architecture of one's own, a name, or a folder with one file."""
    if isinstance(source, dict):
        config = random_init(source)
    elif isinstance(source, str):
        config = pretrained(source)
    else:
        file, content = source
        (tmp_path / file).write_text(content)
        config = pretrained(tmp_path / file if file.endswith("gguf") else tmp_path)
    with pytest.raises(ModelError, match=message):
        load_architecture(config)


def test_supported_kinds_pass():
    for kind in ("qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss", "gpt_neox"):
        assert load_architecture(random_init({"model_type": kind})).model_type == kind


# The embedded model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_embedded_model_is_small_and_right_on_questions_it_was_not_trained_on(dtype):
    """In transformers' own format, read without cbexp."""
    folder = Path(cbexp.__file__).parent / "assets" / "tiny"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 5_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " two  spaces\n\ttab, naïve café, 数学, 🎉"
    assert tokenizer(text).input_ids == list(text.encode())
    chats = [[{"role": "user", "content": question.text}] for question in QUESTIONS]
    shown = tokenizer.apply_chat_template(chats[0], add_generation_prompt=True, tokenize=False)
    assert shown == f"<|im_start|>user\n{QUESTIONS[0].text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    completions = model.generate(**batch, max_new_tokens=96, do_sample=False)[:, batch.input_ids.shape[1] :]
    assert (completions == tokenizer.eos_token_id).any(dim=1).all(), "a completion did not end by itself"
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    pairs = zip(texts, QUESTIONS, strict=True)
    assert sum(verify_answer(text, question.answer) for text, question in pairs) >= 95
