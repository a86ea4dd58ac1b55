"""A burst of decode steps on the device: shapes, compile modes, CUDA graphs, their self-check and timing."""

from cbexp.engine.decode.decoder import Decoder, DecodeRecord

__all__ = ["DecodeRecord", "Decoder"]
