"""TRL's GRPO trainer with the engine's rollouts, on the very model that it trains. Needs the extra `trl`."""

from __future__ import annotations

from cbexp.trl.support import SUPPORTED_TRL, UnsupportedTrlError, check_trl_version, find_trl_version

check_trl_version(find_trl_version())  # before its names are imported, which another version may lack

from cbexp.trl.trainer import CBGRPOTrainer, CBRolloutMixin  # noqa: E402

__all__ = ["SUPPORTED_TRL", "CBGRPOTrainer", "CBRolloutMixin", "UnsupportedTrlError"]
