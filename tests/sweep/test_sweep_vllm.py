"""What a sweep's vLLM workers have to do with its end."""

from tests.vllm_fixtures import read_pids, wait_until_gone, write_hanging_python


def test_killed_sweep_takes_the_workers_of_its_cells_with_it(sweeps):
    wrapper, pids = write_hanging_python(sweeps.folder)
    sweeps.fake_path = None
    sweeps.variables = {"OMP_NUM_THREADS": "1"}
    settings = ["experiment=smoke", "driver=vllm", f"driver.python={wrapper}", "model.device=cpu"]
    sweep = sweeps.start("-m", "seed=1,2", *settings, "compile.cache_dir=null")
    sweeps.wait_for(pids.exists)
    sweep.kill()
    wait_until_gone(read_pids(pids))
