"""Compiled code on disk is shared: what one cell has compiled, the next one, another process, finds there."""

import json

import pytest

SETTINGS = [
    *("model=tiny", "num_rounds=1", "num_warmup_rounds=0"),
    *("dataset.num_prompts=2", "sampling.max_new_tokens=4", "compile=default"),
    *("compile.buckets=[2]", "compile.batch_shape=full", "compile.cache_dir=compiled_here"),
]


@pytest.mark.slow
def test_a_cell_compiles_nothing_that_another_has_compiled(sweeps, monkeypatch):
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    sweeps.fake_path = None  # real cells
    done = sweeps.run("-m", "seed=1,2", *SETTINGS)
    assert done.code == 0, done.out + done.err
    first, second = (json.loads((sweeps.cell_folder(i) / "summary.json").read_text()) for i in (0, 1))
    assert first["compile_mode"] == second["compile_mode"] == "default"
    assert min(first["compile_s"], second["compile_s"]) > 0
    assert first["compile_cache_bytes"] == second["compile_cache_bytes"] > 0
    caches = [path for path in sweeps.folder.rglob("compiled_here") if path.is_dir()]
    assert caches == [sweeps.folder / "compiled_here"]
