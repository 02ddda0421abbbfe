"""What the algorithms of one pair share, and how each is put together from it."""

from __future__ import annotations

import functools

import numpy as np

from hetspec.artifact import PairArtifact
from hetspec.errors import IncompatiblePair, InvalidArtifact, InvalidInput
from hetspec.parts import KERNEL_PRIORS
from hetspec.runtime.algorithms import (
    SLEM,
    Algorithm,
    DraftSettings,
    Healing,
    KernelDraft,
    LookAhead,
    Stopping,
)
from hetspec.runtime.boundaries import FirstTarget, LongerTokens
from hetspec.runtime.bytewise import ByteWalk, BytewiseSLRS, is_bytewise
from hetspec.runtime.enumerated import EnumeratedSLRS
from hetspec.runtime.kernels import Redistribution, TargetKernel, redistribution
from hetspec.runtime.laws import Warping
from hetspec.runtime.sides import Side
from hetspec.runtime.trie import ByteTrie

FEWEST_COUNTS = 4  # observations from which a kernel's row is believed
SLRS_FORMS = ("auto", "lookahead", "first", "bytes", "enumerated")


class PairTools:
    """What the algorithms share for one pair: map, kernels and boundary tables, kept across prompts.

    The map is fitted to the models' rows, which may be padded otherwise than the pair was built with.
    """

    def __init__(self, pair: PairArtifact, target: Side, drafter: Side) -> None:
        self._pair, self._target, self._drafter = pair, target, drafter
        width, drafter_rows = target.vocabulary.rows, drafter.vocabulary.rows
        self.map = pair.map.widened(width, drafter_rows)
        self.intersection = TargetKernel.from_map(self.map.d2t, width)
        self.first_kernel = TargetKernel.from_map(self.map.first, width)
        self.kept = (
            None if drafter.model is None or drafter.model.kept is None else drafter.model.kept.numpy()
        )
        if self.kept is not None:
            self.intersection = self.intersection.restricted(self.kept)
        self.kernels = pair.kernels
        self._redistributions: dict[str, Redistribution] = {}
        stored = pair.kernels.get("cosegment")
        self.cosegment = None if stored is None else TargetKernel.from_kernel(stored, width)
        # Without a stored kernel nothing is known about a token's image, so every position may look ahead.
        self.certainty = np.zeros(drafter_rows)
        if stored is not None:
            known = stored.row_maxima()[:drafter_rows]
            if stored.counts is not None:  # a row hardly ever seen is its smoothing, not knowledge
                known[stored.counts[: len(known)] < FEWEST_COUNTS] = 0
            self.certainty[: len(known)] = known

    def redistribution(self, prior: str) -> Redistribution:
        """RDK's law with a stored kernel and the weights fitted for the head in use; made once."""
        if prior not in self._redistributions:
            self._redistributions[prior] = redistribution(
                self.kernels[prior], self.intersection, kept=self.kept
            )
        return self._redistributions[prior]

    @functools.cached_property
    def longer(self) -> LongerTokens:
        """The drafter's tokens by prefix."""
        return LongerTokens(self._drafter.vocabulary, self._target.segmenter)

    @functools.cached_property
    def first(self) -> FirstTarget:
        """The cached F."""
        return FirstTarget(
            self.map, self._target.vocabulary, self._drafter.vocabulary, self._target.segmenter
        )

    def algorithm(
        self,
        name: str,
        form: str,
        prior: str,
        *,
        warping: Warping,
        draft_warping: Warping,
        eos_ids: frozenset[int],
        stopping: Stopping | None = None,
    ) -> Algorithm:
        """One algorithm by name.

        Args:
            name: "slem", "tli", "rdk" or "slrs".
            form: one of SLRS_FORMS.
            prior: which kernel "rdk" uses, or "auto".
            warping, draft_warping: of target and drafter.
            eos_ids: ids that end a draft.
            stopping: ends drafts early, where the algorithm can tell how sure it is (`tells`).

        Raises:
            IncompatiblePair: the pair lacks what the algorithm needs.
        """
        if name == "slem":
            return SLEM(
                self.map,
                self._target.vocabulary,
                self._drafter.vocabulary,
                self._target.segmenter,
                self.longer,
                stopping,
            )
        settings = DraftSettings(
            mapping=self.map,
            target=self._target.vocabulary,
            drafter=self._drafter.vocabulary,
            drafter_segmenter=self._drafter.segmenter,
            warping=warping,
            draft_warping=draft_warping,
            eos_ids=eos_ids,
        )
        if name == "tli":
            if not (self.map.d2t >= 0).any():
                raise IncompatiblePair(
                    f"the vocabularies of {self._pair.target.name} and {self._pair.drafter.name} share no token.",
                    "Use the algorithm slem, which needs no shared token.",
                )
            return KernelDraft("tli", self.intersection, settings, stopping=stopping)
        if name == "rdk":
            return KernelDraft("rdk", self.redistribution(self.rdk_prior(prior)), settings, stopping=stopping)
        form = self.form(form)
        if form == "bytes":
            return BytewiseSLRS(ByteWalk(settings, *self.stops))
        kernel = self.first_kernel if form == "first" or self.cosegment is None else self.cosegment
        if form == "enumerated":
            return EnumeratedSLRS(settings, self._target.segmenter)
        if form == "first":
            return KernelDraft("slrs", kernel, settings, stopping=stopping)
        return KernelDraft(
            "slrs",
            kernel,
            settings,
            LookAhead(self.first, self.certainty),
            Healing(self.longer, self._drafter.vocabulary),
            stopping,
        )

    def tells(self, name: str, form: str) -> bool:
        """Whether an algorithm can tell how likely its candidates are to be accepted."""
        return name in ("slem", "tli", "rdk") or self.form(form) in ("lookahead", "first")

    def form(self, asked: str) -> str:
        """The form of SLRS: "auto" is "bytes" where the drafter writes bytes and the pair has a stop table."""
        if asked != "auto":
            return asked
        walks = self._pair.stops is not None and is_bytewise(self._drafter.vocabulary)
        return "bytes" if walks else "lookahead"

    @functools.cached_property
    def stops(self) -> tuple[ByteTrie, np.ndarray]:
        """The target's byte trie and the stop table, one entry for each of its nodes.

        Raises:
            IncompatiblePair: the drafter writes more than a byte at once, or the pair has no stop table.
            InvalidArtifact: the table belongs to another vocabulary.
        """
        pair = self._pair
        if not is_bytewise(self._drafter.vocabulary):
            longest = max(map(len, self._drafter.vocabulary.pieces))
            raise IncompatiblePair(
                f"the form bytes needs a drafter whose tokens are single bytes, {pair.drafter.name} has tokens of up "
                f"to {longest}.",
                "Use --slrs-form lookahead.",
            )
        if pair.stops is None:
            raise IncompatiblePair(
                "the pair has no stop table, which the form bytes needs.",
                f"Build one: hetspec-prep build-affinity {pair.target.name} {pair.drafter.name} --prior stops.",
            )
        trie = ByteTrie.of(self._target.vocabulary.pieces)
        if len(trie) != len(pair.stops.stop):
            raise InvalidArtifact(
                f"stops: {len(pair.stops.stop):,} nodes, the target's byte trie has {len(trie):,}.",
                f"Build it again: hetspec-prep build-affinity {pair.target.name} {pair.drafter.name} --prior stops.",
            )
        return trie, pair.stops.stop

    def rdk_prior(self, asked: str) -> str:
        """The prior of the kernel that rdk uses: the one asked for, else the one with the best held-out acceptance."""
        kernels = self._pair.kernels
        if asked != "auto" and asked not in KERNEL_PRIORS:
            raise InvalidInput(
                f"unknown prior {asked!r}.", f"Choose one of auto, {', '.join(KERNEL_PRIORS)}."
            )
        if not kernels or (asked != "auto" and asked not in kernels):
            names = f"{self._pair.target.name} {self._pair.drafter.name}"
            raise IncompatiblePair(
                "the pair has no affinity kernel, which rdk needs."
                if not kernels
                else f"the pair has no {asked} kernel, only {', '.join(kernels)}.",
                f"Build one: hetspec-prep build-affinity {names} "
                f"--prior {'cosegment' if asked == 'auto' else asked}.",
            )
        if asked != "auto":
            return asked
        rates = self._held_out_rates()
        known = {prior: rate for prior in kernels if (rate := rates.get(prior)) is not None}
        if not known:
            return "cosegment" if "cosegment" in kernels else next(iter(kernels))
        return max(known, key=lambda prior: known[prior])

    def _held_out_rates(self) -> dict[str, float | None]:
        """Held-out acceptance of each kernel with the head in use, as recorded."""
        if self.kept is not None:
            return dict(self._pair.figures.get("prune", {}).get("rdk", {}))
        affinity = self._pair.figures.get("affinity", {})
        return {prior: figures.get("held_out_rate") for prior, figures in affinity.items()}
