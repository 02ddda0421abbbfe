"""SLRS-4a: the string-level law by enumeration (Timor et al. 2502.05202, Algorithm 3). A reference, not a product.

Exponential in the number of drafter tokens enumerated; the cost is counted beforehand and refused above a limit.
The other forms of SLRS are tested against it on small vocabularies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetspec.errors import InvalidInput
from hetspec.runtime import laws
from hetspec.runtime.algorithms import DraftSettings
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.rng import Rng
from hetspec.runtime.verify import Proposal
from hetspec.segment import Segmenter

LIMIT = 100_000  # drafter forwards per candidate


class EnumeratedSLRS:
    """Drafts exactly `length` drafter tokens; the candidate is the first target token of their text.

    `ψ(t) = Σ_{(d_1..d_L): first(tok_T(d_1⊕…⊕d_L)) = t} Π_j q(d_j│c, d_{<j})`, summed over *all* continuations, so
    that it is the law of the retokenised candidate. (Summing over segmentations of `t` alone is not.)

    Args:
        settings: the pair and the generation.
        segmenter: of the target's tokenizer.
        length: L, drafter tokens.

    Raises:
        InvalidInput: the enumeration would take more than `LIMIT` drafter forwards.
    """

    name = "slrs"

    def __init__(self, settings: DraftSettings, segmenter: Segmenter, length: int = 2) -> None:
        spelled = int((settings.mapping.first >= 0).sum())
        forwards = sum(spelled**j for j in range(length))
        if forwards > LIMIT:
            raise InvalidInput(
                f"enumerating {length} drafter tokens over a vocabulary of {spelled:,} takes {forwards:,} drafter "
                f"forwards per candidate, more than {LIMIT:,}.",
                "Use --slrs-form lookahead.",
            )
        self.settings, self.segmenter, self.length = settings, segmenter, length

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Draws each candidate from ψ; see `Algorithm.propose`."""
        s = self.settings
        ids: list[int] = []
        proposal_laws: list[Tensor] = []
        while len(ids) < n and context.can_read(self.length):
            psi = self.psi(context)
            total = float(psi.sum())
            if not total > 0:
                break
            pi = laws.truncate(psi / total, s.warping)
            t = int(pi.argmax()) if s.warping.greedy else rng.categorical(pi)
            ids.append(t)
            proposal_laws.append(pi)
            d = int(s.mapping.t2d[t])
            spelling = [d] if d >= 0 else s.drafter_segmenter.encode(s.target.bytes_of(t))
            if t in s.eos_ids or s.drafter.spell(spelling) != s.target.bytes_of(t):
                break
            for token in spelling:
                context.push(token)
        return Proposal(ids, None if s.warping.greedy else proposal_laws)

    def psi(self, context: DrafterContext) -> Tensor:
        """ψ [V_t] after the context; sums to less than 1 where texts have no first token."""
        s = self.settings
        psi = torch.zeros(len(s.mapping.t2d), dtype=torch.float64)

        def walk(text: bytes, probability: float, left: int) -> None:
            if left == 0:
                first = self.segmenter.encode(text)[:1]
                if first:
                    psi[first[0]] += probability
                return
            q = laws.law(context.next_logits(), s.draft_warping, "the drafter")
            for d in torch.nonzero(q).flatten().tolist():
                mass = probability * float(q[d])
                if s.drafter.bytes_of(d):
                    context.push(d)
                    walk(text + s.drafter.pieces[d], mass, left - 1)
                    context.pop()
                elif text:  # the drafter's text ends here
                    walk(text, mass, 0)
                elif s.mapping.d2t[d] >= 0:
                    psi[s.mapping.d2t[d]] += mass

        walk(b"", 1.0, self.length)
        return psi
