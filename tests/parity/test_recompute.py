"""Every way to recompute gives the numbers of none, bit for bit, with dropout on."""

from dataclasses import replace

import numpy as np
from parity.cases import PARITY

from weft.diagnose.verify import rehearse
from weft.elastic.pool import WorkerPool
from weft.recompute.registry import MODES


def test_every_mode_keeps_every_bit(pool: WorkerPool) -> None:
    """In a pipeline of ranks with tensor parallelism that put off weight gradients."""
    case = next(case for case in PARITY if case.name == "tp2-zb-h1-gpt2-attention")
    modes = [name for name, mode in MODES.items() if not mode.offloads and not mode.chunk_tokens]
    off, *others = (
        rehearse(pool.run, replace(case, recompute=mode).plan(), replace(case.rehearsal(), steps=2))
        for mode in (*modes, case.recompute)
    )
    for mode, found in zip((*modes[1:], case.recompute), others, strict=True):
        assert found.losses == off.losses, mode
        for ours, theirs in ((found.grads, off.grads), (found.params, off.params)):
            assert ours.keys() == theirs.keys()
            for name, values in ours.items():
                assert np.array_equal(values, theirs[name], equal_nan=True), (mode, name)
