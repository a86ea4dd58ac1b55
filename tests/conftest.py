"""For every test: no network, no account, one thread a process, outputs in a temporary folder, GPU tests on a GPU."""

import os
import signal

import pytest

# Set before torch is imported, and inherited by the processes that tests start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)
os.environ.pop("WANDB_API_KEY", None)
# A shell that starts the tests in the background has them ignore Ctrl-C, and their children too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _outputs_in_temporary_folder(tmp_path_factory):
    """What a test writes to a relative path (outputs/, wandb/) stays out of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        yield


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            # All that can be checked of it here; a skipped test does not look for its fixtures.
            unknown = set(item.fixturenames) - {"request", *item._fixtureinfo.name2fixturedefs}
            if unknown:
                raise pytest.UsageError(f"{item.nodeid} uses fixtures that do not exist: {sorted(unknown)}")
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
