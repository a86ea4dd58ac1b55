"""The part of vLLM's `platforms` that the worker uses."""

from vllm.misbehaviour import asked


class _Platform:
    device_type = "" if asked("no_device") else "cuda" if asked("cuda") else "cpu"

    def get_device_name(self):
        return "a fake device"


current_platform = _Platform()
