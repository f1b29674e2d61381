"""Verification of draft tokens: what is generated is distributed as without drafts (Leviathan, Kalman, Matias 2023).

A slice is a sequence's last token and the drafts after it, k at most; its logits are rows of the batch, one more than
it has drafts. Row i has the logits after the first i drafts, processed as those of a token without drafts
(temperature, top_k, top_p, min_p, ...).

No speculator reports probabilities of its drafts. So each row's token is drawn as without drafts, by the random number
of its position, and a draft is accepted if it is that token: draft x with probability p(x), and a rejected one is
replaced by a draw from p without x. The first drafts that are accepted are kept, and one token more. With a seed the
tokens are those of decoding without drafts, one by one; greedy rows too.
"""

from __future__ import annotations

import torch


def accept_matching(drafts: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """How many first drafts of each slice are the tokens sampled in their place: [slices] int64.

    drafts: [slices, k] int64, -1 where a slice has fewer; sampled: [slices, k] int64, the tokens sampled from the rows
    before each draft.
    """
    return (drafts == sampled).long().cumprod(dim=1).sum(dim=1)
