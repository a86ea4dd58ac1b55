"""A burst of decode steps on the device: shapes, compile modes, CUDA graphs, their self-check and timing."""

from cbexp.engine.decode.decoder import Decoder
from cbexp.engine.decode.record import DecodeRecord

__all__ = ["DecodeRecord", "Decoder"]
