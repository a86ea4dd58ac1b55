"""On the path of a test's processes: puts fake_job.py in the place of cbexp.experiment, and notes what was loaded."""

import atexit
import importlib.util
import os
import sys
from pathlib import Path


class FakeJobFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        fake_job = Path(__file__).with_name("fake_job.py")
        return importlib.util.spec_from_file_location(name, fake_job) if name == "cbexp.experiment" else None


def note_heavy_modules():
    with open(os.environ["FAKE_LOG"] + ".modules", "a") as file:
        file.write(" ".join({"torch", "transformers", "wandb"} & set(sys.modules)) + "\n")


if "FAKE_LOG" in os.environ:
    sys.meta_path.insert(0, FakeJobFinder)
    atexit.register(note_heavy_modules)
