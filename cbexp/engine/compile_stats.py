"""What compiling and capturing took, and what the compiler counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompileStats:
    """Of one step runner, over its life. Seconds are host time.

    `programs`: functions that torch.compile built; `recompiles`: those of them for a batch size that was ready before.
    `graphs`: CUDA graphs held; `replays`: how often one ran in a burst. `skipped_cudagraphs`: graphs that cudagraph
    trees gave up (fatal where a mode promises them).
    """

    programs: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    skipped_cudagraphs: int = 0
    graphs: int = 0
    replays: int = 0
    compile_s: float = 0.0
    capture_s: float = 0.0


@dataclass(frozen=True)
class CompilerCounts:
    """The process's counts at one moment."""

    programs: int
    graph_breaks: int
    skipped_cudagraphs: int

    def __sub__(self, earlier: CompilerCounts) -> CompilerCounts:
        """What has come since `earlier`."""
        return CompilerCounts(
            self.programs - earlier.programs,
            self.graph_breaks - earlier.graph_breaks,
            self.skipped_cudagraphs - earlier.skipped_cudagraphs,
        )


def read_compiler_counts() -> CompilerCounts:
    """Read Dynamo's and Inductor's counters."""
    from torch._dynamo.utils import counters  # late: it takes seconds, and not every mode compiles

    return CompilerCounts(
        programs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        skipped_cudagraphs=counters["inductor"]["cudagraph_skips"],
    )
