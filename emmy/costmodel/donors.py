"""What rows of other cards are worth to a model of one. Knows samples and targets; trains nothing.

Measured on the convolution of the field's recorded spaces (recall among the ten best predicted): the rows of a card of the
same architecture were worth some 500 of one's own, those of an A100 to an A6000 fewer than 20. All rows of a donor together
therefore count as so many of the card's own, however many they are: they lead while there is little, and fade as rows arrive.
Vendors stay apart, and so do CPUs: there the rows of others made models worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emmy.costmodel.fit import Samples
from emmy.ir.target import Target

SAME_ARCHITECTURE = 500.0  # rows of one's own
OTHER_ARCHITECTURE = 20.0


@dataclass(frozen=True, slots=True)
class DonorSamples:
    """Samples of another card, together worth `worth` rows of the card a model is of."""

    target: str
    samples: Samples
    worth: float

    @property
    def weight(self) -> float:
        """Of each sample; never more than that of one of the card itself."""
        return min(1.0, self.worth / max(len(self.samples), 1))


def worth(donor: Target, of: Target) -> float:
    """How many rows of `of` all rows of `donor` are worth; 0 for itself, and across vendors."""
    if donor.is_cpu or of.is_cpu or donor.name == of.name:
        return 0.0
    return SAME_ARCHITECTURE if donor.arch == of.arch else OTHER_ARCHITECTURE


def with_donors(own: Samples, donors: Sequence[DonorSamples]) -> Samples:
    """The samples of a fit."""
    out = own
    for d in donors:
        out = out.join(d.samples, d.weight)
    return out
