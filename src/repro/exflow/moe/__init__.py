"""Expert-parallel decoding with one all-to-all per layer instead of two (ExFlow's "context coherence").

    two_all_to_alls    DeepSpeed-MoE's: attention at a home rank → all-to-all → expert → all-to-all → home
    coherent           attention → all-to-all → expert, and on from there, as every rank can do the attention of every
                       request; at the end of an iteration, an all-gather of the new tokens

With experts placed by affinity (`placement.py`) the next expert is often on the same rank, and the token does not move.
The next token of a request needs its keys and values on whatever rank it goes to. The paper leaves open how
(docs/exflow.md); `keys_values` says it, and either way every rank holds those of all requests:

    gathered    an all-gather at the end of the iteration, 2·L·kv_width values per token to every rank
    shared      in memory that all ranks see, on one machine: only ids travel, as in the paper's Table I

With top-k > 1 a token stays where its heaviest expert is. Copies visit the ranks of the others, and their part of the
sum comes back: a second, smaller all-to-all.

The decoder is in `decoder.py`. Experts may have copies, and may move between ranks while it serves (`hosting.py`,
`rebalance.py`).
"""

from repro.exflow.moe.decoder import Decoder

__all__ = ["Decoder"]
